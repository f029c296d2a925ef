"""What a diagnosis says: tables, a sentence, a line to paste, and JSON values."""

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from ...errors import counted
from ...tree_config import TreeConfig
from ..policy_text import policy_in_python, shorten_paths
from ..provenance import cpu_threads, describe_policies, provenance
from ..tables import FittedTable, parameter_count, shown_speed
from ..tree_text import format_tree
from .expectations import Expectation, MeasuredPair
from .settings import FULL

SCHEMA_VERSION = 1
# What the policy of an assistant is shown as, if it is another one than those that are diagnosed anyway. It is what to
# write in Python, too.
OWN_POLICY = "assistant.policy"
# Less than this would be shown as 1.00.
_LEAST_SHOWN_GAIN = 1.005
# What the parts of a round are called here.
_PARTS = {
    "backbone": "draft layers",
    "head": "LM head",
    "choice": "choosing tokens",
    "policy": "policy",
    "verification": "verification",
    "other": "the loop",
}


# Tables ------------------------------------------------------------------------------------------------------------


def findings(measured: MeasuredPair) -> list[str]:
    """What is known of the pair, and what was left out, a sentence each."""
    vocabulary = measured.vocabulary
    tokens, rows = vocabulary["tokens"], (vocabulary["target_rows"], vocabulary["drafter_rows"])
    padded = " and ".join(f"{count:,}" for count in dict.fromkeys(rows))
    sentences = [
        f"{_described(measured)}, {cpu_threads(measured.threads)}.",
        f"One tokenizer of {tokens:,} tokens; the heads score {padded} rows.",
    ]
    profile, best = measured.profiles[FULL], measured.oracle
    sentences.append(
        f"The LM head takes {profile.head_share:.0%} of a draft step with the full vocabulary. Without it, chains of "
        f"{best.steps} would have {best.ratio:.2f} times the speed of plain generate: that is the oracle."
    )
    if measured.head_product:
        prompts = range(measured.measured_prompts)
        plain = measured.plain_course(prompts)
        gain = plain.seconds / measured.plain_course(prompts, measured.head_product).seconds
        merit = (
            f"would make plain generate {gain:.2f} times as fast: so much of what is gained is no merit of drafting."
            if gain >= _LEAST_SHOWN_GAIN
            else "would not make plain generate faster."
        )
        sentences.append(f"This package's head product, with which drafts are verified, {merit}")
    if measured.measured_prompts < len(measured.prompts):
        sentences.append(
            f"{measured.measured_prompts} of {len(measured.prompts)} prompts were measured in "
            f"{measured.settings.seconds:g} s: --seconds takes more."
        )
    active = {policy: one.active_vocabulary for policy, one in measured.drafting.items()}
    sentences += [
        f"The shortlist of {policy} is the whole vocabulary here: what it differs from {FULL} in is chance. Give it a "
        "smaller size."
        for policy in active
        if policy != FULL and active[policy] >= active[FULL] > 0
    ]
    return [*sentences, *(f"Note: {note}" for note in measured.notes)]


def _described(measured: MeasuredPair) -> str:
    """Target and drafter, each with its name, size, dtype and device."""
    target, models = measured.models["target"], measured.models
    drafter = models["drafter"] if "drafter" in models else next(iter(models["eagle"].values()))
    return "; ".join(
        f"{role}: {one['name'] or one['class']}, {parameter_count(one['parameters'])} parameters, {one['dtype']} on "
        f"{one['device']}"
        for role, one in (("Target", target), ("drafter", drafter))
    )


def verification_table(measured: MeasuredPair) -> FittedTable:
    """What forwards of the target cost, by their rows."""
    table = FittedTable(
        "One forward of the target, by the tokens that it reads at a time",
        ["tokens", *map(str, measured.verified_rows)],
        caption="a round of chains of 5 verifies 6",
    )
    one = measured.verification[0]
    table.add_row("ms", *(f"{1e3 * seconds:.1f}" for seconds in measured.verification))
    table.add_row("cost", *(f"{seconds / one:.2f}" for seconds in measured.verification))
    return table


def acceptance_table(measured: MeasuredPair) -> FittedTable:
    """Acceptance by draft step, and the least that pays."""
    table = FittedTable(
        "Acceptance by draft step, where the draft before was accepted",
        ["policy", *map(str, measured.lengths), "pays\nfrom"],
        caption="pays from: the acceptance, the same at all steps, with which the best chain is as fast as plain",
    )
    for policy in measured.policies:
        least = measured.break_even(policy)
        cells = [f"{share:.2f}" for share in measured.acceptance(policy)]
        table.add_row(policy, *cells, "never" if least is None else f"{least:.2f}")
    return table


def speed_table(measured: MeasuredPair) -> FittedTable:
    """The expected speed of all settings, as multiples of plain generation's."""
    tree = measured.tree
    shapes: list[tuple[int | None, TreeConfig | None]] = [(steps, None) for steps in measured.lengths]
    headings = [str(steps) for steps in measured.lengths]
    if tree is not None:
        shapes.append((None, tree))
        headings.append("tree")
    table = FittedTable(
        "Expected speed: multiples of plain generate's, by the tokens of a chain",
        ["policy", *headings],
        caption="prompts included" + ("" if tree is None else f"; trees of {format_tree(tree)}"),
    )
    found = {(one.policy, None if one.tree else one.steps, one.tree): one for one in measured.expectations}
    for policy in measured.policies:
        table.add_row(policy, *(f"{found[policy, steps, shape].ratio:.2f}" for steps, shape in shapes))
    return table


def best_table(measured: MeasuredPair) -> FittedTable:
    """The best setting of each policy, with its reason."""
    best = {policy: measured.best_of(policy) for policy in measured.policies}
    changes = {
        policy: "" if policy == FULL else _change(-measured.out_of_vocabulary_loss(one))
        for policy, one in best.items()
    }
    beside = "tokens/round: beside it how many more or fewer they are than with the full vocabulary; "
    table = FittedTable(
        f"The best of each policy, for {counted(measured.settings.max_new_tokens, 'new token')}",
        ["policy", "chain", "tokens/s", "vs plain", "tokens\n/round", "most of a round"],
        caption=(
            f"{beside if any(changes.values()) else ''}±: the standard error from prompt to prompt, of "
            f"{measured.measured_prompts}; oracle: the full vocabulary, if scoring it took no time"
        ),
    )
    plain = measured.plain_course(range(measured.measured_prompts))
    table.add_row("plain", "", f"{plain.tokens / plain.seconds:.1f}", "1.00", "1.00", "", ends_section=True)
    for policy, one in best.items():
        cells = [f"{one.tokens_per_second:.1f}", _ratio(one), f"{one.tokens_per_round:.2f}{changes[policy]}"]
        is_last = policy == list(measured.policies)[-1]
        table.add_row(policy, _chain(one), *cells, _dominant(measured, one), ends_section=is_last)
    one = measured.oracle
    cells = [f"{one.tokens_per_second:.1f}", f"{one.ratio:.2f}", f"{one.tokens_per_round:.2f}"]
    table.add_row("oracle", _chain(one), *cells, "")
    return table


def _change(share: float) -> str:
    """In whole percent, nothing where that is none."""
    return f" {share:+.0%}" if round(100 * share) else ""


def _chain(one: Expectation) -> str:
    return str(one.steps) if one.tree is None else "tree"


def _ratio(one: Expectation) -> str:
    return f"{one.ratio:.2f}" if one.error is None else f"{one.ratio:.2f} ±{one.error:.2f}"


def _dominant(measured: MeasuredPair, one: Expectation) -> str:
    """The part of a round that takes the most time."""
    parts = measured.parts_of_round(one)
    name = max(parts, key=lambda part: parts[part])
    return f"{_PARTS[name]} {parts[name] / sum(parts.values()):.0%}"


# The answer --------------------------------------------------------------------------------------------------------


def sentence(measured: MeasuredPair) -> str:
    """What to do."""
    best = measured.best
    if not measured.accepts:
        faster = (
            f"; what makes it {best.ratio:.2f} times as fast as plain generate is no draft" if best.ratio > 1 else ""
        )
        return (
            f"Use none: with {best.policy} and {best.shape}, the fastest, a round brings {best.tokens_per_round:.2f} "
            f"tokens, and plain generate one: hardly any draft is accepted{faster}."
        )
    if not measured.pays:
        why = "too few drafts are accepted" if measured.oracle.ratio < 1 else "drafting costs what it wins"
        return (
            f"Use none: the most that drafting is expected to bring here is {best.ratio:.2f} times the speed of plain "
            f"generate, by {best.policy} with {best.shape}; {why}."
        )
    error = "" if best.error is None else f" (±{best.error:.2f})"
    tokens = shown_speed(best.tokens_per_second)
    speed = f"{best.ratio:.2f} times{error} the speed of plain generate, {tokens} tokens per second"
    if measured.is_sure:
        return f"Use {best.policy} with {best.shape}: {speed}."
    return f"Try {best.policy} with {best.shape}: {speed}; more prompts or seconds would make that surer."


def line_to_paste(measured: MeasuredPair) -> str:
    """The same in Python, with `target` and `drafter` loaded."""
    best = measured.best
    if not measured.pays:
        return "target.generate(**inputs)  # without an assistant"
    if best.tree is None:
        shape = f"num_assistant_tokens={best.steps}"
    else:
        shape = "tree=True" if best.tree == TreeConfig() else f"tree={best.tree!r}"
    before, policy = policy_in_python(best.policy, measured.settings.policies)
    return f"{before}DynSpecAssistant(drafter, {policy}, target=target, {shape})"


# The whole ---------------------------------------------------------------------------------------------------------


class Diagnosis(MeasuredPair):
    """What was measured, what is expected, and what to do. `str` shows all of it."""

    @property
    def sentence(self) -> str:
        """What to do, in words."""
        return sentence(self)

    @property
    def line(self) -> str:
        """What to do, in Python."""
        return line_to_paste(self)

    def __rich__(self) -> Group:
        tables = [verification_table(self), acceptance_table(self), speed_table(self), best_table(self)]
        # Where the line is too long it is broken between arguments, and is as good Python as before.
        return Group(*map(Text, findings(self)), *tables, Text(self.sentence, style="bold"), Text(self.line))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def to_dict(self, command: Sequence[str] | None = None) -> dict[str, Any]:
        """All that was measured and is expected, and where it comes from, as JSON values. Holds no path beyond its
        last two parts.

        Args:
            command: the words of the command line (None: it was called from Python).
        """
        return {
            "schema_version": SCHEMA_VERSION,
            "provenance": provenance(command, self.started, self.finished, self.threads),
            "notes": self.notes,
            "settings": self.settings.to_dict(),
            "models": self.models,
            "vocabulary": self.vocabulary,
            "policies": describe_policies(self.policies),
            "prompts": self.prompts[: self.measured_prompts],
            "verification": {"rows": list(self.verified_rows), "seconds": list(self.verification)},
            "head_share": self.profiles[FULL].head_share,
            "measured": {label: self._measured(label) for label in self.policies},
            "plain": self._plain(),
            "expected": [_as_json(one) for one in self.expectations],
            "oracle": _as_json(self.oracle),
            "pays": self.pays,
            "is_sure": self.is_sure,
            "best": _as_json(self.best),
            "sentence": self.sentence,
            "line": shorten_paths(self.line),
        }

    def _plain(self) -> dict[str, Any]:
        prompts = range(self.measured_prompts)
        calls = {"plain": self.plain, "head_product": self.head_product}
        courses = {name: self.plain_course(prompts, some) for name, some in calls.items() if some}
        return {name: {**asdict(one), "tokens_per_second": one.tokens / one.seconds} for name, one in courses.items()}

    def _measured(self, policy: str) -> dict[str, Any]:
        """What was measured of a policy."""
        costs = self.chain_costs(policy, range(self.measured_prompts))
        return {
            "acceptance": list(self.acceptance(policy)),
            "break_even": self.break_even(policy),
            "draft_step_seconds": costs.costs.draft_step,
            "other_seconds": costs.costs.other,
            "start_seconds": dict(zip(map(str, costs.lengths), costs.starts, strict=True)),
            "profiled_round": asdict(self.profiles[policy]),
            "drafting": self.drafting[policy].to_dict(),
        }


def _as_json(one: Expectation) -> dict[str, Any]:
    return {**asdict(one), "shape": one.shape}
