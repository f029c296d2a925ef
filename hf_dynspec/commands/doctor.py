"""`hf-dynspec doctor`: whether drafting pays for your models, and with which settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .common import ResultsFile, about, claim_results, command_line, progress_bar, wide_console

if TYPE_CHECKING:
    from ..evaluation.doctor.settings import DoctorSettings


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
            help="Repeatable, as for bench. Default: full, frequency, in_context, hybrid and screen.",
        ),
    ] = None,
    tree: Annotated[
        str, typer.Option(metavar=options.TREE_SHAPE, help="The shape of the trees; none leaves them out.")
    ] = "default",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 50,
    num_assistant_tokens: Annotated[int, typer.Option(help="The longest chain to expect the speed of.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens for each prompt that speeds are expected for.")] = 128,
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

    Costs and acceptance are measured on a few prompts; speeds are predicted from them, prompts included, as
    `bench` measures them. With --config, operations and bytes of both models are counted instead, for a machine that
    need not be there.
    """
    machine = {
        "--device-memory-bandwidth": device_memory_bandwidth,
        "--launch-latency": launch_latency,
        "--device-flops": device_flops,
    }
    if config is not None:
        given = {"--target": target, "--drafter": drafter, "--eagle": eagle, "--prompts": prompts or more}
        results = claim_results(context, json_file)
        _require_machine(machine, given)
        estimate = {"acceptance": tuple(acceptance)} if acceptance else {}
        _print_estimate(
            config,
            tuple(machine.values()),
            results,
            command_line(context),
            num_assistant_tokens=num_assistant_tokens,
            cached_tokens=cached_tokens,
            temperature=temperature,
            dtype=dtype,
            **({"policies": policy} if policy else {}),
            **estimate,
        )
        return
    _require_no_machine({**machine, "--acceptance": acceptance})
    from ..evaluation.doctor.settings import POLICIES, DoctorSettings

    files = [*(prompts or []), *(more or [])]
    shape = None if tree == "none" else tree
    settings = options.settings_of(context, DoctorSettings, prompts=files, policies=policy or POLICIES, tree=shape)
    _print_diagnosis(settings, claim_results(context, json_file), command_line(context))


def _require_machine(machine: dict[str, float | None], given: dict[str, Any]) -> None:
    """Refuse --config without a device, and with models to measure."""
    from ..errors import ConfigurationError

    measured = [name for name, value in given.items() if value]
    if measured:
        raise ConfigurationError(f"--config measures nothing, so leave {' and '.join(measured)} out")
    for name in ("--device-memory-bandwidth", "--launch-latency"):
        if machine[name] is None:
            raise ConfigurationError(f"--config needs {name}: say what device to estimate for")


def _require_no_machine(given: dict[str, Any]) -> None:
    """Refuse a device to estimate for where one is measured."""
    from ..errors import ConfigurationError

    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(f"{name} is for estimates: name two configurations with --config")


def _print_diagnosis(settings: "DoctorSettings", results: ResultsFile, words: list[str]) -> None:
    from ..assistant import DynSpecAssistant
    from ..evaluation.doctor.measure import diagnose_pair
    from ..evaluation.prompts import read_workload

    workload = read_workload(settings.prompts, settings.limit) if settings.prompts else None
    with progress_bar() as report:
        diagnosis = diagnose_pair(settings, DynSpecAssistant, prompts=workload, report=report)
    results.save(lambda: diagnosis.to_dict(words))
    console = wide_console()
    console.print(about(diagnosis.models, diagnosis.threads, settings.max_new_tokens, None), highlight=False)
    console.print(diagnosis)
    results.require_saved()


def _print_estimate(
    config: tuple[str, str], machine: tuple[float | None, ...], results: ResultsFile, words: list[str], **settings: Any
) -> None:
    from ..evaluation.doctor.estimate import EstimateSettings, Machine, estimate_speed
    from ..evaluation.doctor.estimate_report import estimate_report

    estimated = EstimateSettings(*config, Machine(*machine), **settings)
    with progress_bar() as report:
        estimate = estimate_speed(estimated, report=report)
    results.save(lambda: estimate.to_dict(words))
    console = wide_console()
    for part in estimate_report(estimate):
        console.print(part)
    results.require_saved()
