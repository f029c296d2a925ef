"""The dynamic head equals the model's own projection on every shortlist, and fast kernels equal their plain twins."""

import functools
import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from calls import assert_same, generate
from fast_kernels import must_not_run
from full_disk import largest_file
from models import FAMILIES, tiny

from hf_dynspec import DynSpecAssistant, UnsupportedError
from hf_dynspec.generation.target import TargetForward
from hf_dynspec.kernels import (
    argmax_rows,
    argmax_rows_for,
    cpu,
    cpu_top_k,
    most_queries,
    packed_scores,
    reference,
    replace_rows,
    scattered_scores_for,
    top_k_ids,
    top_k_ids_for,
)
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows, widen
from hf_dynspec.protocol import Shortlist

# Relative to the size of the sums: fp32 sums of up to 200 products in another order differ by less than 1e-5, and bf16
# results carry 8 significant bits, of which several roundings touch the last two.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5}}
DTYPES = [torch.float32, torch.bfloat16]
KERNEL_DTYPES = [*DTYPES, torch.float16]
V, D = 211, 37


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_ids(count: int, seed: int = 0, limit: int = V) -> torch.Tensor:
    return torch.randperm(limit, generator=torch.Generator().manual_seed(seed))[:count]


def truth(hidden, weight, bias, ids, scale=1.0, cap=None) -> torch.Tensor:
    """The same in fp64, on copies of the rows, one step at a time."""
    logits = hidden.double() @ weight.double()[ids].T
    if bias is not None:
        logits = logits + bias.double()[ids]
    logits = logits * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits.float()


# The head ------------------------------------------------------------------------------------------------------------


def forms_of(ids: torch.Tensor) -> dict[str, Shortlist]:
    """The ways in which a shortlist may be laid out."""
    occupied = torch.arange(ids.shape[0]) % 3 != 1
    return {
        "packed": Shortlist(ids, 4),
        "packed, in part": Shortlist(ids, 4, size=ids.shape[0] // 2),
        "occupied in part": Shortlist(ids, 4, occupied=occupied),
        "occupied and scored in part": Shortlist(ids, 4, size=ids.shape[0] - 2, occupied=occupied),
        "prefix": Shortlist(torch.arange(ids.shape[0]), 0, is_prefix=True),
        "prefix, in part": Shortlist(torch.arange(V), 0, size=ids.shape[0], is_prefix=True),
        "transient": Shortlist(ids, 9, is_transient=True),
        "transient, occupied in part": Shortlist(ids, 9, occupied=occupied, is_transient=True),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", forms_of(some_ids(7)))
@pytest.mark.parametrize("finish", [(1.0, None), (0.3, None), (1.0, 5.0), (2.5, 3.0)])
def test_scores_on_every_form_of_shortlist(form, dtype, finish, poisoned_memory):
    weight, bias = random(V, D, dtype=dtype), random(V, seed=1, dtype=dtype)
    hidden = random(1, D, seed=2, dtype=dtype)
    for count, used_bias in itertools.product((3, 31, 100), (None, bias)):
        shortlist = forms_of(some_ids(count))[form]
        logits = DynamicLMHead(weight, used_bias, *finish).scores(hidden, shortlist, PackedRows())
        assert logits.shape == (1, shortlist.width) and logits.dtype == torch.float32
        expected = truth(hidden, weight, used_bias, shortlist.scored_slots, *finish)
        occupied = shortlist.scored_occupied
        if occupied is not None:
            assert (logits[:, ~occupied] == -torch.inf).all()
            logits, expected = logits[:, occupied], expected[:, occupied]
        torch.testing.assert_close(logits, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_models_own_logits(family):
    model = tiny(family)
    head = DynamicLMHead.from_model(model)
    text = some_ids(9).unsqueeze(0)
    with torch.no_grad():
        expected = model(text).logits[0, -1:].float()
        hidden = model.get_decoder()(text)[0][0, -1:]
        for shortlist in forms_of(some_ids(40)).values():
            logits = head.scores(hidden, shortlist, PackedRows())
            kept = logits > -torch.inf
            ids = shortlist.scored_slots
            torch.testing.assert_close(logits[kept], expected[:, ids][kept], rtol=1e-5, atol=1e-4)


def test_the_heads_weight_is_neither_copied_nor_written_to():
    model = tiny()
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    head = DynamicLMHead.from_model(model)
    assert head.weight.data_ptr() == weight.data_ptr() and not head.weight.requires_grad
    rows = PackedRows()
    for form in forms_of(some_ids(20)).values():
        head.scores(random(1, 32), form, rows)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("spoil", ["removed", "of another kind", "not in memory"])
def test_models_without_a_projection_are_refused(spoil):
    model = tiny()
    if spoil == "removed":
        model.lm_head = torch.nn.Identity()
    elif spoil == "of another kind":
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(301, 32, dtype=torch.int8), requires_grad=False)
    else:
        model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match="no output projection from hidden states to a vocabulary in memory"):
        DynamicLMHead.from_model(model)


class Int8Linear(torch.nn.Linear):
    """A projection whose weight is held in 8 bits, as quantisation packages hold it."""

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        rounded = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight, self.bias = torch.nn.Parameter(rounded, requires_grad=False), linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight.to(hidden) * self.scale, self.bias)


@pytest.mark.parametrize("quantise", [Int8Linear, "by torch"])
@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_projections_are_asked_what_they_do(quantise, family):
    """Their weights, and biases, are the rows of a matrix as any other's; in either role."""
    model, target = tiny(family), tiny(family)
    if quantise == "by torch":
        of_one = torch.nn.Sequential(model.lm_head)
        model.lm_head = torch.ao.quantization.quantize_dynamic(of_one, dtype=torch.qint8)[0]
    else:
        model.lm_head = quantise(model.lm_head)
    head = DynamicLMHead.from_model(model)
    hidden = random(3, 32)
    actual, expected = head.scores(hidden, Shortlist(torch.arange(301), 0), PackedRows()), model.lm_head(hidden)
    assert (actual - expected).abs().max() <= 0.03 * expected.abs().max()
    assistant = DynSpecAssistant(model, "hybrid", target=target)
    assert_same(target, assistant, some_ids(9)[None], max_new_tokens=12)
    assert assistant.stats.accepted > 6
    # torch's scales all rows of a batch alike, so that what a target says depends on what is read beside it.
    if quantise != "by torch":
        assert_same(model, DynSpecAssistant(target, "hybrid", target=model), some_ids(9)[None], max_new_tokens=12)


# Packed rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_updated_one_by_one_equal_rows_packed_anew(dtype, with_bias, poisoned_memory):
    generator = torch.Generator().manual_seed(5)
    weight = random(V, D, dtype=dtype)
    bias = random(V, seed=1, dtype=dtype) if with_bias else None
    head, rows = DynamicLMHead(weight, bias), PackedRows()
    slots, version, skipped = some_ids(53), 0, 0
    for step in range(60):
        shortlist = Shortlist(slots, version, replaced=replaced if step else None)  # noqa: F821
        hidden = random(1, D, seed=step, dtype=dtype)
        if step % 7 == 3:
            skipped += 1  # a version that was never scored: its changes must not be lost
        else:
            actual = head.scores(hidden, shortlist, rows)
            assert torch.equal(actual, head.scores(hidden, Shortlist(slots, 0), PackedRows()))
        changed = int(torch.randint(0, 9, (), generator=generator))
        replaced = torch.randint(0, 53, (changed,), generator=generator)  # with repeats
        slots = slots.clone()
        slots[replaced] = torch.randint(0, V, (changed,), generator=generator)
        version += 1
    assert skipped > 5


def test_rows_change_only_where_the_shortlist_says(poisoned_memory):
    """Proof that updates are made row by row: a slot that changed unsaid keeps its old row."""
    head, rows = DynamicLMHead(random(V, D)), PackedRows()
    hidden, slots = random(1, D, seed=1), some_ids(10)
    first = head.scores(hidden, Shortlist(slots, 0), rows)
    changed = slots.clone()
    changed[2], changed[7] = some_ids(V)[150], some_ids(V)[151]
    second = head.scores(hidden, Shortlist(changed, 1, replaced=torch.tensor([2])), rows)
    expected = truth(hidden, head.weight, None, changed)
    expected[:, 7] = first[:, 7]
    torch.testing.assert_close(second, expected, **TOLERANCE[torch.float32])
    # The same version is not looked at again.
    assert torch.equal(head.scores(hidden, Shortlist(slots, 1), rows), second)


def test_rows_follow_shortlists_of_other_lengths(poisoned_memory):
    head, rows = DynamicLMHead(random(V, D), random(V, seed=1)), PackedRows()
    hidden = random(2, D, seed=2)
    for version, count in enumerate((5, 70, 1, 33, 70, 69)):
        shortlist = Shortlist(some_ids(count, seed=version), version, replaced=torch.tensor([0]))
        expected = truth(hidden, head.weight, head.bias, shortlist.slots)
        torch.testing.assert_close(head.scores(hidden, shortlist, rows), expected, **TOLERANCE[torch.float32])


def test_widening_puts_every_logit_at_its_id():
    slots = torch.tensor([5, 9, 2, 5, 0])
    occupied = torch.tensor([False, True, True, True, False])
    logits = torch.tensor([1.0, 2.0, -3.0, 4.0, 5.0]).masked_fill(~occupied, -torch.inf)
    wide = torch.full((11,), -torch.inf)
    widen(logits, Shortlist(slots, 0, occupied=occupied), wide)
    expected = torch.full((11,), -torch.inf)
    expected[9], expected[2], expected[5] = 2.0, -3.0, 4.0
    assert torch.equal(wide, expected)


# Kernels -------------------------------------------------------------------------------------------------------------

# Rows of hidden states, rows of the weight, dimension, rows scored.
ODD_SIZES = [
    (1, 211, 37, 53),
    (1, 7, 3, 1),
    (3, 211, 37, 53),
    (5, 1031, 129, 257),
    (1, 1031, 129, 1030),
    (2, 64, 64, 7),
]


def operands(sizes: tuple[int, ...], dtype: torch.dtype, with_bias: bool) -> tuple:
    """Hidden states, a weight, ids of rows, and a bias."""
    m, rows, d, n = sizes
    bias = random(rows, seed=2, dtype=dtype) if with_bias else None
    return random(m, d, dtype=dtype), random(rows, d, seed=1, dtype=dtype), some_ids(n, limit=rows), bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", ODD_SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_reference_kernels(dtype, sizes, with_bias, poisoned_memory):
    hidden, weight, ids, bias = operands(sizes, dtype, with_bias)
    expected = truth(hidden, weight, bias, ids)
    scattered = reference.scattered_scores(hidden, weight, ids, bias)
    packed = packed_scores(hidden, weight[ids], None if bias is None else bias[ids])
    for actual in (scattered, packed):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, **TOLERANCE[dtype])


@pytest.fixture
def kernel_calls(compiled_kernels, monkeypatch) -> list[tuple]:
    """The arguments of each call of a compiled kernel."""
    calls = []

    def recording(kernel):
        return lambda *arguments: (calls.append(arguments), kernel(*arguments))[1]

    kernels = {dtype: recording(kernel) for dtype, kernel in compiled_kernels.items()}
    monkeypatch.setattr(cpu, "_kernels", lambda: kernels)
    return calls


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_the_compiled_kernel_equals_its_plain_twin_and_is_what_ran(dtype, kernel_calls, poisoned_memory, monkeypatch):
    assert scattered_scores_for(torch.device("cpu")) is cpu.scattered_scores
    assert scattered_scores_for(torch.device("meta")) is reference.scattered_scores
    plain = reference.scattered_scores
    monkeypatch.setattr(reference, "scattered_scores", must_not_run)
    for sizes, with_bias in itertools.product(ODD_SIZES, (False, True)):
        hidden, weight, ids, bias = operands(sizes, dtype, with_bias)
        weight[torch.ones(len(weight), dtype=torch.bool).index_fill_(0, ids, False)] = torch.nan
        actual = cpu.scattered_scores(hidden, weight, ids, bias)
        assert actual.dtype == torch.float32 and actual.shape == (len(hidden), len(ids))
        # Sums and results in fp32 are closer to the truth than the plain twin, which rounds 16-bit results.
        torch.testing.assert_close(actual, truth(hidden, weight, bias, ids), **TOLERANCE[torch.float32])
        own = plain(hidden, weight, ids, bias).float()
        torch.testing.assert_close(actual, own, **TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]))
    assert len(kernel_calls) == 2 * len(ODD_SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scattered_rows_that_no_kernel_reads_go_to_the_plain_twin(dtype, kernel_calls):
    hidden, weight, ids = random(2, D, dtype=dtype), random(D, V, seed=1, dtype=dtype).T, some_ids(40)
    weight = weight.contiguous() if dtype == torch.float64 else weight
    actual = cpu.scattered_scores(hidden, weight, ids, None)
    assert torch.equal(actual, reference.scattered_scores(hidden, weight, ids, None).float()) and not kernel_calls


def test_scattered_rows_beyond_the_weight_are_refused(compiled_kernels):
    with pytest.raises(IndexError, match=f"block {V} is out of range"):
        cpu.scattered_scores(random(2, D), random(V, D), torch.tensor([0, V]), None)


KERNELS_IN_A_PROCESS = """
import sys, torch
from hf_dynspec.kernels import cpu
hidden, weight, ids = torch.randn(2, 8), torch.randn(60, 8), torch.tensor([3, 59, 0])
for _ in range(3):
    torch.testing.assert_close(cpu.scattered_scores(hidden, weight, ids, None), hidden @ weight[ids].T)
assert bool(cpu._kernels()) == (sys.argv[1] == "compiled")
"""


def lines_said(expected: str, **environment: str) -> list[str]:
    """What a process of its own says that uses the kernels; torch reads the compiler's name when it is imported."""
    command = [sys.executable, "-W", "default", "-c", KERNELS_IN_A_PROCESS, expected]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return (run.stdout + run.stderr).splitlines()


@pytest.mark.parametrize("environment", [{"CXX": "false"}, {"CXX": "/nowhere/g++"}, {"PATH": "/nowhere"}])
def test_without_a_compiler_that_works_the_plain_twin_runs_and_one_line_says_so(environment, tmp_path):
    (line,) = lines_said("plain", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **environment)
    assert "computed by plain torch" in line and "install g++, or set CXX" in line


def test_a_cache_that_cannot_be_written_is_said_to_be_the_reason(tmp_path):
    with largest_file(1000):
        (line,) = lines_said("plain", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "computed by plain torch" in line and "name another folder by TORCHINDUCTOR_CACHE_DIR" in line


@pytest.mark.process
def test_compiling_is_said_once_with_its_time(compiled_kernels, tmp_path):
    (line,) = lines_said("compiled", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert re.fullmatch(r"compiled the CPU kernels, once on this computer: \d+ s", line)
    assert lines_said("compiled", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) == []


def test_replace_rows(poisoned_memory):
    table = random(V, D)
    packed = torch.empty(20, D)
    slots = torch.tensor([3, 19, 3, 0])
    ids = torch.tensor([7, 200, 7, 9])
    replace_rows(packed, slots, table, ids)
    assert torch.equal(packed[slots], table[ids])
    assert packed[[1, 2, *range(4, 19)]].isnan().all()


@pytest.fixture
def compiled_top_k(compiled_kernels, monkeypatch):
    """torch's own choice must not run."""
    for name in ("top_k_ids", "argmax_rows"):
        monkeypatch.setattr(reference, name, must_not_run)
    monkeypatch.setattr(cpu_top_k, "_FEWEST_NUMBERS_OF_ARGMAX", 0)


def leading(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The columns of the largest, of equal ones the leftmost first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


# From 16,384 columns on the kernel estimates from a sample how high the largest lie.
@pytest.mark.parametrize("columns", [2048, 2049, 5000, 16383, 16384, 16449, 40_001])
@pytest.mark.parametrize("m", [1, 3])
def test_top_k_ids(columns, m, compiled_top_k, poisoned_memory):
    generator = torch.Generator().manual_seed(columns)
    for k in (1, 2, 17, 50, 600, 2048):
        scores = torch.randn(m, columns, generator=generator)
        rising = torch.arange(m * columns).view(m, columns).float()
        two = torch.full_like(scores, -torch.inf)
        two[:, 3], two[:, columns // 2] = 2.0, 1.0
        for kind in (scores, (2 * scores).round(), torch.zeros_like(scores), rising, -rising, two):
            assert torch.equal(top_k_ids(kind, k), leading(kind, k))
            assert torch.equal(argmax_rows(kind), kind.argmax(-1))


def test_top_k_ids_of_rows_that_lie_apart_and_of_16_bits(compiled_top_k):
    wide = torch.randn(6, 20_000, generator=torch.Generator().manual_seed(1))
    for scores in (wide[::2, 11:19_013], wide[:, 1::2], wide.bfloat16(), wide.half()):
        assert torch.equal(top_k_ids(scores, 50), leading(scores, 50))


def test_what_is_no_number_is_the_largest_as_it_is_to_torch(compiled_top_k):
    scores = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(1))
    scores[0, [7, 9]] = torch.nan
    scores[0, 3], scores[1, 5], scores[1, 6] = torch.inf, -torch.inf, torch.inf
    assert argmax_rows(scores).tolist() == [7, 6]
    assert top_k_ids(scores, 3)[0].tolist() == [7, 9, 3] and top_k_ids(scores, 20_000)[1, [0, -1]].tolist() == [6, 5]


@pytest.mark.parametrize("scores", [torch.randn(2, 2047), torch.randn(2, 3000).double(), torch.randn(0, 3000)])
def test_other_scores_are_chosen_from_by_torch(scores):
    assert torch.equal(top_k_ids(scores, 9), scores.topk(9).indices)
    assert torch.equal(argmax_rows(scores), scores.argmax(-1))


def test_top_tokens_are_chosen_by_device():
    assert top_k_ids_for(torch.device("cpu")) is cpu_top_k.top_k_ids
    assert top_k_ids_for(torch.device("meta")) is reference.top_k_ids
    assert argmax_rows_for(torch.device("cpu")) is cpu_top_k.argmax_rows
    assert argmax_rows_for(torch.device("meta")) is reference.argmax_rows


def test_top_k_ids_among_forbidden_tokens():
    """Rows in which processors left few tokens: those come first, and no id comes twice."""
    scores = torch.full((2, 1000), -torch.inf)
    scores[0, 999], scores[0, 3], scores[1, 512] = 1.0, 2.0, 0.5
    top = top_k_ids(scores, 5)
    assert top[0, :2].tolist() == [3, 999] and top[1, 0] == 512
    assert all(row.unique().numel() == 5 for row in top)


# The target's projection ---------------------------------------------------------------------------------------------

DENSE_SIZES = [(1031, 129), (257, 64), (7, 3)]


@pytest.fixture
def small_weights_are_compiled(compiled_kernels, monkeypatch):
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", 1)


@pytest.mark.parametrize("sizes", DENSE_SIZES)
def test_the_compiled_dense_kernel_equals_its_plain_twin_and_is_what_ran(
    sizes, small_weights_are_compiled, kernel_calls, poisoned_memory, monkeypatch
):
    """For each number of queries that has code of its own, for several groups of them, and for a tree's."""
    weight, close = random(*sizes, seed=1), TOLERANCE[torch.float32]
    assert cpu.has_dense_kernel(weight)
    plain = reference.packed_scores
    monkeypatch.setattr(reference, "packed_scores", must_not_run)
    numbers = (*range(1, 18), 61)
    for m in numbers:
        hidden = random(m, sizes[1], seed=m)
        before, out = hidden.clone(), torch.full((m, sizes[0]), torch.nan)
        actual = cpu.dense_scores(hidden, weight)
        assert actual.shape == (m, sizes[0]) and actual.dtype == torch.float32
        torch.testing.assert_close(actual, truth(hidden, weight, None, torch.arange(sizes[0])), **close)
        torch.testing.assert_close(actual, plain(hidden, weight, None), **close)
        assert cpu.dense_scores(hidden, weight, out) is out and torch.equal(out, actual)
        assert torch.equal(hidden, before)
    # A slice of a larger tensor, as the last rows of a forward are.
    part = random(4, 2 * sizes[1], seed=3)[1:, ::2]
    torch.testing.assert_close(cpu.dense_scores(part, weight), plain(part, weight, None), **close)
    assert len(kernel_calls) == 2 * len(numbers) + 1


def test_rows_are_fetched_ahead_where_they_are_many(kernel_calls):
    """Just under and over 512 KiB of rows, and over 4 MiB, with rows that do and do not fill whole cache lines."""
    for d, numbers in itertools.product((33, 64, 272, 1040), (2**17 - 1, 2**17 + 2**14, 2**20 + 2**16)):
        weight = random(numbers // d, d, seed=1)
        for m in (1, 2, 4, 7, 19):
            hidden = random(m, d, seed=m)
            actual = cpu.scattered_scores(hidden, weight, torch.arange(weight.shape[0]), None)
            expected = (hidden.double() @ weight.double().T).float()
            torch.testing.assert_close(actual, expected, rtol=0, atol=2**-22 * d)
    assert len(kernel_calls) == 60


@pytest.mark.parametrize(
    "out", [torch.empty(2, 211), torch.empty(3, 211, dtype=torch.float64), torch.empty(211, 3).T, torch.empty(3, 210)]
)
def test_a_result_that_does_not_fit_is_refused(out, small_weights_are_compiled):
    with pytest.raises(ValueError, match=r"out .* must be contiguous and float32 \[3, 211\] on cpu"):
        cpu.dense_scores(random(3, 37), random(211, 37), out)


@pytest.fixture
def small_heads_are_compiled(compiled_kernels, monkeypatch):
    monkeypatch.setattr(cpu, "FEWEST_HEAD_ELEMENTS", 1)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_compiled_kernel_scores_packed_rows_of_few_hidden_states(
    dtype, with_bias, small_heads_are_compiled, kernel_calls, poisoned_memory, monkeypatch
):
    """Packed rows and the leading ones; of more hidden states the plain twin does, as it takes less time."""
    weight, bias = random(V, D, dtype=dtype), random(V, seed=1, dtype=dtype) if with_bias else None
    head, most = DynamicLMHead(weight, bias), most_queries(dtype)
    plain, plain_calls = reference.packed_scores, []
    monkeypatch.setattr(reference, "packed_scores", lambda *some: (plain_calls.append(some), plain(*some))[1])
    tolerance = TOLERANCE[torch.float32 if dtype == torch.float32 else torch.bfloat16]
    shortlists = [forms_of(some_ids(40))[form] for form in ("packed", "prefix, in part")]
    for m in (1, 2, most, most + 1):
        hidden = random(m, D, seed=m, dtype=dtype)
        for shortlist in shortlists:
            actual = head.scores(hidden, shortlist, PackedRows())
            expected = truth(hidden, weight, bias, shortlist.scored_slots)
            torch.testing.assert_close(actual, expected, **tolerance)
    assert (len(kernel_calls), len(plain_calls)) == (3 * len(shortlists), len(shortlists))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_copies_of_rows_are_of_16_bits_where_that_loses_nothing(
    dtype, with_bias, small_heads_are_compiled, kernel_calls, poisoned_memory, monkeypatch
):
    """A head that was loaded from 16 bits to be computed in fp32: the same scores from half the memory, whatever the
    number of hidden states. By the processor, their last bits may differ."""
    d = 64
    stored, stored_bias = random(V, d, dtype=dtype), random(V, seed=1, dtype=dtype) if with_bias else None
    weight, bias = stored.float(), None if stored_bias is None else stored_bias.float()
    head, rows = DynamicLMHead(weight, bias), PackedRows()
    assert (head.copy_dtype, DynamicLMHead(stored, stored_bias).copy_dtype) == (dtype, dtype)
    whole = Shortlist(torch.arange(V), 0, is_prefix=True)
    changed = some_ids(41)
    assert_same = functools.partial(torch.testing.assert_close, **TOLERANCE[torch.float32])
    for m in (1, 7, 40):
        hidden = random(m, d, seed=m)
        expected = cpu.scattered_scores(hidden, weight, torch.arange(V), bias)
        assert_same(head.scores(hidden, whole, rows), expected)
        assert_same(head.scores(hidden, replace(whole, size=m + 2), rows), expected[:, : m + 2])
        for form in ("packed", "packed, in part"):
            shortlist = forms_of(some_ids(40))[form]
            assert_same(head.scores(hidden, shortlist, PackedRows()), expected[:, shortlist.scored_slots])
        # Packed anew, and then row by row.
        slots = torch.cat([some_ids(40), changed[-1:]])
        assert_same(head.scores(hidden, Shortlist(slots, 2 * m), rows), expected[:, slots])
        slots = torch.cat([changed[:3], slots[3:]])
        shortlist = Shortlist(slots, 2 * m + 1, replaced=torch.arange(3))
        assert_same(head.scores(hidden, shortlist, rows), expected[:, slots])
    assert rows._weight.dtype == dtype and head.weight.dtype == torch.float32
    # A learner asks for gradients, which the kernel has none of.
    hidden = random(2, d).requires_grad_()
    head.scores(hidden, whole, rows).sum().backward()
    torch.testing.assert_close(hidden.grad, weight.sum(0).expand(2, d), **TOLERANCE[torch.float32])


def test_one_number_that_16_bits_do_not_hold_keeps_all_copies_in_32(small_heads_are_compiled, monkeypatch):
    monkeypatch.setattr(cpu, "_COMPARED_ELEMENTS", 5 * D)
    weight, bias = random(V, D, dtype=torch.bfloat16).float(), random(V, seed=1, dtype=torch.bfloat16).float()
    assert DynamicLMHead(weight, bias).copy_dtype == torch.bfloat16
    whole, hidden = Shortlist(torch.arange(V), 0, is_prefix=True), random(1, D)
    for spoilt in (weight, bias):
        kept = spoilt[-1].clone()
        spoilt[-1] += 2**-20
        head, expected = DynamicLMHead(weight, bias), truth(hidden, weight, bias, whole.slots)
        assert head.copy_dtype == torch.float32
        torch.testing.assert_close(head.scores(hidden, whole, PackedRows()), expected, **TOLERANCE[torch.float32])
        assert head._leading is None
        spoilt[-1] = kept
    # What fp16 cannot hold though it is as short, and what is no number.
    numbers = {2.0**20: torch.bfloat16, 1.0 + 2**-10: torch.float16, torch.nan: torch.float32}
    for number, dtype in numbers.items():
        assert DynamicLMHead(torch.full((V, D), number)).copy_dtype == dtype


def test_where_nothing_is_compiled_copies_are_of_the_heads_dtype(monkeypatch):
    weight = random(V, D, dtype=torch.bfloat16).float()
    assert weight.numel() < cpu.FEWEST_HEAD_ELEMENTS and DynamicLMHead(weight).copy_dtype == torch.float32
    monkeypatch.setattr(cpu, "FEWEST_HEAD_ELEMENTS", 1)
    assert DynamicLMHead(weight.double()).copy_dtype == torch.float64
    assert DynamicLMHead(weight.to("meta")).copy_dtype == torch.float32
    monkeypatch.setattr(cpu, "_kernels", dict)
    head, hidden, whole = DynamicLMHead(weight), random(1, D), Shortlist(torch.arange(V), 0, is_prefix=True)
    assert head.copy_dtype == torch.float32
    assert torch.equal(head.scores(hidden, whole, PackedRows()), reference.packed_scores(hidden, weight, None))


def test_small_weights_go_to_the_plain_twin(kernel_calls):
    hidden, weight = random(3, 31), random(269, 31, seed=1)
    assert torch.equal(cpu.dense_scores(hidden, weight), reference.packed_scores(hidden, weight, None))
    assert not kernel_calls


def test_what_has_no_compiled_dense_kernel(small_weights_are_compiled, monkeypatch):
    weight = random(211, 37)
    assert cpu.has_dense_kernel(weight)
    for other in (weight.bfloat16(), weight.double(), weight.T, weight.to("meta")):
        assert not cpu.has_dense_kernel(other)
    monkeypatch.setattr(cpu, "FEWEST_COMPILED_ELEMENTS", weight.numel() + 1)
    assert not cpu.has_dense_kernel(weight)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "granite"])
def test_a_target_is_taken_apart_where_nobody_watches(family, small_weights_are_compiled, monkeypatch):
    """Decoder and projection run one after the other, with the scale, cap and bias of the family; and the model's own
    forward runs where it, or its projection, is hooked, replaced or given another weight. All say the same."""
    drafter = tiny(family, seed=1)

    def counting(calls: list, call):
        return lambda *args, **kwargs: (calls.append(1), call(*args, **kwargs))[1]

    def outputs(change=lambda target: None) -> tuple[torch.Tensor, int, int]:
        """The output of a changed target with an assistant and without, how often its own forward and how often the
        fast product ran."""
        target = tiny(family)
        assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=2)
        kept, forwards, calls = change(target), [], []
        with monkeypatch.context() as patch:
            patch.setattr(DynamicLMHead, "all_scores", counting(calls, DynamicLMHead.all_scores))
            patch.setattr(type(target), "forward", counting(forwards, type(target).forward))
            arguments = {"max_new_tokens": 8, "eos_token_id": 300}
            # A patched forward is one more change: what it says is compared in the first call.
            generate(target, assistant, some_ids(9)[None], **arguments)
            forwards.clear()
            calls.clear()
            output = generate(target, assistant, some_ids(9)[None], **arguments)
            counts = len(forwards), len(calls)
            assert torch.equal(output, generate(target, None, some_ids(9)[None], **arguments))
        del kept
        return output, *counts

    def replace_weight(target):
        projection = target.get_output_embeddings()
        projection.weight = torch.nn.Parameter(projection.weight.detach().clone())

    class Louder(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2.0

    def replace_projection(target):
        projection = target.get_output_embeddings()
        louder = Louder(*projection.weight.T.shape, bias=projection.bias is not None)
        louder.load_state_dict(projection.state_dict())
        target.set_output_embeddings(louder.eval())

    def add_bias(target):
        target.get_output_embeddings().bias = torch.nn.Parameter(random(301, seed=9) * 30)

    plain, own, fast = outputs()
    assert own == 0 and fast > 1, "the fast product did not run"
    _, own, fast = outputs(add_bias)
    assert fast > 1, "the fast product did not follow the bias"
    output, _, fast = outputs(replace_weight)
    assert torch.equal(output, plain) and fast > 1, "the fast product did not follow the weight"
    changes = {
        "hook on the model": lambda target: target.register_forward_hook(lambda *args: None),
        "hook before the model": lambda target: target.register_forward_pre_hook(lambda *args: None),
        "hook on the projection": lambda target: target.get_output_embeddings().register_forward_hook(lambda *_: None),
        "another projection": replace_projection,
        "a forward of its own": lambda target: setattr(target, "forward", target.forward),
    }
    for name, change in changes.items():
        output, own, fast = outputs(change)
        assert torch.equal(output, plain) and fast == 0, name
        assert own > 1 or name == "a forward of its own", name
    # What a hook changes is heard, as in plain generation.
    shift = random(301, seed=8) * 30
    hooked, _, fast = outputs(
        lambda target: target.get_output_embeddings().register_forward_hook(lambda _, __, out: out + shift)
    )
    assert fast == 0 and not torch.equal(hooked, plain)


def test_a_model_with_more_before_its_decoder_is_not_taken_apart(small_weights_are_compiled, monkeypatch):
    """As models of images and text have: their decoder alone would not see the images."""
    target = tiny("llama")
    assert TargetForward(target)._head.fast(target) is not None
    monkeypatch.setattr(type(target), "get_decoder", lambda self: self.model.layers[0])
    assert TargetForward(target)._head.fast(target) is None
