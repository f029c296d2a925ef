"""Trains the pocket models: a small target and what drafts for it, which complete Python code, on a CPU.

For demonstrations of speculative decoding with a large vocabulary that need no download. Everything is made from
source code that is installed:

1. a byte-level BPE tokenizer with 98,304 entries, words and indentation, from the running Python's standard library
   and from packages that `hf_dynspec` needs anyway (torch, transformers, sympy, numpy, networkx),
2. a target, trained on the standard library alone, whose text uses less than half of these entries,
3. a drafter of one layer, distilled from the target on the same text,
4. an EAGLE-2 head, distilled likewise.

Drafter and head share the target's embedding, which is also its projection over the whole vocabulary. So they have
little of their own on the disk, and nearly all their computation is the projection, which `hf_dynspec` shortens.

    python examples/train_pocket.py --out pocket

Training ends after a number of steps, not at a time, so the same seed, thread count, processor and versions give the
same models. Those in `examples/pocket` were made with Python 3.11.7, torch 2.13.0, transformers 5.24.0, sympy 1.14.0,
numpy 2.4.6 and networkx 3.6.1. A C++ compiler is required. An interrupted run continues with the first missing model.
"""

import argparse
import math
import os
import platform
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import pocket_models as models
import torch
from pocket_losses import (
    CandidateSampler,
    Draft,
    distillation_loss,
    eagle_drafts,
    hidden_states,
    independent_drafts,
    text_loss,
)
from pocket_text import (
    VOCABULARY_PACKAGES,
    VOCABULARY_SIZE,
    Batches,
    cut,
    encode,
    read_packages,
    read_sources,
    train_tokenizer,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
from transformers.utils import logging

from hf_dynspec import EagleDrafter

# In optimizer steps.
LOG_EVERY = 200

# --- Training --------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    scales = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def schedule(step: int, steps: int, warm_up_share: float = 0.05) -> float:
    """The learning rate's factor: a linear warm-up, then half a cosine down to zero."""
    warm_up = max(1, round(steps * warm_up_share))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def prepare(model: Qwen3ForCausalLM) -> None:
    """Compile a model, which makes training of thin layers several times as fast."""
    model.set_attn_implementation("eager")
    model.model.compile(dynamic=False)


def multiplies_bfloat16() -> bool:
    """Whether this processor has matrix products of bfloat16; they are several times as fast as fp32, emulated ones as
    much slower."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16"))


def train(
    name: str,
    model: nn.Module,
    loss_function: Callable[[Tensor], Tensor],
    batches: Batches,
    *,
    steps: int,
    learning_rate: float,
    console: Console,
) -> None:
    """Train a model for some optimizer steps, with a progress bar."""
    optimizer = make_optimizer(model, learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    model.train()
    smoothed = None
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, loss=math.nan)
        for step, windows in zip(range(steps), batches, strict=False):
            with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()):
                loss = loss_function(windows)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            value = loss.item()
            smoothed = value if smoothed is None else 0.95 * smoothed + 0.05 * value
            progress.update(task, completed=step + 1, loss=smoothed)
            if (step + 1) % LOG_EVERY == 0:
                console.print(f"{name}: step {step + 1:,} of {steps:,}, loss {smoothed:.3f}", highlight=False)
    model.eval()


class Workshop:
    """Trains all models on the same text."""

    def __init__(self, arguments: argparse.Namespace, training: list[Tensor], console: Console):
        self.arguments, self.training, self.console = arguments, training, console
        self._counts = torch.bincount(torch.cat(training), minlength=VOCABULARY_SIZE)

    def train(
        self,
        name: str,
        model: nn.Module,
        loss_function: Callable[[CandidateSampler, Tensor], Tensor],
        *,
        steps: int,
        learning_rate: float,
        number: int,
    ) -> None:
        """Train one model; each has another `number`, which is added to the seed."""
        seed = self.arguments.seed + number
        sampler = CandidateSampler(self._counts, common=2048, sampled=3072, seed=seed)
        batches = Batches(*self.training, self.arguments.window, self.arguments.batch, seed)
        options = {"steps": steps, "learning_rate": learning_rate, "console": self.console}
        train(name, model, lambda windows: loss_function(sampler, windows), batches, **options)

    def make_target(self) -> Qwen3ForCausalLM:
        """A trained target."""
        given = self.arguments
        target = models.make_model(models.TARGET_LAYERS, models.TARGET_INTERMEDIATE_SIZE, given.seed)
        models.start_embedding(target, self.training, given.seed)
        prepare(target)
        options = {"steps": given.target_steps, "learning_rate": given.target_learning_rate, "number": 1}
        self.train("target", target, lambda sampler, windows: text_loss(target, sampler, windows), **options)
        return target

    def make_drafter(self, target: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
        """A drafter distilled from the target."""
        drafter = models.make_drafter(target, self.arguments.seed)
        prepare(drafter)
        drafts = independent_drafts(drafter)
        self._distil("drafter", target, drafter, drafts, steps=self.arguments.drafter_steps, number=2)
        return drafter

    def make_eagle_head(self, target: Qwen3ForCausalLM) -> EagleDrafter:
        """An EAGLE head distilled from the target."""
        head = models.make_eagle_head(target, self.arguments.seed)
        drafts = eagle_drafts(head)
        self._distil("EAGLE head", target, head.module, drafts, steps=self.arguments.eagle_steps, number=3)
        return head

    def _distil(
        self,
        name: str,
        target: Qwen3ForCausalLM,
        module: nn.Module,
        draft: Draft,
        *,
        steps: int,
        number: int,
    ) -> None:
        prepare(target)
        options = {"steps": steps, "learning_rate": self.arguments.drafter_learning_rate, "number": number}
        self.train(name, module, lambda *batch: distillation_loss(target, *batch, draft), **options)


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Figures of held-out text; losses are nats per token over the whole vocabulary.

    Attributes:
        agreement: for the drafter and the EAGLE head, the share of positions at which its most probable token is the
            target's.
    """

    tokens: int
    target_loss: float
    agreement: tuple[float, float]


@torch.inference_mode()
def measure(target: Qwen3ForCausalLM, drafter: Qwen3ForCausalLM, head: EagleDrafter, windows: Tensor) -> Measurement:
    """The target's loss on `windows`, and how often drafter and head agree with it on the next token."""
    loss, agreed, tokens = 0.0, [0, 0], 0
    for window in windows:
        hidden = hidden_states(target, window[None, :-1])[0]
        (step,) = head.unroll(window[:-1], hidden, 1)
        # From the second token on, which is the first that an EAGLE head can draft.
        drafted = (hidden_states(drafter, window[None, :-1])[0][1:], step.hidden)
        # Some rows at a time, as the logits of a whole window would be allocated again for each.
        parts = (hidden[1:].split(128), *(one.split(128) for one in drafted), window[2:].split(128))
        for of_target, *of_drafters, labels in zip(*parts, strict=True):
            logits = target.lm_head(of_target)
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            for index, one in enumerate(of_drafters):
                agreed[index] += int((target.lm_head(one).argmax(-1) == logits.argmax(-1)).sum())
            tokens += len(labels)
    return Measurement(tokens, loss / tokens, (agreed[0] / tokens, agreed[1] / tokens))


def report(folders: dict[str, Path], held_out: dict[str, Tensor], console: Console) -> None:
    """Load the saved models, measure them and print the figures."""
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
        for name in ("target", "drafter")
    )
    head = EagleDrafter.from_pretrained(folders["eagle"], target=target)
    headings = ("held-out text", "tokens", "target loss", "perplexity", "drafter agrees", "EAGLE head agrees")
    table = Table(*headings)
    for name, windows in held_out.items():
        if len(windows):
            figures = measure(target, drafter, head, windows)
            losses = (f"{figures.target_loss:.3f}", f"{math.exp(figures.target_loss):.0f}")
            table.add_row(name, f"{figures.tokens:,}", *losses, *(f"{share:.1%}" for share in figures.agreement))
    console.print(table)
    parts = {"target": target, "drafter": drafter, "eagle": head.module}
    counts = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in parts.items()}
    for name, folder in folders.items():
        console.print(f"{name}: {counts[name]:,} parameters, {models.folder_size(folder):,} bytes on disk")


# --- Command line ----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the pocket models on the standard library's source.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/, drafter/ and eagle/")
    parser.add_argument("--target-steps", type=int, default=5400, help="optimizer steps of the target")
    parser.add_argument("--drafter-steps", type=int, default=2500, help="those of the drafter")
    parser.add_argument("--eagle-steps", type=int, default=2000, help="those of the EAGLE head")
    parser.add_argument("--window", type=int, default=257, help="tokens per training window")
    parser.add_argument("--batch", type=int, default=8, help="windows per optimizer step")
    parser.add_argument("--target-learning-rate", type=float, default=3e-3)
    parser.add_argument("--drafter-learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="decides the split, the weights and the order of the text")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="processor threads to use")
    return parser.parse_args()


def with_version(package: str) -> str:
    """`package` and its installed version."""
    return f"{package} {version(package)}"


def main() -> None:
    """Train the models that are missing, save them and print figures of held-out text."""
    arguments = parse_arguments()
    folders = {name: arguments.out / name for name in ("target", "drafter", "eagle")}
    started = time.monotonic()
    console = Console()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    # The tokenizers library reads this when it first encodes.
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)

    training, held_out = read_sources(Path(sysconfig.get_paths()["stdlib"]), arguments.seed)
    is_new = not folders["target"].exists()
    if is_new:
        console.print(
            f"vocabulary: Python {platform.python_version()}, {', '.join(map(with_version, VOCABULARY_PACKAGES))}"
        )
        tokenizer = train_tokenizer(chain(training.library, training.tests, read_packages()))
    else:
        tokenizer = AutoTokenizer.from_pretrained(folders["target"])._tokenizer
    rows = [encode(tokenizer, texts) for texts in (training.library, training.tests)]
    used = torch.cat(rows).unique().numel()
    console.print(
        f"training text: {len(rows[0]):,} tokens of library, {len(rows[1]):,} of tests, {used:,} entries used"
    )
    workshop = Workshop(arguments, rows, console)
    if is_new:
        with models.whole_folder(folders["target"]) as folder:
            models.save_model(workshop.make_target(), folder)
            models.save_tokenizer(tokenizer, folder)
    # Drafters learn from the saved, rounded target.
    target = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32).eval()
    if not folders["drafter"].exists():
        with models.whole_folder(folders["drafter"]) as folder:
            models.save_model(workshop.make_drafter(target), folder)
            models.share_with_target(folder, folders["target"])
        # Saving rounds the drafter in place, and with it the embedding that it shares.
        target = AutoModelForCausalLM.from_pretrained(folders["target"], dtype=torch.float32).eval()
    if not folders["eagle"].exists():
        with models.whole_folder(folders["eagle"]) as folder:
            head = workshop.make_eagle_head(target)
            head.module.bfloat16()
            head.save_pretrained(folder)
    windows = [cut(encode(tokenizer, texts), 512)[:32] for texts in (held_out.library, held_out.tests)]
    report(folders, dict(zip(("library", "tests"), windows, strict=True)), console)
    console.print(f"took {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
