"""The kernels that choose the best rows of a low-rank factor equal their plain twin, and are what runs."""

import importlib.util
import platform
from dataclasses import replace

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
from torch._inductor.codecache import CppCodeCache

from hf_dynspec.kernels import (
    TILE_ROWS,
    Screen,
    best_rows_for,
    cpu,
    cpu_best_rows,
    cpu_top_k,
    prepare_best_rows,
    reference,
    tiled,
)
from hf_dynspec.kernels.reference import TILE_COLUMNS

on_the_cpu = pytest.mark.skipif(DEVICE.type != "cpu" or INTERPRETED, reason="tests the CPU's kernel, natively")
plain = reference.best_rows
LOWEST = torch.finfo(torch.float32).min
# From here on the compiled kernel estimates from a sample how high the best rows score.
SAMPLED_FROM = 512 * TILE_ROWS


Problem = tuple[torch.Tensor, Screen]


def problem(m: int, n: int, rank: int, seed: int = 0) -> Problem:
    """Hidden states, a factor whose last tile is padded, and a bias that bars the padding and every seventh row."""
    generator = torch.Generator().manual_seed(seed)
    factor = tiled(torch.randn(n, rank, generator=generator).to(DEVICE))
    bias = torch.full((factor.levels.shape[0], TILE_ROWS), -torch.inf)
    bias.view(-1)[:n] = torch.randn(n, generator=generator)
    bias.view(-1)[::7] = -torch.inf
    # Widths that fill registers and that do not; queries that are about as long for all of them.
    width = 3 * rank + 40
    projection = torch.randn(rank - 1, width, generator=generator)
    hidden = torch.randn(m, width, generator=generator) / width**0.5
    return hidden.to(DEVICE), Screen(projection.to(DEVICE), factor, bias.to(DEVICE))


def queries_of(hidden: torch.Tensor, screen: Screen) -> torch.Tensor:
    """fp64 `[m, r]`, in an obvious way."""
    hidden = hidden.double()
    return torch.cat([hidden @ screen.projection.double().T, hidden.square().sum(1, keepdim=True)], dim=1)


def scores_of(hidden: torch.Tensor, screen: Screen) -> torch.Tensor:
    """fp64 `[B · T]`, in an obvious way."""
    factor, bias = screen.factor, screen.bias.flatten()
    tiles, groups = factor.levels.shape[:2]
    levels = factor.levels.permute(0, 2, 1, 3).reshape(tiles * TILE_ROWS, groups * TILE_COLUMNS)
    rows = factor.lowest.double() + factor.scale.double() * levels[:, : factor.scale.shape[0]].double()
    asked = queries_of(hidden[hidden.isfinite().all(1)], screen)
    products = (asked @ rows.T).amax(0) if len(asked) else rows.new_full((len(rows),), LOWEST)
    scores = (products + bias).nan_to_num(nan=LOWEST, neginf=LOWEST, posinf=torch.inf).clamp_min(LOWEST)
    return scores.masked_fill(bias == -torch.inf, -torch.inf)


def rounding(hidden: torch.Tensor, screen: Screen) -> float:
    """By how much a score may be off that was summed in fp32, the levels and the lowest numbers apart, with a query
    whose numbers, in units of levels, are rounded to 32,512ths of the largest one."""
    factor = screen.factor
    finite = hidden[hidden.isfinite().all(1)].double()
    if not len(finite):
        return 0.0
    largest = queries_of(finite.abs(), replace(screen, projection=screen.projection.abs()))
    of_sums = 1e-6 * float((largest @ (255 * factor.scale + factor.lowest.abs()).double()).amax()) + 1e-6
    in_levels = queries_of(finite, screen).abs() * factor.scale.double()
    return of_sums + 255 * factor.scale.shape[0] * float(in_levels.amax()) / 65_024


def check(chosen: torch.Tensor, hidden: torch.Tensor, screen: Screen, count: int) -> None:
    """They are the best, up to what is rounded."""
    assert chosen.dtype == torch.int64 and chosen.shape == (count,)
    assert chosen.unique().shape == (count,), "a row was chosen twice"
    scores = scores_of(hidden, screen)
    assert (screen.bias.flatten()[chosen] > -torch.inf).all(), "a row was chosen that is barred"
    best = scores.sort(descending=True).values[:count]
    found = scores[chosen].sort(descending=True).values
    torch.testing.assert_close(found, best, rtol=1e-6, atol=rounding(hidden, screen))


# Fewer rows than a tile, tiles that are full and that are not; ranks that fill registers and that do not; one query,
# fewer than are multiplied together, as many, and more.
SIZES = [(1, 5, 1), (1, 64, 16), (3, 333, 17), (4, 1000, 3), (5, 700, 130), (20, 257, 33)]


def allowed(screen: Screen) -> int:
    return int((screen.bias > -torch.inf).sum())


@pytest.mark.parametrize(("m", "n", "rank"), SIZES)
def test_the_plain_kernel(m, n, rank, poisoned_memory):
    arguments = problem(m, n, rank)
    for count in {0, 1, allowed(arguments[1]) // 2, allowed(arguments[1])}:
        check(plain(*arguments, count), *arguments, count)


def test_rows_in_tiles_lie_as_they_are_read():
    rows = torch.randn(70, 3)
    rows[:, 1] = 2.5
    factor = tiled(rows)
    assert factor.levels.shape == (3, 1, TILE_ROWS, TILE_COLUMNS) and factor.levels.is_contiguous()
    assert factor.levels.dtype == torch.uint8 and not factor.levels[2, :, 6:].any() and not factor.levels[..., 3].any()
    half_a_level = (rows.amax(0) - rows.amin(0)) / 510 + 1e-6
    for row in (0, 31, 32, 69):
        stood_for = factor.lowest + factor.scale * factor.levels[row // TILE_ROWS, 0, row % TILE_ROWS, :3]
        assert ((stood_for - rows[row]).abs() <= half_a_level).all()
        torch.testing.assert_close(factor.rows()[row], stood_for)


# On the CPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def natively(request, monkeypatch):
    """Only the compiled kernel may run."""
    request.getfixturevalue("compiled_kernels")
    monkeypatch.setattr(reference, "best_rows", must_not_run)


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(cpu, "_FEWEST_SHARED_PRODUCTS", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@on_the_cpu
@pytest.mark.parametrize(("m", "n", "rank"), [*SIZES, (1, SAMPLED_FROM + 11, 5), (6, 2 * SAMPLED_FROM + 1, 4)])
def test_the_compiled_kernel_equals_its_plain_twin_and_is_what_ran(m, n, rank, threads, natively, poisoned_memory):
    arguments = problem(m, n, rank)
    most = allowed(arguments[1])
    for count in {1, most // 100, most // 2, most - 1, most} - {0}:
        chosen = best_rows_for(DEVICE)(*arguments, count)
        check(chosen, *arguments, count)
        assert (chosen.diff() > 0).all(), "the rows are not in order"
        twin = plain(*arguments, count)
        scores = scores_of(*arguments)
        found, expected = (scores[one].sort().values for one in (chosen, twin))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=rounding(*arguments))


# What the compiler is told to leave out, in whose place the kernels have other instructions.
OLDER_CPUS = {
    "no 512 bits": ("-mno-avx512f",),
    "no products of bytes": ("-mno-avx512vnni", "-mno-avxvnni"),
    "256 bits, no products of bytes": ("-mno-avx512f", "-mno-avxvnni"),
    "128 bits": ("-mno-avx512f", "-mno-avx2", "-mno-avx"),
}


@on_the_cpu
@pytest.mark.parametrize("left_out", OLDER_CPUS)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instructions of other processors")
def test_the_kernels_of_older_processors(left_out, natively, monkeypatch):
    load = CppCodeCache.load
    flags = OLDER_CPUS[left_out]
    compile_older = lambda source, extra_flags: load(source, extra_flags=(*extra_flags, *flags))  # noqa: E731
    monkeypatch.setattr(CppCodeCache, "load", compile_older)
    for module, function, loaded in (
        (cpu_best_rows, "best_rows", cpu_best_rows._kernel.__wrapped__()),
        (cpu_top_k, "top_k", cpu_top_k._kernel.__wrapped__()),
    ):
        assert loaded is not None and loaded.__name__ == function
        monkeypatch.setattr(module, "_kernel", lambda loaded=loaded: loaded)
    for m, n, rank in (*SIZES, (2, SAMPLED_FROM + 11, 17)):
        arguments = problem(m, n, rank)
        count = max(1, allowed(arguments[1]) // 50)
        check(cpu_best_rows.best_rows(*arguments, count), *arguments, count)
    scores = torch.randn(3, 30_001, generator=torch.Generator().manual_seed(0))
    for k in (1, 7, 3000):
        assert torch.equal(cpu_top_k.top_k_ids(scores, k), scores.topk(k).indices)


@on_the_cpu
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e15])
def test_hidden_states_of_any_size(size, natively):
    """The largest number of a query decides what its other numbers are rounded to."""
    hidden, screen = problem(2, 3000, 9)
    hidden *= size
    screen.bias[screen.bias > -torch.inf] = 0.0
    check(cpu_best_rows.best_rows(hidden, screen, 100), hidden, screen, 100)


@on_the_cpu
def test_hidden_states_of_16_bits(natively):
    hidden, screen = problem(2, 3000, 9)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = hidden.to(dtype)
        check(cpu_best_rows.best_rows(rounded, screen, 100), rounded.float(), screen, 100)


@on_the_cpu
def test_wide_hidden_states_are_projected_by_all_threads(threads, natively):
    hidden, screen = problem(4, 700, 130)
    width = 2 * 2**18 // (4 * 130) + 3
    hidden, projection = torch.randn(4, width) / width**0.5, torch.randn(129, width)
    screen = replace(screen, projection=projection)
    check(cpu_best_rows.best_rows(hidden, screen, 50), hidden, screen, 50)


@on_the_cpu
@pytest.mark.parametrize("n", [1000, 2 * SAMPLED_FROM])
def test_of_equals_the_first_are_chosen(n, threads, natively):
    hidden, factor, bias = torch.ones(1, 4), tiled(torch.ones(n, 4)), torch.zeros(-(-n // TILE_ROWS), TILE_ROWS)
    bias.view(-1)[n:] = -torch.inf
    bias[0, :3] = -torch.inf
    bias[1, 5] = 1.0
    chosen = cpu_best_rows.best_rows(hidden, Screen(torch.ones(3, 4), factor, bias), 50)
    assert chosen.tolist() == list(range(3, 53))
    bias[10, 7] = 1.0
    chosen = cpu_best_rows.best_rows(hidden, Screen(torch.ones(3, 4), factor, bias), 50)
    assert chosen.tolist() == [*range(3, 52), 10 * TILE_ROWS + 7]


@on_the_cpu
@pytest.mark.parametrize("misled", ["too few", "too many"])
def test_a_sample_that_misleads_costs_time_and_nothing_else(misled, threads, natively):
    """The tiles that are sampled score far better than all others, or far worse."""
    tiles, count = 1024, 2000
    hidden, screen = problem(1, tiles * TILE_ROWS, 6)
    sampled = (2 * torch.arange(128) + 1) * tiles // 256
    screen.bias[sampled] += 50.0 if misled == "too few" else -50.0
    for one in (6000, count):
        check(cpu_best_rows.best_rows(hidden, screen, one), hidden, screen, one)


@on_the_cpu
def test_what_is_no_number_is_the_worst_choice_and_none_that_is_barred(natively):
    hidden, screen = problem(3, 400, 8)
    most, bias = allowed(screen), screen.bias
    for bad in (torch.nan, torch.inf, -torch.inf):
        for which in ((0,), (0, 1, 2)):
            spoilt = hidden.clone()
            spoilt[list(which), 2] = bad
            for count in (20, most):
                check(cpu_best_rows.best_rows(spoilt, screen, count), spoilt, screen, count)
                check(plain(spoilt, screen, count), spoilt, screen, count)
    bias[3, 4], bias[2, 1], bias[2, 2], bias[5, :] = LOWEST, torch.inf, torch.nan, LOWEST
    screen = replace(screen)
    chosen = cpu_best_rows.best_rows(hidden, screen, 1)
    assert chosen.tolist() == [2 * TILE_ROWS + 1] == plain(hidden, screen, 1).tolist()
    for count in (20, 200):
        check(cpu_best_rows.best_rows(hidden, screen, count), hidden, screen, count)


@on_the_cpu
@pytest.mark.parametrize(
    "change",
    [
        {"hidden": torch.zeros(2, 63)},
        {"hidden": torch.zeros(0, 64)},
        {"hidden": torch.zeros(2, 64, device="meta")},
        {"projection": torch.zeros(6, 64)},
        {"projection": torch.zeros(7, 64, dtype=torch.float64)},
        {"projection": torch.zeros(64, 7).T},
        {"levels": torch.zeros(3, 2, TILE_ROWS, TILE_COLUMNS)},
        {"levels": torch.zeros(3, 2, 16, TILE_COLUMNS, dtype=torch.uint8)},
        {"levels": torch.zeros(3, TILE_ROWS, 2, TILE_COLUMNS, dtype=torch.uint8).transpose(1, 2)},
        {"levels": torch.zeros(3, 3, TILE_ROWS, TILE_COLUMNS, dtype=torch.uint8)},
        {"scale": torch.ones(7)},
        {"lowest": torch.ones(8, dtype=torch.bfloat16)},
        {"bias": torch.zeros(2, TILE_ROWS)},
        {"bias": torch.zeros(3, TILE_ROWS, dtype=torch.bfloat16)},
    ],
)
def test_what_the_kernel_would_misread_is_refused(change, natively):
    hidden, screen = problem(2, 80, 8)
    cpu_best_rows.best_rows(hidden, screen, 3)
    if "hidden" in change:
        hidden = change["hidden"]
    elif change.keys() & {"projection", "bias"}:
        screen = replace(screen, **change)
    else:
        screen = replace(screen, factor=replace(screen.factor, **change))
    with pytest.raises(ValueError, match="do not fit"):
        cpu_best_rows.best_rows(hidden, screen, 3)


@on_the_cpu
@pytest.mark.parametrize("n", [80, 2 * SAMPLED_FROM])
def test_more_rows_than_there_are_cannot_be_chosen(n, natively):
    arguments = problem(1, n, 4)
    with pytest.raises(ValueError, match="fewer may be"):
        cpu_best_rows.best_rows(*arguments, allowed(arguments[1]) + 1)


@on_the_cpu
def test_without_a_compiler_the_plain_twin_runs_and_one_line_says_so(monkeypatch, caplog):
    from torch._inductor import codecache

    def no_compiler(*args, **kwargs):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(codecache.CppCodeCache, "load", no_compiler)
    cpu_best_rows._kernel.cache_clear()
    try:
        arguments = problem(2, 80, 8)
        prepare_best_rows()
        for _ in range(2):
            assert torch.equal(cpu_best_rows.best_rows(*arguments, 9), plain(*arguments, 9))
        (message,) = caplog.messages
        assert "Shortlists are screened by plain torch" in message and "install g++" in message
    finally:
        cpu_best_rows._kernel.cache_clear()


@needs_triton
def test_which_kernel_runs_where(monkeypatch):
    from hf_dynspec.kernels import triton_best_rows

    assert best_rows_for(torch.device("cpu")) is cpu_best_rows.best_rows
    assert best_rows_for(torch.device("cuda")).kernel is triton_best_rows.best_rows
    assert best_rows_for(torch.device("meta")) is reference.best_rows
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert best_rows_for(torch.device("cuda")) is reference.best_rows


# In Triton -----------------------------------------------------------------------------------------------------------


@runs_triton
@pytest.mark.parametrize(("m", "n", "rank"), SIZES)
def test_triton_kernel_equals_its_plain_twin_and_is_what_ran(m, n, rank, poisoned_memory, monkeypatch):
    from hf_dynspec.kernels import triton_best_rows

    monkeypatch.setattr(reference, "best_rows", must_not_run)
    arguments = problem(m, n, rank)
    for count in {1, allowed(arguments[1]) // 2, allowed(arguments[1])}:
        check(triton_best_rows.best_rows(*arguments, count), *arguments, count)


@runs_triton
def test_triton_kernel_makes_the_worst_of_what_is_no_number():
    from hf_dynspec.kernels import triton_best_rows

    hidden, screen = problem(3, 400, 8)
    for which in ((0,), (0, 1, 2)):
        spoilt = hidden.clone()
        spoilt[list(which), 2] = torch.nan
        for count in (20, allowed(screen)):
            check(triton_best_rows.best_rows(spoilt, screen, count), spoilt, screen, count)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs the interpreter")
def test_the_interpreter_runs_the_triton_kernel():
    interpret(__file__, passed=7)
