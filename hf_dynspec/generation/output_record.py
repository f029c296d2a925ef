"""What `return_dict_in_generate` asks for besides the tokens: scores, logits, attentions and hidden states of each."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_names import CACHE
from ..modeling.masks import attention_windows
from ..protocol import Candidates
from .verification import Outcome


class OutputRecord:
    """Collects what `return_dict_in_generate` asks for, one entry per token as plain generation does.

    Args:
        config: the call's resolved configuration.
        text_config: the target's.

    Attributes:
        scores: for each token so far the processed logits that it was chosen by, fp32 `[1, V]`. None where nobody
            asked for them.
    """

    def __init__(self, config: GenerationConfig, text_config: PreTrainedConfig):
        self._returns_dict = bool(config.return_dict_in_generate)
        windows = attention_windows(text_config)
        kinds = getattr(text_config, "layer_types", None) or list(windows) * text_config.num_hidden_layers
        self._windows = [windows[kind] for kind in kinds]
        self.scores = () if self._returns_dict and config.output_scores else None
        self._logits = () if self._returns_dict and config.output_logits else None
        self._attentions = () if self._returns_dict and config.output_attentions else None
        self._hidden_states = () if self._returns_dict and config.output_hidden_states else None

    def add_scores(self, logits: torch.Tensor, outcome: Outcome) -> None:
        """Add the rows of one round's tokens."""
        if self.scores is not None:
            self.scores += outcome.scores
        if self._logits is not None:
            self._logits += logits[outcome.rows].split(1)

    def add_states(self, outputs: Any, candidates: Candidates | None, outcome: Outcome, length: int) -> None:
        """Add the attentions and hidden states of one round.

        Args:
            outputs: the target's.
            candidates: what it verified (None: nothing).
            outcome: the tokens that came out.
            length: of the sequence before the round.
        """
        kept = outcome.accepted + 1
        drafted = 0 if candidates is None else candidates.token_ids.shape[0]
        is_tree = candidates is not None and not candidates.is_chain
        for wanted, states, keys in (
            ("_attentions", outputs.attentions, length),
            ("_hidden_states", outputs.hidden_states, None),
        ):
            collected = getattr(self, wanted)
            if collected is None:
                continue
            if not states or states[0] is None:
                # The model returns none, such as attentions with sdpa. Plain generate passes that on.
                entries = (states,) * kept
            elif is_tree:
                path = tuple(_along_path(layer, drafted, outcome.rows, keys is not None) for layer in states)
                entries = _split_by_token(path, kept - 1, kept, not collected, keys, self._windows)
            else:
                entries = _split_by_token(states, drafted, kept, not collected, keys, self._windows)
            setattr(self, wanted, collected + entries)

    def result(self, input_ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self._returns_dict:
            return input_ids
        return GenerateDecoderOnlyOutput(
            sequences=input_ids,
            scores=self.scores,
            logits=self._logits,
            attentions=self._attentions,
            hidden_states=self._hidden_states,
            **{CACHE: cache},
        )


def _along_path(states: torch.Tensor, drafted: int, rows: torch.Tensor, has_keys: bool = False) -> torch.Tensor:
    """The rows of a tree's states that lie on one path, and of attentions the columns that do, as a chain has them."""
    path = rows + states.shape[-2] - drafted - 1
    states = states.index_select(-2, path.to(states.device))
    if not has_keys:
        return states
    prefix = states.shape[-1] - drafted
    columns = torch.cat([torch.arange(prefix, device=rows.device), rows[1:] - 1 + prefix])
    return states.index_select(-1, columns.to(states.device))


def _split_by_token(
    states: tuple[torch.Tensor, ...],
    drafted: int,
    kept: int,
    is_first: bool,
    keys: int | None,
    windows: list[int | None],
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Give each new token the states of the position that it was predicted at; the first of all has the prompt's too.

    Args:
        states: for each layer `[…, rows, width]`; the last `drafted + 1` rows are those that predict.
        drafted: how many candidates the target read.
        kept: how many new tokens came out.
        is_first: whether the round is the first.
        keys: for attentions, how many positions the first of these tokens looked back on; None for hidden states.
        windows: for attentions, how many positions each layer looks back on at most; None for all.
    """
    first_row = states[0].shape[-2] - drafted - 1
    entries = []
    for token in range(kept):
        is_prompt = is_first and token == 0
        rows = slice(0 if is_prompt else first_row + token, first_row + token + 1)
        columns = [slice(None)] * len(states)
        if keys is not None:
            ends = [layer.shape[-1] - drafted + token for layer in states]
            # A layer with a window has its cache's columns before those that are read now, and forgets the oldest.
            widths = [keys + token if window is None or is_prompt else min(window, keys + token) for window in windows]
            columns = [slice(max(0, end - width), end) for end, width in zip(ends, widths, strict=True)]
        entries.append(tuple(layer[..., rows, which] for layer, which in zip(states, columns, strict=True)))
    return tuple(entries)
