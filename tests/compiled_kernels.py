"""Compile what the package's functions launch, for GPUs that are not there: run as a script, it prints a line for each
kernel.

The functions run as they are, on tensors of the CPU. Only Triton's launch is left out, after the compilation for the
arguments that the kernel was given.

    python compiled_kernels.py FUNCTION CAPABILITIES [NAME=VALUES …]

calls a function of this file with each combination of the values, and prints for each kernel what it was for, its
name, the bytes of shared memory of a program, and those of local memory of a thread, into which registers are spilled.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hf_dynspec.kernels import (
    QueryRows,
    Screen,
    tiled,
    triton_attention,
    triton_best_rows,
    triton_blocks,
    triton_layers,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _Driver:
    """Triton's driver of a GPU that only compiles."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """In which kernels are compiled for a capability, and not launched. Each launch adds its compiled kernel."""
    made, run = [], JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        made.append(run(self, *args, grid=grid, warmup=True, **settings))

    JITFunction.run = compile_only
    driver.set_active(_Driver(capability))
    yield made
    JITFunction.run = run


def local_memory(kernel: Any) -> int:
    """The bytes of local memory of a thread."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", printed)[1])


# What is compiled: each calls a function of the package -------------------------------------------------------------


def attention(d: int, dtype: str, pairs: int, window: int, parts: int = 132) -> None:
    """`pairs` rows of one query head, or a quarter as many of four."""
    heads = 4 if pairs % 4 == 0 else 1
    q = pairs // heads
    rows = QueryRows.chain(torch.tensor([20]), q)
    query, keys = (torch.zeros(shape, dtype=DTYPES[dtype]) for shape in ((1, heads, q, d), (1, 64, 1, d)))
    triton_attention._processors = lambda device: parts
    settings = {"window": window, "soft_cap": 3.0, "sinks": torch.zeros(heads)} if window else {}
    triton_attention.round_attention(query, keys, keys, rows, scale=1.0, **settings)


def many_shapes(d: int, dtype: str) -> None:
    """Rows, windows and sizes of memory as calls and policies bring them."""
    for q, window, size in itertools.product((1, 6, 16), (5, 16, 1024), (64, 128, 2100)):
        rows = QueryRows.chain(torch.tensor([20]), q)
        query, keys = (torch.zeros(shape, dtype=DTYPES[dtype]) for shape in ((1, 1, q, d), (1, size, 1, d)))
        triton_attention.round_attention(query, keys, keys, rows, scale=1.0, window=window)


def layers(d: int, dtype: str) -> None:
    query, key = torch.zeros(1, 4, 6, d, dtype=DTYPES[dtype]), torch.zeros(1, 2, 6, d, dtype=DTYPES[dtype])
    triton_layers.rotated(query, key, *torch.zeros(2, 1, 6, d, dtype=DTYPES[dtype]))


def norms(d: int, dtype: str) -> None:
    triton_layers.norm_from_one(torch.zeros(1, 6, d, dtype=DTYPES[dtype]), torch.zeros(d, dtype=DTYPES[dtype]), 1e-6)


def blocks(d: int, dtype: str, rows: int) -> None:
    weight = torch.zeros(4, rows, d, dtype=DTYPES[dtype])
    triton_blocks.block_scores(weight[0, :1], weight, torch.arange(2), torch.zeros(4, rows, dtype=DTYPES[dtype]))


def best_rows(rank: int) -> None:
    factor = tiled(torch.randn(64, rank))
    screen = Screen(torch.randn(rank - 1, 32), factor, torch.zeros(factor.levels.shape[0], 32))
    triton_best_rows.best_rows(torch.randn(1, 32), screen, 4)


def main(function: str, capabilities: str, *settings: str) -> None:
    names, values = zip(*(one.split("=") for one in settings), strict=True)
    combinations = itertools.product(*(one.split(",") for one in values))
    for combination in combinations:
        chosen = {name: int(one) if one.isdigit() else one for name, one in zip(names, combination, strict=True)}
        for capability in map(int, capabilities.split(",")):
            with compiling(capability) as made:
                globals()[function](**chosen)
            for kernel in made:
                found = {"name": kernel.metadata.name, "shared": kernel.metadata.shared, "local": local_memory(kernel)}
                uses = sorted({*re.findall(r"\b(?:mma|wgmma|tf32|cp\.async\.cg)\b", kernel.asm["ptx"])})
                print(json.dumps({"capability": capability, **chosen, **found, "uses": uses, "id": id(kernel)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
