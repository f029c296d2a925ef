"""Texts in fixed memory go on as each of them does alone in a dynamic cache."""

import runpy
from pathlib import Path

import families
import pytest
import torch
from fast_kernels import INTERPRETED, interpret, needs_triton
from models import FAMILIES, VOCABULARY, prompt, tiny, with_clear_preferences
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_dynspec.cache_names import cache_inputs
from hf_dynspec.kernels import QueryRows, norm_from_one, rotated
from hf_dynspec.memory import fixed_decoder
from hf_dynspec.memory.fixed import FixedMemory
from hf_dynspec.memory.fixed_decoder import FixedDecoder, with_fused_norms

EXAMPLES = Path(__file__).parents[2] / "examples"
# The root's children are 1 and 2, those of 1 are 3 and 4, and 5 follows 4.
PARENTS = [-1, 0, 0, 1, 1, 4]
LENGTHS = [5, 30, 14]


def gpt_oss():
    """Attention with sinks, every other layer with a window."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}
    config = GptOssConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=512, **shape, **experts
    )
    config._attn_implementation = "eager"
    return with_clear_preferences(GptOssForCausalLM(config).eval())


def model_of(family: str):
    return gpt_oss() if family == "gpt_oss" else tiny(family)


def prefilled(model, texts: list[torch.Tensor], nodes: int, capacity: int) -> FixedMemory:
    """Fixed memory with texts `[1, n]`, each of which was read alone."""
    memory = None
    for number, text in enumerate(texts):
        cache = DynamicCache(config=model.config)
        model(input_ids=text, **cache_inputs(cache))
        memory = memory or FixedMemory.like(cache, model.config, len(texts), capacity, nodes)
        memory.begin(number, cache, text.shape[1])
    return memory


def expected(model, text: torch.Tensor) -> torch.Tensor:
    """The last hidden state after a text `[1, n]`, without any cache."""
    return model.base_model(input_ids=text, use_cache=False)[0][0, -1]


def tree_rows(lengths: torch.Tensor) -> QueryRows:
    paths: list[set[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append({node} | (paths[parent] if parent >= 0 else set()))
    within = torch.tensor([[[node in path for node in range(len(paths))] for path in paths]])
    return QueryRows(lengths, within, torch.tensor([[len(path) - 1 for path in paths]]))


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
@torch.no_grad()
def test_chains_and_trees_of_several_texts(family):
    model = model_of(family)
    decoder = FixedDecoder(model)
    texts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    memory = prefilled(model, texts, nodes=6, capacity=64)
    generator = torch.Generator().manual_seed(0)
    for round in range(4):
        is_tree = round % 2 == 1
        token_ids = torch.randint(3, VOCABULARY, (len(texts), 6), generator=generator)
        rows = tree_rows(memory.lengths) if is_tree else QueryRows.chain(memory.lengths, 6)
        hidden = decoder(token_ids, memory, rows).last_hidden_state
        # Of each text another part of the draft is kept.
        paths = [[0, 1, 4, 5], [0, 2], [0]] if is_tree else [[0, 1, 2, 3, 4, 5], [0, 1], [0, 1, 2]]
        paths = paths[round % 3 :] + paths[: round % 3]
        for text, path in enumerate(paths):
            for end in range(1, len(path) + 1):
                whole = torch.cat([texts[text], token_ids[text : text + 1, path[:end]]], dim=1)
                torch.testing.assert_close(hidden[text, path[end - 1]], expected(model, whole), rtol=1e-4, atol=1e-4)
            texts[text] = whole
        count = torch.tensor([len(path) for path in paths])
        padded = torch.tensor([path + [0] * (4 - len(path)) for path in paths]) if is_tree else None
        memory.keep(count, padded)
        assert memory.lengths.tolist() == [text.shape[1] for text in texts]
        if round == 1:
            # A larger memory, with the texts in another order.
            memory = memory.copy(torch.tensor([2, 0, 1]), 128)
            texts = [texts[2], *texts[:2]]
    assert max(memory.lengths.tolist()) > 2 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "olmo2", "qwen3_next"])
@torch.no_grad()
def test_norms_are_one_operation_with_the_same_result(family, dtype):
    own = families.model_of(family).to(dtype).base_model
    generator = torch.Generator().manual_seed(0)
    for name, weight in own.named_parameters():
        if "norm" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator))
    fused = dict(with_fused_norms(own, in_one_operation).named_modules())
    norms = {name: one for name, one in own.named_modules() if type(one).__name__.endswith("RMSNorm")}
    assert len(norms) > own.config.num_hidden_layers
    for name, norm in norms.items():
        size = norm.weight.shape[0] if hasattr(norm, "weight") else 8
        # Rows of small and of large numbers.
        states = (torch.randn(3, size, generator=generator) * torch.tensor([[1e-3], [1.0], [50.0]])).to(dtype)
        count = Counting()
        with count:
            actual = fused[name](states)
        assert actual.dtype == dtype and count.operations == 1
        torch.testing.assert_close(actual, norm(states))


def test_without_a_kernel_gemmas_norms_stay_as_they_are():
    """In 16 bits the same text comes out only if every rounding is the same."""
    own = tiny("gemma3").to(torch.bfloat16)
    assert all("forward" not in vars(one) for one in with_fused_norms(own.base_model, None).modules())


@torch.library.custom_op("tests::norm_from_one", mutates_args=())
def in_one_operation(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm_from_one(states, weight, eps)


class Counting(TorchFunctionMode):
    """Counts the operations of torch that compute something."""

    operations = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if getattr(function, "__name__", "") not in ("__get__", "size", "dim"):
            self.operations += 1
        return function(*arguments, **(keywords or {}))


class HalvedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) / 2


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * gate


@pytest.mark.parametrize("kind", [HalvedRMSNorm, GatedRMSNorm])
def test_a_norm_with_another_formula_stays_as_it_is(kind):
    (norm,) = with_fused_norms(torch.nn.Sequential(kind(8)), norm_from_one)
    assert "forward" not in vars(norm)


WITH_KERNELS = ["qwen3", "gemma3"]


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; tests/generation/test_gpu.py runs on GPUs")
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_triton_kernels_of_a_decoder(family, monkeypatch):
    from hf_dynspec.kernels import triton_attention, triton_layers

    kernels = {
        "norm_from_one_for": triton_layers.norm_from_one,
        "rotation_for": triton_layers.rotated,
        "round_attention_for": triton_attention.round_attention,
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(fixed_decoder, name, lambda device, kernel=kernel: kernel)
    test_chains_and_trees_of_several_texts(family)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs the interpreter")
@pytest.mark.process
def test_the_interpreter_runs_the_triton_kernels_of_a_decoder():
    interpret(__file__, passed=len(WITH_KERNELS))


# Their rotations turn all of a head, a part of it, and queries and keys in two calls.
ROTATED = ["llama", "qwen3", "gemma3_text", "phi", "gpt_neox", "olmo2", "glm4_moe", "gemma4_text", "qwen2_moe"]


@pytest.mark.parametrize("family", ROTATED)
@torch.no_grad()
def test_queries_and_keys_are_rotated_in_one_operation(family, monkeypatch):
    model, calls = families.model_of(family), []

    def noted(*arguments):
        calls.append([*map(torch.Tensor.size, arguments)])
        return rotated(*arguments)

    monkeypatch.setattr(fixed_decoder, "rotation_for", lambda device: noted)
    decoder = FixedDecoder(model)
    texts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    memory = prefilled(model, texts, nodes=6, capacity=64)
    nodes = prompt(18, 3).view(3, 6)
    hidden = decoder(nodes, memory, tree_rows(memory.lengths)).last_hidden_state
    for text, path in enumerate(([0, 1, 4, 5], [0, 2], [0, 1, 3])):
        whole = torch.cat([texts[text], nodes[text : text + 1, path]], dim=1)
        torch.testing.assert_close(hidden[text, path[-1]], expected(model, whole), rtol=1e-4, atol=1e-4)
    layers = model.config.num_hidden_layers
    assert len(calls) in ((2 * layers,) if family == "gemma4_text" else (layers,))
    # Neither the model nor its class knows of it.
    model(input_ids=texts[0])
    assert len(calls) in (layers, 2 * layers) and all("forward" not in vars(one) for one in model.modules())


@pytest.mark.parametrize("family", ["cohere", "glm4", "gpt_oss", "gpt2"])
@torch.no_grad()
def test_other_rotations_stay_as_they_are(family, monkeypatch):
    def never(*arguments):
        raise AssertionError

    monkeypatch.setattr(fixed_decoder, "rotation_for", lambda device: never)
    model = families.model_of(family)
    memory = prefilled(model, [prompt(5)], nodes=6, capacity=64)
    FixedDecoder(model)(prompt(6), memory, tree_rows(memory.lengths))


def test_the_example_times_both(capsys):
    example = runpy.run_path(str(EXAMPLES / "memory_times.py"))
    example["main"](target=str(EXAMPLES / "pocket/target"), context=[8, 300], rows=[1, 3], threads=None, calls=1)
    assert [line.split()[1:4:2] for line in capsys.readouterr().out.splitlines() if line.startswith("│")] == [
        ["8", "1"],
        ["8", "3"],
        ["300", "1"],
        ["300", "3"],
    ]
