"""The models that an artifact names, and those it names them by: fetched from the Hub, from nowhere else, and without
any code of theirs."""

import os
from pathlib import Path

from transformers import PreTrainedModel

from ..artifacts.config import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, ModelReference
from ..artifacts.hub import download_snapshot
from ..drafters import CausalLMDrafter, Drafter, EagleDrafter
from ..drafters.eagle.checkpoint_files import HEAD_FILES
from ..errors import ArtifactError, ConfigurationError
from ..files import is_there, read_file
from ..loading import first_line, load_model
from ..modeling.parts import output_rows

# A model and its tokenizer. Neither code nor pickles are ever fetched.
_MODEL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    WEIGHTS_FILE,
    INDEX_FILE,
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
)
_ADAPTER_FILE = "adapter_config.json"
_LARGEST_CONFIG = 2**24
_FIELD = f"{CONFIG_FILE}: drafter"
_LOAD_IT_YOURSELF = "Load the drafter yourself and pass it as drafter=…."


def model_reference(model: PreTrainedModel | None) -> ModelReference | None:
    """Which model this is, or None where it does not say where it came from."""
    if model is None or not model.name_or_path:
        return None
    return ModelReference(
        name_or_path=model.name_or_path,
        commit=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
        vocab_size=output_rows(model),
        # What an absolute path is, a snapshot in the Hub's cache or not, the reference tells itself.
        local=not os.path.isabs(model.name_or_path) and os.path.isdir(model.name_or_path),
    )


def drafter_reference(drafter: Drafter) -> ModelReference | None:
    """Which drafter this is, or None where it does not say where it came from."""
    if isinstance(drafter, CausalLMDrafter):
        return model_reference(drafter.model)
    if not isinstance(drafter, EagleDrafter) or drafter.checkpoint.folder is None:
        return None
    return ModelReference(drafter.checkpoint.folder, architecture=EagleDrafter.__name__)


def load_named_drafter(
    reference: ModelReference | None,
    target: PreTrainedModel,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> PreTrainedModel | Drafter:
    """Load the drafter that an artifact names, at the commit that it names: a causal language model in the target's
    dtype and on its device, or an EAGLE head.

    Raises:
        ArtifactError: the artifact names none, or it is not on the Hub, brings code of its own, is an adapter, or
            cannot be loaded.
    """
    if reference is None or reference.hub_id is None:
        raise _unknown_drafter(reference)
    if reference.architecture == EagleDrafter.__name__:
        folder = download_snapshot(reference.hub_id, HEAD_FILES, reference.commit, cache_dir, token)
        return EagleDrafter.from_pretrained(folder, target=target)
    folder = download_snapshot(reference.hub_id, _MODEL_FILES, reference.commit, cache_dir, token)
    # transformers would go on to the model that the adapter names, wherever that is.
    if is_there(folder / _ADAPTER_FILE):
        raise ArtifactError(_FIELD, f"{reference.hub_id} is an adapter of another model", _LOAD_IT_YOURSELF)
    try:
        return load_model(folder, device=target.device, dtype=target.dtype, role="drafter", local_files_only=True)
    except ConfigurationError as error:
        problem = f"{reference.hub_id} cannot be loaded: {first_line(error.__cause__ or error)}"
        if _brings_code(folder):
            problem = (
                f"{reference.hub_id} needs code of its own to be loaded, and code from an artifact's models is never "
                "run"
            )
        raise ArtifactError(_FIELD, problem, _LOAD_IT_YOURSELF) from error


def _unknown_drafter(reference: ModelReference | None) -> ArtifactError:
    """The error for a drafter that nobody but whoever saved the artifact could load."""
    if reference is None:
        return ArtifactError(_FIELD, "names no drafter", _LOAD_IT_YOURSELF)
    loaded = "AutoModelForCausalLM.from_pretrained(FOLDER)"
    if reference.architecture == EagleDrafter.__name__:
        loaded = "EagleDrafter.from_pretrained(FOLDER, target=target)"
    return ArtifactError(
        _FIELD,
        f"{reference.name_or_path!r} was read from a local folder when this was saved, and is not on the Hub",
        f"Say where it is: DynSpecAssistant.from_pretrained(…, drafter={loaded}).",
    )


def _brings_code(folder: Path) -> bool:
    path = folder / CONFIG_FILE
    return is_there(path) and b'"auto_map"' in read_file(path, CONFIG_FILE, _LARGEST_CONFIG)
