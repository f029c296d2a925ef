"""The attention of a round equals attention over each text alone, in plain torch, on the host and in Triton.

The Triton kernels run on a GPU where there is one. Everywhere they run in triton's interpreter, which must be chosen
before triton is imported: a test runs this file once more, in a process of its own.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

from hf_dynspec.kernels import QueryRows, round_attention_for
from hf_dynspec.kernels.attention import host_round_attention, round_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
runs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (INTERPRETED or DEVICE.type == "cuda"),
    reason="needs a GPU or TRITON_INTERPRET=1",
)

# Parents of a tree's nodes: the root has two children, the first of which has two, the last of which has one.
TREE = [-1, 0, 0, 1, 1, 4]
NODES = {
    "one": [-1],
    "chain": [-1, 0, 1, 2],
    "long": list(range(-1, 18)),
    "tree": TREE,
    # The last level of a tree, whose other nodes are cached.
    "level": TREE,
}
# Query heads, key heads, and the sizes of keys and values.
HEADS = {"grouped": (6, 2, 16, 16), "single": (3, 3, 24, 24), "odd": (4, 1, 80, 40), "wide": (2, 1, 256, 256)}
OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "wide_window": {"window": 90},
    "capped": {"soft_cap": 3.0, "window": 40},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "soft_cap": 2.0, "window": 7},
}
CASES = [
    ("one", "grouped", "plain", torch.float32),
    ("one", "odd", "window", torch.float32),
    ("chain", "grouped", "plain", torch.float32),
    ("chain", "odd", "all", torch.float32),
    ("chain", "single", "window", torch.bfloat16),
    ("chain", "wide", "capped", torch.float16),
    ("long", "grouped", "wide_window", torch.float32),
    ("long", "odd", "sinks", torch.bfloat16),
    ("tree", "grouped", "window", torch.float32),
    ("tree", "single", "capped", torch.float32),
    ("tree", "wide", "plain", torch.bfloat16),
    ("level", "grouped", "plain", torch.float32),
    ("level", "odd", "all", torch.float32),
]
# Nothing, less than one block of keys, exactly one with a chain's nodes, and several.
LENGTHS = [0, 3, 60, 131]
BATCHES = [(LENGTHS, False), (LENGTHS[2:3], True), (LENGTHS[::-1], True)]


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def paths(parents: list[int]) -> list[set[int]]:
    found: list[set[int]] = []
    for node, parent in enumerate(parents):
        found.append({node} | (found[parent] if parent >= 0 else set()))
    return found


def query_rows(kind: str, lengths: list[int], shared: bool) -> QueryRows:
    found = paths(NODES[kind])
    within = torch.tensor([[node in path for node in range(len(found))] for path in found], device=DEVICE)
    levels = torch.tensor([len(path) - 1 for path in found], device=DEVICE)
    if kind == "level":
        within = within[-1:]
    texts = 1 if shared else len(lengths)
    return QueryRows(
        torch.tensor(lengths, device=DEVICE), within.expand(texts, -1, -1).contiguous(), levels.expand(texts, -1)
    )


def problem(kind: str, heads: str, option: str, dtype: torch.dtype, lengths: list[int], shared: bool):
    """Inputs, in whose memory everything that no row may attend to is NaN, and the expected output."""
    (query_heads, key_heads, d, e), options = HEADS[heads], dict(OPTIONS[option])
    rows = query_rows(kind, lengths, shared)
    nodes, q, window = rows.levels.shape[1], rows.within.shape[1], options.get("window")
    size = max(lengths) + nodes if window is None else min(max(lengths), window - 1) + nodes
    if options.pop("sinks", False):
        options["sinks"] = random(query_heads, seed=4, dtype=dtype)
    options["scale"] = d**-0.5
    query = random(len(lengths), query_heads, q, d, seed=1, dtype=dtype)
    keys = torch.full((len(lengths), size, key_heads, d), torch.nan, dtype=dtype, device=DEVICE)
    values = torch.full((len(lengths), size, key_heads, e), torch.nan, dtype=dtype, device=DEVICE)
    expected = []
    for text, length in enumerate(lengths):
        # All that the text ever had. The memory forgets what a window has passed.
        all_keys = random(length + nodes, key_heads, d, seed=10 + text, dtype=dtype)
        all_values = random(length + nodes, key_heads, e, seed=20 + text, dtype=dtype)
        for position in range(length + nodes):
            if window is None or position > length - window:
                keys[text, position % size] = all_keys[position]
                values[text, position % size] = all_values[position]
        expected.append(truth(query[text], all_keys, all_values, kind, length, options))
    return (query, keys, values, rows), options, torch.stack(expected)


def truth(query, keys, values, kind, length, options) -> torch.Tensor:
    """`[q, H, e]` in fp64, one row and head after another, over the positions that it attends to."""
    found = paths(NODES[kind])
    count, group = query.shape[1], query.shape[0] // keys.shape[1]
    output = torch.zeros(count, query.shape[0], values.shape[2], dtype=torch.float64)
    for row in range(count):
        path = sorted(found[len(found) - count + row])
        places = [*range(length), *(length + node for node in path)]
        if "window" in options:
            places = places[-options["window"] :]
        for head in range(query.shape[0]):
            scores = keys[places, head // group].double().cpu() @ query[head, row].double().cpu() * options["scale"]
            if "soft_cap" in options:
                scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
            sink = [options["sinks"][head].double().cpu().view(1)] if "sinks" in options else []
            weights = torch.cat([scores, *sink]).softmax(0)[: len(places)]
            output[row, head] = weights @ values[places, head // group].double().cpu()
    return output


def check(attend, case, batches=BATCHES) -> None:
    kind, heads, option, dtype = case
    for lengths, shared in batches:
        arguments, options, expected = problem(kind, heads, option, dtype, lengths, shared)
        actual = attend(*arguments, **options)
        assert actual.dtype == dtype and actual.shape == expected.shape
        tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain(case, poisoned_memory):
    check(round_attention, case)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="is for CPUs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_host(case, poisoned_memory):
    check(host_round_attention, case)


@runs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(case, poisoned_memory):
    from hf_dynspec.kernels import triton_attention

    # The interpreter takes a tenth of a second for each block of keys.
    check(triton_attention.round_attention, case, [([3, 131], False), ([0], True)])


def test_the_device_says_which_one_runs():
    assert round_attention_for(torch.device("cpu")) is host_round_attention
    assert round_attention_for(torch.device("meta")) is round_attention
    if importlib.util.find_spec("triton") is not None:
        from hf_dynspec.kernels import triton_attention

        assert round_attention_for(torch.device("cuda")).kernel is triton_attention.round_attention


def test_rows_know_their_positions_and_slots():
    rows = query_rows("level", [7, 2], shared=True)
    assert rows.positions.tolist() == [[7 + 3], [2 + 3]]
    assert rows.slots(8).tolist() == [[(7 + 5) % 8], [7]]
    chain = QueryRows.chain(torch.tensor([4]), 3)
    assert chain.positions.tolist() == [[4, 5, 6]] == chain.slots(100).tolist()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs the interpreter")
def test_the_interpreter_runs_the_triton_kernels():
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_triton"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(rf"\b{len(CASES)} passed\b", done.stdout) and "skipped" not in done.stdout, done.stdout[-2000:]
