"""Recording of a request, round by round, without waiting for the device."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..protocol import Shortlist
from .replay import LARGEST_SHORTLIST, Trajectory

# Of longer requests, the last tokens are kept.
MOST_VERIFIED = 512


class Notes(NamedTuple):
    """What is kept of the target's answer at `v` tokens: see `Trajectory`."""

    token_ids: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    log_normalisers: torch.Tensor

    @classmethod
    def of(
        cls,
        temperature: float,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        top_ids: torch.Tensor,
        top_logits: torch.Tensor,
    ) -> "Notes":
        """Note an answer.

        Args:
            temperature: of the request; 0 if greedy.
            logits: `[v, V]`: the target's logits for the tokens, before any processor.
            token_ids: int64 `[v]`: the tokens, on the drafter's device.
            top_ids: int64 `[v, k]`: the most probable ones, the first one first, on the drafter's device.
            top_logits: fp32 `[v, k]`: their logits.
        """
        scale = 1 / (temperature or 1.0)
        largest = top_logits.amax(-1).to(logits.device)
        # As the largest logit is known, this reads a row half as often as `logsumexp`.
        sums = (logits.float() - largest[:, None]).mul_(scale).exp_().sum(-1)
        log_normalisers = (scale * largest + sums.log()).to(token_ids.device)
        return cls(token_ids.clone(), top_ids.contiguous(), top_logits.contiguous(), log_normalisers)

    def first(self, count: int) -> "Notes":
        """A copy of the first `count`."""
        return Notes(*(one[:count].clone() for one in self))


class Recorder:
    """Records the verdicts of one request. For one thread.

    Args:
        top_k: how many of the target's most probable ids are kept at each position.
        context: tokens that are kept before the first verified one.
        adapter: the `Adapter` that will learn the request.

    Attributes:
        temperature: the temperature of the request; 0 if greedy.
        seconds: the time of recording.
        start: the position in the text at which the trajectory begins; set by `finish`.
    """

    def __init__(self, top_k: int, context: int, adapter: Any):
        self.top_k = top_k
        self.adapter = adapter
        self.temperature = 0.0
        self.seconds = 0.0
        self.start = 0
        self._context = context
        self._prompt = torch.empty(0, dtype=torch.int64, device="cpu")
        # The number of tokens before the first recorded round.
        self._first = 0
        self._verified = 0
        self._rounds: deque[Notes] = deque()
        self._shortlist: Shortlist | None = None
        self._failure: Exception | None = None
        # Hidden states of the target, each with the position of its first row in the text.
        self._features: deque[tuple[int, torch.Tensor]] = deque()

    def begin(self, prompt: torch.Tensor) -> None:
        """Set the text before the first round, int64 `[n]`, without padding."""
        self._first = prompt.shape[0]
        self._prompt = prompt[-self._context :].clone()

    def add(
        self,
        logits: torch.Tensor,
        top: Mapping[str, torch.Tensor],
        verified: torch.Tensor,
        shortlist: Shortlist | None,
        features: torch.Tensor | None,
        features_end: int,
    ) -> None:
        """Add a round.

        Args:
            logits: `[v, V]`: the target's logits for the verified tokens, before any processor.
            top: `top_ids` and `top_logits` of at least `top_k` ids, most probable first, on the drafter's device.
            verified: int64 `[v]`: the verified tokens, on the drafter's device.
            shortlist: the shortlist of the first draft step (None: nothing was drafted).
            features: `[m, d · layers]`: the target's hidden states for the drafter.
            features_end: one past the position of the last of these rows.
        """
        with self._noting():
            most_probable = (top[name][:, : self.top_k] for name in ("top_ids", "top_logits"))
            notes = Notes.of(self.temperature, logits, verified, *most_probable)
            self._append(notes, shortlist, features, features_end)

    def add_notes(
        self,
        notes: Notes,
        count: int,
        shortlist: Shortlist | None,
        features: torch.Tensor | None,
        features_end: int,
    ) -> None:
        """Add a round of which the first `count` tokens were verified. The tensors are copied."""
        with self._noting():
            features = None if features is None else features[:count]
            self._append(notes.first(count), shortlist, features, features_end)

    def _append(
        self, notes: Notes, shortlist: Shortlist | None, features: torch.Tensor | None, features_end: int
    ) -> None:
        self._rounds.append(notes)
        self._verified += notes.token_ids.shape[0]
        if shortlist is not None:
            self._shortlist = shortlist
        if features is not None:
            kept = features[-(self._context + MOST_VERIFIED) :]
            self._features.append((features_end - kept.shape[0], kept.clone()))
        self._forget_beginning()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Count the time, and keep an error for `finish`: generation goes on without learning."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._failure = error
        self.seconds += time.perf_counter() - start

    def _forget_beginning(self) -> None:
        """Drop the beginning of a long text."""
        while self._verified - self._rounds[0].token_ids.shape[0] >= MOST_VERIFIED:
            oldest = self._rounds.popleft().token_ids
            self._prompt = torch.cat([self._prompt, oldest])[-self._context :]
            self._first += oldest.shape[0]
            self._verified -= oldest.shape[0]
        while self._features and self._features[0][0] + self._features[0][1].shape[0] <= self._first - self._context:
            self._features.popleft()

    def finish(self) -> Trajectory | None:
        """The trajectory of the request; None if nothing was verified after a prompt. Waits for the device. Raises the
        first error of recording."""
        if self._failure is not None:
            raise self._failure
        start = time.perf_counter()
        prompt = self._prompt[self._without_features() :]
        if not self._rounds or not prompt.shape[0]:
            return None
        rounds = list(self._rounds)
        # The last token of a round is the target's own: the draft there was rejected, or there was none.
        is_wrong = torch.zeros(self._verified, dtype=torch.bool, device="cpu")
        is_wrong[torch.tensor([one.token_ids.shape[0] for one in rounds], device="cpu").cumsum(0) - 1] = True
        shortlist_ids = prompt[:0] if self._shortlist is None else self._shortlist.reachable_ids()[:LARGEST_SHORTLIST]
        self.start = self._first - prompt.shape[0]
        token_ids = torch.cat([prompt, *[one.token_ids for one in rounds]])
        trajectory = Trajectory(
            token_ids,
            prompt.shape[0],
            torch.cat([one.top_ids for one in rounds]),
            torch.cat([one.top_logits for one in rounds]),
            torch.cat([one.log_normalisers for one in rounds]),
            is_wrong.to(prompt.device),
            shortlist_ids.clone(),
            self._joined_features(self.start, token_ids.shape[0]),
            float(self.temperature),
        )
        self.seconds += time.perf_counter() - start
        return trajectory

    def _without_features(self) -> int:
        """The number of kept prompt tokens without features, since a passed-in cache held them. An EAGLE head cannot
        draft after them. At least one token stays, so that the text is not empty."""
        if not self._features:
            return 0
        begin = self._first - self._prompt.shape[0]
        return max(0, min(self._features[0][0] - begin, self._prompt.shape[0] - 1))

    def _joined_features(self, begin: int, length: int) -> torch.Tensor | None:
        """`[length, d · layers]`: the features of the tokens from `begin` on; zeros if they are unknown."""
        if not self._features:
            return None
        joined = self._features[0][1].new_zeros(length, self._features[0][1].shape[1])
        for start, rows in self._features:
            place = max(0, start - begin)
            kept = rows[max(0, begin - start) :][: length - place]
            joined[place : place + kept.shape[0]] = kept
        return joined
