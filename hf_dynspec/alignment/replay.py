"""Remembered requests. They are users' text, which stays in memory; `clear` erases it."""

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..errors import ConfigurationError

# The most ids of a request's shortlist that are kept, from its beginning.
LARGEST_SHORTLIST = 8192

# The fields of a trajectory by kind.
_NUMBERS = ("first", "temperature")
_MAY_MISS = ("features", "is_chosen")
_IDS = ("token_ids", "top_ids", "shortlist_ids")
_FLAGS = ("is_wrong", "is_chosen")
# A row for each verified token.
_OF_VERIFIED = ("top_ids", "top_logits", "log_normalisers", "is_wrong")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The record of one request that a drafter learns from, without rows of the full vocabulary.

    Token `i` of the `v` verified ones is `token_ids[first + i]`. All tensors are on the drafter's device.

    Args:
        token_ids: int64 `[n]`, `n = first + v`: the last part of the prompt and the verified tokens.
        first: the index of the first verified token, at least 1.
        top_ids: int64 `[v, K]`: the target's most probable tokens for each verified one.
        top_logits: fp32 `[v, K]`: their logits, before any processor; −inf if there were fewer.
        log_normalisers: fp32 `[v]`: the log of the softmax's denominator over the full vocabulary, at the request's
            temperature (1 if greedy).
        is_wrong: bool `[v]`: the draft was rejected there, or there was none.
        shortlist_ids: int64 `[s]`: the ids of the request's shortlist, `s` up to `LARGEST_SHORTLIST`.
        features: `[n, d_target · layers]`: the input of an EAGLE head at each token, zeros if unknown. None for
            drafters that read nothing of the target.
        temperature: the temperature of the request, 0 if greedy; acceptance depends on it.
        is_chosen: bool `[v]`: whether to learn from a draft that begins there (None: from all).
    """

    token_ids: torch.Tensor
    first: int
    top_ids: torch.Tensor
    top_logits: torch.Tensor
    log_normalisers: torch.Tensor
    is_wrong: torch.Tensor
    shortlist_ids: torch.Tensor
    features: torch.Tensor | None = None
    temperature: float = 1.0
    is_chosen: torch.Tensor | None = None

    def __post_init__(self) -> None:
        # Tensors of inference mode cannot be trained on.
        with torch.inference_mode(False):
            for field in fields(self):
                value = getattr(self, field.name)
                if isinstance(value, torch.Tensor) and value.is_inference():
                    object.__setattr__(self, field.name, value.clone())

    @property
    def places(self) -> int | None:
        """The number of chosen places; None if none were chosen."""
        return None if self.is_chosen is None else int(self.is_chosen.sum())

    def up_to(self, count: int | None) -> "Trajectory | None":
        """Its first `count` tokens (None: all); None if no verified token is among them."""
        if count is None or count >= self.token_ids.shape[0]:
            return self
        if count <= self.first:
            return None
        kept = {"token_ids": self.token_ids[:count]}
        rows = {name: getattr(self, name) for name in (*_OF_VERIFIED, "is_chosen")}
        kept |= {name: None if value is None else value[: count - self.first] for name, value in rows.items()}
        return replace(self, **kept, features=None if self.features is None else self.features[:count])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class ReplayBuffer:
    """The trajectories of the last requests. Shareable between threads.

    Args:
        capacity: the most trajectories (B).
        largest_bytes: the most bytes of all together. A single larger trajectory is not added.
    """

    def __init__(self, capacity: int = 32, largest_bytes: int = 2**28):
        self._capacity, self._largest_bytes = capacity, largest_bytes
        self._lock = threading.Lock()
        self._trajectories: deque[Trajectory] = deque()
        self._nbytes = 0

    def add(self, trajectory: Trajectory) -> bool:
        """Add a trajectory; the oldest ones make room for it. Returns whether it was added."""
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
        """The newest trajectory, and others drawn without repeats.

        Args:
            size: the most trajectories to return.
            random: draws them; a generator of the CPU.
        """
        held = list(self)
        others = torch.randperm(max(0, len(held) - 1), generator=random, device="cpu")[: size - 1]
        return held[-1:] + [held[place] for place in others.tolist()]

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        """The present trajectories, the oldest first."""
        with self._lock:
            held = list(self._trajectories)
        return iter(held)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._nbytes


class FillingBuffer(ReplayBuffer):
    """Collects chosen places of requests until there are enough for an update (Zhang et al. 2026, "EvoSpec", algorithm
    1, lines 25 to 29).

    Args:
        capacity: the places of an update (B).
        largest_bytes: as for `ReplayBuffer`.
    """

    @property
    def is_full(self) -> bool:
        """Whether there are enough places for an update."""
        return sum(one.places for one in self) >= self._capacity

    def take(self) -> list[Trajectory]:
        """Remove and return the oldest places: as many as an update takes, or all."""
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


# As plain tensors ----------------------------------------------------------------------------------------------------


def requests_state(trajectories: Iterable[Trajectory]) -> list[dict[str, torch.Tensor]]:
    """Copies of each request's tensors by the names of `Trajectory`; numbers become tensors without dimensions."""
    state = []
    for trajectory in trajectories:
        values = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
        numbers = {name: torch.tensor(values[name], device="cpu") for name in _NUMBERS}
        tensors = {name: one.clone() for name, one in values.items() if isinstance(one, torch.Tensor)}
        state.append(tensors | numbers)
    return state


def requests_from(
    state: Sequence[Mapping[str, torch.Tensor]], num_embeddings: int, reads_features: bool, device: torch.device
) -> list[Trajectory]:
    """Check a state of `requests_state`, which may be hostile, and make its trajectories.

    Args:
        state: the state of each request.
        num_embeddings: the number of ids that the drafter reads.
        reads_features: whether it reads hidden states of the target.
        device: the device of the trajectories.

    Raises:
        ConfigurationError: it is no such state, or of another kind of drafter; names what is wrong.
    """
    trajectories = []
    for number, one in enumerate(state):
        if problem := _problem(one, num_embeddings, reads_features):
            raise ConfigurationError(f"request {number} of the replay buffer: {problem}. Save the buffer again.")
        values: dict[str, Any] = {name: value.to(device) for name, value in one.items() if name not in _NUMBERS}
        values |= {"first": int(one["first"]), "temperature": float(one["temperature"])}
        trajectories.append(Trajectory(**values))
    return trajectories


def _problem(one: Mapping[str, torch.Tensor], num_embeddings: int, reads_features: bool) -> str | None:
    """The first problem of a request's state, or None."""
    names = {field.name for field in fields(Trajectory)}
    if wrong := sorted((names - one.keys() - {*_MAY_MISS}) | (one.keys() - names)):
        return f"it lacks or has too much of {', '.join(map(str, wrong))}"
    if wrong := [name for name, value in one.items() if not isinstance(value, torch.Tensor)]:
        return f"{wrong[0]} is no tensor"
    if ("features" in one) != reads_features:
        return "it was left by a drafter that reads other things of the target"
    return _problem_of_tensors(one) or _problem_of_values(one, num_embeddings)


def _problem_of_tensors(one: Mapping[str, torch.Tensor]) -> str | None:
    """The first problem of dtypes and shapes, or None."""
    for name, value in one.items():
        if not _is_of_its_kind(name, value.dtype):
            return f"{name} is {value.dtype}"
    if any(one[name].dim() for name in _NUMBERS) or one["token_ids"].dim() != 1 or one["top_ids"].dim() != 2:
        return "its shapes are wrong"
    n, verified, kept = one["token_ids"].shape[0], one["is_wrong"].numel(), one["top_ids"].shape[1]
    if not 1 <= int(one["first"]) == n - verified < n:
        return f"{verified} of its {n} tokens are verified, and they begin at {int(one['first'])}"
    shapes = {"top_ids": (verified, kept), "top_logits": (verified, kept)}
    shapes |= dict.fromkeys(("log_normalisers", *_FLAGS), (verified,))
    for name, shape in shapes.items():
        if name in one and tuple(one[name].shape) != shape:
            return f"{name} has the shape {list(one[name].shape)}, and not {list(shape)}"
    if one["shortlist_ids"].dim() != 1 or one["shortlist_ids"].shape[0] > LARGEST_SHORTLIST or not kept:
        return "its shapes are wrong"
    if "features" in one and (one["features"].dim() != 2 or one["features"].shape[0] != n):
        return f"features has the shape {list(one['features'].shape)}"
    return None


def _is_of_its_kind(name: str, dtype: torch.dtype) -> bool:
    if name in _FLAGS:
        return dtype == torch.bool
    return dtype == torch.int64 if name in (*_IDS, "first") else dtype.is_floating_point


def _problem_of_values(one: Mapping[str, torch.Tensor], num_embeddings: int) -> str | None:
    """The first problem of the numbers, or None."""
    if any(bool((one[name] < 0).any()) for name in _IDS) or bool((one["token_ids"] >= num_embeddings).any()):
        return f"an id is no token; there are {num_embeddings}"
    for name in ("log_normalisers", "features"):
        if name in one and not bool(one[name].isfinite().all()):
            return f"{name} holds NaN or infinity"
    # −inf stands for missing ids.
    if bool((one["top_logits"].isnan() | (one["top_logits"] == torch.inf)).any()):
        return "top_logits holds NaN or infinity"
    temperature = float(one["temperature"])
    return None if math.isfinite(temperature) and temperature >= 0 else f"its temperature is {temperature}"
