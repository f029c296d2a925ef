"""The kernels that score blocks of rows equal their plain twin, and are what runs."""

import importlib.util
import sys

import pytest
import torch
from fast_kernels import (
    DEVICE,
    INTERPRETED,
    interpret,
    must_not_run,
    needs_triton,
    runs_triton,
)
from torch._inductor import codecache

from hf_dynspec.kernels import block_scores_for, cpu, prepare_kernels, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
plain = reference.block_scores


def tolerance(d: int) -> dict[str, float]:
    """All implementations sum in fp32, products of 16-bit numbers being exact there, so that they differ by the order
    of the sums. Each of `d` additions rounds sums of about √d by up to 2⁻²⁴ of them, at random: together 2⁻²⁴ · d, of
    which four times as much is allowed, and on a GPU sixteen times, as tensor cores cut off what others round. Sums in
    bf16 or products in tf32 would be off by over ten times the former."""
    return {"rtol": 0.0, "atol": (2**-20 if DEVICE.type == "cuda" else 2**-22) * d}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def problem(m: int, shape: tuple[int, int, int], asked: list[int], dtype: torch.dtype, with_bias: bool):
    """Hidden states, a weight and bias that are NaN in the blocks not asked for, and the blocks."""
    blocks = torch.tensor(asked, dtype=torch.int64, device=DEVICE)
    weight, bias = random(*shape, seed=1, dtype=dtype), random(*shape[:2], seed=2, dtype=dtype)
    unasked = torch.ones(shape[0], dtype=torch.bool, device=DEVICE)
    unasked[blocks[blocks >= 0]] = False
    assert unasked.any(), "nothing is poisoned"
    weight[unasked], bias[unasked] = torch.nan, torch.nan
    return random(m, shape[2], dtype=dtype), weight, blocks, bias if with_bias else None


def truth(hidden, weight, blocks, bias) -> torch.Tensor:
    """In fp64, block by block."""
    parts = []
    for block in blocks.tolist():
        if block < 0:
            parts.append(torch.full((hidden.shape[0], weight.shape[1]), -torch.inf, dtype=torch.float64))
            continue
        scores = hidden.double().cpu() @ weight[block].double().cpu().T
        parts.append(scores if bias is None else scores + bias[block].double().cpu())
    return torch.cat(parts, dim=1).float() if parts else torch.empty(hidden.shape[0], 0)


def check(scores: torch.Tensor, hidden, weight, blocks, bias) -> None:
    assert scores.dtype == torch.float32 and scores.shape == (hidden.shape[0], blocks.shape[0] * weight.shape[1])
    torch.testing.assert_close(scores.cpu(), truth(hidden, weight, blocks, bias), **tolerance(hidden.shape[1]))
    torch.testing.assert_close(scores, plain(hidden, weight, blocks, bias), **tolerance(hidden.shape[1]))


# No block, one, absent ones in any place, one block twice. Block 0 is never asked for, so it is always NaN.
ASKED = [[], [3], [-1], [4, -1, 1, 1, -1], [-1, 2, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_plain_kernel(dtype, with_bias, poisoned_memory):
    for m, d in ((1, 96), (3, 200), (16, 1000)):
        for asked in ASKED:
            arguments = problem(m, (5, 16, d), asked, dtype, with_bias)
            check(reference.block_scores(*arguments), *arguments)


# On the CPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def natively(request, monkeypatch):
    """Only the compiled kernel may run, and what other tests compiled in this process does not count."""
    if DEVICE.type != "cpu" or INTERPRETED:
        pytest.skip("tests the CPU's kernel, natively")
    request.getfixturevalue("compiled_kernels")
    cpu._kernels.cache_clear()
    monkeypatch.setattr(reference, "block_scores", must_not_run)


# Columns that fill whole vectors, that do not, and that do not fill one; rows that fill whole tiles, and that do not.
@pytest.mark.parametrize("shape", [(5, 16, 200), (5, 17, 37), (5, 48, 96), (5, 1, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_compiled_kernel_equals_its_plain_twin_and_is_what_ran(
    dtype, shape, threads, natively, poisoned_memory, monkeypatch
):
    monkeypatch.setattr(cpu, "_FEWEST_SHARED_PRODUCTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Each number of queries that has code of its own, and groups of equal and of different sizes.
        for m in (1, 2, 3, 4, 5, 6, 7, 12, 16):
            for asked in ASKED:
                for with_bias in (False, True):
                    arguments = problem(m, shape, asked, dtype, with_bias)
                    check(block_scores_for(DEVICE)(*arguments), *arguments)
    finally:
        torch.set_num_threads(before)


def test_rows_and_blocks_may_be_cut_from_longer_ones(natively):
    hidden, weight, _, bias = problem(3, (5, 16, 40), [1, 2, 3], torch.float32, True)
    blocks = torch.tensor([[1, 0], [3, 0], [2, 0]])[:, 0]
    last = torch.stack([torch.full_like(hidden, torch.nan), hidden], dim=1)[:, -1]
    assert not blocks.is_contiguous() and not last.is_contiguous()
    check(cpu.block_scores(last, weight, blocks, bias), hidden, weight, blocks, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_as_what_it_is(dtype, natively):
    """With subnormals, both infinities and NaN, as a row, as a bias, and where it does not fill a vector."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 1, 1)
    blocks, nothing = torch.arange(2**16), torch.zeros(1, 1, dtype=dtype)
    alone = cpu.block_scores(nothing + 1, numbers, blocks, None)
    as_bias = cpu.block_scores(nothing, torch.zeros_like(numbers), blocks, numbers[..., 0])
    one_of_many = torch.zeros(1, 16, dtype=dtype).index_fill_(1, torch.tensor([5]), 1)
    in_a_vector = cpu.block_scores(one_of_many, numbers.expand(-1, -1, 16).contiguous(), blocks, None)
    expected = numbers.flatten().float()
    finite = expected.isfinite()
    for scores in (alone[0], as_bias[0]):
        torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(in_a_vector[0, finite], expected[finite], rtol=0, atol=0)
    assert not in_a_vector[0, ~finite].isfinite().any()


def test_it_is_compiled_once_and_shares_out_only_what_is_large(natively, monkeypatch):
    prepare_kernels()
    compilations = cpu._kernels.cache_info
    assert compilations().misses == 1
    hits = compilations().hits
    kernels = cpu._kernels()
    threads_used = []

    def recorded(call):
        threads_used.append(cpu._CALL.unpack(call)[-1])
        return kernels[torch.float32](call)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with torch.no_grad():
        arguments = problem(2, (5, 16, 64), [2, 1, 2], torch.float32, False)
        check(cpu.block_scores(*arguments), *arguments)
        assert compilations().misses == 1 and compilations().hits > hits
        monkeypatch.setattr(cpu, "_kernels", lambda: {torch.float32: recorded})
        products = 2 * 3 * 16 * 64
        for fewest in (products + 1, products):
            monkeypatch.setattr(cpu, "_FEWEST_SHARED_PRODUCTS", fewest)
            check(cpu.block_scores(*arguments), *arguments)
    assert threads_used == [1, 3]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(2, 9)}, ValueError, r"float32 \[2, 9\] on cpu.*weight float32 \[5, 16, 8\]"),
        ({"hidden": torch.zeros(2, 8, device="meta")}, ValueError, "on meta .*everything on the CPU"),
        ({"bias": torch.zeros(5, 16, device="meta")}, ValueError, "on meta must be .* on cpu"),
        ({"blocks": torch.zeros(3, dtype=torch.int32)}, ValueError, "must be .*int64"),
        ({"weight": torch.zeros(5, 8, 16).transpose(1, 2)}, ValueError, "contiguous"),
        ({"bias": torch.zeros(5, 15)}, ValueError, r"bias float32 \[5, 15\] on cpu must be .*float32 \[5, 16\]"),
        ({"bias": torch.zeros(5, 16, dtype=torch.float16)}, ValueError, "bias float16"),
        ({"bias": torch.zeros(16, 5).T}, ValueError, "contiguous"),
        ({"blocks": torch.tensor([4, 5])}, IndexError, "block 5 is out of range.* 5 blocks"),
    ],
)
def test_what_the_kernel_would_misread_is_refused(change, error, message, natively):
    names = ("hidden", "weight", "blocks", "bias")
    arguments = dict(zip(names, problem(2, (5, 16, 8), [1, 2], torch.float32, True), strict=True))
    cpu.block_scores(*arguments.values())
    with pytest.raises(error, match=message):
        cpu.block_scores(*(arguments | change).values())


@pytest.mark.skipif(DEVICE.type != "cpu", reason="tests the CPU's kernel")
@pytest.mark.parametrize(("dtype", "has_compiler"), [(torch.float32, False), (torch.float64, True)])
def test_without_a_compiler_or_code_for_a_dtype_the_plain_twin_runs(dtype, has_compiler, monkeypatch):
    monkeypatch.setattr(cpu, "_run", must_not_run)
    if not has_compiler:
        monkeypatch.setattr(cpu, "_kernels", dict)
    arguments = problem(3, (5, 16, 40), [2, -1], dtype, True)
    prepare_kernels()
    assert torch.equal(cpu.block_scores(*arguments), plain(*arguments))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="tests the CPU's kernel")
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scores_are_fp32_whatever_torchs_default_is(default, natively):
    """As while transformers loads a model in another thread."""
    arguments = problem(3, (5, 16, 40), [2, -1, 4], torch.float32, True)
    torch.set_default_dtype(default)
    try:
        scores = cpu.block_scores(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    check(scores, *arguments)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="tests the CPU's kernel")
@pytest.mark.parametrize("change", ["no module", "no class", "other arguments", "no compiler"])
def test_where_torch_compiles_in_another_way_the_plain_twins_run_and_one_line_says_so(change, monkeypatch, caplog):
    def fail(*arguments, **others):
        if change == "no compiler":
            raise RuntimeError("no working C++ compiler\n" + "and pages of what it says\n" * 100)
        raise TypeError("takes other arguments")

    if change == "no module":
        monkeypatch.setitem(sys.modules, "torch._inductor.codecache", None)
    elif change == "no class":
        monkeypatch.delattr(codecache, "CppCodeCache")
    else:
        monkeypatch.setattr(codecache.CppCodeCache, "load", fail)
    monkeypatch.setattr(cpu, "_run", must_not_run)
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)
    cpu._kernels.cache_clear()
    try:
        hidden, weight, blocks, bias = problem(3, (5, 16, 40), [2, -1], torch.float32, True)
        rows, row_bias, ids = weight.flatten(0, 1), bias.flatten(), torch.tensor([40, 33])
        assert torch.equal(cpu.block_scores(hidden, weight, blocks, bias), plain(hidden, weight, blocks, bias))
        scattered = reference.scattered_scores(hidden, rows, ids, row_bias)
        assert torch.equal(cpu.scattered_scores(hidden, rows, ids, row_bias), scattered)
        assert not cpu.has_dense_kernel(rows)
        dense = reference.packed_scores(hidden, rows[32:48], None)
        assert torch.equal(cpu.dense_scores(hidden, rows[32:48]), dense)
        (message,) = caplog.messages
        assert "the CPU kernels cannot be compiled: install g++" in message and "\n" not in message
    finally:
        cpu._kernels.cache_clear()


# The resolver --------------------------------------------------------------------------------------------------------


@needs_triton
def test_which_kernel_runs_where(monkeypatch):
    from hf_dynspec.kernels import triton_blocks

    assert block_scores_for(torch.device("cpu")) is cpu.block_scores
    assert block_scores_for(torch.device("cuda")).kernel is triton_blocks.block_scores
    assert block_scores_for(torch.device("meta")) is reference.block_scores
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert block_scores_for(torch.device("cuda")) is reference.block_scores


# In Triton -----------------------------------------------------------------------------------------------------------


class CountedLaunches:
    """A Triton kernel whose launches are counted, with the size of each grid."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@runs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "asked"),
    [((5, 16, 96), asked) for asked in ASKED]
    + [((5, 48, 200), [4, -1, 1]), ((5, 64, 1000), [2]), ((3, 32, 129), [1, 2]), ((3, 16, 8192), [2, -1])],
)
def test_triton_kernel_equals_its_plain_twin_and_is_what_ran(
    shape, asked, dtype, with_bias, poisoned_memory, monkeypatch
):
    from hf_dynspec.kernels import triton_blocks

    launches = CountedLaunches(triton_blocks._block_scores_kernel)
    monkeypatch.setattr(triton_blocks, "_block_scores_kernel", launches)
    monkeypatch.setattr(reference, "block_scores", must_not_run)
    # The last is more than one program takes.
    for m in (1, 3, 10, 16, 19):
        arguments = problem(m, shape, asked, dtype, with_bias)
        check(triton_blocks.block_scores(*arguments), *arguments)
    # One program for each block, as all query rows up to 16 share a reading of the weight.
    n = len(asked)
    assert launches.grids == ([(n, 1)] * 4 + [(n, 2)] if n else [])


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs the interpreter")
def test_the_interpreter_runs_the_triton_kernel():
    interpret(__file__, passed=54)
