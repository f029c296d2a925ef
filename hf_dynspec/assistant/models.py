"""The models that an artifact names. They are fetched from the Hub only, and without their code."""

import os
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..artifacts.config import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, ModelReference
from ..artifacts.hub import download_snapshot
from ..drafters import BesideTarget, CausalLMDrafter, Drafter, EagleDrafter, MtpDrafter, as_drafter
from ..drafters.eagle.checkpoint import holds_a_head
from ..drafters.eagle.checkpoint_files import HEAD_FILES
from ..errors import ArtifactError, ConfigurationError, NotBoundError, shown_value
from ..files import is_there, read_file
from ..loading import first_line, load_model
from ..modeling.parts import output_rows, unwrapped

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


# The name of the MTP layers in a target's own checkpoint.
MTP = "mtp"


def model_reference(model: PreTrainedModel | None) -> ModelReference | None:
    """The reference to a model, or None if the model does not name its source."""
    if model is None or not model.name_or_path:
        return None
    return ModelReference(
        name_or_path=model.name_or_path,
        commit=getattr(model.config, "_commit_hash", None),
        architecture=type(model).__name__,
        # A drafter of blocks has none of its own.
        vocab_size=None if model.get_output_embeddings() is None else output_rows(model),
        # The reference itself tells a snapshot in the Hub's cache from other absolute paths.
        local=not os.path.isabs(model.name_or_path) and os.path.isdir(model.name_or_path),
    )


def drafter_reference(drafter: Drafter) -> ModelReference | None:
    """The reference to a drafter, or None if it does not name its source."""
    if isinstance(drafter, CausalLMDrafter | BesideTarget):
        return model_reference(drafter.model)
    if isinstance(drafter, MtpDrafter):
        target = model_reference(drafter.target)
        return target and replace(target, architecture=MtpDrafter.__name__)
    if not isinstance(drafter, EagleDrafter) or drafter.checkpoint.folder is None:
        return None
    return ModelReference(drafter.checkpoint.folder, architecture=EagleDrafter.__name__)


def load_drafter(name: str | os.PathLike, target: PreTrainedModel) -> Drafter:
    """Load a drafter for a target.

    Args:
        name: `"mtp"` for the MTP layers in the target's own checkpoint; or the folder of an EAGLE head; or the folder
            or Hub id of a model, which is loaded in the target's dtype and on its device.
        target: the target.

    Raises:
        ConfigurationError: as `load_model`.
        ArtifactError: the target's checkpoint has no MTP layers, or a head or a model is not for this target.
        UnsupportedError: it cannot draft, or not for this target.
    """
    if name == MTP:
        layers = MtpDrafter.from_pretrained(target)
        layers.follows_targets = True
        return layers
    if os.path.isdir(name) and holds_a_head(name):
        return EagleDrafter.from_pretrained(name, target=target)
    model = load_model(name, device=target.device, dtype=target.dtype, role="drafter")
    return as_drafter(model).for_target(target)


class UnloadedDrafter(Drafter):
    """A drafter by name, which is loaded once the target is known: see `load_drafter`."""

    def __init__(self, name: str | os.PathLike):
        self._name = name
        if name != MTP and not os.path.isdir(name) and "/" not in str(name):
            raise ConfigurationError(
                f"there is no drafter named {shown_value(name)}: name a folder or a repository on the Hub, or "
                f"{MTP!r} for the MTP layers of the target."
            )

    def for_target(self, target: PreTrainedModel) -> Drafter:
        return load_drafter(self._name, target)

    def _wanted(self, *arguments: Any, **named: Any) -> Any:
        raise NotBoundError(
            f"the drafter {str(self._name)!r} is loaded for a target: pass target=… to DynSpecAssistant, or call "
            "assistant.bind(target)."
        )

    module = head = property(_wanted)
    num_embeddings = property(_wanted)
    embed = unroll = start = _wanted


def known_drafter(drafter: Any, target: Any) -> Drafter:
    """The drafter that was given, loaded if there is a target.

    Raises:
        ConfigurationError, ArtifactError, UnsupportedError: as `load_drafter` and `as_drafter`.
    """
    if not isinstance(drafter, str | os.PathLike):
        return as_drafter(drafter)
    drafter, target = UnloadedDrafter(drafter), unwrapped(target)
    return drafter.for_target(target) if isinstance(target, PreTrainedModel) else drafter


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
