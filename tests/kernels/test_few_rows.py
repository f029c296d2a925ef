"""Layers of 16 bits on CPUs: a few rows are multiplied by the kernel of heads, within assisted generation alone."""

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_dynspec
from hf_dynspec import DynSpecAssistant
from hf_dynspec.kernels import cpu_few_rows, few_rows_for, most_queries

MULTIPLIED = "packed_scores"


class Holder(nn.Linear):
    """Has what is asked of a model: where its weights are, and their dtype."""

    device = property(lambda self: self.weight.device)
    dtype = property(lambda self: self.weight.dtype)


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of the rows that the kernel is given."""
    seen, real = [], cpu_few_rows.packed_scores

    def noted(hidden, *others):
        seen.append(tuple(hidden.shape))
        return real(hidden, *others)

    monkeypatch.setattr(cpu_few_rows, MULTIPLIED, noted)
    return seen


def layer(dtype=torch.bfloat16, bias=False, columns=576, rows=257):
    torch.manual_seed(0)
    return Holder(columns, rows, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (1, 6), (2, 3), (5,)])
def test_products_are_rounded_once_from_sums_in_fp32(shapes, dtype, bias, shape):
    one = layer(dtype, bias)
    hidden = torch.randn(*shape, 576).to(dtype)
    with torch.no_grad(), few_rows_for(one):
        product = one(hidden)
    assert shapes == [(hidden.shape[:-1].numel(), 576)]
    exact = nn.functional.linear(hidden.double(), one.weight.double(), one.bias.double() if bias else None)
    assert product.dtype == dtype and product.shape == exact.shape
    torch.testing.assert_close(product, exact.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 2**-9, atol=1e-3)
    # A part of something else.
    parts = torch.randn(*shape, 2, 576).to(dtype)[..., 0, :]
    with torch.no_grad(), few_rows_for(one):
        product = one(parts)
        assert torch.equal(product, one(parts.contiguous()))


def test_all_else_is_left_to_torch(shapes):
    one, hidden = layer(), torch.randn(4, 576).bfloat16()
    most = most_queries(torch.bfloat16)
    with torch.no_grad():
        one(hidden)
        with few_rows_for(one):
            one(hidden[:1])
            one(hidden[:0])
            one(torch.randn(most + 1, 576).bfloat16())
            layer(rows=64)(hidden)
            # Not contiguous.
            nn.functional.linear(hidden, layer(columns=257, rows=576).weight.t())
            with torch.autocast("cpu", torch.float16):
                assert one(hidden).dtype == torch.float16
            with pytest.raises(RuntimeError, match="dtype"):
                one(hidden.float())
            other = threading.Thread(target=one, args=(hidden,))
            other.start()
            other.join()
        with few_rows_for(layer(torch.float32)):
            one(hidden)
    weight = layer().requires_grad_()
    with few_rows_for(one):
        weight(hidden).sum().backward()
    assert weight.weight.grad is not None and shapes == []


def large(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("texts", [1, 2])
def test_assisted_generation_has_it_and_plain_generation_has_not(shapes, texts):
    target = large()
    ids = torch.randint(3, 1000, (texts, 9))
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **arguments)
    assert shapes == []
    assistant = DynSpecAssistant(large(), "full", target=target, num_assistant_tokens=2)
    output = target.generate(ids, **arguments, assistant_model=assistant)
    # A verification of three rows a text.
    assert (3 * texts, 256) in shapes
    # The target drafts for itself, and rounding may decide otherwise only at near ties.
    assert torch.equal(output[:, :20], plain[:, :20]) and assistant.stats.accepted > 0
    shapes.clear()
    target.generate(ids, **arguments)
    with torch.no_grad():
        target(ids[:, :3])
    assert shapes == []


def test_a_compiled_module_can_be_asked():
    one, hidden = layer(), torch.randn(4, 576).bfloat16()
    compiled = torch.compile(one, backend="eager")
    with torch.no_grad():
        expected = one(hidden)
        with few_rows_for(one):
            torch.testing.assert_close(compiled(hidden), expected, rtol=2**-7, atol=1e-3)


TIMED = """
import statistics, time
import torch
from hf_dynspec.kernels import cpu_few_rows
torch.set_num_threads(1)
weights = [torch.randn(1024, 1024).bfloat16() for _ in range(8)]
rows, times = torch.randn(6, 1024).bfloat16(), {True: [], False: []}
with torch.no_grad():
    for weight in weights * 8:
        for kind in times:
            began = time.perf_counter()
            if kind:
                with cpu_few_rows._FewRows():
                    torch.nn.functional.linear(rows, weight)
            else:
                torch.nn.functional.linear(rows, weight)
            times[kind].append(time.perf_counter() - began)
print(statistics.median(times[True]) / statistics.median(times[False]))
"""


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are oneDNN's and torch's for x86")
def test_six_rows_take_less_than_half_the_time_on_a_cpu_without_units_for_16_bits():
    root = Path(hf_dynspec.__file__).parents[1]
    slow = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", TIMED], env={**os.environ, **slow}, capture_output=True, text=True, check=True
    )
    # It is about a quarter.
    assert float(done.stdout.splitlines()[-1]) < 0.5
