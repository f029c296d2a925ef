"""The gain of a shortlist in a draft step of real size, measured on this computer in fp32 with random weights."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.protocol import Shortlist

# Qwen3-0.6B. An EAGLE head has one layer of this size.
VOCABULARY_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE, LAYERS = 151_936, 1024, 3072, 28
# A core of 1,024 tokens and a window of 4,096: the default of `hybrid`.
SHORTLIST_SIZE = 5120
REPEATS = 15
# Besides the head's weights: a layer, the shortlist's rows, logits and torch's own buffers.
_OTHER_BYTES = 400 * 2**20


def available_bytes() -> int | None:
    """Free memory, or None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


@torch.inference_mode()
def median_seconds(run: Callable[[], object]) -> float:
    """Median seconds of a call, after two that warm up."""
    seconds = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def head_seconds() -> tuple[float, float]:
    """Seconds to score one hidden state and choose a token: over the whole vocabulary, and over a shortlist."""
    # A repeated tile, as random numbers for all rows would take longer than the measurement.
    tile = torch.randn(VOCABULARY_SIZE // 32, HIDDEN_SIZE)
    head = DynamicLMHead(tile.repeat(32, 1))
    hidden = torch.randn(1, HIDDEN_SIZE)
    full = Shortlist(torch.arange(VOCABULARY_SIZE), version=0, is_prefix=True)
    chosen = torch.randperm(VOCABULARY_SIZE)[:SHORTLIST_SIZE].sort().values
    found = []
    for shortlist in (full, Shortlist(chosen, version=0)):
        rows = PackedRows()

        def step(shortlist: Shortlist = shortlist, rows: PackedRows = rows) -> torch.Tensor:
            return shortlist.ids_at(head.scores(hidden, shortlist, rows).argmax(-1))

        found.append(median_seconds(step))
    return found[0], found[1]


def layer_seconds() -> float:
    """Seconds of one layer of that size for one token."""
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    layer = Qwen3Model(config).eval()
    token = torch.zeros(1, 1, dtype=torch.int64)
    return median_seconds(lambda: layer(input_ids=token, use_cache=False))


def show_real_head(console: Console) -> None:
    """Measure and print the gain of a shortlist in a draft step of real size, if there is memory for it."""
    needed = VOCABULARY_SIZE * HIDDEN_SIZE * torch.float32.itemsize + _OTHER_BYTES
    available = available_bytes()
    if available is not None and available < needed:
        have, want = (f"{count / 2**30:.1f} GiB" for count in (available, needed))
        console.print(f"A head of real size was not measured: it takes {want} of memory, and {have} are free.\n")
        return
    with console.status("Measuring a head of real size"):
        full, short = head_seconds()
        layer = layer_seconds()
    console.print(
        f"Pairs of real size: on this computer a head of {VOCABULARY_SIZE:,} tokens × {HIDDEN_SIZE:,} (fp32, random "
        f"weights) takes {full * 1e3:.1f} ms for all tokens and {short * 1e3:.1f} ms for {SHORTLIST_SIZE:,}, and a "
        f"layer {layer * 1e3:.1f} ms. So a draft step takes:",
        highlight=False,
    )
    table = Table("drafter", box=box.SIMPLE)
    for heading in ("full", "hybrid", "times as fast"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, layers in (("1 layer, as EAGLE heads have", 1), (f"{LAYERS} layers, as Qwen3-0.6B has", LAYERS)):
        steps = [layers * layer + head for head in (full, short)]
        table.add_row(label, *(f"{step * 1e3:.1f} ms" for step in steps), f"{steps[0] / steps[1]:.1f}")
    console.print(table)
