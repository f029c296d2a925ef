"""The small operations of layers are in Triton what they are in plain torch. See `fast_kernels`."""

import pytest
import torch
from fast_kernels import DEVICE, INTERPRETED, interpret, needs_triton, runs_triton

from hf_dynspec.kernels import norm_from_one, norm_from_one_for, rotated, rotation_for

# Texts, query heads, key heads, rows, numbers of a head, and how many of them are rotated.
SHAPES = {
    "one row": (1, 4, 2, 1, 16, 16),
    "a chain": (2, 6, 2, 6, 64, 64),
    "odd numbers": (3, 5, 1, 7, 40, 24),
    "keys alone": (2, 0, 3, 4, 32, 32),
    "a part of each head": (1, 3, 3, 5, 80, 20),
}
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def problem(shape: str, dtype: torch.dtype, common_tables: bool) -> list[torch.Tensor]:
    """Queries, keys and tables. Those of a layer are views of its products, whose rows lie one after another."""
    texts, heads, key_heads, rows, d, turned = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    tables = 1 if common_tables else texts
    made = [
        torch.randn(size, generator=generator).to(dtype).to(DEVICE)
        for size in ((texts, rows, heads + 2 * key_heads, d), *[(tables, rows, turned)] * 2)
    ]
    product = made[0].transpose(1, 2)
    return [product[:, :heads], product[:, heads : heads + key_heads], *made[1:]]


CASES = [(shape, dtype, common) for shape in SHAPES for dtype in TOLERANCES for common in (False, True)]


@runs_triton
@pytest.mark.parametrize(("shape", "dtype", "common"), CASES, ids=str)
def test_triton_rotates(shape, dtype, common, poisoned_memory):
    from hf_dynspec.kernels import triton_layers

    arguments = problem(shape, dtype, common)
    for actual, expected in zip(triton_layers.rotated(*arguments), rotated(*arguments), strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@runs_triton
def test_triton_writes_queries_as_attention_reads_them_and_keys_as_memory_holds_them():
    from hf_dynspec.kernels import triton_layers

    query, key = triton_layers.rotated(*problem("a chain", torch.float32, False))
    assert query.is_contiguous() and key.transpose(1, 2).is_contiguous()


# Shapes of states; the last of them are transposed, as queries are before they are rotated.
STATES = {"a row": (1, 64), "hidden states": (2, 3, 1200), "odd numbers": (5, 40), "queries": (2, 4, 3, 24)}
NORMS = [(shape, dtype) for shape in STATES for dtype in TOLERANCES]


@runs_triton
@pytest.mark.parametrize(("shape", "dtype"), NORMS, ids=str)
def test_triton_normalises(shape, dtype, poisoned_memory):
    from hf_dynspec.kernels import triton_layers

    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(STATES[shape], generator=generator) * 20).to(dtype).to(DEVICE)
    states = states.transpose(1, 2) if shape == "queries" else states
    weight = torch.randn(states.shape[-1], generator=generator).to(dtype).to(DEVICE)
    for scaled in (states, states * 1e-4):
        actual = triton_layers.norm_from_one(scaled, weight, 1e-6)
        assert actual.dtype == dtype and actual.is_contiguous()
        tolerance = TOLERANCES[dtype] if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(actual, norm_from_one(scaled, weight, 1e-6), rtol=tolerance, atol=tolerance)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs the interpreter")
@pytest.mark.process
def test_the_interpreter_runs_the_triton_kernels():
    interpret(__file__, passed=len(CASES) + len(NORMS) + 1)


@needs_triton
def test_the_device_says_which_one_runs():
    from hf_dynspec.kernels import triton_layers

    assert rotation_for(torch.device("cuda")).kernel is triton_layers.rotated
    assert norm_from_one_for(torch.device("cuda")).kernel is triton_layers.norm_from_one
    assert rotation_for(torch.device("cpu")) is norm_from_one_for(torch.device("cpu")) is None
