"""What alignment has done, and what it cost."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class AlignmentStatistics:
    """Counts since the aligner was made or reset.

    Attributes:
        requests: that were learnt from, or are remembered for it.
        updates: of what is learnt; each is `OnlineAlignment.steps` optimizer steps.
        kept: updates after which what was learnt was served.
        rolled_back: how often what was served was withdrawn, or what was learnt was given up, as it drafted worse.
        dropped: optimizer steps that were not taken, as loss or gradients were not finite.
        loss: of the last optimizer step, before it; None before the first.
        acceptance_before: how much of the drafter's own drafts would be accepted, from 0 to 1, a mean over the last
            requests that were scored (`OnlineAlignment.gate_window`); None where none was.
        acceptance_after: likewise with what it had learnt before it was trained on them.
        is_served: whether what was learnt is drafted with now.
        why_not_served: why it is not, if that is for the gate; None otherwise.
        seconds: that recording, scoring, training and taking up took.
        generation_seconds: that the requests took, recording included.
        longest_swap: seconds that a draft could have had to wait for weights to be put in place, at most.
        longest_swap_work: seconds of processor time that this took, at most: what other processes do adds nothing.
        buffer_bytes: of the requests that are remembered.
        training_bytes: of gradients and the optimizer's state.
        error: what turned learning off, None where nothing did.
    """

    requests: int = 0
    updates: int = 0
    kept: int = 0
    rolled_back: int = 0
    dropped: int = 0
    loss: float | None = None
    acceptance_before: float | None = None
    acceptance_after: float | None = None
    is_served: bool = False
    why_not_served: str | None = None
    seconds: float = 0.0
    generation_seconds: float = 0.0
    longest_swap: float = 0.0
    longest_swap_work: float = 0.0
    buffer_bytes: int = 0
    training_bytes: int = 0
    error: str | None = None

    @property
    def overhead(self) -> float:
        """Seconds of alignment per second of generation; 0 before the first request is over."""
        return self.seconds / self.generation_seconds if self.generation_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can say it."""
        return {**asdict(self), "overhead": self.overhead}

    def __str__(self) -> str:
        before, after = (
            "not scored yet" if share is None else f"{share:.3f}"
            for share in (self.acceptance_before, self.acceptance_after)
        )
        rows = [
            ("requests learnt from", f"{self.requests}"),
            ("updates", f"{self.updates} ({self.kept} served, {self.rolled_back} rolled back)"),
            ("acceptance before", before),
            ("acceptance after", after),
            ("drafts with", "what was learnt" if self.is_served else "the drafter's own weights"),
            ("time", f"{self.seconds:.2f} s, {self.overhead:.1%} of generation's"),
            ("memory", f"requests {self.buffer_bytes:,} bytes, training {self.training_bytes:,} bytes"),
        ]
        if self.why_not_served is not None:
            rows.append(("not what was learnt, as", self.why_not_served))
        if self.error is not None:
            rows.append(("turned off by", self.error))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
