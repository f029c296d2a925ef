"""Measure `num_assistant_tokens="auto"` against fixed draft lengths and plain generation, domain by domain; and with
several policies the choice between them as well, against each of them at each length.

All of them take turns on every prompt, in one process, so that whatever else the computer does meets all alike. Tables
show tokens per second, how close automatic drafting comes to the best fixed setting of each domain, which nobody knows
beforehand, and to plain generation where drafting loses, with the standard error that comes of the prompts being few;
that the best setting is picked by the same calls makes its ratio a little lower besides. An assistant sees one prompt
after another, as it would in a server: what it learns from one is there for the next, and nothing is at the first. On
the embedded pair:

    python examples/automatic_drafting.py --target examples/pocket/target --drafter examples/pocket/drafter \\
        --prompts examples/pocket/prompts.jsonl

with `--eagle` in place of `--drafter` for a head, with `--policy hybrid --policy screen` to choose between these, and
with `--random-weights` for a drafter that is never right.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_dynspec import AutomaticShortlist, DynSpecAssistant
from hf_dynspec.evaluation.pair import Pair, PairSettings, generation_config, open_pair
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.files import write_json

PLAIN, AUTO = "plain", "auto"
# By domain and system: the prompt, seconds and new tokens of every call.
Measured = dict[str, dict[str, list[dict[str, Any]]]]

app = typer.Typer(add_completion=False)


def open_assistants(
    pair: Pair, policies: list[str], lengths: list[int], tree: bool, random_weights: bool
) -> dict[str, DynSpecAssistant | None]:
    """What is compared, by name: plain generation, each fixed setting, and an assistant that chooses."""
    drafter = next(iter(pair.drafters.values()))
    if random_weights:
        torch.manual_seed(0)
        for parameter in drafter.module.parameters():
            parameter.data = torch.randn_like(parameter) * 0.02
    settings = {"target": pair.target, "tokenizer": pair.tokenizer, "tree": tree}
    made = {text: parse_policy(text) for text in policies}
    fixed = {
        f"{text}, {'tree' if length is None else length}": (policy, length)
        for text, policy in made.items()
        for length in ([None] if tree else lengths)
    }
    chosen = next(iter(made.values())) if len(made) == 1 else AutomaticShortlist(list(made.values()))
    return {PLAIN: None} | {
        name: DynSpecAssistant(drafter, policy, num_assistant_tokens=length, **settings)
        for name, (policy, length) in {**fixed, AUTO: (chosen, AUTO)}.items()
    }


def measure(
    pair: Pair, assistants: dict[str, DynSpecAssistant | None], new_tokens: int, temperature: float, repeats: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields domain, system, and prompt, seconds and new tokens of one call after another."""
    config = generation_config(pair.target, new_tokens, temperature)
    names = list(assistants)
    for repeat in range(-1, repeats):
        for place, (prompt, token_ids) in enumerate(zip(pair.prompts, pair.encoded, strict=True)):
            input_ids = torch.tensor([token_ids], device=pair.target.device)
            # Nobody is always the one after the slowest.
            turn = (repeat + place) % len(names)
            for name in names[turn:] + names[:turn]:
                # Sampled texts are others in each repeat.
                torch.manual_seed(place + repeat * len(pair.prompts))
                start = time.perf_counter()
                output = pair.target.generate(input_ids, generation_config=config, assistant_model=assistants[name])
                if output.is_cuda:
                    torch.cuda.synchronize(output.device)
                seconds = time.perf_counter() - start
                if repeat >= 0:
                    tokens = output.shape[1] - len(token_ids)
                    yield prompt.domain, name, {"prompt": place, "seconds": seconds, "tokens": tokens}
            if repeat < 0:
                # A warm-up.
                break


def over_all(measured: Measured, names: list[str]) -> Measured:
    """What was measured, and under "all" that of all domains together."""
    return measured | {"all": {name: [call for calls in measured.values() for call in calls[name]] for name in names}}


def speed(calls: list[dict[str, Any]]) -> float:
    """Tokens per second."""
    return sum(call["tokens"] for call in calls) / sum(call["seconds"] for call in calls)


def standard_error(calls: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """How far the ratio of two systems' speeds may be off since other prompts could have been taken, as a share of it:
    that of a ratio of sums (Cochran, Sampling Techniques, 1977, section 6.4), as both were given the same prompts. NaN
    where there is only one."""
    off = defaultdict(float)
    for sign, system in ((1, calls), (-1, others)):
        tokens, seconds = sum(call["tokens"] for call in system), sum(call["seconds"] for call in system)
        for call in system:
            off[call["prompt"]] += sign * (call["tokens"] / tokens - call["seconds"] / seconds)
    count = len(off)
    return math.sqrt(count / (count - 1) * sum(one * one for one in off.values())) if count > 1 else math.nan


def show(console: Console, title: str, measured: Measured, names: list[str]) -> None:
    """Print a table of tokens per second, with how automatic drafting compares with the best fixed setting of each
    domain, and with the one that is the best over all of them."""
    table = Table(
        "", PLAIN, "best fixed", "", "best of\nall", AUTO, "auto /\nbest fixed", "auto /\nplain", title=title
    )
    fixed = [name for name in names if name not in (PLAIN, AUTO)]
    best_of_all = max(fixed, key=lambda name: speed(measured["all"][name]))
    for domain, calls in measured.items():
        best = max(fixed, key=lambda name: speed(calls[name]))
        shown = (f"{speed(calls[name]):.1f}" for name in (best, best_of_all, AUTO))
        ratios = []
        for name in (best, PLAIN):
            ratio = speed(calls[AUTO]) / speed(calls[name])
            error = ratio * standard_error(calls[AUTO], calls[name])
            ratios.append(f"{ratio:.3f}" if math.isnan(error) else f"{ratio:.3f} ± {error:.3f}")
        table.add_row(domain, f"{speed(calls[PLAIN]):.1f}", best, *shown, *ratios)
    console.print(table)


@app.command()
def main(
    target: Annotated[str, typer.Option("--target", help="Folder or Hub id of the model to speed up.")],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSON lines files of prompts.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help="Folder or Hub id of the small model.")] = None,
    eagle: Annotated[str | None, typer.Option(help="Folder or Hub id of an EAGLE head, in its place.")] = None,
    policy: Annotated[list[str], typer.Option(help="Shortlist policy. Repeatable.")] = ["hybrid"],  # noqa: B006
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths, comma separated.")] = "1,2,3,5,8,12",
    tree: Annotated[bool, typer.Option(help="Draft trees of the default shape, and smaller ones.")] = False,
    random_weights: Annotated[bool, typer.Option(help="Give the drafter random weights.")] = False,
    temperature: Annotated[list[float], typer.Option(help="0 decodes greedily.")] = [0.0, 0.8],  # noqa: B006
    limit: Annotated[int, typer.Option(help="Prompts of each domain.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="How often all of it is timed.")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write what was measured to.")] = None,
) -> None:
    """Compare automatic drafting with every fixed setting."""
    console = Console()
    settings = PairSettings(target, drafter, prompts, max_new_tokens=max_new_tokens, limit=limit, threads=threads)
    results = {}
    with open_pair(settings, eagle=[eagle] if eagle else []) as pair, Progress(transient=True) as progress:
        for value in temperature:
            # Made anew for each temperature, so that it learns from nothing.
            assistants = open_assistants(pair, policy, [int(one) for one in lengths.split(",")], tree, random_weights)
            names = list(assistants)
            measured: Measured = {one.domain: {name: [] for name in names} for one in pair.prompts}
            task = progress.add_task(f"T = {value:g}", total=repeats * len(pair.prompts) * len(names))
            for domain, name, call in measure(pair, assistants, max_new_tokens, value, repeats):
                measured[domain][name].append(call)
                progress.advance(task)
            rounds = {name: dict(one.stats_total.rounds_of) for name, one in assistants.items() if one is not None}
            domains = over_all(measured, names)
            speeds = {domain: {name: speed(calls[name]) for name in names} for domain, calls in domains.items()}
            results[f"{value:g}"] = {"calls": measured, "tokens_per_second": speeds, "rounds_of": rounds}
            for one in assistants.values():
                if one is not None:
                    one.unbind()
            if out is not None:
                write_json(out, {"models": pair.described_models(), "results": results})
            show(console, f"tokens per second, T = {value:g}", domains, names)


if __name__ == "__main__":
    app()
