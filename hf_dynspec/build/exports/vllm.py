"""A head for vLLM: EAGLE-3 in speculators' layout, trimmed to a static shortlist."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...artifacts.hub import local_folder
from ...assistant import DynSpecAssistant
from ...drafters import EagleDrafter
from ...drafters.eagle.checkpoint import NO_HEAD, EagleCheckpoint, read_checkpoint, write_checkpoint
from ...drafters.eagle.checkpoint_files import CONFIG_FILE, HEAD_FILES, WEIGHTS_FILE, read_json
from ...drafters.eagle.conversion import convert_checkpoint, read_output_rows, speculators_config
from ...drafters.eagle.trimming import has_target_rows, trim_checkpoint
from ...errors import ArtifactError, DynSpecError
from ...shortlists import FrequencyShortlist
from .static import StaticShortlist


def read_head(head: str | os.PathLike, *, allow_pickle: bool = False) -> EagleCheckpoint:
    """Read an EAGLE-3 head, official or of speculators, to be trimmed for vLLM. An EAGLE-2 head or a whole model is
    refused with an alternative."""
    config = read_json(local_folder(head, [CONFIG_FILE]), CONFIG_FILE)
    whole = (
        "vLLM drafts with such a model from its whole vocabulary, and takes it as it is: there is nothing to export "
        '(--speculative-config \'{"method": "draft_model", "model": …}\').'
    )
    if config.get("num_hidden_layers", 1) != 1 and "speculators_model_type" not in config:
        raise ArtifactError(str(head), "is a model of its own, and no EAGLE head", whole)
    try:
        checkpoint = read_checkpoint(head, allow_pickle=allow_pickle)
    except ArtifactError as error:
        if NO_HEAD not in str(error):
            raise
        raise ArtifactError(error.field, NO_HEAD, f"Give an EAGLE-3 head. {whole}") from error
    if checkpoint.settings.generation != 3:
        problem = "is an EAGLE-2 head, and vLLM has no map of draft tokens for those"
        fix = (
            "SGLang has one: `hf-dynspec export sglang` and `hf-dynspec convert eagle --to sglang`. Or use an EAGLE-3 "
            "head."
        )
        raise ArtifactError(str(head), problem, fix)
    return checkpoint


def trimmed_for_vllm(
    head: EagleCheckpoint,
    shortlist: StaticShortlist,
    target: str | os.PathLike,
    *,
    verifier: str | None = None,
    speculative_tokens: int = 5,
) -> EagleCheckpoint:
    """The head with no more tokens than a shortlist's, in speculators' layout. `target` is the folder or Hub id of its
    target, and `verifier` another name for that in the configuration.

    Its `lm_head` holds its own rows of these tokens, or the target's if it has none. A head with rows of its own may
    lack some of the shortlist's tokens; `size` of the others are taken.

    Raises:
        ArtifactError: the head was made for another target, or speculators' layout cannot express it.
        ConfigurationError: the head can draft fewer of the ranking's tokens than the shortlist's size.
    """
    folder = local_folder(target, HEAD_FILES)
    rows, architectures = read_output_rows(folder)
    layers = _require_made_for(head, folder, rows)
    lent = has_target_rows(head, rows)
    own = None if lent else head.token_ids()
    trimmed = trim_checkpoint(head, shortlist.token_ids(own), rows if lent else None)
    name = verifier or str(target)
    as_speculators = convert_checkpoint(trimmed, "speculators", verifier=name, architectures=architectures)
    config: dict[str, Any] = dict(as_speculators.config)
    # Nothing is left to a server's own defaults, of which there are several.
    config["transformer_layer_config"] |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    config.setdefault("architectures", ["Eagle3Speculator"])
    config["norm_before_residual"] = head.settings.norm_before_residual
    config["eagle_aux_hidden_state_layer_ids"] = list(head.settings.target_layer_ids or layers)
    config["speculators_config"] = speculators_config(name, architectures, speculative_tokens)
    return EagleCheckpoint.from_parts(config, as_speculators.named_tensors())


def write_head(folder: Path, head: EagleCheckpoint) -> None:
    """Write a head and read it back, bit for bit."""
    write_checkpoint(folder, head)
    found = read_checkpoint(folder)
    same = found.settings == head.settings and found.tensors.keys() == head.tensors.keys()
    if not same or not all(torch.equal(tensor, head.tensors[name]) for name, tensor in found.tensors.items()):
        raise ArtifactError(WEIGHTS_FILE, "was not read back as it was written", "Write it to another disk.")


def require_equal_drafts(
    original: EagleCheckpoint,
    trimmed: EagleCheckpoint,
    shortlist: FrequencyShortlist,
    target: PreTrainedModel,
    texts: Sequence[torch.Tensor],
) -> int:
    """Compare the drafts of the trimmed head as it was written, from its own rows and maps, with the original's from
    the shortlist, after texts that are each int64 `[1, n]`. Returns the number of compared tokens. The target is in
    fp32: in 16 bit more scores tie."""
    drafts = []
    for checkpoint, policy in ((original, shortlist), (trimmed, "full")):
        drafter = EagleDrafter(checkpoint, target, only_own_tokens=checkpoint is trimmed)
        assistant = DynSpecAssistant(drafter, policy, target=target)
        try:
            drafts.append([assistant.draft_round(text).token_ids.tolist() for text in texts])
        finally:
            assistant.unbind()
    for index, (expected, found) in enumerate(zip(*drafts, strict=True)):
        if expected != found:
            raise DynSpecError(f"after text {index} the head drafts {found}, and with its shortlist here {expected}")
    return sum(map(len, drafts[0]))


def _require_made_for(head: EagleCheckpoint, folder: Path, rows: torch.Tensor) -> tuple[int, ...]:
    """Compare a head's sizes with a target's. Returns the hidden states of the target that heads read by default.

    Raises:
        ArtifactError: they differ, or the target has fewer layers than the head reads.
    """
    settings, config = head.settings, read_json(folder, CONFIG_FILE)
    text_config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    layers = text_config.get("num_hidden_layers")
    fix = "Give the target that the head was made for."
    for name, own, its in (
        ("vocab_size", settings.vocab_size, rows.shape[0]),
        ("hidden_size", settings.target_hidden_size, text_config.get("hidden_size")),
    ):
        if own != its:
            raise ArtifactError(f"{CONFIG_FILE}: {name}", f"of the head is {own}, and the target's is {its}", fix)
    is_known = isinstance(layers, int)
    usual = (2, layers // 2, layers - 3) if is_known else ()
    reads = settings.target_layer_ids or usual
    if not is_known or max(reads) > layers or min(reads) < 0:
        problem = f"is {layers} in the target, and the head reads the hidden states {list(reads)}"
        raise ArtifactError(f"{CONFIG_FILE}: num_hidden_layers", problem, fix)
    return usual
