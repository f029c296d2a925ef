"""The settings of online alignment."""

from dataclasses import dataclass, fields
from typing import Any

from ..errors import shown_value
from ..fields import LARGEST_SEED, LARGEST_TOP_K, FieldError, Number, OneOf, SettingRule, Share, Switch, WholeNumber
from .objectives import OBJECTIVES

ALL_LINEAR = "all-linear"
ALL_PARAMETERS = "all-parameters"
AT_REQUEST, AT_FULL_BUFFER = "request", "full_buffer"


@dataclass(frozen=True)
class OnlineAlignment:
    """How a drafter is aligned with its target while it generates.

    The defaults suit streams of some dozen requests; `paper()` is EvoSpec (Zhang et al. 2026, "EvoSpec: Evolving
    Speculative Decoding via Real-Time Vocabulary and Parameter Adaptation", section 3.4 and table 5) as printed, which
    hardly learns in a hundred requests, and `osd()` is its baseline, online speculative decoding (Liu et al. 2024,
    "Online Speculative Decoding", algorithm 2).

    Args:
        modules: the modules that get LoRA: `"all-linear"`, all linear layers except the output projection (`fc` of
            EAGLE heads included), or the last parts of their names, such as `("q_proj", "v_proj")`; or
            `"all-parameters"`: train every weight, without LoRA.
        rank: the rank of LoRA.
        alpha: LoRA's changes are scaled by `alpha / rank`.
        learning_rate: the learning rate of AdamW.
        steps: optimizer steps in one update. Those after the first one are left out if `max_overhead` does not allow
            them.
        batch: requests that a step averages over. An update begins with the newest request and goes on with others
            drawn from the buffer.
        objective: a name in `alignment.objectives.OBJECTIVES`.
        support: the ids over which the draft is normalised: `"kept"`, the target's most probable ones at the position
            (equation 5 as printed), or `"shortlist"`, which adds those of the request's other positions, the verified
            tokens and the request's shortlist. The kept ids alone do not hold the draft's mass, and high learning
            rates then do harm.
        horizon: steps that a draft is unrolled for (γ).
        decay: β of the horizon's weights, equation 4; with 0 all steps weigh the same.
        temperature: T_KD of the distillation, for target and draft, whatever the temperature of generation.
        top_k: the target's most probable ids that are kept at each position.
        update_at: when to update: `"request"`: after each request, on it and others of the buffer, within
            `max_overhead`; or `"full_buffer"`: when `buffer` places of requests have been collected, on all of them,
            which are then dropped, without a limit on time (algorithm 1, lines 25 to 29).
        buffer: requests to keep (B); for `"full_buffer"` the places of an update.
        buffer_bytes: the most memory of the buffer; the oldest requests leave first.
        context: tokens before the first verified one that are kept with a request.
        fill: the places of a request to learn from: `"all"`, or `"gate"`: those with the verified token in the
            shortlist, and with a rejected draft or a first step that diverges by more than `align_threshold`
            (algorithm 1, lines 22 to 24). They are chosen when the request enters the buffer.
        align_threshold: ε_align, in nats.
        background: train in another thread during requests, not between them.
        synchronous: finish every update before the next request begins, without a limit on time: reproducible to the
            bit.
        max_overhead: the most training time, as a share of the time of generation, unless `synchronous` or `update_at`
            decide.
        gate: serve the trained weights only while they are measured to draft better than the drafter's own, by at
            least 3%.
        gate_window: the number of last requests that the gate compares (W).
        gate_least: the least number of these requests.
        seed: the seed of all random numbers.

    Raises:
        ConfigurationError: a setting is mistyped or out of range. The message names it and its range.
    """

    modules: str | tuple[str, ...] = ALL_LINEAR
    rank: int = 32
    alpha: float = 32.0
    learning_rate: float = 1e-3
    steps: int = 2
    batch: int = 1
    objective: str = "horizon_kl"
    support: str = "shortlist"
    horizon: int = 5
    decay: float = 0.3
    temperature: float = 1.0
    top_k: int = 50
    update_at: str = AT_REQUEST
    buffer: int = 32
    buffer_bytes: int = 2**28
    context: int = 128
    fill: str = "all"
    align_threshold: float = 0.1
    background: bool = False
    synchronous: bool = False
    max_overhead: float = 0.05
    gate: bool = True
    gate_window: int = 8
    gate_least: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _RULES:
                _RULES[field.name].require(field.name, getattr(self, field.name))
        object.__setattr__(self, "modules", _checked_modules(self.modules))
        if self.gate_least > self.gate_window:
            problem = f"is {self.gate_least}, more than the {self.gate_window} of gate_window"
            raise FieldError("gate_least", problem, "Give no more than gate_window")
        if self.background and self.synchronous:
            raise FieldError("background", "is True, and so is synchronous", "Give one of them")

    @classmethod
    def paper(cls, **changes: Any) -> "OnlineAlignment":
        """EvoSpec as printed: equations 4 and 5, algorithm 1 and table 5. The paper gives no K and no ε_align. It
        trains in the background (section 4.1); add `background=True` for that."""
        printed = {
            "modules": ("q_proj", "v_proj"),
            "learning_rate": 1e-5,
            "support": "kept",
            "horizon": 6,
            "fill": "gate",
            "update_at": AT_FULL_BUFFER,
            "gate": False,
            "steps": 1,
        }
        return cls(**printed | changes)

    @classmethod
    def osd(cls, **changes: Any) -> "OnlineAlignment":
        """Online speculative decoding: all weights, on the target's distribution at wrong drafts."""
        printed = {
            "modules": ALL_PARAMETERS,
            "objective": "cross_entropy",
            "learning_rate": 1e-4,
            "horizon": 1,
            "decay": 0.0,
            "gate": False,
            "steps": 1,
        }
        return cls(**printed | changes)

    @property
    def trains_all_parameters(self) -> bool:
        """Whether every weight is trained, without LoRA."""
        return self.modules == ALL_PARAMETERS

    @property
    def waits_for_full_buffer(self) -> bool:
        """Whether updates are made when the buffer is full, not after requests."""
        return self.update_at == AT_FULL_BUFFER

    @property
    def goes_by_clock(self) -> bool:
        """Whether recording and training depend on the time that they take."""
        return not self.synchronous and not self.waits_for_full_buffer


_RULES: dict[str, SettingRule] = {
    "rank": WholeNumber(1, 4096),
    "alpha": Number(0, 1e6),
    "learning_rate": Number(0, 10),
    "steps": WholeNumber(1, 1024),
    "batch": WholeNumber(1, 4096),
    "objective": OneOf(tuple(OBJECTIVES)),
    "support": OneOf(("kept", "shortlist")),
    "horizon": WholeNumber(1, 64),
    "decay": Number(0, 1e3, or_least=True),
    "temperature": Number(0, 1e3),
    "top_k": WholeNumber(1, LARGEST_TOP_K),
    "update_at": OneOf((AT_REQUEST, AT_FULL_BUFFER)),
    "buffer": WholeNumber(1),
    "buffer_bytes": WholeNumber(1, 2**50),
    "context": WholeNumber(1),
    "fill": OneOf(("all", "gate")),
    "align_threshold": Number(0, 1e3, or_least=True),
    "background": Switch(),
    "synchronous": Switch(),
    "max_overhead": Share(),
    "gate": Switch(),
    "gate_window": WholeNumber(1),
    "gate_least": WholeNumber(1),
    "seed": WholeNumber(0, LARGEST_SEED),
}


def _checked_modules(value: Any) -> str | tuple[str, ...]:
    fix = f'Give "{ALL_LINEAR}", "{ALL_PARAMETERS}" or names such as ("q_proj", "v_proj")'
    if isinstance(value, str):
        if value not in (ALL_LINEAR, ALL_PARAMETERS):
            raise FieldError("modules", f"is {shown_value(value)}, which is no set of modules", fix)
        return value
    names = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise FieldError("modules", f"must name modules, got {shown_value(value)}", fix)
    return names
