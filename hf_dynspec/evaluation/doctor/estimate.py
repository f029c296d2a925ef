"""An estimate of speeds from two configurations, for a machine that need not be there: a roofline.

Operations are counted: those of the models on torch's `meta` device, at their real sizes and without memory; those of
the rest of a round in real rounds of tiny models with the real vocabulary, on the pretended device. Bytes are those of
the parameters and of the cached keys and values; arithmetic is that of the products with the parameters.
"""

import copy
import operator
import os
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ...assistant import DynSpecAssistant
from ...cache_names import cache_inputs, is_recurrent
from ...drafters.traceable_decoder import can_be_recorded
from ...drafting.expected_speed import RoundCosts, acceptance_for, best_chain_length, expected_speed
from ...errors import ConfigurationError, UnsupportedError, shown_value
from ...fields import Number, SettingError, WholeNumber
from ...kernels import TILE_COLUMNS
from ...loading import empty_model, first_line, load_config, shared_rows
from ...memory.fixed_decoder import fuse_rotations, with_fused_norms
from ...memory.recurrent import layers_with_states, require_states_in_cache
from ...modeling.parts import FORWARD_ERRORS, decoder_of, output_rows
from ...shortlists import ShortlistPolicy, UnionShortlist
from ...shortlists.screen.factor import usual_rank
from ...shortlists.screen.policy import ScreenShortlist
from ..operations.counting import OperationCounter
from ..operations.pretended_device import move, pretended_device, register_device, to_device
from ..operations.rounds import PROMPT_TOKENS, operations, random_model, recording
from ..pair import utc_now
from ..policy_text import named_policies, policy_in_python, shorten_paths
from ..provenance import describe_policies, provenance
from ..tables import FittedTable, parameter_count
from .measure import Report
from .settings import FULL, POLICIES, fastest_but_for_ties

# 3: rounds are graphs, and plain generation may be one.
SCHEMA_VERSION = 3
# µs of an operation in a CUDA graph at most, from small models of 16 and 28 layers on an H100.
_GRAPH_LATENCY = 2.5
# transformers' dynamic cache copies keys and values at each step (a read and a write), and attention reads them.
# Memory of a fixed size is only read.
_CACHE_ACCESSES = 3
# Settings for the number of experts of a layer, by family.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Shape of the recorded rounds.
_CHAIN, _NEW_TOKENS = 5, 11
# More layers are no model, and would take long to build.
_LAYERS = WholeNumber(1, 1024)


@dataclass(frozen=True)
class Machine:
    """A device by its data sheet.

    Raises:
        FieldError: a number is out of range.
    """

    memory_bandwidth: float  # GB/s (10⁹ bytes)
    # µs of each operation besides, mostly the host's time to launch it; 0 if CUDA graphs of everything are replayed.
    launch_latency: float
    flops: float | None = None  # TFLOP/s (10¹²) of products in the models' dtype (None: never the limit)

    def __post_init__(self):
        Number(0, 1e7).require("memory_bandwidth", self.memory_bandwidth)
        Number(0, 1e6, or_least=True).require("launch_latency", self.launch_latency)
        if self.flops is not None:
            Number(0, 1e7).require("flops", self.flops)


@dataclass(frozen=True)
class Work:
    """The work of a part of a round."""

    operations: float = 0  # kernels to launch
    bytes: float = 0  # bytes of parameters, keys and values that are read or written
    flops: float = 0  # floating-point operations; a multiplication and an addition are two
    is_captured: bool = False  # one CUDA graph launches the operations

    def seconds(self, machine: Machine) -> float:
        """Seconds on a machine: those of the bytes or of the arithmetic, whichever is longer, and of the launches."""
        memory = self.bytes / (1e9 * machine.memory_bandwidth)
        arithmetic = 0.0 if machine.flops is None else self.flops / (1e12 * machine.flops)
        latency = min(machine.launch_latency, _GRAPH_LATENCY) if self.is_captured else machine.launch_latency
        return max(memory, arithmetic) + 1e-6 * self.operations * latency


@dataclass(frozen=True)
class EstimateSettings:
    """What to estimate.

    Args:
        target: a `config.json`, or the folder or Hub id of a model that has one: the model to speed up.
        drafter: likewise: the small model.
        machine: the device.
        policies: texts for `parse_policy`, or policies by the name to show; none that needs training.
        acceptance: acceptance rates to estimate speeds for, each equal at all draft steps.
        num_assistant_tokens: the longest chain.
        cached_tokens: tokens of the text before a round.
        temperature: 0 decodes greedily.
        dtype: of both models, such as `"bfloat16"` (None: as each configuration says).

    Raises:
        ConfigurationError: a setting is out of range, or a policy needs weights of its own.
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
        """The policies by label, `full` first. Raises `ConfigurationError` for a policy with weights of its own."""
        policies = named_policies(self.policies)
        for label, policy in policies.items():
            parts = policy.policies if isinstance(policy, UnionShortlist) else (policy,)
            if not {one.name for one in parts} <= set(POLICIES):
                raise ConfigurationError(
                    f"the policy {label!r} has weights or an index of its own, which configurations do not describe. "
                    f"Take one of {', '.join(POLICIES)}, or have it measured."
                )
        return {**named_policies([FULL]), **policies}


@dataclass(frozen=True)
class PolicyEstimate:
    """The estimate of one policy."""

    rows: int  # rows that the head scores at a draft step
    head: Work  # the work of a draft step besides the drafter's layers: head, choice of a token, policy
    other: Work  # the work of a round besides draft steps and verification
    costs: RoundCosts  # seconds of the parts of a round
    head_share: float  # the share of `head` in a draft step
    pays_from: float | None  # the acceptance from which on some chain is as fast as plain generation; None if none is
    # For each acceptance rate the best chain length (0: no drafts) and its tokens per second.
    chains: tuple[tuple[int, float], ...]

    def as_fast_as(self, speed: float, longest: int) -> float | None:
        """The least acceptance with which some chain has so many tokens per second; None if none has."""
        found = [acceptance_for(speed * self.costs.of_round(steps), steps) for steps in range(1, longest + 1)]
        return min((one for one in found if one is not None), default=None)


@dataclass(frozen=True)
class Estimate:
    """Estimated speeds of a pair."""

    settings: EstimateSettings
    models: dict[str, dict[str, Any]]  # descriptions of `"target"` and `"drafter"`
    vocabulary: int  # token ids that both score
    forward: Work  # the work of a forward of the target over one token, in plain generation
    verification: tuple[Work, ...]  # the work of a forward over 1, 2, … tokens, in a round
    layers: Work  # the work of the drafter's layers in a draft step
    plain: Work  # the work of plain generation for a token besides the forward
    plain_speed: float  # tokens per second of plain generation
    compiled_speed: float  # and with a static cache, compiled: as a graph
    policies: dict[str, PolicyEstimate]  # the estimate of each policy
    started: str  # UTC time in ISO format, as `finished`
    finished: str

    def to_dict(self, command: Sequence[str] | None = None) -> dict[str, Any]:
        """All of it and its origin, see `provenance`, as JSON values."""
        names = {name: shorten_paths(str(getattr(self.settings, name))) for name in ("target", "drafter")}
        return {
            "schema_version": SCHEMA_VERSION,
            "is_estimate": True,
            "provenance": provenance(command, self.started, self.finished, torch.get_num_threads()),
            "settings": {**vars(self.settings), **names, "machine": asdict(self.settings.machine)}
            | {"policies": describe_policies(self.settings.resolved_policies())},
            "models": self.models,
            "vocabulary": self.vocabulary,
            "forward": asdict(self.forward),
            "verification": [asdict(one) for one in self.verification],
            "layers": asdict(self.layers),
            "plain": asdict(self.plain),
            "plain_speed": self.plain_speed,
            "compiled_speed": self.compiled_speed,
            "policies": {label: asdict(one) for label, one in self.policies.items()},
            "sentence": self.sentence,
            "line": self.line,
        }

    # The answer --------------------------------------------------------------------------------------------------

    def _best(self) -> tuple[float, str, int, float]:
        """The middle acceptance rate, and the policy, chain length and tokens per second to choose there, as if all
        policies were accepted equally often."""
        rates = self.settings.acceptance
        middle = len(rates) // 2
        label = fastest_but_for_ties({label: one.chains[middle][1] for label, one in self.policies.items()})
        return rates[middle], label, *self.policies[label].chains[middle]

    @property
    def sentence(self) -> str:
        """What to do at the middle acceptance rate, in words."""
        rate, label, steps, speed = self._best()
        if not steps:
            least = min((one.pays_from for one in self.policies.values() if one.pays_from is not None), default=None)
            pays = "drafting would not pay at any" if least is None else f"drafting would pay from {least:.2f} on"
            return f"Estimate: use none at an acceptance rate of {rate:.2f}; {pays}."
        return (
            f"Estimate: at an acceptance rate of {rate:.2f}, {label} with chains of {steps} would have "
            f"{speed / self.plain_speed:.2f} times the speed of plain generate, {_speed(speed)} tokens per second; it "
            f"would pay from {self.policies[label].pays_from:.2f} on."
        )

    @property
    def line(self) -> str:
        """The same in Python, with `target` and `drafter` loaded."""
        _, label, steps, _ = self._best()
        if not steps:
            return "target.generate(**inputs)  # without an assistant"
        before, policy = policy_in_python(label, self.settings.policies)
        return f"{before}DynSpecAssistant(drafter, {policy}, target=target, num_assistant_tokens={steps})"

    # Showing it --------------------------------------------------------------------------------------------------

    def report(self) -> Iterator[RenderableType]:
        """The parts of the output of a terminal."""
        machine = self.settings.machine
        models = ", ".join(
            f"{role} {one['model_type']} of {parameter_count(one['parameters'])} parameters ({one['dtype']})"
            for role, one in self.models.items()
        )
        flops = "" if machine.flops is None else f", {machine.flops:g} TFLOP/s"
        yield Text(
            f"ESTIMATE from configurations, nothing was measured: {models}; a device of {machine.memory_bandwidth:g} "
            f"GB/s{flops} and {machine.launch_latency:g} µs for each operation; {self.settings.cached_tokens:,} "
            "tokens of text before."
        )
        yield self._work_table()
        yield self._policy_table()
        yield Text(
            "A part takes the time of its bytes, or of its arithmetic if that is longer and --device-flops is given, "
            "and of its launches. A round is a CUDA graph, in which an operation takes 2.5 µs at most, unless a model "
            "cannot be recorded. Plain generate is launched; compiled is plain generate with a static cache. "
            "Tokenizers were not compared, as configurations do not describe them. Of a mixture's experts, the "
            "expected number for randomly choosing tokens is read.",
            style="dim",
        )
        yield Text(self.sentence, style="bold")
        yield Text(self.line)

    def _work_table(self) -> FittedTable:
        with_flops = ["GFLOP"] if self.settings.machine.flops is not None else []
        table = FittedTable(
            "Estimate: the work of a round",
            ["part", "operations", "bytes", *with_flops, "ms"],
            caption="layers and head make a draft step; loop: the rest of a round, or of a plain token",
        )
        shown = min(6, len(self.verification))
        parts = [("target, 1 token", self.forward), (f"target, {shown} tokens", self.verification[shown - 1])]
        parts += [("loop: plain", self.plain), ("layers", self.layers)]
        for label, one in self.policies.items():
            parts += [(f"head: {label}", one.head), (f"loop: {label}", one.other)]
        for label, work in parts:
            cells = [f"{work.operations:,.0f}", _size(work.bytes)]
            cells += [f"{work.flops / 1e9:.2f}"] * len(with_flops)
            table.add_row(label, *cells, f"{1e3 * work.seconds(self.settings.machine):.3g}")
        return table

    def _policy_table(self) -> FittedTable:
        rates, longest = self.settings.acceptance, self.settings.num_assistant_tokens
        middle = len(rates) // 2
        table = FittedTable(
            "Estimate: tokens per second by acceptance rate, and the best chain length",
            ["policy", "rows", "head of\na step", "pays\nfrom", f"as full\nat {rates[middle]:.2f}"]
            + [f"{rate:.2f}" for rate in rates],
            caption=(
                "pays from: the acceptance with which the best chain is as fast as plain generate; as full: the one "
                "with which it is as fast as full; a shortlist is accepted less often than full; (0): no drafts"
            ),
        )
        table.add_row("plain", "", "", "", "", *[_speed(self.plain_speed)] * len(rates))
        table.add_row("compiled", "", "", "", "", *[_speed(self.compiled_speed)] * len(rates), ends_section=True)
        for label, one in self.policies.items():
            equal = one.as_fast_as(self.policies[FULL].chains[middle][1], longest) if label != FULL else None
            least = "never" if one.pays_from is None else f"{one.pays_from:.2f}"
            cells = [f"{one.rows:,}", f"{one.head_share:.0%}", least, "" if equal is None else f"{equal:.3f}"]
            table.add_row(label, *cells, *(f"{_speed(speed)} ({steps})" for steps, speed in one.chains))
        return table


def estimate_speed(
    settings: EstimateSettings,
    target: PreTrainedConfig | None = None,
    drafter: PreTrainedConfig | None = None,
    report: Report = lambda *_: None,
) -> Estimate:
    """Estimate speeds. Only configurations are downloaded, and no weights take memory.

    Args:
        settings: what to estimate.
        target: the configuration, in place of the one that the settings name.
        drafter: likewise.
        report: called with the activity, the steps done and the steps in all.

    Raises:
        ConfigurationError: there is no configuration, or it cannot be used.
        UnsupportedError: a model cannot draft or be drafted for, the vocabularies differ, or torch is older than 2.9.
    """
    register_device()
    started, policies, machine = utc_now(), settings.resolved_policies(), settings.machine
    total = len(policies) + 1
    report("counting operations", 0, total)
    dtype = getattr(torch, settings.dtype) if settings.dtype else None
    target_model = countable_model(target or load_config(settings.target, "target"), dtype, "target")
    drafter_model = countable_model(drafter or load_config(settings.drafter, "drafter"), dtype, "drafter")
    vocabulary = shared_rows(output_rows(target_model), output_rows(drafter_model))
    rows = range(1, settings.num_assistant_tokens + 2)
    # A round is one graph, in which both models take part.
    is_captured = all(can_be_recorded(one, list(decoder_of(one).modules())) for one in (target_model, drafter_model))
    (forward,) = forward_work(target_model, [1], settings.cached_tokens)
    verification = forward_work(target_model, rows, settings.cached_tokens, is_captured=is_captured)
    (layers,) = forward_work(drafter_model, [1], settings.cached_tokens, has_head=False, is_captured=is_captured)
    plain = Work(plain_operations(vocabulary, target_model.dtype, settings.temperature))
    seconds = tuple(one.seconds(machine) for one in (forward, *verification[1:]))
    compiled = replace(verification[0], is_captured=True).seconds(machine)
    found = {}
    for done, (label, policy) in enumerate(policies.items(), start=1):
        report("counting operations", done, total)
        counted = count_round(policy, vocabulary, target_model.dtype, settings.temperature)
        head = replace(_head_work(policy, counted, drafter_model, vocabulary), is_captured=is_captured)
        other = Work(counted.other, is_captured=is_captured)
        parts = head.seconds(machine), layers.seconds(machine)
        costs = RoundCosts(sum(parts), seconds, other.seconds(machine), plain.seconds(machine))
        lengths = [best_chain_length([rate], costs, rows[-2]) for rate in settings.acceptance]
        chains = [
            (length, expected_speed([rate], costs, length))
            for rate, length in zip(settings.acceptance, lengths, strict=True)
        ]
        one = PolicyEstimate(counted.rows, head, other, costs, parts[0] / sum(parts), None, tuple(chains))
        least = one.as_fast_as(1 / costs.of_round(0), rows[-2])
        found[label] = PolicyEstimate(**{**vars(one), "pays_from": least})
    report("counting operations", total, total)
    return Estimate(
        settings=settings,
        models={"target": _described(target_model), "drafter": _described(drafter_model)},
        vocabulary=vocabulary,
        forward=forward,
        verification=tuple(verification),
        layers=layers,
        plain=plain,
        plain_speed=1 / (seconds[0] + plain.seconds(machine)),
        compiled_speed=1 / (compiled + plain.seconds(machine)),
        policies=found,
        started=started,
        finished=utc_now(),
    )


# Models on meta ------------------------------------------------------------------------------------------------------


def countable_model(config: PreTrainedConfig, dtype: torch.dtype | None, role: str) -> PreTrainedModel:
    """The model of a configuration on `meta`, with weights of a dtype (None: as it says, by default float32). `role`
    names it in errors.

    Raises:
        ConfigurationError: a size is out of range, or the weights are quantised and no dtype is given.
        UnsupportedError: it can neither draft nor be drafted for, or transformers cannot build it.
    """
    if config.is_encoder_decoder:
        raise UnsupportedError(f"the {role} is an encoder-decoder ({config.model_type}). Name a decoder-only model.")
    is_head = any("eagle" in str(one).lower() for one in config.architectures or ())
    # EAGLE-2 heads come with the architecture of their layer, and with a setting that no model of it has.
    has_own_bias = hasattr(config, "bias") and not hasattr(type(config)(), "bias")
    if is_head or has_own_bias or getattr(config, "draft_vocab_size", None) is not None:
        raise UnsupportedError(
            f"the {role}'s configuration is that of an EAGLE head, whose layers it does not describe. Have the head "
            "measured, with --eagle."
        )
    text = config.get_text_config()
    _LAYERS.require(f"the {role}'s num_hidden_layers", getattr(text, "num_hidden_layers", None))
    WholeNumber(2).require(f"the {role}'s vocab_size", getattr(text, "vocab_size", None))
    if dtype is None and getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            f"the {role}'s weights are quantised, and the bytes that its kernels read are not known. Name a dtype, "
            "such as bfloat16, to count the model before quantisation."
        )
    model = empty_model(config, dtype or config.dtype or text.dtype or torch.float32, role)
    if is_recurrent(model):
        require_states_in_cache(model)
    return model


def forward_work(
    model: PreTrainedModel, rows: Sequence[int], cached: int, has_head: bool = True, is_captured: bool = False
) -> list[Work]:
    """The work of forwards of a model on `meta`, each over one of these numbers of `rows`, after `cached` tokens,
    with or without the head's logits for all rows. Raises `UnsupportedError` if it cannot be counted without its
    weights."""
    decoder = decoder_of(model)
    part = model if has_head else decoder
    cache = DynamicCache(config=model.config.get_text_config())
    if not has_head and not layers_with_states(cache):
        # A drafter keeps all positions in every layer.
        cache = DynamicCache()

    def run(module: nn.Module, count: int, into: DynamicCache) -> int:
        ids = torch.zeros(1, count, dtype=torch.int64, device="meta")
        with torch.no_grad(), OperationCounter() as counter:
            module(input_ids=ids, **cache_inputs(into))
        return counter.operations

    try:
        run(part, max(1, cached), cache)
        counts = {count: run(part, count, copy.deepcopy(cache)) for count in {rows[0], rows[-1]}}
        if is_captured:
            # On `meta` nothing is computed: one operation counts for a kernel.
            fused = with_fused_norms(decoder, lambda states, *others: states.clone())
            fuse_rotations(fused, lambda query, key, *tables: (query.clone(), key))
            for count in counts:
                saved = (run(module, count, copy.deepcopy(cache)) for module in (decoder, fused))
                counts[count] -= operator.sub(*saved)
    except (*FORWARD_ERRORS, NotImplementedError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be counted from its configuration: {first_line(error)}. Load it, and have "
            "it measured."
        ) from error
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    states = [one for layer in layers_with_states(cache) for one in (layer.conv_states, layer.recurrent_states)]
    held = [one for one in (*held, *(state for one in states for state in one.values())) if one is not None]
    accesses = 1 if is_captured else _CACHE_ACCESSES
    kept = accesses * sum(one.numel() * one.element_size() for one in held) if cached else 0
    found = []
    for count in rows:
        size, flops = _parameters_read(model, count, has_head)
        found.append(Work(counts.get(count, counts[rows[-1]]), size + kept, flops, is_captured))
    return found


def _parameters_read(model: PreTrainedModel, rows: int, has_head: bool) -> tuple[float, float]:
    """Bytes of the parameters that a forward over `rows` tokens reads, and floating-point operations with them. Of a
    mixture's experts, the expected number for tokens that choose at random is read."""
    config = model.config.get_text_config()
    experts = max(getattr(config, name, None) or 0 for name in _EXPERTS)
    chosen = config.num_experts_per_tok / experts if experts else 0.0
    size, flops = 0.0, 0.0
    for name, one in decoder_of(model).named_parameters():
        if one is model.get_input_embeddings().weight:
            size += rows * one.shape[1] * one.element_size()
            continue
        is_expert = experts and ".experts." in name
        size += one.numel() * one.element_size() * (1 - (1 - chosen) ** rows if is_expert else 1)
        flops += 2 * rows * one.numel() * (chosen if is_expert else 1) * (one.dim() > 1)
    if has_head:
        head = model.get_output_embeddings().weight
        size, flops = size + head.numel() * head.element_size(), flops + 2 * rows * head.numel()
    return size, flops


def _described(model: PreTrainedModel) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "model_type": model.config.model_type,
        "parameters": sum(one.numel() for one in parameters),
        "bytes": sum(one.numel() * one.element_size() for one in parameters),
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_rows": output_rows(model),
    }


# Rounds of tiny models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedRound:
    """Operations of a round of chains besides the models' layers and the target's head."""

    step: int  # of each draft step: head, choice, policy, the drafter's cache
    other: int  # of the rest of the round: acceptance, policy, the loop
    rows: int  # rows that the head scored at a draft step


def count_round(policy: ShortlistPolicy, vocabulary: int, dtype: torch.dtype, temperature: float) -> CountedRound:
    """Count the operations of a round in a call with tiny models of so many tokens, by a policy that needs nothing
    trained for the drafter."""
    target, drafter = (random_model(1, vocabulary, seed).to(dtype) for seed in (0, 1))
    of_target, of_layers = (
        forward_work(empty_model(one.config, dtype, "model"), [count], PROMPT_TOKENS, has_head)[0].operations
        for one, count, has_head in ((target, _CHAIN + 1, True), (drafter, 1, False))
    )
    with pretended_device() as device, torch.random.fork_rng([]):
        target, drafter = move(target), move(drafter)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the tokenizers of target and drafter")
            assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=_CHAIN)
        with recording(device) as recorded:
            _generate(target, temperature, assistant_model=assistant)
    # The first round reads the prompt, and the last ones draft less.
    steady = recorded.rounds(device.events)[2]
    steps = [operations(steady.events[begin:end]) for begin, end in pairwise(steady.heads)]
    step = statistics.median_high(steps) - of_layers
    other = operations(steady.events) - of_target - _CHAIN * (step + of_layers)
    return CountedRound(step, other, steady.shortlists[0].width)


def plain_operations(vocabulary: int, dtype: torch.dtype, temperature: float) -> int:
    """Count the operations of transformers' loop for a token, besides the target's forward. See `count_round`."""
    model = random_model(1, vocabulary, 0).to(dtype)
    of_forward = forward_work(empty_model(model.config, dtype, "model"), [1], PROMPT_TOKENS)[0].operations
    begins: list[int] = []
    with pretended_device() as device, torch.random.fork_rng([]):
        model = move(model)
        model.register_forward_pre_hook(lambda *_: begins.append(len(device.events)))
        _generate(model, temperature)
    return operations(device.events[begins[3] : begins[4]]) - of_forward


def _generate(model: PreTrainedModel, temperature: float, **arguments: object) -> None:
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    prompt = to_device(torch.arange(3, 3 + PROMPT_TOKENS).unsqueeze(0))
    mask = to_device(torch.ones(1, PROMPT_TOKENS, dtype=torch.int64))
    ends = {"max_new_tokens": _NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    model.generate(prompt, attention_mask=mask, **ends, **sampling, **arguments)


def _head_work(policy: ShortlistPolicy, counted: CountedRound, drafter: PreTrainedModel, vocabulary: int) -> Work:
    projection = drafter.get_output_embeddings().weight
    numbers = counted.rows * projection.shape[1]
    size, flops = numbers * projection.element_size(), 2 * numbers
    for one in policy.policies if isinstance(policy, UnionShortlist) else (policy,):
        if isinstance(one, ScreenShortlist):
            # Its factor in 8 bits and its projection in 32, read once.
            rank = one.rank or usual_rank(projection.shape[1])
            size += vocabulary * -(-(rank + 1) // TILE_COLUMNS) * TILE_COLUMNS + 4 * rank * projection.shape[1]
            flops += 2 * rank * (vocabulary + projection.shape[1])
    return Work(counted.step, size, flops)


def _size(count: float) -> str:
    unit, size = next((one for one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= one[1]), ("B", 1))
    return f"{count / size:.3g} {unit}"


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
