"""The verified text of one call: its padding, the part that a passed-in cache holds, and its length."""

from typing import Any

import torch
from torch.nn import functional
from transformers import Cache

from ..cache_names import cached_tokens, passed_cache

# Arguments of a forward for a text without images, besides switches and caches. Types of tokens may say which parts of
# a prompt attend to each other.
_OF_TEXT = {"attention_mask", "position_ids", "cache_position"}


class VerifiedText:
    """The prompt of one call and the tokens generated after it. The target reads them with padding, the drafter
    without.

    Args:
        input_ids: int64 `[1, n]`: the prompt, padding included.
        model_kwargs: the keyword arguments of the target's forward.
        mask_length: the length of the call's attention mask, if `model_kwargs` has none (None: not known).
        device: the drafter's device.

    Attributes:
        prompt: int64 `[p]`: the prompt, without padding, on the drafter's device.
        known: the number of leading prompt tokens that the session observed in an earlier call.
        skipped: the number of leading tokens of `input_ids` that a passed-in cache holds already.
        cached_before: the number of tokens that it holds before `input_ids`, if only new tokens were passed.
        is_text_alone: the target reads nothing else, such as images.
    """

    def __init__(
        self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], mask_length: int | None, device: torch.device
    ):
        self.known = 0
        given = {name: one for name, one in model_kwargs.items() if name not in _OF_TEXT}
        self.is_text_alone = all(one is None or isinstance(one, bool | int | Cache) for one in given.values())
        self._device = device
        self._padded_prompt_length = self._end = input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids[0]
        self._is_token: torch.Tensor | None = None
        if mask is not None and mask.shape[1] >= self._padded_prompt_length:
            self._is_token = mask[0, mask.shape[1] - self._padded_prompt_length :].to(input_ids.device).bool()
            prompt = prompt[self._is_token]
        self.prompt = prompt.to(device=device, dtype=torch.int64)
        cached = cached_tokens(passed_cache(model_kwargs))
        mask_length = mask_length if mask is None else mask.shape[1]
        holds_all = mask_length is None or mask_length == input_ids.shape[1]
        self.skipped, self.cached_before = (cached, 0) if holds_all else (0, cached)
        self._hidden_by_mask = 0 if mask is None else int((mask[0] == 0).sum())
        self._mask = mask[0].bool() if self._hidden_by_mask else None

    def extend(self, input_ids: torch.Tensor) -> None:
        """Set the text so far, int64 `[1, n]`, padding included."""
        self._end = input_ids.shape[1]

    def tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]`: the verified tokens without padding, on the drafter's device."""
        new = input_ids[0, self._padded_prompt_length :].to(device=self._device, dtype=torch.int64)
        return torch.cat([self.prompt, new])

    @property
    def length(self) -> int:
        """The number of verified tokens, without padding."""
        return self.prompt.shape[0] + self._end - self._padded_prompt_length

    @property
    def padding(self) -> int:
        """The number of padding tokens in the prompt."""
        return self._padded_prompt_length - self.prompt.shape[0]

    @property
    def positions(self) -> int:
        """The number of positions of the text in the target, padding and earlier cached tokens included."""
        return self.cached_before + self._end

    @property
    def visible_positions(self) -> int:
        """The number of these positions that the mask does not hide."""
        return self.positions - self._hidden_by_mask

    @property
    def is_visible(self) -> torch.Tensor | None:
        """bool `[positions - 1]`: the positions before the last one that the mask does not hide (None: all)."""
        if self._mask is None:
            return None
        return functional.pad(self._mask, (0, self.positions - 1 - self._mask.shape[0]), value=True)

    @property
    def is_unread(self) -> bool:
        """Whether the target has not read the prompt yet."""
        return self._end == self._padded_prompt_length

    @property
    def unknown(self) -> int:
        """The number of prompt tokens that the session observed in no earlier call."""
        return self.prompt.shape[0] - self.known

    def without_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """Drop the rows of padding from `[m, …]`, which has a row for each of the prompt's last `m` positions."""
        if self._is_token is None:
            return rows
        return rows[self._is_token[self._padded_prompt_length - rows.shape[0] :].to(rows.device)]
