"""A diagnosis: the measured speeds of a pair, tables, a sentence, a line to paste, and JSON values."""

import io
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ...drafting.expected_speed import acceptance_for
from ...errors import ConfigurationError, counted
from ...shortlists import ShortlistPolicy
from ...stats import DRAFT_SECTIONS, DraftingStatistics
from ...tree_config import TreeConfig
from ..policy_text import policy_in_python, shorten_paths
from ..provenance import cpu_threads, describe_policies, provenance
from ..tables import FittedTable, parameter_count, shown_speed
from ..tree_text import format_tree
from .settings import FULL, DoctorSettings, fastest_but_for_ties

SCHEMA_VERSION = 2
# The label of an assistant's own policy, if it is none of the default ones. It is also how to write it in Python.
OWN_POLICY = "assistant.policy"
# A smaller gain is not worth an assistant.
_LEAST_GAIN = 1.03
# A smaller gain would be shown as 1.00.
_LEAST_SHOWN_GAIN = 1.005
# With fewer drafts than this, the share of accepted ones has a standard error of 0.07 or more.
_FEW_DRAFTS = 50
# The parts of a round by section of a profile.
_PARTS = {
    "backbone": "draft layers",
    "head": "LM head",
    "choice": "choosing tokens",
    "policy": "policy",
    "verification": "verification",
    "other": "the loop",
}


@dataclass(frozen=True)
class TimedCall:
    """One call of `generate`."""

    prompt: int
    ends: tuple[float, ...]  # seconds from the start to the arrival of each round's tokens
    tokens: tuple[int, ...]  # the number of tokens of each round, the target's own included


@dataclass
class TimedSetting:
    """The calls of one policy with one shape of drafts, or of plain generation."""

    policy: str
    shape: int | TreeConfig | None  # the length of chains, or the shape of trees; None for plain generation
    calls: list[TimedCall] = field(default_factory=list)  # one for each prompt, in their order
    stats: DraftingStatistics = field(default_factory=DraftingStatistics)  # the counts of all calls

    def seconds(self, tokens: int, prompts: Collection[int]) -> float:
        """Seconds of a text of so many tokens, the prompt included: the mean first round, then the median round."""
        calls = [call for call in self.calls if call.prompt in prompts]
        first = fmean(call.ends[0] for call in calls)
        more = tokens - fmean(call.tokens[0] for call in calls)
        return first + more / self.tokens_per_round(prompts) * self.round_seconds(prompts)

    def round_seconds(self, prompts: Collection[int]) -> float:
        """Seconds of a round that reads no prompt: the median, which does not follow a computer's other work."""
        return median(
            after - before
            for call in self.calls
            if call.prompt in prompts
            for before, after in zip(call.ends, call.ends[1:], strict=False)
        )

    def tokens_per_round(self, prompts: Collection[int]) -> float:
        """Mean number of tokens of a round that reads no prompt."""
        return fmean(count for call in self.calls if call.prompt in prompts for count in call.tokens[1:])


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed of one policy with one shape of drafts."""

    policy: str
    steps: int  # the length of the chains, or the draft steps of the trees
    tree: TreeConfig | None  # the shape of the trees; None for chains
    tokens_per_second: float  # new tokens / seconds of a text, the prompt included
    ratio: float  # this speed / that of plain generation on the same prompts
    error: float | None  # the standard error of the ratio over prompts; None with one prompt
    tokens_per_round: float  # the acceptance length
    round_seconds: float  # the median seconds of a round
    rounds: int
    prompts: int
    # For chains, the acceptance, equal at all steps, with which a round is as fast as plain generation; None for
    # trees, and if no acceptance is enough.
    pays_from: float | None

    @property
    def shape(self) -> str:
        """The shape in words."""
        return f"chains of {self.steps}" if self.tree is None else f"trees of {format_tree(self.tree)}"


@dataclass
class Diagnosis:
    """The measurements of a pair, and what to do. `str` shows all of it."""

    settings: DoctorSettings
    policies: dict[str, ShortlistPolicy]  # the policies by label, `full` among them
    models: dict[str, Any]  # descriptions of the target and the drafter
    vocabulary: dict[str, int]  # `tokens`, `target_rows` and `drafter_rows`
    # Identifier, domain and number of tokens of each prompt. The first ones were measured.
    prompts: list[dict[str, Any]]
    threads: int  # CPU threads in use
    started: str  # UTC time in ISO format
    finished: str | None = None  # UTC time
    notes: list[str] = field(default_factory=list)  # what was left out and why
    # Tokens per second of plain generation and of the default policy, on one prompt, in each dtype that was tried.
    dtypes: dict[str, list[float]] = field(default_factory=dict)
    # Calls of plain generation.
    plain: TimedSetting = field(default_factory=lambda: TimedSetting("plain generate", None))
    head_product: TimedSetting | None = None  # the same with the head product of verifications; None if there is none
    # Calls of policies: all with chains of the middle length, the best one with other lengths and trees.
    timed: list[TimedSetting] = field(default_factory=list)
    # By policy the seconds of a round of chains of the middle length, by section of `stats.SECTIONS`.
    profiles: dict[str, dict[str, float]] = field(default_factory=dict)

    # Figures -----------------------------------------------------------------------------------------------------

    @property
    def measured_prompts(self) -> int:
        """The number of prompts that there was time for."""
        return len(self.plain.calls)

    def usable_prompts(self, *ways: TimedSetting) -> list[int]:
        """The numbers of the prompts on which plain generation and all of these were measured, without texts that end
        in their first round."""
        each = [{call.prompt for call in way.calls if len(call.ends) > 1} for way in (self.plain, *ways)]
        return sorted(set.intersection(*each))

    @property
    def speeds(self) -> list[MeasuredSpeed]:
        """The speed of each measured setting. Settings without a text of two rounds are left out."""
        return [self._speed(way, prompts) for way in self.timed if (prompts := self.usable_prompts(way))]

    def _speed(self, way: TimedSetting, prompts: list[int]) -> MeasuredSpeed:
        tokens, plain = self.settings.max_new_tokens, self.plain
        ratios = [plain.seconds(tokens, [one]) / way.seconds(tokens, [one]) for one in prompts]
        seconds, cost = way.seconds(tokens, prompts), way.round_seconds(prompts)
        is_chain = isinstance(way.shape, int)
        return MeasuredSpeed(
            policy=way.policy,
            steps=way.shape if is_chain else way.shape.depth + 1,
            tree=None if is_chain else way.shape,
            tokens_per_second=tokens / seconds,
            ratio=plain.seconds(tokens, prompts) / seconds,
            error=stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None,
            tokens_per_round=way.tokens_per_round(prompts),
            round_seconds=cost,
            rounds=sum(way.stats.rounds_of.values()),
            prompts=len(prompts),
            pays_from=acceptance_for(cost / plain.round_seconds(prompts), way.shape) if is_chain else None,
        )

    @property
    def best(self) -> MeasuredSpeed:
        """The setting to choose: the fastest one, or that of the default policy if it is not clearly slower. Raises
        `ConfigurationError` if all texts ended at once."""
        if not (speeds := self.speeds):
            raise ConfigurationError(
                "all texts ended with their first token, so there is nothing to time: give other prompts, more "
                "--seconds, or --chat-template for a chat model"
            )
        fastest = {one.policy: one for one in sorted(speeds, key=lambda one: one.ratio)}
        return fastest[fastest_but_for_ties({policy: one.ratio for policy, one in fastest.items()})]

    @property
    def pays(self) -> bool:
        """Whether the fastest setting is clearly faster than plain generation, and by its drafts: each round has one
        forward of the target, so without more tokens it is not drafting that wins."""
        return self.best.ratio >= _LEAST_GAIN and self.best.tokens_per_round >= _LEAST_GAIN

    @property
    def is_sure(self) -> bool:
        """Whether the gain or loss is larger than two standard errors, as the fastest of several settings is chosen,
        and enough drafts stand behind it."""
        best = self.best
        return best.error is not None and abs(best.ratio - 1) > 2 * best.error and best.rounds >= _FEW_DRAFTS

    @property
    def head_share(self) -> float:
        """The share of a draft step that scoring and choosing tokens takes with the full vocabulary."""
        profile = self.profiles[FULL]
        drafting = sum(profile[name] for name in DRAFT_SECTIONS)
        return (profile["head"] + profile["choice"]) / drafting if drafting else 0.0

    @property
    def oracle(self) -> float | None:
        """The ratio to plain generation that chains with the full vocabulary would have, if scoring and choosing
        tokens took no time: the most that any shortlist can win. None if no text of `full` had a second round."""
        profile = self.profiles[FULL]
        share = (profile["head"] + profile["choice"]) / sum(profile.values())
        full = [one.ratio for one in self.speeds if one.policy == FULL and one.steps == self.settings.lengths[1]]
        return full[0] / max(1e-9, 1 - share) if full else None

    def acceptance(self, way: TimedSetting) -> list[tuple[float, int]]:
        """For each draft step of chains: the share of drafts that were accepted, among those whose predecessor was,
        and the number of these drafts."""
        stats = way.stats
        accepted = [*stats.accepted_at, *[0] * way.shape][: way.shape]
        drafted = [*stats.drafted_at, *[0] * way.shape][: way.shape]
        reached = [min(count, before) for count, before in zip(drafted, [drafted[0], *accepted], strict=False)]
        return [(count / most if most else 0.0, most) for count, most in zip(accepted, reached, strict=True)]

    # The answer --------------------------------------------------------------------------------------------------

    @property
    def sentence(self) -> str:
        """What to do, in words."""
        best = self.best
        basis = f"measured on {counted(best.prompts, 'prompt')} with {counted(best.rounds, 'draft')}"
        basis += "." if self.is_sure else "; more prompts or seconds would make that surer."
        if best.tokens_per_round < _LEAST_GAIN:
            faster = f"; the {best.ratio:.2f} times of plain generate's speed come from no draft"
            return (
                f"Use none: hardly any draft is accepted. With {best.policy} and {best.shape}, the fastest, a round "
                f"has {best.tokens_per_round:.2f} tokens, and plain generate one{faster if best.ratio > 1 else ''}, "
                f"{basis}"
            )
        if not self.pays:
            why = "too few drafts are accepted" if (self.oracle or 0.0) < 1 else "drafting costs what it wins"
            return (
                f"Use none: the fastest drafts, by {best.policy} with {best.shape}, have {best.ratio:.2f} times the "
                f"speed of plain generate ({why}), {basis}"
            )
        error = "" if best.error is None else f" (±{best.error:.2f})"
        speed = f"{best.ratio:.2f} times{error} the speed of plain generate"
        said = f"{best.policy} with {best.shape}: {speed}, {shown_speed(best.tokens_per_second)} tokens per second"
        return f"{'Use' if self.is_sure else 'Try'} {said}, {basis}"

    @property
    def line(self) -> str:
        """What to do, in Python, with `target` and `drafter` loaded."""
        best = self.best
        loaded = f"# loaded with dtype=torch.{self.models['target']['dtype']}:\n"
        if not self.pays:
            return f"{loaded}target.generate(**inputs)  # without an assistant"
        if best.tree is None:
            shape = f"num_assistant_tokens={best.steps}"
        else:
            shape = "tree=True" if best.tree == TreeConfig() else f"tree={best.tree!r}"
        before, policy = policy_in_python(best.policy, self.settings.policies)
        return f"{loaded}{before}DynSpecAssistant(drafter, {policy}, target=target, {shape})"

    # Showing it --------------------------------------------------------------------------------------------------

    def __rich__(self) -> Group:
        tables = [self._speed_table(), self._acceptance_table(), self._round_table()]
        # A line that is too long is broken between arguments, and stays valid Python.
        return Group(*map(Text, self._findings()), *tables, Text(self.sentence, style="bold"), Text(self.line))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _findings(self) -> list[str]:
        """Sentences on the pair, on how much was measured, and on what was left out."""
        rows = dict.fromkeys((self.vocabulary["target_rows"], self.vocabulary["drafter_rows"]))
        middle = self.settings.lengths[1]
        sentences = [
            f"{self._described()}, {cpu_threads(self.threads)}.",
            f"One tokenizer of {self.vocabulary['tokens']:,} tokens; the heads score "
            f"{' and '.join(f'{one:,}' for one in rows)} rows.",
            f"The LM head takes {self.head_share:.0%} of a draft step with the full vocabulary."
            + (
                ""
                if self.oracle is None
                else f" If it took no time, chains of {middle} would have {self.oracle:.2f} times the speed of plain "
                "generate: that is the oracle."
            ),
        ]
        product = self.head_product
        if product is not None and (prompts := self.usable_prompts(product)):
            tokens = self.settings.max_new_tokens
            gain = self.plain.seconds(tokens, prompts) / product.seconds(tokens, prompts)
            merit = (
                f"would make plain generate {gain:.2f} times as fast: this part of the gain is no merit of drafting."
                if gain >= _LEAST_SHOWN_GAIN
                else "would not make plain generate faster."
            )
            sentences.append(f"This package's head product, with which drafts are verified, {merit}")
        measured: dict[tuple[str, int], list[str]] = {}
        for one in self.speeds:
            measured.setdefault((one.shape, one.prompts), []).append(one.policy)
        parts = [f"{', '.join(names)} with {how} on {counted(n, 'prompt')}" for (how, n), names in measured.items()]
        more = ": --seconds takes more" if self.measured_prompts < len(self.prompts) else ""
        sentences.append(f"Measured, of {counted(len(self.prompts), 'prompt')}: {'; '.join(parts)}{more}.")
        if self.dtypes:
            speeds = [f"{dtype} {plain:.1f} and {drafted:.1f}" for dtype, (plain, drafted) in self.dtypes.items()]
            sentences.append(
                f"Tokens per second of plain generate and with drafts: in {', in '.join(speeds)}, in seconds. All "
                f"else was measured in {self.models['target']['dtype']}, the faster one: load both models in it."
            )
        ended = self.measured_prompts - len(self.usable_prompts())
        if ended:
            sentences.append(f"Left out: {counted(ended, 'text')} without a second round.")
        active = {way.policy: way.stats.active_vocabulary for way in self.timed if way.shape == middle}
        sentences += [
            f"The shortlist of {policy} is the whole vocabulary here, so it differs from {FULL} by chance. Give it a "
            "smaller size."
            for policy in active
            if policy != FULL and active[policy] >= active[FULL] > 0
        ]
        return [*sentences, *(f"Note: {note}" for note in self.notes)]

    def _described(self) -> str:
        models = self.models
        drafter = models["drafter"] if "drafter" in models else next(iter(models["eagle"].values()))
        return "; ".join(
            f"{role}: {one['name'] or one['class']}, {parameter_count(one['parameters'])} parameters, {one['dtype']} "
            f"on {one['device']}"
            for role, one in (("Target", models["target"]), ("drafter", drafter))
        )

    def _speed_table(self) -> FittedTable:
        table = FittedTable(
            f"Measured speed, for {counted(self.settings.max_new_tokens, 'new token')}",
            ["policy", "drafts", "tokens/s", "vs plain", "tokens\n/round", "rounds", "pays\nfrom"],
            caption=(
                "±: the standard error over prompts; rounds: how many were measured; pays from: the acceptance, equal "
                "at all steps, with which chains are as fast as plain generate"
            ),
        )
        prompts = self.usable_prompts()
        tokens = self.settings.max_new_tokens
        plain = tokens / self.plain.seconds(tokens, prompts)
        table.add_row("plain", "", f"{plain:.1f}", "1.00", "1.00", "", "", ends_section=True)
        for one in self.speeds:
            ratio = f"{one.ratio:.2f}" if one.error is None else f"{one.ratio:.2f} ±{one.error:.2f}"
            pays_from = "" if one.tree else "never" if one.pays_from is None else f"{one.pays_from:.2f}"
            drafts = str(one.steps) if one.tree is None else "tree"
            cells = [f"{one.tokens_per_second:.1f}", ratio, f"{one.tokens_per_round:.2f}", str(one.rounds), pays_from]
            table.add_row(one.policy, drafts, *cells)
        return table

    def _acceptance_table(self) -> FittedTable:
        longest = self.settings.num_assistant_tokens
        table = FittedTable(
            "Share of accepted drafts by draft step, and the number of drafts",
            ["policy", *map(str, range(1, longest + 1))],
            caption="drafts count if the draft before was accepted",
        )
        chains = {way.policy: way for way in self.timed if isinstance(way.shape, int) and self.usable_prompts(way)}
        for policy in dict.fromkeys(way.policy for way in self.timed if way.policy in chains):
            ways = [way for way in self.timed if way.policy == policy and isinstance(way.shape, int)]
            way = max(ways, key=lambda one: (bool(one.calls), one.shape))
            steps = self.acceptance(way)
            cells = [f"{share:.2f}\n({most})" if most else "–" for share, most in steps]
            table.add_row(policy, *cells, *[""] * (longest - len(cells)))
        return table

    def _round_table(self) -> FittedTable:
        table = FittedTable(
            f"Milliseconds of a round with chains of {self.settings.lengths[1]}",
            ["policy", *_PARTS.values()],
            caption=f"plain generate takes {1e3 * self.plain.round_seconds(self.usable_prompts()):.1f} ms for a token",
        )
        for policy, seconds in self.profiles.items():
            table.add_row(policy, *(f"{1e3 * seconds[name]:.1f}" for name in _PARTS))
        return table

    def to_dict(self, command: Sequence[str] | None = None) -> dict[str, Any]:
        """All measurements, the answer and their origin, see `provenance`, as JSON values."""
        tokens, prompts = self.settings.max_new_tokens, self.usable_prompts()
        return {
            "schema_version": SCHEMA_VERSION,
            "provenance": provenance(command, self.started, self.finished, self.threads),
            "notes": self.notes,
            "settings": self.settings.to_dict(),
            "models": self.models,
            "vocabulary": self.vocabulary,
            "dtypes": self.dtypes,
            "policies": describe_policies(self.policies),
            "prompts": self.prompts[: self.measured_prompts],
            "plain": {
                "tokens_per_second": tokens / self.plain.seconds(tokens, prompts),
                "token_seconds": self.plain.round_seconds(prompts),
            },
            "measured": [_as_json(one) for one in self.speeds],
            "acceptance": [
                {"policy": way.policy, "steps": way.shape, "by_step": self.acceptance(way)}
                for way in self.timed
                if isinstance(way.shape, int) and way.calls
            ],
            "profiled_rounds": self.profiles,
            "head_share": self.head_share,
            "oracle": self.oracle,
            "pays": self.pays,
            "is_sure": self.is_sure,
            "best": _as_json(self.best),
            "sentence": self.sentence,
            "line": shorten_paths(self.line),
        }


def _as_json(one: MeasuredSpeed) -> dict[str, Any]:
    return {**asdict(one), "shape": one.shape}
