"""What was measured, text by text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...shortlists import ShortlistPolicy
from .settings import CoverageSettings


@dataclass(frozen=True)
class DepthCoverage:
    """One policy on one text at one draft depth, for a depth that is verified.

    Args:
        depth: how many drafts of the round come before.
        draft_steps: expected number of rounds that draft at this depth.
        positions: expected number of them in which all drafts before were accepted, so that this one is verified.
        size: as for `TextCoverage`, over the draft steps at this depth.
        mass, acceptance: likewise, over its positions.
    """

    depth: int
    draft_steps: float
    positions: float
    size: float
    mass: float
    acceptance: float


@dataclass(frozen=True)
class TextCoverage:
    """One policy on one text, a continuation of a prompt. Means are over the positions that a run verifies and has a
    shortlist for: the accepted drafts of every round and the first that is not accepted. The size's alone is over all
    draft steps, each of which scores a shortlist.

    Counts are expectations over what chance could do along the text, and means are weighted by the same probabilities.
    Where rounds are drawn, counts are means over the draws, and means are over the rounds of all draws.

    Args:
        prompt: the prompt's identifier.
        continuation: which of its texts, from 0.
        domain: the prompt's domain.
        policy: the policy's label.
        draws: how many courses of rounds were drawn; 0 where these are expectations, or nothing is left to chance.
        draft_steps: expected number of draft steps.
        positions: expected number of positions.
        rounds: expected number of rounds.
        size: mean number of token ids on the shortlist `V_t`, over draft steps, as `bench`'s active vocabulary.
        mass: the target's probability mass on `V_t`, the largest acceptance probability that any drafter can reach
            with it (lemma 1).
        oracle_mass: the mass of the `|V_t|` most probable tokens, the most that a shortlist of that size can have
            (lemma 2).
        recall: share of the target's `recall_k` most probable tokens that `V_t` holds.
        oov: share of positions at which `V_t` does not hold the text's own token.
        acceptance: acceptance probability `Σ_x min(p(x), q(x))`, `q` being the drafter's distribution on `V_t`
            (equation 3).
        acceptance_length: expected tokens per round, the target's own token included, see
            `draft_steps.expected_tokens`.
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
    """Everything that was measured, as far as it was; `estimates` and `report` tell what follows from it.

    Args:
        settings: what was asked for.
        policies: the policies by label and domain, in the order of the table. The others are compared with the first.
        prompts: identifier, domain and number of tokens of each prompt.
        models: what is known of the target and the drafter.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        finished: UTC time; None while the run is not complete.
        notes: what a reader should know, such as a prompt that was left out.
        measured: each policy on each text.
        drawn: likewise, where some policy learns from verdicts, so that its rounds are drawn: those of all policies,
            drawn with the same luck. By these it is compared with others, so that what luck does to both cancels out.
            Empty in greedy decoding, where nothing is left to chance.
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
        """The label of the policy that the others are compared with: the first."""
        return next(iter(self.policies))
