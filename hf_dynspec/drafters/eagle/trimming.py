"""Trimming an EAGLE-3 head to a few tokens: its own output projection, with the maps `d2t` and `t2d`."""

from dataclasses import replace

import torch

from ...errors import ArtifactError
from .checkpoint import EagleCheckpoint
from .checkpoint_files import CONFIG_FILE

_HEAD = "lm_head.weight"


def trim_checkpoint(
    checkpoint: EagleCheckpoint, token_ids: torch.Tensor, output_rows: torch.Tensor | None
) -> EagleCheckpoint:
    """Limit a head to some tokens.

    Args:
        checkpoint: an EAGLE-3 head in any layout, which is kept.
        token_ids: int64 `[n]`, without repeats. They are stored in ascending order, since speculators picks the
            verifier's rows by the mask `t2d`.
        output_rows: `[V, H]`: the target's output projection, whose rows are taken in the dtype of the head (None:
            take the head's own rows).

    Returns:
        The head with new `lm_head` `[n, H]`, `d2t` int64 `[n]` (row `i` stands for token `i + d2t[i]`) and `t2d` bool
        `[V]`, and otherwise unchanged.

    Raises:
        ArtifactError: the head has no row for a token, the target's rows have another size, or an id is no token of
            the target.
    """
    settings, ids = checkpoint.settings, token_ids.sort().values
    if int(ids[-1]) >= settings.vocab_size:
        problem = f"is {settings.vocab_size}, and the tokens go up to {int(ids[-1])}"
        raise ArtifactError(f"{CONFIG_FILE}: vocab_size", problem, "Give a ranking of the head's own tokenizer.")
    if output_rows is None:
        rows = checkpoint.tensors[_HEAD].index_select(0, _own_rows(checkpoint, ids))
    else:
        shape = (settings.vocab_size, settings.hidden_size)
        if tuple(output_rows.shape) != shape:
            problem = f"has shape {list(output_rows.shape)}, and the head draws on {list(shape)}"
            raise ArtifactError(f"target: {_HEAD}", problem, "Give the target that the head was made for.")
        rows = output_rows.index_select(0, ids).to(checkpoint.tensors["fc.weight"].dtype)
    known = ids.new_zeros(settings.vocab_size, dtype=torch.bool)
    known[ids] = True
    maps = {_HEAD: rows, "d2t": ids - torch.arange(ids.numel(), device=ids.device), "t2d": known}
    named = replace(checkpoint, tensors={**checkpoint.tensors, **maps}).named_tensors()
    return EagleCheckpoint.from_parts({**checkpoint.config, "draft_vocab_size": ids.numel()}, named)


def has_target_rows(checkpoint: EagleCheckpoint, output_rows: torch.Tensor) -> bool:
    """Whether a head drafts through the target's output projection `[V, H]`: its own is missing, or has copies of the
    target's rows."""
    own = checkpoint.tensors.get(_HEAD)
    if own is None:
        return True
    if own.shape[1] != output_rows.shape[1] or checkpoint.settings.vocab_size != output_rows.shape[0]:
        return False
    return are_copies(own, checkpoint.token_ids(), output_rows)


def are_copies(own: torch.Tensor, token_ids: torch.Tensor | None, output_rows: torch.Tensor) -> bool:
    """Whether rows are copies of the target's, in their own dtype.

    Args:
        own: `[n, H]`, on any device.
        token_ids: int64 `[n]`: the token of each row (None: row `i` is token `i`).
        output_rows: `[V, H]`: the target's output projection.
    """
    # A few rows first, since comparing all of them takes long.
    for rows in (slice(0, 8), slice(None)):
        ids = torch.arange(own.shape[0], device="cpu")[rows] if token_ids is None else token_ids[rows]
        theirs = output_rows.index_select(0, ids.to(output_rows.device))
        if not torch.equal(theirs.to(device="cpu", dtype=own.dtype), own[rows].cpu()):
            return False
    return True


def _own_rows(checkpoint: EagleCheckpoint, ids: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: the rows of these tokens in the head."""
    own = checkpoint.token_ids()
    if own is None:
        return ids
    row_of = own.new_full((checkpoint.settings.vocab_size,), -1)
    row_of[own] = torch.arange(own.numel(), device=own.device)
    rows = row_of[ids]
    if bool((rows < 0).any()):
        problem = f"has no row for the token {int(ids[rows < 0][0])}"
        raise ArtifactError(_HEAD, problem, "Trim the head to tokens that it can draft.")
    return rows
