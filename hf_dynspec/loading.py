"""Loading models, configurations and tokenizers, end-of-sequence ids, and the token ids that two models share.

No code of a repository is run, and weights are read from safetensors only.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from .drafters import CausalLMDrafter, Drafter
from .drafters.dflash import DFlashDrafter
from .errors import ConfigurationError, UnsupportedError, counted, warn_user
from .modeling.parts import LARGEST_PADDING, output_rows
from .vocabulary import as_token_ids

_NO_TOKENIZER = "there are no files of one"
# In all layouts; models have `layers` within them.
_NAMES_IN_EAGLE_HEADS = ("fc.", "midlayer.", "d2t", "t2d")
_ALTERNATIVE = (
    "Choose a drafter of the target's family, or use transformers' universal assisted generation: pass the drafter "
    "itself as assistant_model, with tokenizer and assistant_tokenizer."
)
# By target and drafter (the target itself for a head): the given tokenizer that was found to agree with theirs.
# Comparing large vocabularies takes a second or two, and benchmarks bind a pair many times.
_AGREEING: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, tuple]] = WeakKeyDictionary()


def load_model(
    name_or_path: str | os.PathLike,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    role: str = "model",
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, or a drafter of blocks, from a folder or the Hub, ready to generate.

    Args:
        name_or_path: the folder or Hub id.
        device: its device; `"auto"`: any with room.
        dtype: of its weights; `"auto"`: that of the files.
        role: its name in errors, such as `"target"`.
        local_files_only: ask nothing of the Hub.

    Raises:
        ConfigurationError: it cannot be loaded, or lacks weights, which transformers would fill with random ones.
    """
    _require_folder_or_hub_id(name_or_path, f"the {role} {name_or_path} cannot be loaded")
    try:
        with without_warnings_of_transformers():
            config = AutoConfig.from_pretrained(
                str(name_or_path), trust_remote_code=False, local_files_only=local_files_only
            )
            # Such a model has no output projection of its own.
            auto = AutoModel if DFlashDrafter.is_kind_of(config) else AutoModelForCausalLM
            model, found = auto.from_pretrained(
                str(name_or_path),
                dtype=dtype,
                device_map={"": device} if isinstance(device, torch.device) else device,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=local_files_only,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers does not document its errors
        problem = f"the {role} {name_or_path} cannot be loaded on {device} as {dtype}: {first_line(error)}"
        raise ConfigurationError(_or_no_folder(problem, name_or_path)) from error
    _require_all_weights(f"the {role} {name_or_path}", found)
    return model.eval()


def _require_all_weights(described: str, found: Mapping[str, Iterable[Any]]) -> None:
    """Refuse a model with random weights. `found` is transformers' loading info."""
    wrong = [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if not wrong:
        return
    if any(name.startswith(_NAMES_IN_EAGLE_HEADS) for name in found["unexpected_keys"]):
        raise ConfigurationError(
            f"{described} is an EAGLE head, and no model by itself. Name it with --eagle, or load it by "
            "EagleDrafter.from_pretrained."
        )
    raise ConfigurationError(
        f"{described} has {counted(len(wrong), 'weight')} that its files lack or hold in another shape, such as "
        f"{min(wrong)}. Load a model whose files fit its config.json."
    )


@contextmanager
def without_warnings_of_transformers() -> Iterator[None]:
    """Silence transformers' warnings in this block."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_config(name: str | os.PathLike, role: str) -> PreTrainedConfig:
    """Read a configuration from a `config.json`, or from the folder or Hub id of a model. `role` names it in errors.

    Raises:
        ConfigurationError: there is none, it is damaged, or this transformers does not know the kind of model.
    """
    _require_folder_or_hub_id(name, f"the {role}'s configuration cannot be read from {name}")
    try:
        return AutoConfig.from_pretrained(str(name), trust_remote_code=False)
    except Exception as error:  # transformers does not document its errors
        problem = f"the {role}'s configuration cannot be read from {name}: {first_line(error)}"
        problem = problem if os.path.isfile(name) else _or_no_folder(problem, name)
        raise ConfigurationError(
            f"{problem} Give a config.json, or the folder or Hub id of a model whose kind this transformers knows; "
            "code that comes with a model is not run."
        ) from error


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, role: str) -> PreTrainedModel:
    """A model on the meta device: shapes without memory. `role` names it in errors.

    Raises:
        UnsupportedError: transformers cannot build it from its configuration.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False).eval()
    except Exception as error:  # each family fails in its own way
        raise UnsupportedError(
            f"the {role} ({config.model_type}) cannot be built from its configuration: {first_line(error)}. Give the "
            "config.json of a decoder-only language model that this transformers knows."
        ) from error


def load_tokenizer(name_or_path: str | os.PathLike) -> Any:
    """Load a tokenizer from a folder or the Hub.

    Raises:
        ConfigurationError: there is none.
    """
    fix = "Give the folder or the Hub id of a model that has one, such as the target."
    _require_folder_or_hub_id(name_or_path, f"no tokenizer can be loaded from {name_or_path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path), trust_remote_code=False)
    except Exception as error:  # damaged tokenizers raise anything, bare exceptions too
        reason = first_line(error)
        if reason.endswith(":"):  # a list of missing files follows
            reason = _NO_TOKENIZER
        problem = f"no tokenizer can be loaded from {name_or_path}: {reason.rstrip('.')}."
        raise ConfigurationError(f"{_or_no_folder(problem, name_or_path)} {fix}") from error
    if not _has_words(tokenizer):
        raise ConfigurationError(f"no tokenizer can be loaded from {name_or_path}: {_NO_TOKENIZER}. {fix}")
    return tokenizer


def _require_folder_or_hub_id(name_or_path: str | os.PathLike, problem: str) -> None:
    """Refuse a missing path that cannot be a repository's name either."""
    if os.path.exists(name_or_path):
        return
    try:
        validate_repo_id(str(name_or_path))
    except HFValidationError:
        raise ConfigurationError(f"{problem}: there is no such folder.") from None


def _or_no_folder(problem: str, name_or_path: str | os.PathLike) -> str:
    """Add that there is no folder of that name, as the Hub's answer speaks of repositories only."""
    if os.path.isdir(name_or_path):
        return problem
    return f"{problem.rstrip('.')}. There is no folder {name_or_path} here."


def local_tokenizer(model: PreTrainedModel) -> Any:
    """The tokenizer beside the model's weights, or None if there is none on this computer."""
    if not model.name_or_path:
        return None
    try:
        found = AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False, local_files_only=True)
    except Exception:  # damaged tokenizers raise anything, bare exceptions too
        return None
    return found if _has_words(found) else None


def _has_words(tokenizer: Any) -> bool:
    """Whether a tokenizer has more than special tokens. transformers invents one without for a model without files of
    a tokenizer."""
    return len(tokenizer.get_vocab()) > len(tokenizer.added_tokens_decoder)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def find_eos_token_ids(name_or_path: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of a generation configuration, which can name several, and of the tokenizer.

    Args:
        name_or_path: folder or Hub id of the model, or of a tokenizer alone.
        tokenizer: its tokenizer. Ids that it lacks are left out.
    """
    try:
        generation = as_token_ids(GenerationConfig.from_pretrained(str(name_or_path)).eos_token_id)
    except (OSError, ValueError):  # a tokenizer without a model
        generation = ()
    known = set(tokenizer.get_vocab().values())
    found = [*generation, *as_token_ids(tokenizer.eos_token_id)]
    return tuple(dict.fromkeys(token_id for token_id in found if token_id in known))


def draftable_eos_token_ids(
    generation_config: GenerationConfig, drafter: Drafter, vocabulary_size: int
) -> tuple[int, ...]:
    """The end-of-sequence ids below `vocabulary_size` that the drafter can score, without repeats."""
    # Some say −1 for a text without an end.
    eos = [one for one in as_token_ids(generation_config.eos_token_id) if 0 <= one < vocabulary_size]
    draftable = drafter.head.token_ids
    if draftable is not None:
        eos = [one for one in eos if bool((draftable == one).any())]
    return tuple(dict.fromkeys(eos))


def shared_tokenizer(target: PreTrainedModel, drafter: Drafter, given: Any = None) -> Any:
    """The tokenizer of both models: the given one, or one beside either's weights on this computer. Warns if the two
    have different sources and their tokenizers are not both known.

    Args:
        target: the model that verifies.
        drafter: the model that drafts. A head for the target has no tokenizer of its own.
        given: the caller's tokenizer for both.

    Returns:
        The tokenizer, or None if it is not known.

    Raises:
        UnsupportedError: the two have different tokenizers, or one of them has another than the given one.
    """
    other = drafter.model if isinstance(drafter, CausalLMDrafter) else target
    agreeing = _AGREEING.setdefault(target, WeakKeyDictionary())
    compared = None if given is None else (given, len(given), target.name_or_path, other.name_or_path)
    if compared is not None and agreeing.get(other) == compared:
        return given
    known = {"the given tokenizer": given, "the target's tokenizer": local_tokenizer(target)}
    if isinstance(drafter, CausalLMDrafter):
        is_same_source = bool(target.name_or_path) and drafter.model.name_or_path == target.name_or_path
        its = "the target's tokenizer" if is_same_source else "the drafter's tokenizer"
        known[its] = known.get(its) or local_tokenizer(drafter.model)
        if known[its] is None or (given is None and known["the target's tokenizer"] is None):
            warn_user(
                "the tokenizers of target and drafter could not be compared, as they are not both known here. If they "
                "differ, hardly any draft is accepted. Load both models from folders that have their tokenizers."
            )
    vocabularies = {name: tokenizer.get_vocab() for name, tokenizer in known.items() if tokenizer is not None}
    for name, vocabulary in vocabularies.items():
        first, expected = next(iter(vocabularies.items()))
        if _disagree(vocabulary, expected):
            raise UnsupportedError(
                f"{first} ({len(expected):,} entries) and {name} ({len(vocabulary):,}) differ. {_ALTERNATIVE}"
            )
    if compared is not None and None not in known.values():
        agreeing[other] = compared
    return next((tokenizer for tokenizer in known.values() if tokenizer is not None), None)


def _disagree(one: dict[str, int], other: dict[str, int]) -> bool:
    """Whether a token or an id has two meanings. A chat model's vocabulary may have more tokens than its base's."""
    if one == other:
        return False
    by_id = {token_id: token for token, token_id in other.items()}
    return any(
        other.get(token, token_id) != token_id or by_id.get(token_id, token) != token
        for token, token_id in one.items()
    )


def shared_vocabulary_size(target: PreTrainedModel, drafter: Drafter, tokenizer: Any) -> int:
    """The number of leading ids that are tokens and that both models score. Without a tokenizer padding counts too.

    Raises:
        UnsupportedError: the models' vocabularies differ by more than padding, or the drafter's holds other ids.
    """
    rows, draftable = shared_rows(*scored_rows(target, drafter)), drafter.head.token_ids
    # Ids may have gaps, so the length of the tokenizer could cut off real tokens.
    size = rows if tokenizer is None else min(rows, max(tokenizer.get_vocab().values()) + 1)
    if draftable is not None and int(draftable.max()) >= size:
        raise UnsupportedError(
            f"the drafter's head scores the token id {int(draftable.max()):,}, and the tokenizer's end at "
            f"{size - 1:,}. Load the head that was made for this target."
        )
    return size


def scored_rows(target: PreTrainedModel, drafter: Drafter) -> tuple[int, int]:
    """How many token ids the target and the drafter score, padding included."""
    target_rows = output_rows(target)
    # A trimmed head lists its tokens, and was made for this target.
    is_trimmed = drafter.head.token_ids is not None
    return target_rows, target_rows if is_trimmed else drafter.head.weight.shape[0]


def shared_rows(target_rows: int, drafter_rows: int) -> int:
    """The number of leading ids that two heads score, padding included.

    Raises:
        UnsupportedError: they differ by more than padding.
    """
    if abs(target_rows - drafter_rows) >= LARGEST_PADDING:
        raise UnsupportedError(
            f"the target scores {target_rows:,} token ids and the drafter {drafter_rows:,}, so they have different "
            f"tokenizers. {_ALTERNATIVE}"
        )
    return min(target_rows, drafter_rows)
