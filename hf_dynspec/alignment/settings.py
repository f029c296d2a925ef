"""The settings of online alignment: what is trained, on what, by which objective, when, and what is served."""

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

    The defaults are what works on streams of some dozen requests; `paper()` is EvoSpec (Zhang et al. 2026, "EvoSpec:
    Evolving Speculative Decoding via Real-Time Vocabulary and Parameter Adaptation", section 3.4 and table 5) as
    printed, which hardly moves in a hundred requests, and `osd()` is online speculative decoding (Liu et al. 2024,
    "Online Speculative Decoding", algorithm 2), which it is compared with.

    Args:
        modules: which of the drafter's modules get LoRA: `"all-linear"`, which is all linear layers but the output
            projection (`fc` of EAGLE heads among them), or the last parts of their names, such as
            `("q_proj", "v_proj")`; or `"all-parameters"`: no LoRA, every weight is trained.
        rank: of LoRA.
        alpha: of LoRA; what is learnt is scaled by `alpha / rank`.
        learning_rate: of AdamW.
        steps: optimizer steps in one update.
        batch: requests that a step averages over: the newest, and others drawn from the buffer.
        objective: a name in `alignment.objectives.OBJECTIVES`.
        support: over which ids the draft is normalised: `"kept"`, the target's most probable ones at the position
            (equation 5 as printed), or `"shortlist"`, which adds those that were kept at the request's other
            positions, the verified tokens and the request's shortlist. Over the kept ids alone nothing holds the
            draft's mass on them, and higher learning rates do harm.
        horizon: steps that a draft is unrolled for (γ).
        decay: β of the horizon's weights, equation 4; 0 weighs all steps alike.
        temperature: of the distillation, T_KD: target and draft alike, whatever is generated with.
        top_k: the target's most probable ids that are kept at each position.
        update_at: when it is updated: `"request"`, after each one, on it and others of the buffer, as far as
            `max_overhead` lets it; or `"full_buffer"`: whenever `buffer` places of requests have come together, on all
            of them, which are forgotten then, however long that takes (algorithm 1, lines 25 to 29).
        buffer: requests that are remembered (B); of `"full_buffer"` the places that an update is made on.
        buffer_bytes: what they may take; the oldest leave first.
        context: tokens before the first verified one that are remembered with a request.
        fill: from which places of a request drafts are learnt: `"all"`, or `"gate"`: those whose verified token was in
            the shortlist, and where the draft was rejected or its first step diverges by more than `align_threshold`
            (algorithm 1, lines 22 to 24). It is settled when the request is taken into the buffer.
        align_threshold: ε_align, in nats.
        background: train on a thread of its own while requests go on, and not between them.
        synchronous: finish every update before the next request begins, whatever it takes: reproducible to the bit.
        max_overhead: the share of the time of generation that training may take, where neither `synchronous` nor
            `update_at` says when it is done.
        gate: serve what was learnt only while it is measured to draft better than the drafter itself, by 3% at least.
        gate_window: over how many of the last requests (W).
        gate_least: of which there must be so many.
        seed: of everything that is drawn at random.

    Raises:
        ConfigurationError: a setting is mistyped or out of range; it names the setting and what it may be.
    """

    modules: str | tuple[str, ...] = ALL_LINEAR
    rank: int = 32
    alpha: float = 32.0
    learning_rate: float = 1e-3
    steps: int = 1
    batch: int = 2
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
        """EvoSpec as printed: equations 4 and 5, algorithm 1 and table 5. The paper gives no K and no ε_align, and
        trains in the background (section 4.1), which takes `background=True` here too."""
        printed = {
            "modules": ("q_proj", "v_proj"),
            "learning_rate": 1e-5,
            "support": "kept",
            "horizon": 6,
            "fill": "gate",
            "update_at": AT_FULL_BUFFER,
            "gate": False,
        }
        return cls(**printed | changes)

    @classmethod
    def osd(cls, **changes: Any) -> "OnlineAlignment":
        """Online speculative decoding: all weights, on the target's distribution where drafts were wrong."""
        printed = {
            "modules": ALL_PARAMETERS,
            "objective": "cross_entropy",
            "learning_rate": 1e-4,
            "horizon": 1,
            "decay": 0.0,
            "gate": False,
            "batch": 1,
        }
        return cls(**printed | changes)

    @property
    def trains_all_parameters(self) -> bool:
        """Whether every weight is trained, and no LoRA."""
        return self.modules == ALL_PARAMETERS

    @property
    def waits_for_full_buffer(self) -> bool:
        """Whether updates are made when the buffer is full, and not after requests."""
        return self.update_at == AT_FULL_BUFFER

    @property
    def goes_by_clock(self) -> bool:
        """Whether what may be recorded and learnt depends on the time that it takes."""
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
