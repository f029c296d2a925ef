"""What was measured of a pair, and what speed is expected of it, setting by setting."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from ...drafting.expected_speed import RoundCosts
from ...shortlists import ShortlistPolicy
from ...stats import DRAFT_SECTIONS, DraftingStatistics
from ...tree_config import TreeConfig
from ..tree_text import format_tree
from .prediction import ChainCosts, Course, acceptance_by_step, chain_costs, pace_of, rounds_along, verdicts_of
from .settings import FULL, DoctorSettings
from .timing import TimedCall

# Less than this is not worth an assistant.
_LEAST_GAIN = 1.03
# What scores tokens and chooses among them: with a shortlist, little is left of both.
HEAD_SECTIONS = ("head", "choice")


@dataclass(frozen=True)
class Profile:
    """Where the time of a round goes.

    Args:
        seconds: of a round, by section; see `stats.SECTIONS`.
        steps: its draft steps.
    """

    seconds: dict[str, float]
    steps: int

    @property
    def head_share(self) -> float:
        """The share of a draft step that scoring and choosing tokens takes."""
        drafting = sum(self.seconds[name] for name in DRAFT_SECTIONS)
        return sum(self.seconds[name] for name in HEAD_SECTIONS) / drafting if drafting else 0.0


@dataclass(frozen=True)
class Expectation:
    """What is expected of one setting.

    Args:
        policy: its label.
        steps: the length of the chains, or the draft steps of the trees.
        tree: the shape of the trees; None for chains.
        tokens_per_second: new tokens / seconds of a call, the prompt included.
        ratio: of that to plain generation's.
        error: the standard error of the ratio, from prompt to prompt; None where there is one prompt only.
        tokens_per_round: the acceptance length.
        round_seconds: of a round with all its draft steps.
    """

    policy: str
    steps: int
    tree: TreeConfig | None
    tokens_per_second: float
    ratio: float
    error: float | None
    tokens_per_round: float
    round_seconds: float

    @property
    def shape(self) -> str:
        """In words."""
        return f"chains of {self.steps}" if self.tree is None else f"trees of {format_tree(self.tree)}"


@dataclass
class MeasuredPair:
    """Everything that was measured of a pair, and what is expected of it.

    Calls are lists with one for each prompt, in their order.

    Args:
        settings: what was asked for.
        policies: the policies by label, `full` among them.
        models: what is known of the target and the drafter.
        vocabulary: how many tokens there are, and rows of both heads.
        prompts: identifier, domain and number of tokens of each prompt, of which the first were measured.
        threads: CPU threads in use.
        started: UTC time in ISO format.
        short_chain: the length of the shorter chains that are timed.
        drafts_at_once: a chain is drafted in the round that reads the prompt too.
        verified_rows: the numbers of rows of the forwards that were timed.
        verification: their seconds.
        finished: UTC time.
        notes: what was left out, and why.
        plain: calls of plain generation.
        head_product: the same with the product that verifications compute the target's logits by, where there is one.
        short_chains: calls by policy.
        long_chains: calls by policy.
        trees: calls by policy.
        profiles: by policy, with long chains.
        drafting: counts by policy, of the calls with long chains.
    """

    settings: DoctorSettings
    policies: dict[str, ShortlistPolicy]
    models: dict[str, Any]
    vocabulary: dict[str, int]
    prompts: list[dict[str, Any]]
    threads: int
    started: str
    short_chain: int
    drafts_at_once: bool
    verified_rows: tuple[int, ...]
    verification: tuple[float, ...] = ()
    finished: str | None = None
    notes: list[str] = field(default_factory=list)
    plain: list[TimedCall] = field(default_factory=list)
    head_product: list[TimedCall] = field(default_factory=list)
    short_chains: dict[str, list[TimedCall]] = field(default_factory=dict)
    long_chains: dict[str, list[TimedCall]] = field(default_factory=dict)
    trees: dict[str, list[TimedCall]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    drafting: dict[str, DraftingStatistics] = field(default_factory=dict)

    # What follows ------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> range:
        """The lengths of chains that speeds are expected of."""
        return range(1, self.settings.num_assistant_tokens + 1)

    @property
    def tree(self) -> TreeConfig | None:
        """The shape of the trees that were measured; None where there were none."""
        return self.settings.resolved_tree() if self.trees else None

    @property
    def measured_prompts(self) -> int:
        """How many prompts there was time for."""
        return len(self.plain)

    @cached_property
    def expectations(self) -> list[Expectation]:
        """Of every policy, with chains of every length and with trees."""
        every = self._predicted(range(self.measured_prompts))
        without_one = [
            self._predicted([one for one in range(self.measured_prompts) if one != left_out])
            for left_out in range(self.measured_prompts if self.measured_prompts > 1 else 0)
        ]
        return [
            replace(one, error=_jackknife([others[number].ratio for others in without_one]))
            for number, one in enumerate(every)
        ]

    @cached_property
    def oracle(self) -> Expectation:
        """What the best chain would bring with the full vocabulary's acceptance, if scoring and choosing took no time:
        at the costs of the policy whose rounds are the shortest then, as reading the whole head at each draft
        step leaves the target less of the processor's caches."""
        prompts = range(self.measured_prompts)
        free = [self.chain_costs(one, prompts).without_head(self.profiles[one].head_share) for one in self.policies]
        chains = (self._chain(FULL, costs, prompts, steps, "oracle") for costs in free for steps in self.lengths)
        return max(chains, key=lambda one: one.ratio)

    def best_of(self, policy: str) -> Expectation:
        """The fastest setting of a policy."""
        return max((one for one in self.expectations if one.policy == policy), key=lambda one: one.ratio)

    @property
    def best(self) -> Expectation:
        """The fastest setting of all."""
        return max(self.expectations, key=lambda one: one.ratio)

    @property
    def pays(self) -> bool:
        """Whether the fastest setting is expected to be faster than plain generation, by more than is too little to
        bother, and by its drafts."""
        return self.best.ratio >= _LEAST_GAIN and self.accepts

    @property
    def accepts(self) -> bool:
        """Whether a round of the fastest setting brings enough tokens that its drafts can have won something. Each
        round holds a forward of the target: what is faster without more tokens is not so by drafting."""
        return self.best.tokens_per_round >= _LEAST_GAIN

    @property
    def is_sure(self) -> bool:
        """Whether what it gains is more than its standard error."""
        best = self.best
        return best.error is not None and best.ratio - best.error > 1

    def break_even(self, policy: str) -> float | None:
        """See `ChainCosts.break_even`."""
        prompts = range(self.measured_prompts)
        return self.chain_costs(policy, prompts).break_even(pace_of(self.plain).round_seconds)

    def out_of_vocabulary_loss(self, one: Expectation) -> float:
        """The share of the full vocabulary's tokens per round, in the same shape, that a policy does not reach."""
        full = next(
            other
            for other in self.expectations
            if (other.policy, other.steps, other.tree) == (FULL, one.steps, one.tree)
        )
        return 1 - one.tokens_per_round / full.tokens_per_round

    def parts_of_round(self, one: Expectation) -> dict[str, float]:
        """Seconds of a round of chains by section: a profiled round, its draft steps as many as the setting has, and
        verification by its rows."""
        profile, verification = self.profiles[one.policy], self.verification_costs
        parts = dict(profile.seconds)
        for name in DRAFT_SECTIONS:
            parts[name] *= one.steps / profile.steps
        more_rows = (1 + one.steps) if one.tree is None else one.tree.total_tokens
        change = verification.of_verification(more_rows) - verification.of_verification(1 + profile.steps)
        parts["verification"] = max(0.0, parts["verification"] + change)
        return parts

    @cached_property
    def verification_costs(self) -> RoundCosts:
        """What forwards of the target cost; nothing else is known of a round."""
        plain = pace_of(self.plain).round_seconds
        alone = max(0.0, plain - self.verification[0])
        return RoundCosts(0.0, self.verified_rows, self.verification, other_alone=alone)

    def acceptance(self, policy: str) -> tuple[float, ...]:
        """See `acceptance_by_step`, of the long chains."""
        return acceptance_by_step(self.long_chains[policy], self.settings.num_assistant_tokens, self.drafts_at_once)

    def chain_costs(self, policy: str, prompts: Collection[int]) -> ChainCosts:
        """What chains of a policy cost, from its calls on some of the prompts."""
        lengths = self.short_chain, self.settings.num_assistant_tokens
        short, long = (
            pace_of([calls[number] for number in prompts], steps, self.drafts_at_once)
            for calls, steps in zip((self.short_chains[policy], self.long_chains[policy]), lengths, strict=True)
        )
        return chain_costs(short, long, lengths, self.verification_costs)

    def plain_course(self, prompts: Collection[int], calls: Sequence[TimedCall] | None = None) -> Course:
        """What texts take without drafts."""
        pace = pace_of([(calls or self.plain)[number] for number in prompts])
        tokens = fmean(self._lengths(FULL, prompts))
        return Course(pace.start_seconds + (tokens - 1) * pace.round_seconds, tokens, tokens)

    def _lengths(self, policy: str, prompts: Collection[int]) -> list[int]:
        """Tokens of each text: as many as are asked for, or fewer where it ended before."""
        calls = [self.long_chains[policy][number] for number in prompts]
        most = self.settings.max_new_tokens
        return [most if call.new_tokens >= call.wanted else call.new_tokens for call in calls]

    def _texts(self, policy: str, prompts: Collection[int]) -> list[list[bool]]:
        longest = self.settings.num_assistant_tokens
        return verdicts_of([self.long_chains[policy][number] for number in prompts], longest, self.drafts_at_once)

    def _predicted(self, prompts: Collection[int]) -> list[Expectation]:
        found = []
        for policy in self.policies:
            costs = self.chain_costs(policy, prompts)
            found += [self._chain(policy, costs, prompts, steps) for steps in self.lengths]
            if policy in self.trees:
                found.append(self._tree(policy, prompts))
        return found

    def _chain(
        self, policy: str, costs: ChainCosts, prompts: Collection[int], steps: int, name: str | None = None
    ) -> Expectation:
        texts, lengths = self._texts(policy, prompts), self._lengths(policy, prompts)
        expected = costs.course(steps, texts, lengths, self.drafts_at_once)
        seconds = costs.costs.of_round(steps)
        return _expectation(name or policy, steps, None, expected, self.plain_course(prompts), seconds)

    def _tree(self, policy: str, prompts: Collection[int]) -> Expectation:
        """Trees are timed on the first part of the texts alone, which may be easier or harder than the rest. How much,
        chains of as many draft steps tell, but for the last, which few trees get through."""
        shape = self.tree
        levels = shape.depth + 1
        if self.settings.temperature > 0:
            levels = min(levels, shape.total_tokens - 1)
        calls, texts = [self.trees[policy][number] for number in prompts], self._texts(policy, prompts)
        lengths, parts = self._lengths(policy, prompts), [call.new_tokens for call in calls]
        steps = max(1, levels - 1)
        of_texts = sum(
            len(rounds_along(text, steps, False)) * length / len(text)
            for text, length in zip(texts, lengths, strict=True)
        )
        of_parts = sum(len(rounds_along(text[:part], steps, False)) for text, part in zip(texts, parts, strict=True))
        rounds = sum(len(call.tokens) for call in calls) * of_texts / of_parts / len(calls)
        pace = pace_of(calls, levels)
        expected = Course(pace.start_seconds + (rounds - 1) * pace.round_seconds, rounds, fmean(lengths))
        return _expectation(policy, levels, shape, expected, self.plain_course(prompts), pace.round_seconds)


def _expectation(
    policy: str, steps: int, tree: TreeConfig | None, expected: Course, plain: Course, round_seconds: float
) -> Expectation:
    speed = expected.tokens / expected.seconds
    ratio = speed / (plain.tokens / plain.seconds)
    return Expectation(policy, steps, tree, speed, ratio, None, expected.tokens_per_round, round_seconds)


def _jackknife(values: Sequence[float]) -> float | None:
    """The standard error of a figure, from what it is without each of the prompts (Efron, 1979)."""
    if not values:
        return None
    mean = fmean(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((value - mean) ** 2 for value in values))
