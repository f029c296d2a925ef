"""What happened while drafting: acceptance, active vocabulary, and where the time went."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from math import inf, nextafter
from typing import Any

import torch

from .devices import is_host_memory
from .protocol import BackgroundWork, Candidates, Shortlist

# What a profiled call is divided into. "other" is the rest: the generation loop and the acceptance of tokens.
DRAFT_SECTIONS = ("backbone", "head", "policy", "choice")
SECTIONS = (*DRAFT_SECTIONS, "verification")
# What of it is layers, the target's with its output projection: all that an oracle would need time for.
LAYER_SECTIONS = ("backbone", "verification")


class Clock:
    """Tells the time in seconds, each time more than before: what is measured is divided by, and a computer's clock
    may say the same twice, where it is coarse or stands still. Not shared between threads.

    Args:
        now: what it goes by (None: `time.perf_counter`).
    """

    def __init__(self, now: Callable[[], float] | None = None):
        self._now = now
        self._last = -inf

    def __call__(self) -> float:
        now = time.perf_counter() if self._now is None else self._now()
        self._last = max(now, nextafter(self._last, inf))
        return self._last


class Stopwatch:
    """Sums the seconds spent in named sections. Costs nothing where it is not enabled.

    Args:
        devices: CUDA devices among these are waited for at both ends of a section, so that it is charged with its own
            work. That slows the call down, so a profiled call is for finding out where time goes, not how much.
    """

    def __init__(self, enabled: bool, devices: tuple[torch.device, ...] = ()):
        self.enabled = enabled
        self.seconds = dict.fromkeys(SECTIONS, 0.0) if enabled else {}
        self._clock = Clock()
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        # Tens of sections are entered in a round, and none within itself.
        self._sections = {name: _Section(self, name) for name in self.seconds}

    def now(self) -> float:
        """The time in seconds after all work given to the devices is done, by a `Clock`."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        return self._clock()

    def section(self, name: str) -> AbstractContextManager:
        """Charge the enclosed work to a section, which is not in one of the same name."""
        return self._sections[name] if self.enabled else _NOT_TIMED


# Tens of sections are entered in a round, each for less time than a generator would take to say so.
_NOT_TIMED = nullcontext()


class _Section:
    """Charges what happens between its two ends to a section of a stopwatch."""

    __slots__ = ("_name", "_start", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str):
        self._stopwatch, self._name = stopwatch, name

    def __enter__(self) -> None:
        self._start = self._stopwatch.now()

    def __exit__(self, *error: object) -> None:
        self._stopwatch.seconds[self._name] += self._stopwatch.now() - self._start


class DraftingStatistics:
    """Counts of one call, or the sum over calls.

    Counters that live on the device are read when a property asks for them, so that counting never waits for it.

    Attributes:
        background_work: what the policy did in a thread of its own.
        rounds_of: how many rounds were drafted with each policy, by its name.
        lane: how the rounds of the last call were run: "fixed memory, as a graph", "fixed memory", or "general" and
            the reason.
    """

    def __init__(self):
        self.calls = 0
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        # tokens_per_round[n]: in how many rounds n tokens came out; accepted_at[i]: how many tokens of draft step i.
        self.tokens_per_round: list[int] = []
        self.accepted_at: list[int] = []
        self.seconds: dict[str, float] = {}
        self.background_work = BackgroundWork()
        self.rounds_of: Counter[str] = Counter()
        self.lane = "general"
        self._drafted_at: list[int | torch.Tensor] = []
        self._draft_steps = 0
        self._active_sum: int | torch.Tensor = 0
        self._active_max: int | torch.Tensor = 0
        self._checked = 0
        self._out_of_vocabulary: int | torch.Tensor = 0
        self._covered_positions = 0
        self._coverage_sum: float | torch.Tensor = 0.0

    # Recording ---------------------------------------------------------------------------------------------------

    def record_draft(self, candidates: Candidates, policy: str) -> None:
        """Count the candidates of one round and the shortlists that a policy let them be chosen from."""
        depths = range(len(candidates.shortlists))
        drafted_at = [1 if candidates.is_chain else (candidates.depths == depth).sum() for depth in depths]
        counted: Shortlist | None = None
        active: list[int | torch.Tensor] = []
        for shortlist in candidates.shortlists:
            active.append(active[-1] if shortlist is counted else _read_if_free(shortlist.count))
            counted = shortlist
        self.record_steps(candidates.token_ids.shape[0], drafted_at, active, policy)

    def record_steps(
        self, drafted: int, drafted_at: list[int | torch.Tensor], active: list[int | torch.Tensor], policy: str
    ) -> None:
        """Count the candidates of one round, and at each draft step the candidates and the tokens of the policy's
        shortlist."""
        self.rounds_of[policy] += 1
        self.drafted += drafted
        counted: int | torch.Tensor = -1
        for depth, (at_depth, count) in enumerate(zip(drafted_at, active, strict=True)):
            _add_at(self._drafted_at, depth, at_depth)
            if count is not counted:
                self._active_max, counted = _maximum(self._active_max, count), count
            self._active_sum = self._active_sum + count
        self._draft_steps += len(active)

    def record_verification(self, accepted: int) -> None:
        """Count one round in which `accepted` candidates, one below the other, were accepted."""
        self.rounds += 1
        self.accepted += accepted
        _add_at(self.tokens_per_round, accepted + 1)
        for position in range(accepted):
            _add_at(self.accepted_at, position)

    def record_verified_tokens(self, accepted: int, has_missed: torch.Tensor | None) -> None:
        """Count which of the verified tokens of a round their draft step's shortlist did not hold.

        Args:
            accepted: how many of them were candidates, which came out of their shortlists.
            has_missed: see `Candidates.has_missed`.
        """
        self._checked += accepted
        if has_missed is not None:
            self._checked += 1
            self._out_of_vocabulary = self._out_of_vocabulary + has_missed

    def record_coverage(self, mass: torch.Tensor) -> None:
        """Count the target's probability mass `[n]` on the shortlists of `n` verified positions."""
        self._covered_positions += mass.shape[0]
        self._coverage_sum = self._coverage_sum + mass.double().sum()

    def add(self, other: "DraftingStatistics") -> None:
        """Add the counts of another call."""
        for name in ("calls", "rounds", "drafted", "accepted", "_draft_steps", "_checked", "_covered_positions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tokens_per_round", "_drafted_at", "accepted_at"):
            for index, count in enumerate(getattr(other, name)):
                _add_at(getattr(self, name), index, _number(count))
        self.background_work += other.background_work
        self.rounds_of += other.rounds_of
        self.lane = other.lane
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._active_sum = _number(self._active_sum) + _number(other._active_sum)
        self._active_max = max(_number(self._active_max), _number(other._active_max))
        self._out_of_vocabulary = _number(self._out_of_vocabulary) + _number(other._out_of_vocabulary)
        self._coverage_sum = _number(self._coverage_sum) + _number(other._coverage_sum)

    # Reading -----------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """New tokens: the accepted ones and one of the target's own for each round."""
        return self.accepted + self.rounds

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per round with the bonus token; plain decoding has 1.0."""
        return _ratio(self.tokens, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens / drafted tokens, without the bonus token. Of a tree only one path can be accepted, so that
        this is small however good its drafts are; that is what `accepted_per_round` tells."""
        return _ratio(self.accepted, self.drafted)

    @property
    def drafted_at(self) -> list[int]:
        """For each draft step, how many tokens were drafted there."""
        return [_number(count) for count in self._drafted_at]

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """For each draft step, the share of tokens drafted there that were accepted."""
        drafted_at = self.drafted_at
        accepted = self.accepted_at + [0] * (len(drafted_at) - len(self.accepted_at))
        return [_ratio(count, drafted) for count, drafted in zip(accepted, drafted_at, strict=False)]

    @property
    def accepted_per_round(self) -> list[float]:
        """For each draft step, the share of rounds in which a token of it was accepted. Chains and trees compare by
        it; with 1, these add up to the acceptance length."""
        accepted = self.accepted_at + [0] * (len(self._drafted_at) - len(self.accepted_at))
        return [_ratio(count, self.rounds) for count in accepted]

    @property
    def oov_rate(self) -> float:
        """Share of verified tokens that the shortlist of their draft step did not hold."""
        return _ratio(_number(self._out_of_vocabulary), self._checked)

    @property
    def active_vocabulary(self) -> float:
        """Mean number of token ids in a shortlist, over draft steps."""
        return _ratio(_number(self._active_sum), self._draft_steps)

    @property
    def active_vocabulary_max(self) -> int:
        """The largest number of token ids in a shortlist."""
        return int(_number(self._active_max))

    @property
    def coverage(self) -> float | None:
        """Mean probability mass of the target on the shortlist, over verified positions. None where not measured."""
        return _ratio(_number(self._coverage_sum), self._covered_positions) if self._covered_positions else None

    @property
    def draft_seconds(self) -> float | None:
        """Seconds spent in drafting. None unless profiled."""
        return sum(self.seconds[name] for name in DRAFT_SECTIONS) if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain numbers, lists and dicts."""
        return {
            "calls": self.calls,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "tokens_per_round": list(self.tokens_per_round),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": self.acceptance_rate_by_position,
            "accepted_per_round": self.accepted_per_round,
            "oov_rate": self.oov_rate,
            "active_vocabulary": self.active_vocabulary,
            "active_vocabulary_max": self.active_vocabulary_max,
            "coverage": self.coverage,
            "rounds_of": dict(self.rounds_of),
            "lane": self.lane,
            "seconds": dict(self.seconds),
            "background_work": self._background_figures(),
        }

    def _background_figures(self) -> dict[str, Any] | None:
        """The figures of the work in the background; None where there was none."""
        work = self.background_work
        return {**asdict(work), "hidden_share": work.hidden_share} if work.jobs else None

    def __repr__(self) -> str:
        length = f"acceptance length {self.acceptance_length:.2f}" if self.rounds else "no round yet"
        return f"<{type(self).__name__}: {self.tokens} tokens in {self.rounds} rounds, {length}>"

    def __str__(self) -> str:
        by_position = " ".join(f"{rate:.2f}" for rate in self.accepted_per_round)
        # A chain has one token at each draft step of a round, and a tree has several.
        has_trees = any(count > self.rounds for count in self.drafted_at)
        rate_name = "tree nodes accepted" if has_trees else "acceptance rate"
        per_round = " ".join(str(count) for count in self.tokens_per_round[1:])
        rows = [
            ("rounds", f"{self.rounds}"),
            ("new tokens", f"{self.tokens}"),
            ("acceptance length", f"{self.acceptance_length:.2f}"),
            ("rounds with 1, 2, … tokens", per_round),
            (rate_name, f"{self.acceptance_rate:.3f} ({self.accepted} of {self.drafted})"),
            ("accepted per round, by draft step", by_position),
            ("out of vocabulary", f"{self.oov_rate:.4f}"),
            ("active vocabulary", f"{self.active_vocabulary:.0f} (at most {self.active_vocabulary_max})"),
        ]
        if len(self.rounds_of) > 1:
            rows.append(("rounds drafted with", ", ".join(f"{name} {n}" for name, n in self.rounds_of.most_common())))
        if self.coverage is not None:
            rows.append(("coverage", f"{self.coverage:.4f}"))
        for name, seconds in self.seconds.items():
            per_round_ms = 1e3 * _ratio(seconds, self.rounds)
            rows.append((f"time: {name}", f"{seconds:.3f} s ({per_round_ms:.2f} ms per round)"))
        work = self.background_work
        if work.hidden_share is not None:
            told = f"{work.jobs} jobs, {work.seconds:.3f} s, {work.hidden_share:.1%} of it hidden"
            rows.append(("in the background", f"{told}; {work.late_rounds} rounds without its last results"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _add_at(counts: list[int | torch.Tensor], index: int, amount: int | torch.Tensor = 1) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] = counts[index] + amount


def _maximum(first: int | torch.Tensor, second: int | torch.Tensor) -> int | torch.Tensor:
    """The larger of two counts, either of which may still be on the device."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.maximum(first, second)
    if isinstance(first, torch.Tensor):
        # Not by making a tensor of the number, which would be copied to the device and waited for.
        return first.clamp_min(second)
    return second.clamp_min(first) if isinstance(second, torch.Tensor) else max(first, second)


def _read_if_free(count: int | torch.Tensor) -> int | torch.Tensor:
    """The number itself where nothing has to be waited for, as adding numbers is faster than adding tensors."""
    return count.item() if isinstance(count, torch.Tensor) and is_host_memory(count.device) else count


def _number(count: float | torch.Tensor) -> float:
    return count.item() if isinstance(count, torch.Tensor) else count


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
