"""What online alignment brings where a drafter is stale: the experiments of EvoSpec (Zhang et al., 2026) on one pair.

The target is fine-tuned first, on texts that its drafter never saw, which takes a minute or two and is done once. Then
requests are generated, each system meeting the same ones in the same order, and acceptance lengths are compared with
those of the frozen drafter, request by request:

- `switch` (figure 2): a stream that begins with the texts that both models know, and switches to the new ones;
- `ablation` (figure 3): what retrieval and alignment bring alone and together, for each kind of text;
- `decay` (figure 5): the sensitivity of the curriculum;
- `noise`: the same for a drafter whose query and value projections were disturbed;
- `harm`: the original target and known texts alone, where there is nothing to learn, also at a hundred times the rate;
- `clock`: what the default settings bring and cost, which give alignment a share of the time;
- `memory` (table 4): bytes of gradients and optimizer state;
- `conversations` (table 7): long conversations.

    python examples/online_alignment.py --out alignment/                  # the embedded pair, on the standard library
    python examples/online_alignment.py --target T --drafter D --texts new/ --prompts known.jsonl --out alignment/

Results are written to results.json after each system, and a run that was stopped goes on with the next one; a picture
is drawn for each experiment.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from alignment_experiments import EXPERIMENTS, NEW, Setting, serve
from alignment_figures import write_figure
from alignment_gains import gains, shown
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel
from transformers.utils import logging
from tuned_target import read_texts, tuned_target

from hf_dynspec import DynSpecAssistant, EagleDrafter, FrequencyShortlist
from hf_dynspec.build.prompts import read_prompts
from hf_dynspec.build.tokens import prefix_ids
from hf_dynspec.errors import DynSpecError
from hf_dynspec.evaluation.pair import utc_now
from hf_dynspec.evaluation.provenance import provenance
from hf_dynspec.evaluation.tables import FittedTable
from hf_dynspec.files import write_json
from hf_dynspec.loading import load_model, load_tokenizer

POCKET = Path(__file__).parent / "pocket"
# Python's help texts are the only prose of their kind in its library, and the embedded pair has never seen them.
NEW_TEXTS = Path(sysconfig.get_path("stdlib"), "pydoc_data")
KNOWN_TEXTS = Path(sysconfig.get_path("stdlib"), "email")
TUNED = "tuned-target"
PIECE_TOKENS, PROMPT_TOKENS = 256, 64
TUNING_BATCH, TUNING_RATE = 2, 3e-4


class Results:
    """What was measured with some settings, in results.json; what was measured with others before is replaced.

    Args:
        path: of the file.
        settings: as JSON values.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path, self._settings, self._started = path, settings, utc_now()
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._experiments: dict[str, Any] = before["experiments"] if before.get("settings") == settings else {}

    def of(self, experiment: str) -> dict[str, Any]:
        """By system what `serve` returned."""
        return self._experiments.setdefault(experiment, {})

    def write(self) -> None:
        """Replace the file."""
        origin = provenance(sys.argv, self._started, utc_now(), torch.get_num_threads())
        write_json(self._path, {"settings": self._settings, "provenance": origin, "experiments": self._experiments})


def measure(setting: Setting, name: str, wanted: Sequence[str] | None, results: Results) -> dict[str, Any]:
    """Run what is missing of one experiment: all systems, or the first and those that are wanted. Returns by system
    what `serve` returned."""
    experiment = EXPERIMENTS[name](setting)
    measured = results.of(name)
    asked = [experiment.systems[0], *(one for one in experiment.systems[1:] if not wanted or one.name in wanted)]
    missing = [system for system in asked if system.name not in measured]
    with Progress() as progress:
        for system in missing:
            task = progress.add_task(f"{name}: {system.name}", total=len(experiment.requests))
            measured[system.name] = serve(setting, system, experiment, lambda task=task: progress.advance(task))
            results.write()
    return measured


# Tables --------------------------------------------------------------------------------------------------------------


def table_of(name: str, measured: dict[str, Any]) -> FittedTable:
    """Acceptance lengths by system, gains with 95% intervals, and what alignment cost."""
    first = next(iter(measured))
    kinds = {one["kind"] for one in measured[first]["requests"]}
    columns = {"all": None, "known": kinds - {NEW}, NEW: {NEW}} if NEW in kinds and len(kinds) > 1 else {"all": None}
    headings = ["system", "length", *(f"gain, {kind}" for kind in columns), "share of time", "bytes of training"]
    table = FittedTable(f"{name}: acceptance length relative to {first}", headings, "intervals are 95%")
    by_column = [gains(measured, kinds) for kinds in columns.values()]
    for system, result in measured.items():
        lengths = [one["acceptance_length"] for one in result["requests"]]
        said = result["alignment"]
        cost = ("", "") if said is None else (f"{said['overhead']:.1%}", f"{said['training_bytes']:,}")
        table.add_row(system, f"{sum(lengths) / len(lengths):.2f}", *(shown(one[system]) for one in by_column), *cost)
    return table


# What is measured on -------------------------------------------------------------------------------------------------


def loader_of(drafter: str, eagle: str | None) -> Callable[[PreTrainedModel], Any]:
    """What makes a drafter of a target that nothing was done to."""
    if eagle is not None:
        return lambda target: EagleDrafter.from_pretrained(eagle, target=target)
    return lambda target: load_model(drafter, dtype=torch.float32, device="cpu", role="drafter")


def known_requests(
    prompts: Sequence[Path] | None, tokenizer: Any, most: int, seed: int
) -> dict[str, list[torch.Tensor]]:
    """Requests of the kinds of text that both models know, by kind."""
    if not prompts:
        known = read_texts([KNOWN_TEXTS], tokenizer, PIECE_TOKENS, seed)
        return {"known texts": beginnings(torch.cat([known.held_out, known.training]), most)}
    return {
        path.name.split(".")[0]: [
            tokenizer(turns[0], return_tensors="pt")["input_ids"] for turns in islice(read_prompts([path]), most)
        ]
        for path in prompts
    }


def beginnings(pieces: torch.Tensor, most: int) -> list[torch.Tensor]:
    """The first tokens of as many pieces of text."""
    return [piece[None, :PROMPT_TOKENS] for piece in pieces[:most]]


def read_conversations(path: Path | None, tokenizer: Any, pieces: torch.Tensor) -> list[list[torch.Tensor]]:
    """The turns of each conversation; without a file, those of two that are made of pieces of text. Only a first turn
    begins as texts begin."""
    if path is None:
        start, talks = len(prefix_ids(tokenizer)), (pieces[:6], pieces[6:12])
        return [[one[None, start if turn else 0 : PROMPT_TOKENS] for turn, one in enumerate(talk)] for talk in talks]
    return [
        [
            tokenizer(text, return_tensors="pt", add_special_tokens=turn == 0)["input_ids"]
            for turn, text in enumerate(texts)
        ]
        for texts in read_prompts([path])
    ]


# The command ---------------------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option("--out", help="Folder of results, pictures and the tuned target.")],
    target: Annotated[str, typer.Option("--target", help="Folder or Hub id.")] = str(POCKET / "target"),
    drafter: Annotated[str, typer.Option("--drafter", help="An independent drafter.")] = str(POCKET / "drafter"),
    eagle: Annotated[str | None, typer.Option("--eagle", help="An EAGLE head in the drafter's place.")] = None,
    texts: Annotated[list[Path] | None, typer.Option("--texts", help="What the target is fine-tuned on.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option("--prompts", help="JSON lines of a known kind.")] = None,
    turns: Annotated[Path | None, typer.Option("--turns", help="JSON lines of conversations.")] = None,
    ranking: Annotated[str | None, typer.Option("--ranking", help="Artifact with the core's ranking.")] = None,
    core: Annotated[int, typer.Option("--core", min=1, help="Tokens of the static core.")] = 4096,
    experiment: Annotated[list[str] | None, typer.Option("--experiment", help="One of them; all by default.")] = None,
    system: Annotated[list[str] | None, typer.Option("--system", help="Besides the first; all by default.")] = None,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Of each kind of text.")] = 36,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Generated for each request.")] = 80,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.8,
    tuning_steps: Annotated[int, typer.Option("--tuning-steps", min=1, help="Of the fine-tuning.")] = 40,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
) -> None:
    """Measure, write results.json and draw pictures."""
    names = experiment or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(EXPERIMENTS)}", param_hint="--experiment")
    if out.is_file():
        raise typer.BadParameter(f"{out} is a file; give a folder", param_hint="--out")
    logging.disable_progress_bar()  # transformers', for each drafter that is loaded
    tokenizer, make_drafter = load_tokenizer(target), loader_of(drafter, eagle)
    original = load_model(target, dtype=torch.float32, device="cpu", role="target")
    # What is wrong with any of these is found before the target is tuned.
    DynSpecAssistant(make_drafter(original), target=original, tokenizer=tokenizer).unbind()
    FrequencyShortlist(ranking, size=core)
    new = read_texts(texts or [NEW_TEXTS], tokenizer, PIECE_TOKENS, seed)
    known = known_requests(prompts, tokenizer, requests, seed)
    talks = read_conversations(turns, tokenizer, new.held_out)
    setting = Setting(
        target=original,
        tuned=tuned_target(target, tokenizer, new, out / TUNED, tuning_steps, TUNING_BATCH, TUNING_RATE, seed),
        load_drafter=make_drafter,
        requests={**known, NEW: beginnings(new.held_out, requests)},
        conversations=talks,
        core=(ranking, core),
        new_tokens=new_tokens,
        temperature=temperature,
        seed=seed,
    )
    asked = {
        "target": Path(target).name, "drafter": Path(eagle or drafter).name, "requests": requests, "core": core,
        "new_tokens": new_tokens, "temperature": temperature, "tuning_steps": tuning_steps, "seed": seed,
        "texts": hashlib.sha256(new.held_out.numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    results = Results(out / "results.json", asked)
    for name in names:
        measured = measure(setting, name, system, results)
        Console().print(table_of(name, measured))
        write_figure(out / f"{name}.png", name, measured, NEW)
    typer.echo(f"{out}: results.json, and {', '.join(names)} as .png")


if __name__ == "__main__":
    try:
        app()
    except DynSpecError as error:
        sys.exit(f"error: {error}")
