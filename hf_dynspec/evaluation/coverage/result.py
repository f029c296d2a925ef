"""What was measured, text by text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...shortlists import ShortlistPolicy
from .settings import CoverageSettings


@dataclass(frozen=True)
class DepthCoverage:
    """One policy on one text at one draft depth that is verified. Figures as in `TextCoverage`."""

    depth: int  # how many drafts of the round come before
    draft_steps: float  # rounds that draft at this depth
    positions: float  # rounds that verify this draft, as all before it are accepted
    size: float
    mass: float
    acceptance: float


@dataclass(frozen=True)
class TextCoverage:
    """One policy on one text.

    Means are over positions: the drafts of each round that are verified, up to the first that is rejected. Only `size`
    is a mean over all draft steps. Counts and means are expectations; if rounds are drawn, counts are means over the
    draws, and means are over the rounds of all draws. `V_t` is the shortlist.
    """

    prompt: str  # its identifier
    continuation: int  # which of the prompt's texts, from 0
    domain: str
    policy: str  # its label
    draws: int  # how often the rounds were drawn; 0 for expectations and greedy decoding
    draft_steps: float
    positions: float
    rounds: float
    size: float  # ids on `V_t`, as `bench`'s active vocabulary
    mass: float  # the target's probability of `V_t`: the highest acceptance probability of any drafter (lemma 1)
    oracle_mass: float  # of the `|V_t|` most probable tokens: the most of any shortlist of that size (lemma 2)
    recall: float  # share of the target's `recall_k` most probable tokens that `V_t` holds
    oov: float  # share of positions whose token `V_t` does not hold
    acceptance: float  # probability `Σ_x min(p(x), q(x))`, with the drafter's distribution `q` on `V_t` (equation 3)
    acceptance_length: float  # expected tokens per round, the target's own included: `rounds.expected_tokens`
    by_depth: tuple[DepthCoverage, ...]  # from the first draft of a round to the last that is verified


@dataclass
class CoverageResult:
    """Everything that was measured so far."""

    settings: CoverageSettings
    policies: Mapping[str, Mapping[str, ShortlistPolicy]]  # by label and domain, in the order of the table
    prompts: list[dict[str, Any]]  # identifier, domain and number of tokens of each
    models: dict[str, Any]  # descriptions of the target and the drafter
    threads: int  # CPU threads in use
    started: str  # UTC time in ISO format
    finished: str | None = None  # None while the run is not complete
    notes: list[str] = field(default_factory=list)  # for the reader, such as a prompt that was left out
    measured: list[TextCoverage] = field(default_factory=list)  # each policy on each text
    # If the rounds of some policy are drawn, those of all policies, drawn with the same luck, for comparisons.
    drawn: list[TextCoverage] = field(default_factory=list)
    # By prompt and continuation: pairs of a shortlist size and the mean oracle mass at that size, over all new tokens.
    oracle_curves: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        return self.finished is not None

    @property
    def domains(self) -> list[str]:
        """The domains that were measured."""
        return list(dict.fromkeys(one.domain for one in self.measured))

    @property
    def baseline(self) -> str:
        """The label of the first policy, with which the others are compared."""
        return next(iter(self.policies))
