"""The models that an artifact names. They are fetched from the Hub only, and without their code."""

import os
from dataclasses import replace

from transformers import PreTrainedModel

from ..artifacts.config import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, ModelReference
from ..artifacts.hub import download_snapshot
from ..drafters import CausalLMDrafter, Drafter, EagleDrafter, MtpDrafter
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
_LARGEST_CONFIG = 2**24
_FIELD = f"{CONFIG_FILE}: drafter"
_LOAD_IT_YOURSELF = "Load the drafter yourself and pass it as drafter=…."


def model_reference(model: PreTrainedModel | None) -> ModelReference | None:
    """The reference to a model, or None if the model does not name its source."""
    if model is None or not model.name_or_path:
        return None
    return ModelReference(
        name_or_path=model.name_or_path,
        commit=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
        vocab_size=output_rows(model),
        # The reference itself tells a snapshot in the Hub's cache from other absolute paths.
        local=not os.path.isabs(model.name_or_path) and os.path.isdir(model.name_or_path),
    )


def drafter_reference(drafter: Drafter) -> ModelReference | None:
    """The reference to a drafter, or None if it does not name its source."""
    if isinstance(drafter, CausalLMDrafter):
        return model_reference(drafter.model)
    if isinstance(drafter, MtpDrafter):
        target = model_reference(drafter.target)
        return target and replace(target, architecture=MtpDrafter.__name__)
    if not isinstance(drafter, EagleDrafter) or drafter.checkpoint.folder is None:
        return None
    return ModelReference(drafter.checkpoint.folder, architecture=EagleDrafter.__name__)


def load_named_drafter(
    reference: ModelReference | None,
    target: PreTrainedModel,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
) -> PreTrainedModel | Drafter:
    """Load an artifact's drafter at its commit: a causal language model in the target's dtype and on its device, or an
    EAGLE head. MTP layers are those of this target.

    Raises:
        ArtifactError: the artifact names none, or it is not on the Hub, needs code of its own, is an adapter, or
            cannot be loaded.
    """
    if reference is None:
        raise ArtifactError(_FIELD, "names no drafter", _LOAD_IT_YOURSELF)
    if reference.architecture == MtpDrafter.__name__:
        return MtpDrafter.from_pretrained(target, cache_dir=cache_dir, token=token)
    is_head, name = reference.architecture == EagleDrafter.__name__, reference.hub_id
    if name is None:
        kind, more = ("EagleDrafter", ", target=target") if is_head else ("AutoModelForCausalLM", "")
        problem = f"{reference.name_or_path!r} was read from a local folder when this was saved, and is not on the Hub"
        fix = f"Say where it is: DynSpecAssistant.from_pretrained(…, drafter={kind}.from_pretrained(FOLDER{more}))."
        raise ArtifactError(_FIELD, problem, fix)
    folder = download_snapshot(name, HEAD_FILES if is_head else _MODEL_FILES, reference.commit, cache_dir, token)
    if is_head:
        return EagleDrafter.from_pretrained(folder, target=target)
    # transformers would load the adapter's base model, wherever that is.
    if is_there(folder / "adapter_config.json"):
        raise ArtifactError(_FIELD, f"{name} is an adapter of another model", _LOAD_IT_YOURSELF)
    try:
        return load_model(folder, device=target.device, dtype=target.dtype, role="drafter", local_files_only=True)
    except ConfigurationError as error:
        problem = f"{name} cannot be loaded: {first_line(error.__cause__ or error)}"
        config = folder / CONFIG_FILE
        if is_there(config) and b'"auto_map"' in read_file(config, CONFIG_FILE, _LARGEST_CONFIG):
            problem = f"{name} needs code of its own to be loaded, and code from an artifact's models is never run"
        raise ArtifactError(_FIELD, problem, _LOAD_IT_YOURSELF) from error
