"""What online alignment brings where a drafter is stale: the experiments of EvoSpec (Zhang et al., 2026) on one pair.

The target is fine-tuned first, on texts that its drafter never saw, which takes a minute or two and is done once. Then
requests are generated, each system meeting the same ones in the same order, and acceptance lengths are compared with
those of the frozen drafter, request by request:

- `switch` (figure 2): a stream that begins with the texts that both models know, and switches to the new ones;
- `ablation` (figure 3): what retrieval and alignment bring alone and together, for each kind of text;
- `decay` (figure 5): the sensitivity of the curriculum;
- `noise`: the same for a drafter whose query and value projections were disturbed;
- `harm`: known texts alone, where there is nothing to learn, also with a learning rate a hundred times too high;
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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from alignment_figures import write_figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel
from tuned_target import read_texts, tuned_target

from hf_dynspec import DynSpecAssistant, EagleDrafter, FrequencyShortlist, OnlineAlignment, RetrievalShortlist
from hf_dynspec.build.prompts import read_prompts
from hf_dynspec.drafters import as_drafter
from hf_dynspec.evaluation.coverage.estimates import Estimate
from hf_dynspec.evaluation.pair import utc_now
from hf_dynspec.evaluation.provenance import provenance
from hf_dynspec.files import write_json
from hf_dynspec.loading import load_model, load_tokenizer
from hf_dynspec.shortlists import ShortlistPolicy

POCKET = Path(__file__).parent / "pocket"
# Python's help texts are the only prose of their kind in its library, and the embedded pair has never seen them.
NEW_TEXTS = Path(sysconfig.get_path("stdlib"), "pydoc_data")
KNOWN_TEXTS = Path(sysconfig.get_path("stdlib"), "email")
NEW = "new texts"
PIECE_TOKENS, PROMPT_TOKENS = 256, 64
TUNING_BATCH, TUNING_RATE = 2, 3e-4
DECAYS = (0.0, 0.1, 0.3, 0.5, 1.0)


@dataclass
class Setting:
    """What all systems are measured with.

    Args:
        target: the fine-tuned one.
        load_drafter: makes a drafter that nothing was done to.
        requests: by the kind of text, token ids int64 `[1, n]` of each request.
        conversations: the turns of each.
        core: the ranking and the size of the static core.
        new_tokens: to generate for each request.
        temperature: 0 for greedy decoding.
        seed: of what is drawn.
    """

    target: PreTrainedModel
    load_drafter: Callable[[], Any]
    requests: dict[str, list[torch.Tensor]]
    conversations: list[list[torch.Tensor]]
    core: tuple[str | None, int]
    new_tokens: int
    temperature: float
    seed: int

    def static(self) -> ShortlistPolicy:
        """The static core alone, as FR-Spec has it."""
        return FrequencyShortlist(self.core[0], size=self.core[1])

    def retrieval(self) -> ShortlistPolicy:
        """The core and the cache of retrieved tokens."""
        return RetrievalShortlist(self.core[0], size=self.core[1], synchronous=True)


@dataclass(frozen=True)
class System:
    """A policy, and how its drafter is aligned."""

    name: str
    policy: ShortlistPolicy | None = None
    alignment: OnlineAlignment | None = None


@dataclass(frozen=True)
class Experiment:
    """Systems, and the requests that each of them answers.

    Args:
        systems: the first is what the others are compared with.
        requests: the kind of each, and its token ids int64 `[1, n]`.
        starts_anew: every kind meets a drafter that has learnt nothing.
        in_conversations: the requests of a kind are the turns of one conversation.
        is_disturbed: noise is added to the drafter's query and value projections first.
    """

    systems: list[System]
    requests: list[tuple[str, torch.Tensor]]
    starts_anew: bool = False
    in_conversations: bool = False
    is_disturbed: bool = False


def serve(setting: Setting, system: System, experiment: Experiment, advance: Callable[[], None]) -> dict[str, Any]:
    """Lead one system through all requests, in real `generate` calls.

    Returns:
        For each request its kind, acceptance length, seconds and the loss of the last update, and what the alignment
        says of itself at the end, as JSON values.
    """
    drafter = as_drafter(setting.load_drafter())
    if experiment.is_disturbed:
        disturb(drafter.module, setting.seed)
    assistant = DynSpecAssistant(drafter, system.policy, target=setting.target, alignment=system.alignment)
    rows, speaker, text = [], assistant, None
    for number, (kind, request) in enumerate(experiment.requests):
        if not rows or kind != rows[-1]["kind"]:
            text = None
            speaker = assistant.conversation() if experiment.in_conversations else assistant
            if assistant.alignment is not None and experiment.starts_anew:
                assistant.alignment.reset()
        prompt = request if text is None else torch.cat([text, request], dim=1)
        start = time.perf_counter()
        output = generate(setting, speaker, prompt, number)
        seconds = time.perf_counter() - start
        text = output if experiment.in_conversations else None
        loss = None if assistant.alignment is None else assistant.alignment.stats.loss
        length = assistant.stats.acceptance_length
        rows.append({"kind": kind, "acceptance_length": length, "seconds": seconds, "loss": loss})
        advance()
    said = None if assistant.alignment is None else assistant.alignment.stats.to_dict()
    assistant.unbind()
    return {"requests": rows, "alignment": said}


def disturb(module: nn.Module, seed: int) -> None:
    """Add noise of one standard deviation of each weight to the query and value projections."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("q_proj.weight", "v_proj.weight")):
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std())


def generate(setting: Setting, assistant: Any, prompt: torch.Tensor, number: int) -> torch.Tensor:
    """Answer one request. Every system draws with the same seed."""
    sampling: dict[str, Any] = {"do_sample": False}
    if setting.temperature > 0:
        sampling = {"do_sample": True, "temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(setting.seed + number)
    length = {"max_new_tokens": setting.new_tokens, "min_new_tokens": setting.new_tokens}
    return setting.target.generate(prompt, assistant_model=assistant, **sampling, **length)


# The experiments -----------------------------------------------------------------------------------------------------


def switch(setting: Setting) -> Experiment:
    """Figure 2: known texts, and from the middle on new ones."""
    systems = [
        System("frozen"),
        System("the paper's", alignment=OnlineAlignment.paper(synchronous=True)),
        System("aligned", alignment=OnlineAlignment(synchronous=True)),
        System("OSD", alignment=OnlineAlignment.osd(synchronous=True)),
    ]
    new = [(NEW, one) for one in setting.requests[NEW]]
    known = [(kind, one) for kind, ones in setting.requests.items() if kind != NEW for one in ones]
    return Experiment(systems, [*known[: len(new)], *new])


def ablation(setting: Setting) -> Experiment:
    """Figure 3: retrieval and alignment alone and together, on each kind of text."""
    static, retrieval = setting.static(), setting.retrieval()
    aligned = OnlineAlignment(synchronous=True)
    systems = [
        System("static", static),
        System("static + OSD", static, OnlineAlignment.osd(synchronous=True)),
        System("static + alignment", static, aligned),
        System("retrieval", retrieval),
        System("retrieval + alignment", retrieval, aligned),
    ]
    requests = [(kind, one) for kind, ones in setting.requests.items() for one in ones]
    return Experiment(systems, requests, starts_anew=True)


def decay(setting: Setting) -> Experiment:
    """Figure 5: the sensitivity β of the horizon's weights, on new texts."""
    systems = [System(f"β = {value}", alignment=OnlineAlignment(decay=value, synchronous=True)) for value in DECAYS]
    return Experiment([System("frozen"), *systems], [(NEW, one) for one in setting.requests[NEW]])


def noise(setting: Setting) -> Experiment:
    """A drafter that is bad in a way that low-rank updates can mend."""
    systems = [System("disturbed"), System("aligned", alignment=OnlineAlignment(synchronous=True))]
    return Experiment(systems, [(NEW, one) for one in setting.requests[NEW]], is_disturbed=True)


def harm(setting: Setting) -> Experiment:
    """Known texts, to which the drafter is aligned already."""
    too_high = 100 * OnlineAlignment().learning_rate
    systems = [
        System("frozen"),
        System("aligned", alignment=OnlineAlignment(synchronous=True)),
        System("100 times the rate", alignment=OnlineAlignment(learning_rate=too_high, synchronous=True)),
        System("aligned, no gate", alignment=OnlineAlignment(gate=False, synchronous=True)),
    ]
    return Experiment(systems, [(kind, one) for kind, ones in setting.requests.items() if kind != NEW for one in ones])


def memory(setting: Setting) -> Experiment:
    """Table 4: what training holds, after a few requests."""
    presets = {"OSD": OnlineAlignment.osd, "the paper's": OnlineAlignment.paper, "aligned": OnlineAlignment}
    systems = [System(name, alignment=preset(synchronous=True, buffer=2)) for name, preset in presets.items()]
    return Experiment(systems, [(NEW, one) for one in setting.requests[NEW][:4]])


def conversations(setting: Setting) -> Experiment:
    """Table 7: conversations of many turns."""
    systems = [
        System("static", setting.static()),
        System("retrieval + alignment", setting.retrieval(), OnlineAlignment(synchronous=True)),
    ]
    turns = [(f"conversation {i}", turn) for i, one in enumerate(setting.conversations) for turn in one]
    return Experiment(systems, turns, in_conversations=True)


EXPERIMENTS = {one.__name__: one for one in (switch, ablation, decay, noise, harm, memory, conversations)}


# The command ---------------------------------------------------------------------------------------------------------


def measure(setting: Setting, name: str, results: dict[str, Any], keep: Callable[[], None]) -> None:
    """Run what is missing of one experiment."""
    experiment = EXPERIMENTS[name](setting)
    measured = results.setdefault(name, {})
    missing = [system for system in experiment.systems if system.name not in measured]
    with Progress() as progress:
        for system in missing:
            task = progress.add_task(f"{name}: {system.name}", total=len(experiment.requests))
            measured[system.name] = serve(setting, system, experiment, lambda task=task: progress.advance(task))
            keep()


def gains(measured: dict[str, Any], kind: str | None = None) -> dict[str, Estimate]:
    """By system: acceptance length relative to that of the first one on the same requests, with its standard error.

    Args:
        measured: what `serve` returned, by system.
        kind: requests of this kind alone (None: all).
    """
    lengths = {
        name: [one["acceptance_length"] for one in result["requests"] if kind in (None, one["kind"])]
        for name, result in measured.items()
    }
    first = next(iter(lengths.values()))
    return {name: Estimate.of_ratio(ones, first) for name, ones in lengths.items()}


def print_table(console: Console, name: str, measured: dict[str, Any]) -> None:
    """Acceptance lengths by system, and their gains with 95% intervals, for each kind of text."""
    kinds = list(dict.fromkeys(one["kind"] for one in next(iter(measured.values()))["requests"]))
    columns = [NEW] if NEW in kinds else []
    table = Table(title=f"{name}: acceptance length relative to {next(iter(measured))}")
    for heading in ("system", "all", *columns, "bytes of training"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for system, result in measured.items():
        cells = [shown(gains(measured, kind)[system]) for kind in (None, *columns)]
        held = "" if result["alignment"] is None else f"{result['alignment']['training_bytes']:,}"
        table.add_row(system, *cells, held)
    console.print(table)


def shown(ratio: Estimate) -> str:
    """`+8.1% ± 2.0` for a ratio of 1.081, with its 95% interval."""
    interval = "" if ratio.standard_error is None else f" ± {196 * ratio.standard_error:.1f}"
    return f"{100 * (ratio.mean - 1):+.1f}%{interval}"


def main(
    out: Annotated[Path, typer.Option(help="Folder of results, pictures and the tuned target.")],
    target: str = str(POCKET / "target"),
    drafter: str = str(POCKET / "drafter"),
    eagle: Annotated[str | None, typer.Option(help="An EAGLE head in the drafter's place.")] = None,
    texts: Annotated[list[Path] | None, typer.Option(help="What the target is fine-tuned on.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines of known kinds, a file each.")] = None,
    conversations: Annotated[Path | None, typer.Option(help="JSON lines with turns.")] = None,
    ranking: Annotated[str | None, typer.Option(help="Artifact with the core's ranking.")] = None,
    core: Annotated[int, typer.Option(help="Tokens of the static core.")] = 4096,
    experiment: Annotated[list[str] | None, typer.Option(help="One or more of them; all by default.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each kind of text.")] = 36,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generated for each request.")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.8,
    tuning_steps: Annotated[int, typer.Option(min=1, help="Of the fine-tuning.")] = 80,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Measure, write results.json and draw pictures."""
    names = experiment or list(EXPERIMENTS)
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(EXPERIMENTS)}")
    out.mkdir(parents=True, exist_ok=True)
    started = utc_now()
    tokenizer = load_tokenizer(target)
    new = read_texts(texts or [NEW_TEXTS], tokenizer, PIECE_TOKENS, seed)
    tuned = tuned_target(target, new, out / "tuned-target", tuning_steps, TUNING_BATCH, TUNING_RATE, seed)
    setting = Setting(
        target=tuned,
        load_drafter=loader_of(tuned, drafter, eagle),
        requests={**known_requests(prompts, tokenizer, requests, seed), NEW: beginnings(new.held_out, requests)},
        conversations=read_conversations(conversations, tokenizer, new.held_out),
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
    kept = out / "results.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    results = before["experiments"] if before.get("settings") == asked else {}

    def keep() -> None:
        origin = provenance(sys.argv, started, utc_now(), torch.get_num_threads())
        write_json(kept, {"settings": asked, "provenance": origin, "experiments": results})

    console = Console()
    for name in names:
        measure(setting, name, results, keep)
        print_table(console, name, results[name])
        write_figure(out / f"{name}.png", name, results[name], NEW)


def loader_of(target: PreTrainedModel, drafter: str, eagle: str | None) -> Callable[[], Any]:
    """What makes a drafter that nothing was done to."""
    if eagle is not None:
        return lambda: EagleDrafter.from_pretrained(eagle, target=target)
    return lambda: load_model(drafter, dtype=torch.float32, device="cpu", role="drafter")


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
    """The turns of each conversation; without a file, those of two that are made of pieces of text."""
    if path is None:
        return [[piece[None, :PROMPT_TOKENS] for piece in pieces[start : start + 6]] for start in (0, 6)]
    encode = lambda turn: tokenizer(turn, return_tensors="pt", add_special_tokens=False)["input_ids"]  # noqa: E731
    return [[encode(turn) for turn in turns] for turns in read_prompts([path])]


if __name__ == "__main__":
    typer.run(main)
