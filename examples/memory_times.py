"""Time a target's layers over a dynamic cache of transformers and over this package's memory of a fixed size.

Both read the same tokens after the same text, and take turns. Keys and values are random, so that a long text costs no
time. Plain generation with a static cache has the same gain: it is not due to speculation.

    python examples/memory_times.py --target examples/pocket/target --context 64 --context 256
"""

import statistics
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from hf_dynspec.cache_names import cache_inputs
from hf_dynspec.kernels import QueryRows
from hf_dynspec.loading import load_model
from hf_dynspec.memory.fixed import FixedMemory
from hf_dynspec.memory.fixed_decoder import FixedDecoder

WARM_UP_CALLS = 3


@torch.no_grad()
def main(
    target: Annotated[str, typer.Option(help="Folder or Hub id.")],
    context: Annotated[list[int], typer.Option(help="Tokens before those that are read.")] = [512, 4096],  # noqa: B006
    rows: Annotated[list[int], typer.Option(help="Tokens that are read at once.")] = [1, 6],  # noqa: B006
    device: str = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    calls: int = 20,
) -> None:
    """Print the medians in milliseconds."""
    if threads:
        torch.set_num_threads(threads)
    model = load_model(target, device=torch.device(device), dtype=dtype, role="target")
    decoder, fixed = model.get_decoder(), FixedDecoder(model)
    table = Table("tokens before", "tokens read", "dynamic cache", "fixed memory", "ratio", title="milliseconds")
    for length in context:
        cache = DynamicCache(config=model.config.get_text_config())
        decoder(input_ids=torch.ones(1, 1, dtype=torch.int64, device=model.device), **cache_inputs(cache))
        cache.activate_past_recording()
        for number, layer in enumerate(cache.layers):
            made_up = [torch.randn_like(one.expand(-1, -1, length - 1, -1)) for one in (layer.keys, layer.values)]
            cache.update(*made_up, number)
        memory = FixedMemory.like(cache, model.config.get_text_config(), 1, length + max(rows), max(rows))
        memory.begin(0, cache, length)
        for count in rows:
            token_ids = torch.ones(1, count, dtype=torch.int64, device=model.device)
            seconds: dict[str, list[float]] = {"dynamic": [], "fixed": []}
            for call in range(WARM_UP_CALLS + calls):
                for name, taken in seconds.items():
                    start = time.perf_counter()
                    if name == "fixed":
                        hidden = fixed(token_ids, memory, QueryRows.chain(memory.lengths, count))[0]
                    else:
                        hidden = decoder(input_ids=token_ids, **cache_inputs(cache))[0]
                        cache.crop(-count)
                    hidden.sum().item()
                    if call >= WARM_UP_CALLS:
                        taken.append(time.perf_counter() - start)
            dynamic, own = (1e3 * statistics.median(taken) for taken in seconds.values())
            table.add_row(f"{length:,}", f"{count}", f"{dynamic:.2f}", f"{own:.2f}", f"{dynamic / own:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
