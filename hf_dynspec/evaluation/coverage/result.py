"""What was measured, text by text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...shortlists import ShortlistPolicy
from .settings import CoverageSettings


@dataclass(frozen=True)
class DepthCoverage:
    """One policy on one text at one draft depth that is verified.

    Args:
        depth: how many drafts of the round come before.
        draft_steps: expected number of rounds that draft at this depth.
        positions: expected number of rounds that verify this draft, as all before it are accepted.
        size: mean over the draft steps at this depth; see `TextCoverage`.
        mass: mean over its positions.
        acceptance: mean over its positions.
    """

    depth: int
    draft_steps: float
    positions: float
    size: float
    mass: float
    acceptance: float


@dataclass(frozen=True)
class TextCoverage:
    """One policy on one text.

    Means are over positions: the drafts of each round that are verified, up to the first that is rejected. Only `size`
    is a mean over all draft steps. Counts and means are expectations; if rounds are drawn, counts are means over the
    draws, and means are over the rounds of all draws.

    Args:
        prompt: the prompt's identifier.
        continuation: which of the prompt's texts, from 0.
        domain: the prompt's domain.
        policy: the policy's label.
        draws: how often the rounds were drawn; 0 for expectations and for greedy decoding.
        draft_steps: number of draft steps.
        positions: number of positions.
        rounds: number of rounds.
        size: token ids on the shortlist `V_t`, as `bench`'s active vocabulary.
        mass: the target's probability mass on `V_t`, the highest acceptance probability of any drafter (lemma 1).
        oracle_mass: the mass of the `|V_t|` most probable tokens, the most of any shortlist of that size (lemma 2).
        recall: share of the target's `recall_k` most probable tokens that `V_t` holds.
        oov: share of positions whose token `V_t` does not hold.
        acceptance: acceptance probability `Σ_x min(p(x), q(x))`, `q` being the drafter's distribution on `V_t`
            (equation 3).
        acceptance_length: expected tokens per round, the target's own included, see `rounds.expected_tokens`.
        by_depth: from the first draft of a round to the last that is verified.
    """

    prompt: str
    continuation: int
    domain: str
    policy: str
    draws: int
    draft_steps: float
    positions: float
    rounds: float
    size: float
    mass: float
    oracle_mass: float
    recall: float
    oov: float
    acceptance: float
    acceptance_length: float
    by_depth: tuple[DepthCoverage, ...]


@dataclass
class CoverageResult:
    """Everything that was measured so far.

    Args:
        settings: what was asked for.
        policies: the policies by label and domain, in the order of the table.
        prompts: identifier, domain and number of tokens of each prompt.
        models: descriptions of the target and the drafter.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: UTC time; None while the run is not complete.
        notes: remarks for the reader, such as a prompt that was left out.
        measured: each policy on each text.
        drawn: if rounds are drawn for some policy, those of all policies, drawn with the same luck, for comparisons.
        oracle_curves: by prompt and continuation: pairs of a shortlist size and the mean oracle mass at that size
            (lemma 2), over all tokens of the continuation.
    """

    settings: CoverageSettings
    policies: Mapping[str, Mapping[str, ShortlistPolicy]]
    prompts: list[dict[str, Any]]
    models: dict[str, Any]
    threads: int
    started: str
    finished: str | None = None
    notes: list[str] = field(default_factory=list)
    measured: list[TextCoverage] = field(default_factory=list)
    drawn: list[TextCoverage] = field(default_factory=list)
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
