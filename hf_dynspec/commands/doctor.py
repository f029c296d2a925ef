"""`hf-dynspec doctor`: whether drafting pays for your models, and with which settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from . import options
from .common import ResultsFile, about, claim_results, progress_bar, wide_console

if TYPE_CHECKING:
    from ..evaluation.doctor.estimate import EstimateSettings
    from ..evaluation.doctor.settings import DoctorSettings
    from ..evaluation.settings import PairSettings

# What an estimate from configurations takes, and nothing else; and what it takes as a measurement does.
_OF_ESTIMATES = ("config", "device_memory_bandwidth", "launch_latency", "device_flops", "acceptance", "cached_tokens")
_OF_BOTH = ("policy", "temperature", "num_assistant_tokens", "dtype", "json_file")

# And what it takes to say what can draft for a target.
_OF_TARGETS = {"target", "dtype", "device", "threads", "json_file"}


def doctor(
    *,
    context: typer.Context,
    target: options.TargetIfMeasured = None,
    drafter: options.DrafterModel = None,
    eagle: options.EagleHead = None,
    allow_pickle: options.AllowPickle = False,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="JSON lines, as for bench. Default: a few texts of several kinds."),
    ] = None,
    more: options.MorePrompts = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar=options.POLICY,
            help="Repeatable, as for bench. Default: full, hybrid, frequency, in_context and screen.",
        ),
    ] = None,
    tree: Annotated[
        str, typer.Option(metavar=options.TREE_SHAPE, help="The shape of the trees; none leaves them out.")
    ] = "default",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 50,
    num_assistant_tokens: Annotated[int, typer.Option(help="The longest chain of three to measure.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the texts to compare speeds for.")] = 128,
    seconds: Annotated[float, typer.Option(help="About how long to measure, after the models are loaded.")] = 90.0,
    limit: options.Limit = None,
    chat_template: options.ChatTemplate = False,
    max_prompt_tokens: options.MaxPromptTokens = None,
    dtype: options.Dtype = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: options.Seed = 0,
    json_file: options.JsonFile = None,
    config: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="TARGET DRAFTER",
            help="Measure nothing, and estimate from two config.json, or folders or Hub ids that have one.",
        ),
    ] = None,
    device_memory_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", help="With --config: of the device to estimate for.")
    ] = None,
    launch_latency: Annotated[
        float | None, typer.Option(metavar="MICROSECONDS", help="With --config: what launching an operation takes.")
    ] = None,
    device_flops: Annotated[
        float | None, typer.Option(metavar="TFLOP/S", help="With --config: of products. Default: never waited for.")
    ] = None,
    acceptance: Annotated[
        list[float] | None, typer.Option(help="With --config: repeatable. Default: 0.5, 0.6, 0.7, 0.8 and 0.9.")
    ] = None,
    cached_tokens: Annotated[int, typer.Option(help="With --config: tokens of the text before a round.")] = 1024,
) -> None:
    """Say whether drafting pays for a target and a drafter on this computer, with which settings, and why.

    It measures all policies with chains of one length, then two other lengths and trees with the best policy, on as
    many prompts as the seconds allow. Without a drafter it says what can draft for the target. With --config, it
    counts operations and bytes of both models instead, for a machine that need not be there.
    """
    given = {
        parameter.name: "--prompts" if parameter.name == "more" else parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name).name == "COMMANDLINE"
    }
    if config is not None:
        _require_estimate(given)
        results = claim_results(context, json_file)
        from ..evaluation.doctor.estimate import EstimateSettings, Machine

        machine = Machine(device_memory_bandwidth, launch_latency, device_flops)
        models = {"target": config[0], "drafter": config[1], "machine": machine}
        policies, rates = policy or EstimateSettings.policies, tuple(acceptance or EstimateSettings.acceptance)
        _print_estimate(
            options.settings_of(context, EstimateSettings, **models, policies=policies, acceptance=rates), results
        )
        return
    for name in _OF_ESTIMATES:
        if name in given:
            raise ConfigurationError(f"{given[name]} is for estimates: name two configurations with --config")
    from ..evaluation.prompts import read_workload

    results = claim_results(context, json_file)
    files = [*(prompts or []), *(more or [])]
    workload = read_workload(files, limit) if files else None
    from ..evaluation.doctor.settings import POLICIES, DoctorSettings
    from ..evaluation.settings import PairSettings

    if target is not None and given.keys() <= _OF_TARGETS:
        _print_ways(options.settings_of(context, PairSettings), results)
        return
    shape = None if tree == "none" else tree
    settings = options.settings_of(context, DoctorSettings, prompts=files, policies=policy or POLICIES, tree=shape)
    _print_diagnosis(settings, workload, results)


def _require_estimate(given: dict[str, str]) -> None:
    """Refuse an estimate without a device, and options that say how to measure; `given` holds how options that were
    given are written, by their names."""
    measured = [option for name, option in given.items() if name not in (*_OF_ESTIMATES, *_OF_BOTH)]
    if measured:
        raise ConfigurationError(f"--config measures nothing, so leave {' and '.join(measured)} out")
    needed = {"device_memory_bandwidth": "--device-memory-bandwidth", "launch_latency": "--launch-latency"}
    if missing := [option for name, option in needed.items() if name not in given]:
        raise ConfigurationError(f"--config needs {' and '.join(missing)}: say what device to estimate for")


def _print_diagnosis(settings: "DoctorSettings", workload: list | None, results: ResultsFile) -> None:
    from ..assistant import DynSpecAssistant
    from ..evaluation.doctor.measure import diagnose_pair

    with progress_bar() as report:
        diagnosis = diagnose_pair(settings, DynSpecAssistant, prompts=workload, report=report)
    results.save(diagnosis.to_dict)
    console = wide_console()
    console.print(about(diagnosis.models, diagnosis.threads, settings.max_new_tokens, None), highlight=False)
    console.print(diagnosis)
    results.end()


def _print_ways(settings: "PairSettings", results: ResultsFile) -> None:
    from ..evaluation.doctor.drafters import ways_to_draft
    from ..evaluation.pair import load_part

    ways = ways_to_draft(load_part(settings, "target"), str(settings.target))
    results.save(ways.to_dict)
    console = wide_console()
    for line in ways.report():
        console.print(line, markup=False, highlight=False)
    results.end()


def _print_estimate(settings: "EstimateSettings", results: ResultsFile) -> None:
    from ..evaluation.doctor.estimate import estimate_speed

    with progress_bar() as report:
        estimate = estimate_speed(settings, report=report)
    results.save(estimate.to_dict)
    console = wide_console()
    for part in estimate.report():
        console.print(part)
    results.end()
