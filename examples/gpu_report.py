"""Check and measure this package on a GPU, in about eight minutes, and write a page about it.

    python examples/gpu_report.py --out report/

It runs the tests that need a GPU, and measures random models of Llama-3.1-8B's shapes, which agree at a chosen share
of tokens (`real_size.py` says what follows from such models, and what does not). No model is downloaded. `report.md`
is for readers, and `report.json` has all single measurements. Sections that the time does not suffice for are named.

`--small` runs everything with tiny models, on a CPU too. It shows that the script works, and nothing about speed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from real_size import CYCLE, cycle, eagle_head, known, random_model
from rich.console import Console
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from hf_dynspec import DynSpecAssistant
from hf_dynspec.cache_names import cache_inputs
from hf_dynspec.devices import has_graphs, without_attention_plans
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.evaluation.provenance import provenance
from hf_dynspec.files import replacing
from hf_dynspec.kernels import QueryRows, round_attention_for
from hf_dynspec.memory.fixed import FixedMemory
from hf_dynspec.memory.fixed_decoder import FixedDecoder
from hf_dynspec.rounds.recorded import record

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/generation/test_gpu.py",
    "tests/kernels/test_round_attention.py",
    "tests/kernels/test_layer_kernels.py",
)
TARGET = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
# Llama-3.2-1B.
DRAFTER = {**TARGET, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
SMALL = {
    "vocab_size": 6000,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
PLAIN, COMPILED = "plain generate", "plain generate, static cache, compiled"
ROWS_OF_KERNELS, CALLS_OF_KERNELS = (1, 6, 61), 20


class Report:
    """The page and its measurements, written anew after each section.

    Args:
        folder: for `report.md` and `report.json`.
        seconds: sections that begin later are left out.
    """

    def __init__(self, folder: Path, seconds: float):
        self._folder, self._end = folder, time.monotonic() + seconds
        self._began = time.monotonic()
        self._page: list[str] = []
        self.data: dict[str, Any] = {}
        self._console = Console()

    def section(self, title: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Add a section. `measure` is given a function that adds a line, and the arguments. Its error is noted."""
        lines: list[str] = []
        self._console.print(f"{time.monotonic() - self._began:5.0f} s  {title}")
        try:
            if time.monotonic() > self._end:
                raise TimeoutError("left out, as the time did not suffice")
            measure(lines.append, *arguments)
        # The other sections are worth having.
        except Exception as error:
            lines += ["", f"**{type(error).__name__}:** {error!s:.500}"]
            self._console.print(lines[-1])
        self._page += [f"## {title}", "", *lines, ""]
        self.write()

    def table(self, add: Callable[[str], None], headings: list[str], rows: list[list[str]]) -> None:
        """Add a table to a section."""
        add("")
        for cells in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows):
            add("| " + " | ".join(cells) + " |")

    def write(self) -> None:
        """Write both files."""
        for name, text in (
            ("report.md", "\n".join(["# Measurements on a GPU", "", *self._page])),
            ("report.json", json.dumps(self.data, indent=1)),
        ):
            with replacing(self._folder / name) as scratch:
                scratch.write_text(text + "\n", encoding="utf-8")


class Models:
    """The random target, and its drafters by name."""

    def __init__(self, small: bool, agreement: float, device: str):
        self.small, self.device = small, device
        dtype = torch.float32 if small else torch.bfloat16
        knows = known(agreement)
        self.target = self._made(SMALL if small else TARGET, dtype, 0, torch.ones(CYCLE, dtype=torch.bool))
        self.drafters = {
            "EAGLE-2 head": eagle_head(self.target, knows),
            "independent drafter": self._made(SMALL if small else DRAFTER, dtype, 1, knows),
        }

    def _made(self, shape: dict[str, Any], dtype: torch.dtype, seed: int, knows: torch.Tensor) -> PreTrainedModel:
        with tempfile.TemporaryDirectory() as folder:
            LlamaConfig(**shape).save_pretrained(folder)
            return random_model(folder, dtype, self.device, seed, knows)

    def assistant(self, drafter: str, policy: str, tree: bool = False) -> DynSpecAssistant:
        """An assistant with default settings: chains of 5, or the default tree."""
        return DynSpecAssistant(self.drafters[drafter], parse_policy(policy), target=self.target, tree=tree)

    def prompt(self, length: int, texts: int = 1) -> torch.Tensor:
        """int64 `[texts, length]`: each text begins at another place of the cycle."""
        order = cycle().repeat(-(-length // CYCLE) + 1)
        return torch.stack([order[37 * text :][:length] for text in range(texts)]).to(self.device)


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """The time of a call on an idle device, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def generate(models: Models, assistant: DynSpecAssistant | None, prompt: torch.Tensor, new: int, **more: Any):
    """Greedy text. A setting that would speed up plain generation too is the same for all."""
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "do_sample": False, **more}
    with without_attention_plans(models.target.device):
        return models.target.generate(prompt, assistant_model=assistant, **arguments)


def describe(add: Callable[[str], None], report: Report, device: str) -> None:
    """The device and the versions of packages."""
    versions = [f"{name} {version}" for name, version in report.data["provenance"]["versions"].items()]
    add(", ".join([torch.cuda.get_device_name() if device == "cuda" else "CPU", *versions]))


def run_tests(add: Callable[[str], None], report: Report) -> None:
    """The tests that need a GPU, in another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=240)
    report.data["tests"] = ran.stdout[-4000:]
    add(f"`{' '.join(command[1:])}`: {ran.stdout.strip().splitlines()[-1]}")


def measure_speeds(add: Callable[[str], None], report: Report, models: Models, drafter: str, repeats: int) -> None:
    """Speeds of one text, with the systems in turns."""
    prompt, new = models.prompt(64), 32 if models.small else 160
    systems: dict[str, tuple[DynSpecAssistant | None, dict[str, Any]]] = {
        PLAIN: (None, {}),
        COMPILED: (None, {"cache_implementation": "static"}),
    }
    for tree in (False, True):
        for policy in ("full", "frequency", "hybrid"):
            systems[f"{policy}, {'default trees' if tree else 'chains of 5'}"] = (
                models.assistant(drafter, policy, tree),
                {},
            )
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    first, texts = {}, {}
    for repeat in range(repeats + 1):
        for name, (assistant, more) in systems.items():
            taken, text = seconds_of(lambda a=assistant, m=more: generate(models, a, prompt, new, **m))
            texts[name] = text.cpu()
            if repeat:
                seconds[name].append(taken)
            else:
                first[name] = taken
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    rows, found = [], []
    for name, (assistant, _) in systems.items():
        rounds = new if assistant is None else assistant.stats.rounds
        same = int((texts[name] == texts[PLAIN]).sum()) / texts[PLAIN].numel()
        found.append(
            {
                "system": name,
                "seconds": seconds[name],
                "first_call_seconds": first[name],
                "new_tokens": new,
                "rounds": rounds,
                "same_tokens": same,
                "drafting": None if assistant is None else assistant.stats.to_dict(),
            }
        )
        rows.append(
            [
                name,
                f"{new / medians[name]:.1f}",
                f"{medians[COMPILED] / medians[name]:.2f}×",
                f"{1e3 * medians[name] / rounds:.2f}",
                f"{new / rounds:.2f}",
                f"{first[name]:.1f}",
                f"{same:.1%}",
                "" if assistant is None else assistant.stats.lane,
            ]
        )
    report.data[f"speeds, {drafter}"] = found
    add(f"{new} new tokens after 64, greedy, medians of {repeats} calls in turns. Rounds' times include the prompt's.")
    columns = ["ms a round", "tokens a round", "first call, s", "plain's tokens", "lane"]
    report.table(add, ["system", "tokens/s", "of compiled", *columns], rows)
    for assistant, _ in systems.values():
        if assistant is not None:
            assistant.unbind()


def measure_contexts(add: Callable[[str], None], report: Report, models: Models) -> None:
    """The time of a round after texts of several lengths, from two numbers of new tokens."""
    assistant, rows, found = models.assistant("EAGLE-2 head", "hybrid"), [], []
    for length in (64, 128, 256) if models.small else (512, 4096, 16000):
        prompt, at = models.prompt(length), {}
        for new in (32, 128, 32, 128):
            taken, _ = seconds_of(lambda p=prompt, n=new: generate(models, assistant, p, n))
            at[new] = taken, assistant.stats.rounds
        (few, few_rounds), (many, many_rounds) = at[32], at[128]
        each = 1e3 * (many - few) / (many_rounds - few_rounds)
        found.append({"tokens_before": length, "ms_per_round": each, "lane": assistant.stats.lane})
        rows.append([f"{length:,}", f"{each:.2f}", f"{each / found[0]['ms_per_round']:.2f}×"])
    report.data["contexts"] = found
    report.table(add, ["tokens before", "ms a round", "of the first"], rows)
    assistant.unbind()


def measure_batches(add: Callable[[str], None], report: Report, models: Models) -> None:
    """Tokens per second of one text and of several at once."""
    assistant, rows, found = models.assistant("EAGLE-2 head", "hybrid"), [], []
    new = 32 if models.small else 160
    for texts in (1, 8):
        prompt, taken = models.prompt(64, texts), []
        for _ in range(4):
            seconds, _ = seconds_of(lambda p=prompt: generate(models, assistant, p, new, pad_token_id=0))
            taken.append(seconds)
        # The first call records.
        speed, rounds = texts * new / statistics.median(taken[1:]), assistant.stats.rounds / texts
        found.append({"texts": texts, "seconds": taken, "tokens_per_second": speed, "rounds_per_text": rounds})
        round_ms = 1e3 * statistics.median(taken[1:]) / rounds
        ratio = speed / found[0]["tokens_per_second"]
        rows.append([str(texts), f"{speed:.1f}", f"{ratio:.2f}×", f"{round_ms:.2f}", assistant.stats.lane])
    report.data["batches"] = found
    report.table(add, ["texts", "tokens/s", "of one text", "ms a round", "lane"], rows)
    assistant.unbind()


def measure_attention(add: Callable[[str], None], report: Report, models: Models) -> None:
    """The attention of rounds in a layer of the target's shape, against the time to read its keys and values."""
    shape, dtype = models.target.config, models.target.dtype
    big = torch.empty(2**20 if models.small else 2**30, dtype=torch.uint8, device=models.device)
    copied = min(seconds_of(big.clone)[0] for _ in range(5))
    bandwidth = 2 * big.numel() / copied
    heads, shared, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    attend, rows, found = round_attention_for(models.target.device), [], []
    for length in (64, 256) if models.small else (512, 4096, 16000):
        memory = [torch.randn(1, length + 64, shared, size, dtype=dtype, device=models.device) for _ in range(2)]
        lengths = torch.tensor([length], device=models.device)
        for count in ROWS_OF_KERNELS:
            query = torch.randn(1, heads, count, size, dtype=dtype, device=models.device)
            nodes = QueryRows.chain(lengths, count)

            def attend_often(query=query, memory=memory, nodes=nodes) -> None:
                for _ in range(CALLS_OF_KERNELS):
                    attend(query, *memory, nodes, scale=size**-0.5)

            each = best_seconds(attend_often, models.target.device) / CALLS_OF_KERNELS
            read = 2 * (length + count) * shared * size * memory[0].element_size() / bandwidth
            found.append({"tokens_before": length, "rows": count, "seconds": each, "floor": read})
            rows.append([f"{length:,}", str(count), f"{1e6 * each:.0f}", f"{1e6 * read:.1f}"])
    report.data["attention"] = {"bytes_per_second": bandwidth, "measurements": found}
    add(f"A copy moves {bandwidth / 1e12:.2f} TB/s. {CALLS_OF_KERNELS} calls as one graph.")
    report.table(add, ["tokens before", "rows", "µs", "µs to read keys and values"], rows)


def measure_verification(add: Callable[[str], None], report: Report, models: Models) -> None:
    """The target's forward over fixed memory as a graph, against the time to read its weights."""
    target, nodes = models.target, max(ROWS_OF_KERNELS)
    decoder, head, rows, found = FixedDecoder(target), target.get_output_embeddings(), [], []
    for length in (64, 256) if models.small else (512, 4096, 16000):
        cache = DynamicCache(config=target.config)
        target.model(models.prompt(8), **cache_inputs(cache))
        memory = FixedMemory.like(cache, target.config, 1, length + nodes, nodes)
        memory.lengths.fill_(length)
        for count in ROWS_OF_KERNELS:
            token_ids, of_nodes = models.prompt(count), QueryRows.chain(memory.lengths, count)

            def verify(token_ids=token_ids, memory=memory, of_nodes=of_nodes) -> None:
                head(decoder(token_ids, memory, of_nodes)[0]).argmax(-1)

            each = best_seconds(verify, target.device)
            found.append({"tokens_before": length, "rows": count, "seconds": each})
            rows.append([f"{length:,}", str(count), f"{1e3 * each:.2f}"])
    weights = sum(one.nbytes for one in target.parameters()) - target.get_input_embeddings().weight.nbytes
    report.data["verification"] = {"bytes": weights, "measurements": found}
    add(f"The weights have {weights / 1e9:.1f} GB.")
    report.table(add, ["tokens before", "rows", "ms"], rows)


def best_seconds(run: Callable[[], None], device: torch.device) -> float:
    """The shortest of five times, as a graph if the device has them."""
    for _ in range(2):
        run()
    launch = record(run, device) if has_graphs(device) else run
    return min(seconds_of(launch)[0] for _ in range(5))


@torch.no_grad()
def main(
    out: Annotated[Path, typer.Option(help="Folder for the page.")],
    small: Annotated[bool, typer.Option("--small", help="Tiny models, on a CPU too.")] = False,
    agreement: Annotated[float, typer.Option(help="How often the drafters agree, 0 to 1.")] = 0.75,
    minutes: Annotated[float, typer.Option(help="Sections that begin later are left out.")] = 7.0,
    repeats: Annotated[int, typer.Option(help="Timed calls of each system.", min=1)] = 3,
    tests: Annotated[bool, typer.Option(help="Run the tests that need a GPU.")] = True,
) -> None:
    """Check and measure this package on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not small:
        raise typer.BadParameter("there is no GPU: give --small to try the script with tiny models")
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, 60 * minutes)
    report.data["provenance"] = provenance(sys.argv, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), None, 1)
    report.section("Computer", describe, report, device)
    models = Models(small, agreement, device)
    for drafter in models.drafters:
        report.section(f"One text, {drafter}", measure_speeds, report, models, drafter, repeats)
    report.section("Rounds after long texts, EAGLE-2 head, chains of 5, hybrid", measure_contexts, report, models)
    report.section("Batches, EAGLE-2 head, chains of 5, hybrid", measure_batches, report, models)
    report.section("Verification, as a graph", measure_verification, report, models)
    report.section("Attention of a round, one layer", measure_attention, report, models)
    del models
    if tests:
        report.section("Tests", run_tests, report)
    Console().print(f"wrote {out / 'report.md'} and {out / 'report.json'}")


if __name__ == "__main__":
    typer.run(main)
