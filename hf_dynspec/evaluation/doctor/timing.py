"""When the tokens of one `generate` call come out, and what forwards of the target cost."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import BaseStreamer

from ...cache_names import cache_inputs
from ...stats import Stopwatch

# Tokens of a text that forwards are timed at the end of: about as many as a prompt has.
_CACHED = 256
_FEWEST_REPEATS, _MOST_REPEATS = 3, 15


@dataclass(frozen=True)
class TimedCall:
    """One call of `generate`.

    Args:
        prompt: the prompt's number.
        wanted: the most new tokens that it was to bring.
        seconds: wall time, the prompt included.
        ends: for each round, seconds from the start until its tokens were there.
        tokens: for each round, how many tokens it brought, with the target's own.
    """

    prompt: int
    wanted: int
    seconds: float
    ends: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens of the text, which may have ended before all that were wanted were there."""
        return sum(self.tokens)


class RoundClock(BaseStreamer):
    """Notes when the tokens of each round come out. Passed as a streamer, to `generate` with an assistant or without.

    Args:
        now: tells the time in seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._start = now()
        self._ends: list[float] = []
        self._tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """See `BaseStreamer.put`. What comes first is the prompt."""
        self._ends.append(self._now() - self._start)
        self._tokens.append(value.numel())

    def end(self) -> None:
        """See `BaseStreamer.end`."""

    def call(self, prompt: int, wanted: int) -> TimedCall:
        """What was noted of a call that is over now."""
        return TimedCall(prompt, wanted, self._now() - self._start, tuple(self._ends[1:]), tuple(self._tokens[1:]))


@torch.no_grad()
def time_forwards(
    target: PreTrainedModel,
    token_ids: Sequence[int],
    rows: Sequence[int],
    seconds: float,
    surroundings: Callable[[], AbstractContextManager],
) -> tuple[float, ...]:
    """Measure forwards of the target over several tokens after a text that it has read.

    Args:
        target: the model, whose cache can be cropped.
        token_ids: some text, repeated where it is short.
        rows: how many tokens to read at a time; all numbers take turns.
        seconds: about how long to measure.
        surroundings: makes what the forwards run in.

    Returns:
        The median of the seconds, for each of `rows`.
    """
    clock = Stopwatch(enabled=False, devices=(target.device,))
    config = target.config.get_text_config()
    length = min(_CACHED, getattr(config, "max_position_embeddings", None) or _CACHED)
    text = torch.tensor([(list(token_ids) * length)[:length]], device=target.device)
    cache = DynamicCache(config=config)
    target(input_ids=text[:, : length - max(rows)], **cache_inputs(cache))
    cache.activate_past_recording()
    measured: list[list[float]] = [[] for _ in rows]
    with surroundings():
        _forward(target, text[:, : rows[-1]], cache)
        began = clock.now()
        for repeat in range(_MOST_REPEATS):
            if repeat >= _FEWEST_REPEATS and clock.now() - began > seconds:
                break
            for count, times in zip(rows, measured, strict=True):
                start = clock.now()
                _forward(target, text[:, :count], cache)
                times.append(clock.now() - start)
    return tuple(map(median, measured))


def _forward(target: PreTrainedModel, token_ids: torch.Tensor, cache: Any) -> None:
    target(input_ids=token_ids, **cache_inputs(cache))
    cache.crop(-token_ids.shape[1])
