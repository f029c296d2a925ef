"""What speed to expect of two models that nobody has loaded yet, on a machine that nobody has yet."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...drafters.traceable_decoder import can_be_recorded
from ...drafting.expected_speed import RoundCosts, best_chain_length, break_even_acceptance, expected_speed
from ...errors import ConfigurationError, shown_value
from ...fields import Number, SettingError, WholeNumber
from ...loading import load_config, shared_rows
from ...modeling.parts import decoder_of, output_rows
from ...shortlists import ShortlistPolicy, UnionShortlist
from ..operations.counting import Work
from ..operations.pretended_device import register_device
from ..pair import utc_now
from ..policy_text import named_policies, shorten_paths
from ..provenance import describe_policies, provenance
from .configurations import countable_model
from .counted_round import (
    head_work,
    layers_work,
    plain_overhead,
    record_overhead,
    screen_work,
    verification_work,
)
from .settings import FULL, POLICIES

SCHEMA_VERSION = 1
_BYTES_PER_SECOND, _SECONDS, _FLOPS = 1e9, 1e-6, 1e12
# µs of an operation within a CUDA graph, at most: between what small models of 16 and of 28 layers take on an H100.
_GRAPH_LATENCY = 2.5

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Machine:
    """A device, as its data sheet has it.

    Args:
        memory_bandwidth: GB/s (10⁹ bytes) that it reads from and writes to its memory.
        launch_latency: µs that each operation takes beside, which is mostly the host's time to launch it; 0 if CUDA
            graphs of everything were replayed.
        flops: TFLOP/s (10¹²) of products in the models' dtype (None: enough never to be waited for).

    Raises:
        FieldError: a number is out of range.
    """

    memory_bandwidth: float
    launch_latency: float
    flops: float | None = None

    def __post_init__(self):
        Number(0, 1e7).require("memory_bandwidth", self.memory_bandwidth)
        Number(0, 1e6, or_least=True).require("launch_latency", self.launch_latency)
        if self.flops is not None:
            Number(0, 1e7).require("flops", self.flops)

    def launch_seconds(self, work: Work, is_captured: bool = False) -> float:
        """The seconds of its operations' launches, by the host or within a CUDA graph."""
        latency = min(self.launch_latency, _GRAPH_LATENCY) if is_captured else self.launch_latency
        return work.operations * latency * _SECONDS

    def seconds(self, work: Work, is_captured: bool = False) -> float:
        """The seconds of some work: of its bytes or its arithmetic, whichever takes longer, and of its launches."""
        memory = work.bytes / (self.memory_bandwidth * _BYTES_PER_SECOND)
        arithmetic = 0.0 if self.flops is None else work.flops / (self.flops * _FLOPS)
        return max(memory, arithmetic) + self.launch_seconds(work, is_captured)


@dataclass(frozen=True)
class EstimateSettings:
    """What to estimate.

    Args:
        target: a `config.json`, or the folder or Hub id of a model that has one: the model to speed up.
        drafter: likewise: the small model.
        machine: what they are to run on.
        policies: what `parse_policy` understands, or policies by the name to show; none that needs training.
        acceptance: the acceptance rates to expect speeds for, each the same at all draft steps.
        num_assistant_tokens: the longest chain.
        cached_tokens: of the text before a round.
        temperature: 0 decodes greedily.
        dtype: of both models, such as `"bfloat16"` (None: what each configuration says).

    Raises:
        ConfigurationError: a setting is out of range, or a policy cannot be counted from configurations alone.
    """

    target: str | os.PathLike
    drafter: str | os.PathLike
    machine: Machine
    policies: Sequence[str] | Mapping[str, ShortlistPolicy] = POLICIES
    acceptance: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    num_assistant_tokens: int = 8
    cached_tokens: int = 1024
    temperature: float = 0.0
    dtype: str | None = None

    def __post_init__(self):
        WholeNumber(1, 128).require("num_assistant_tokens", self.num_assistant_tokens)
        WholeNumber(0).require("cached_tokens", self.cached_tokens)
        Number(0, 100, or_least=True).require("temperature", self.temperature)
        if not self.acceptance:
            raise ConfigurationError("name an acceptance rate")
        for rate in self.acceptance:
            Number(0, 1, or_least=True).require("acceptance", rate)
        dtype = None if self.dtype is None else getattr(torch, self.dtype, None)
        if self.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise SettingError("dtype", f"must be a torch dtype such as bfloat16, got {shown_value(self.dtype)}")
        self.resolved_policies()

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """The policies by what they are shown as, `full` first.

        Raises:
            ConfigurationError: one is none, or needs weights of its own.
        """
        policies = named_policies(self.policies)
        for label, policy in policies.items():
            parts = policy.policies if isinstance(policy, UnionShortlist) else (policy,)
            if not {one.name for one in parts} <= set(POLICIES):
                raise ConfigurationError(
                    f"the policy {label!r} has weights or an index of its own, of which configurations tell nothing. "
                    f"Take one of {', '.join(POLICIES)}, or have it measured."
                )
        return {**named_policies([FULL]), **policies}


@dataclass(frozen=True)
class PolicyEstimate:
    """What to expect of one policy.

    Attributes:
        rows: that the head scores at a draft step.
        head: what the head of a draft step is.
        step: what else a draft step has beside the drafter's layers: the choice of a token, and the policy.
        round: what a round has beside draft steps and the target's forward.
        costs: the same in seconds, with the models.
        head_share: of a draft step's seconds.
        break_even: `break_even_acceptance`.
        chains: for each acceptance rate the best chain length, 0 for none, and its tokens per second.
    """

    rows: int
    head: Work
    step: Work
    round: Work
    costs: RoundCosts
    head_share: float
    break_even: float | None
    chains: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Estimate:
    """What to expect, by counting.

    Attributes:
        settings: what it was made for.
        models: what is known of `"target"` and `"drafter"`.
        vocabulary: token ids that both score.
        verified_rows: ascending numbers of tokens that one forward of the target scores, the first being 1.
        verification: for each of them, what such a forward is.
        layers: what the drafter's layers are in a draft step.
        is_captured: whether they are a CUDA graph there.
        plain: what plain generation has for each token beside the target's forward.
        plain_speed: tokens per second of plain generation.
        policies: what to expect of each.
        started: when it was begun, UTC in ISO format; likewise `finished`.
    """

    settings: EstimateSettings
    models: dict[str, dict[str, Any]]
    vocabulary: int
    verified_rows: tuple[int, ...]
    verification: tuple[Work, ...]
    layers: Work
    is_captured: bool
    plain: Work
    plain_speed: float
    policies: dict[str, PolicyEstimate]
    started: str
    finished: str

    def to_dict(self, command: Sequence[str] | None = None) -> dict[str, Any]:
        """All of it and where it comes from, as JSON values. Holds no path beyond its last two parts.

        Args:
            command: the words of the command line (None: it was called from Python).
        """
        names = {name: shorten_paths(str(getattr(self.settings, name))) for name in ("target", "drafter")}
        return {
            "schema_version": SCHEMA_VERSION,
            "is_estimate": True,
            "provenance": provenance(command, self.started, self.finished, torch.get_num_threads()),
            "settings": {**vars(self.settings), **names, "machine": asdict(self.settings.machine)}
            | {"policies": describe_policies(self.settings.resolved_policies())},
            "models": self.models,
            "vocabulary": self.vocabulary,
            "verified_rows": list(self.verified_rows),
            "verification": [asdict(one) for one in self.verification],
            "layers": asdict(self.layers),
            "layers_are_captured": self.is_captured,
            "plain": asdict(self.plain),
            "plain_speed": self.plain_speed,
            "expected": {label: asdict(one) for label, one in self.policies.items()},
        }


def estimate_speed(
    settings: EstimateSettings,
    target: PreTrainedConfig | None = None,
    drafter: PreTrainedConfig | None = None,
    report: Report = lambda *_: None,
) -> Estimate:
    """Count what the models give a device to do, and expect speeds of a machine from it. Nothing is downloaded but
    configurations, and no weights take memory.

    Tokenizers are not compared: configurations say nothing of them.

    Args:
        settings: what to estimate.
        target: the configuration, in place of the one that the settings name.
        drafter: likewise.
        report: is told what is being counted, how much of it is done and how much there is.

    Raises:
        ConfigurationError: there is no configuration, or it is of no use.
        UnsupportedError: a model is none that can be drafted for or with, they have different vocabularies, or torch
            is older than 2.9.
    """
    register_device()
    started, policies = utc_now(), settings.resolved_policies()
    total = len(policies) + 2
    report("counting operations", 0, total)
    dtype = getattr(torch, settings.dtype) if settings.dtype else None
    target_model = countable_model(target or load_config(settings.target, "target"), dtype, "target")
    drafter_model = countable_model(drafter or load_config(settings.drafter, "drafter"), dtype, "drafter")
    vocabulary = shared_rows(output_rows(target_model), output_rows(drafter_model))
    rows = _rows_to_count(settings.num_assistant_tokens + 1)
    verification = verification_work(target_model, rows, settings.cached_tokens)
    layers = layers_work(drafter_model, settings.cached_tokens)
    is_captured = can_be_recorded(drafter_model, list(decoder_of(drafter_model).modules()))
    layers_seconds = settings.machine.seconds(layers, is_captured)
    report("counting operations", 1, total)
    plain = plain_overhead(vocabulary, target_model.dtype, settings.temperature)
    report("counting operations", 2, total)
    seconds = settings.machine.seconds
    alone = RoundCosts(0.0, tuple(rows), tuple(map(seconds, verification)), other_alone=seconds(plain))
    found = {}
    for done, (label, policy) in enumerate(policies.items(), start=3):
        found[label] = _of_policy(
            policy, settings, drafter_model, target_model.dtype, vocabulary, layers_seconds, alone
        )
        report("counting operations", done, total)
    models = {"target": _described(target_model), "drafter": _described(drafter_model)}
    return Estimate(
        settings=settings,
        models=models,
        vocabulary=vocabulary,
        verified_rows=tuple(rows),
        verification=tuple(verification),
        layers=layers,
        is_captured=is_captured,
        plain=plain,
        plain_speed=expected_speed([0.0], alone, 0),
        policies=found,
        started=started,
        finished=utc_now(),
    )


def _rows_to_count(most: int) -> list[int]:
    """Numbers of verified tokens to count forwards for. Those between lie on straight lines, but for a mixture's
    experts, nearly."""
    return sorted({min(count, most) for count in (1, 2, 3, 4, 6, 9, 17, 33, 65, most)})


def _of_policy(
    policy: ShortlistPolicy,
    settings: EstimateSettings,
    drafter: PreTrainedModel,
    dtype: torch.dtype,
    vocabulary: int,
    layers_seconds: float,
    alone: RoundCosts,
) -> PolicyEstimate:
    overhead = record_overhead(policy, vocabulary, dtype, settings.temperature)
    head, update = head_work(drafter, overhead)
    step = overhead.step + screen_work(policy, drafter.get_output_embeddings().in_features, vocabulary)
    rest = overhead.round + update
    seconds, longest = settings.machine.seconds, settings.num_assistant_tokens
    parts = [seconds(head), layers_seconds, seconds(step)]
    costs = RoundCosts(sum(parts), alone.verified_rows, alone.verification, seconds(rest), alone.other_alone)
    chains = []
    for rate in settings.acceptance:
        length = best_chain_length([rate], costs, longest)
        chains.append((length, expected_speed([rate], costs, length)))
    least = break_even_acceptance(costs, longest, costs.of_round(0))
    rows = overhead.shortlists[0].width
    return PolicyEstimate(rows, head, step, rest, costs, parts[0] / sum(parts), least, tuple(chains))


def _described(model: PreTrainedModel) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "model_type": model.config.model_type,
        "parameters": sum(one.numel() for one in parameters),
        "bytes": sum(one.numel() * one.element_size() for one in parameters),
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_rows": output_rows(model),
    }
