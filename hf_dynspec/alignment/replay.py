"""What requests left for a drafter to learn from. It is users' text: it stays in memory, and `clear` erases it."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

# Ids of a request's shortlist that are of use: the leading ones of those that are longer.
LARGEST_SHORTLIST = 8192


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What one request left: everything that a drafter can learn from it, and never full vocabularies.

    `v` tokens were verified, of which the `i`-th is `token_ids[first + i]`; all tensors lie on the drafter's device.

    Args:
        token_ids: int64 `[n]`, `n = first + v`: the last part of the prompt and the verified tokens.
        first: where the verified tokens begin; at least 1.
        top_ids: int64 `[v, K]`: the target's most probable tokens at the places where these were chosen.
        top_logits: fp32 `[v, K]`: their logits, before any processor; −inf where there were fewer.
        log_probabilities: fp32 `[v]`: of the verified tokens under the target, over its full vocabulary, at the
            temperature of the request; at 1 where it was greedy.
        log_normalisers: fp32 `[v]`: what the logits, over that temperature, are less by as log-probabilities.
        is_wrong: bool `[v]`: the draft was rejected there, or there was none.
        shortlist_ids: int64 `[s]`: the ids that the request was drafted from, `s` up to `LARGEST_SHORTLIST`.
        features: `[n, d_target · layers]`: what an EAGLE head reads at each token, zeros where that is not known. None
            for drafters that read nothing of the target.
        temperature: what the request was generated at, 0 where it was greedy: what would be accepted goes by it.
        is_chosen: bool `[v]`: a draft that begins there is learnt from. None: from all places.
    """

    token_ids: torch.Tensor
    first: int
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    log_probabilities: torch.Tensor
    log_normalisers: torch.Tensor
    is_wrong: torch.Tensor
    shortlist_ids: torch.Tensor
    features: torch.Tensor | None = None
    temperature: float = 1.0
    is_chosen: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # What was made in inference mode cannot be learnt from.
        with torch.inference_mode(False):
            for field in fields(self):
                value = getattr(self, field.name)
                if isinstance(value, torch.Tensor) and value.is_inference():
                    object.__setattr__(self, field.name, value.clone())

    @property
    def places(self) -> int | None:
        """How many places are learnt from; None where these were not chosen."""
        return None if self.is_chosen is None else int(self.is_chosen.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class ReplayBuffer:
    """The trajectories of the last requests. Several threads may share one.

    Args:
        capacity: trajectories that it holds at most (B).
        largest_bytes: what they may take together; one that is larger by itself is not taken in.
    """

    def __init__(self, capacity: int = 32, largest_bytes: int = 2**28):
        self._capacity, self._largest_bytes = capacity, largest_bytes
        self._lock = threading.Lock()
        self._trajectories: deque[Trajectory] = deque()
        self._nbytes = 0

    def add(self, trajectory: Trajectory) -> bool:
        """Take one in, for which the oldest leave where there is no room.

        Returns:
            Whether it was taken in.
        """
        with self._lock:
            if trajectory.nbytes > self._largest_bytes:
                return False
            self._trajectories.append(trajectory)
            self._nbytes += trajectory.nbytes
            while len(self._trajectories) > self._capacity or self._nbytes > self._largest_bytes:
                self._nbytes -= self._trajectories.popleft().nbytes
            return True

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._trajectories.clear()
            self._nbytes = 0

    def batch(self, size: int, random: torch.Generator) -> list[Trajectory]:
        """The newest trajectory, and others that are drawn without repeats.

        Args:
            size: how many there are to be; fewer where it holds fewer.
            random: draws them; a generator of the CPU.
        """
        held = list(self)
        others = torch.randperm(max(0, len(held) - 1), generator=random, device="cpu")[: size - 1]
        return held[-1:] + [held[place] for place in others.tolist()]

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        """Those that are held now, the oldest first."""
        with self._lock:
            held = list(self._trajectories)
        return iter(held)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._nbytes


class FillingBuffer(ReplayBuffer):
    """Places of requests, until there are enough of them for an update (Zhang et al. 2026, "EvoSpec", algorithm 1,
    lines 25 to 29). What it takes in has its places chosen.

    Args:
        capacity: places that an update is made on (B).
        largest_bytes: what the requests that they are of may take together.
    """

    @property
    def is_full(self) -> bool:
        """Whether there are enough of them."""
        return sum(one.places for one in self) >= self._capacity

    def take(self) -> list[Trajectory]:
        """The oldest places, as many as an update is made on or all that there are. They are forgotten here."""
        taken: list[Trajectory] = []
        room = self._capacity
        with self._lock:
            while room and self._trajectories:
                oldest = self._trajectories.popleft()
                self._nbytes -= oldest.nbytes
                if oldest.places > room:
                    is_of_rest = oldest.is_chosen & (oldest.is_chosen.cumsum(0) > room)
                    rest = replace(oldest, is_chosen=is_of_rest)
                    self._trajectories.appendleft(rest)
                    self._nbytes += rest.nbytes
                    oldest = replace(oldest, is_chosen=oldest.is_chosen & ~is_of_rest)
                taken.append(oldest)
                room -= oldest.places
        return taken
