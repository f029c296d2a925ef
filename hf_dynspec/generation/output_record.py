"""What `return_dict_in_generate` asks for besides the tokens: scores, logits, attentions and hidden states of each."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache_names import CACHE
from ..modeling.masks import attention_windows
from ..protocol import Candidates
from .verification import Outcome

# The kinds of layers that return no attentions, by transformers' names.
_WITHOUT_ATTENTION = "linear_attention", "conv", "moe", "mlp"


class OutputRecord:
    """Collects what `return_dict_in_generate` asks for, with one entry per token as in plain generation.

    Args:
        config: the call's resolved configuration.
        text_config: the target's text configuration.

    Attributes:
        scores: the processed logits that each token so far was chosen from, fp32 `[1, V]`. None if nobody asked for
            them.
    """

    def __init__(self, config: GenerationConfig, text_config: PreTrainedConfig):
        self._returns_dict = bool(config.return_dict_in_generate)
        windows = attention_windows(text_config)
        kinds = getattr(text_config, "layer_types", None) or list(windows) * text_config.num_hidden_layers
        self._windows = [windows[kind] for kind in kinds if kind not in _WITHOUT_ATTENTION]
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
            outputs: the target's outputs.
            candidates: the verified candidates (None: nothing was drafted).
            outcome: the verified tokens.
            length: the length of the sequence before the round.
        """
        kept = outcome.accepted + 1
        drafted = 0 if candidates is None else candidates.token_ids.shape[0]
        is_tree = candidates is not None and not candidates.is_chain
        for wanted, states, keys in (
            # The outputs of recurrent models have no such field.
            ("_attentions", getattr(outputs, "attentions", None), length),
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
        """The result of `generate`."""
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
    """Select the rows of one path from a tree's states, and its columns from attentions, so that they look like a
    chain's."""
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
    """Split states by token: each new token gets those of the position that predicted it. The first token of a call
    gets the prompt's too.

    Args:
        states: for each layer `[…, rows, width]`; the last `drafted + 1` rows predict tokens.
        drafted: the number of candidates that the target read.
        kept: the number of new tokens.
        is_first: whether the round is the first.
        keys: for attentions, the positions that the first of these tokens attends to; None for hidden states.
        windows: for attentions, the window of each layer; None for full attention.
    """
    first_row = states[0].shape[-2] - drafted - 1
    entries = []
    for token in range(kept):
        is_prompt = is_first and token == 0
        rows = slice(0 if is_prompt else first_row + token, first_row + token + 1)
        columns = [slice(None)] * len(states)
        if keys is not None:
            ends = [layer.shape[-1] - drafted + token for layer in states]
            # The columns of a layer with a window are its cached positions, then those read now; plain generation
            # would have dropped the oldest.
            widths = [keys + token if window is None or is_prompt else min(window, keys + token) for window in windows]
            columns = [slice(max(0, end - width), end) for end, width in zip(ends, widths, strict=True)]
        entries.append(tuple(layer[..., rows, which] for layer, which in zip(states, columns, strict=True)))
    return tuple(entries)
