"""An estimate as tables, a sentence and a line to paste."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from ...drafting.expected_speed import break_even_acceptance
from ...errors import counted
from ..operations.counting import Work
from ..policy_text import policy_in_python
from ..tables import FittedTable, parameter_count
from .estimate import Estimate, PolicyEstimate
from .settings import FULL

# What an assistant takes if it is told nothing, and the share of the best speed that speaks for it.
_DEFAULT, _CLEARLY = "hybrid", 0.97


def estimate_report(estimate: Estimate) -> Iterator[RenderableType]:
    """What a terminal shows."""
    yield Text(_basis(estimate))
    yield _work_table(estimate)
    yield _policy_table(estimate)
    yield _speed_table(estimate)
    for one in _assumptions(estimate):
        yield Text(one, style="dim")
    yield Text(sentence(estimate), style="bold")
    yield Text(line_to_paste(estimate))


def sentence(estimate: Estimate) -> str:
    """What to do, at the middle one of the acceptance rates."""
    rate, label, steps, speed = _best(estimate)
    if not steps:
        least = min((one.break_even for one in estimate.policies.values() if one.break_even is not None), default=None)
        pays = "drafting would not pay at any" if least is None else f"drafting would pay from {least:.2f} on"
        return f"Estimate: use none at an acceptance rate of {rate:.2f}; {pays}."
    ratio, least = speed / estimate.plain_speed, estimate.policies[label].break_even
    return (
        f"Estimate: at an acceptance rate of {rate:.2f}, {label} with chains of {steps} would have {ratio:.2f} times "
        f"the speed of plain generate, {_figure(speed)} tokens per second; it would pay from {least:.2f} on."
    )


def line_to_paste(estimate: Estimate) -> str:
    """The same in Python, with `target` and `drafter` loaded."""
    _, label, steps, _ = _best(estimate)
    if not steps:
        return "target.generate(**inputs)  # without an assistant"
    before, policy = policy_in_python(label, estimate.settings.policies)
    return f"{before}DynSpecAssistant(drafter, {policy}, target=target, num_assistant_tokens={steps})"


def _best(estimate: Estimate) -> tuple[float, str, int, float]:
    """The middle acceptance rate, and there a policy, its best chain length and its tokens per second.

    Which shortlist is accepted most often configurations do not tell, so the default policy is taken unless another is
    clearly faster where both are accepted as often.
    """
    rates = estimate.settings.acceptance
    middle = len(rates) // 2
    speeds = {label: one.chains[middle][1] for label, one in estimate.policies.items()}
    label = max(speeds, key=lambda one: speeds[one])
    if speeds.get(_DEFAULT, 0.0) >= _CLEARLY * speeds[label]:
        label = _DEFAULT
    return rates[middle], label, *estimate.policies[label].chains[middle]


def _basis(estimate: Estimate) -> str:
    machine = estimate.settings.machine
    models = ", ".join(
        f"{role} {one['model_type']} of {parameter_count(one['parameters'])} parameters ({one['dtype']}, "
        f"{_size(one['bytes'])})"
        for role, one in estimate.models.items()
    )
    flops = "" if machine.flops is None else f", {machine.flops:g} TFLOP/s"
    return (
        f"ESTIMATE from configurations, nothing was measured: {models}; a device of {machine.memory_bandwidth:g} GB/s"
        f"{flops} and {machine.launch_latency:g} µs for each operation; {estimate.settings.cached_tokens:,} tokens of "
        "text before."
    )


def _work_table(estimate: Estimate) -> FittedTable:
    """Operations and bytes of the parts of a round."""
    with_flops = ["GFLOP"] if estimate.settings.machine.flops is not None else []
    table = FittedTable(
        "Estimate: what a round gives the device to do, counted",
        ["part", "operations", "weights", "other\nbytes", *with_flops, "ms", "of it\nlaunches"],
        caption=(
            f"layers{' (a CUDA graph)' if estimate.is_captured else ''}, head and choice make a draft step; other "
            "bytes: keys, values, activations; loop: what else a round has, and plain generate for each token"
        ),
    )
    for rows in (1, _shown_rows(estimate)):
        work = estimate.verification[estimate.verified_rows.index(rows)]
        _add_work(table, estimate, f"target, {counted(rows, 'token')}", work)
    _add_work(table, estimate, "loop: plain", estimate.plain)
    _add_work(table, estimate, "layers", estimate.layers, estimate.is_captured, ends_section=True)
    for label, policy in estimate.policies.items():
        _add_work(table, estimate, f"head: {label}", policy.head)
        _add_work(table, estimate, f"choice: {label}", policy.step)
        _add_work(table, estimate, f"loop: {label}", policy.round, ends_section=True)
    return table


def _shown_rows(estimate: Estimate) -> int:
    """Of the numbers of rows that were counted the one of chains of 5, or the next below it."""
    return max(rows for rows in estimate.verified_rows if rows <= max(6, estimate.verified_rows[1]))


def _add_work(
    table: FittedTable,
    estimate: Estimate,
    label: str,
    work: Work,
    is_captured: bool = False,
    ends_section: bool = False,
) -> None:
    machine = estimate.settings.machine
    seconds, launches = machine.seconds(work, is_captured), machine.launch_seconds(work, is_captured)
    cells = [f"{work.operations:,.0f}", _size(work.weight_bytes), _size(work.other_bytes)]
    cells += [] if machine.flops is None else [f"{work.flops / 1e9:.2f}"]
    share = f"{launches / seconds:.0%}" if seconds else ""
    table.add_row(label, *cells, _milliseconds(seconds), share, ends_section=ends_section)


def _policy_table(estimate: Estimate) -> FittedTable:
    """Sizes and shares of the policies, and the acceptance that they need."""
    rate = _best(estimate)[0]
    table = FittedTable(
        "Estimate: draft steps by policy",
        ["policy", "rows", "head", "a step\nms", "head of\na step", "pays\nfrom", f"equals\nfull's {rate:.2f}"],
        caption=(
            "pays from: the acceptance rate with which the best chain is as fast as plain generate; equals: the rate "
            f"with which a shortlist is as fast as the full vocabulary with {rate:.2f}"
        ),
    )
    for label, one in estimate.policies.items():
        least = "never" if one.break_even is None else f"{one.break_even:.2f}"
        cells = [f"{one.rows:,}", _size(one.head.bytes), _milliseconds(one.costs.draft_step), f"{one.head_share:.0%}"]
        table.add_row(label, *cells, least, _as_good_as_full(estimate, one) if label != FULL else "")
    return table


def _as_good_as_full(estimate: Estimate, one: PolicyEstimate) -> str:
    """The acceptance rate with which a policy is as fast as the full vocabulary is with the middle one."""
    rates, longest = estimate.settings.acceptance, estimate.settings.num_assistant_tokens
    speed = estimate.policies[FULL].chains[len(rates) // 2][1]
    least = break_even_acceptance(one.costs, longest, 1 / speed)
    return "never" if least is None else f"{least:.3f}"


def _speed_table(estimate: Estimate) -> FittedTable:
    """Tokens per second by acceptance rate."""
    rates = estimate.settings.acceptance
    table = FittedTable(
        "Estimate: tokens per second, and of how many tokens the best chain is, by acceptance rate",
        ["policy", *(f"{rate:.2f}" for rate in rates)],
        caption=(
            "the rate is the same at all draft steps, and a policy's own: a shortlist is accepted less often than "
            "full; (0): no chain is faster than plain generate"
        ),
    )
    table.add_row("plain", *(_figure(estimate.plain_speed) for _ in rates), ends_section=True)
    for label, one in estimate.policies.items():
        table.add_row(label, *(f"{_figure(speed)} ({steps})" for steps, speed in one.chains))
    return table


def _assumptions(estimate: Estimate) -> Iterator[str]:
    captured = "The drafter's layers are a CUDA graph, in which an operation takes 2.5 µs at most. "
    yield (
        "A part takes the time of its bytes, or of its arithmetic where that is longer and --device-flops is given, "
        f"and of its launches one after another. {captured if estimate.is_captured else ''}Graphs of everything would "
        "take the launches away: --launch-latency 0 shows what is left."
    )
    yield "Tokenizers were not compared, as configurations say nothing of them: if they differ, nothing is accepted."
    if any(not float(one.weight_bytes).is_integer() for one in (*estimate.verification, estimate.layers)):
        yield (
            "Of a mixture's experts, as many different ones are taken to be read as there are on average if each "
            "token chooses at random."
        )


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} B"


def _milliseconds(seconds: float) -> str:
    """With three figures, as parts of a round are nanoseconds here and milliseconds there."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.3g}" if milliseconds >= 1e-4 or not milliseconds else "< 0.0001"


def _figure(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
