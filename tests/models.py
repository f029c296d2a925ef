"""Tiny random models, tokenizers and shortlist policies that the tests share. Nothing is downloaded."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from hf_dynspec.protocol import Shortlist, VocabularyInfo
from hf_dynspec.shortlists import POLICIES, CooccurrenceGraph, ShortlistPolicy, ShortlistState
from hf_dynspec.shortlists.frequency import FrequencyShortlist
from hf_dynspec.shortlists.in_context import InContextShortlist
from hf_dynspec.shortlists.router import Router, RouterShortlist
from hf_dynspec.shortlists.screen import ScreenShortlist

VOCABULARY = 301
PAD, BOS, EOS = 0, 1, 2
SLIDING_WINDOW = 16

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_HEAD_DIM = {"head_dim": 8}
_GPT_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
_WINDOW = {"sliding_window": SLIDING_WINDOW}
_UNTIED = {"tie_word_embeddings": False}

_BOTH_LAYERS = ["sliding_attention", "full_attention"]
_GEMMA = _SHAPE | _HEAD_DIM | _WINDOW | _UNTIED | {"query_pre_attn_scalar": 8}
# The names of classes of transformers, and shapes. Families differ in attention, in normalisation, and between hidden
# states and logits.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SHAPE),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SHAPE),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SHAPE | _HEAD_DIM | {"tie_word_embeddings": True}),
    # Soft-capped logits and attention, every other layer with a sliding window.
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA | {"final_logit_softcapping": 20.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA | {"layer_types": _BOTH_LAYERS}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT_SHAPE),
    # A head with a bias.
    "gptj": ("GPTJConfig", "GPTJForCausalLM", _GPT_SHAPE | {"rotary_dim": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", _SHAPE | {"num_key_value_heads": 4}),
    # Every layer with a sliding window.
    "mistral": ("MistralConfig", "MistralForCausalLM", _SHAPE | _HEAD_DIM | _WINDOW),
    # Logits multiplied, divided.
    "cohere": ("CohereConfig", "CohereForCausalLM", _SHAPE | _UNTIED | {"logit_scale": 0.25}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _SHAPE | _HEAD_DIM | _WINDOW | _UNTIED | {"logit_scale": 0.25}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _SHAPE | {"logits_scaling": 4.0}),
}


def tiny(family: str = "llama", seed: int = 0, vocabulary: int = VOCABULARY, **changes: Any) -> PreTrainedModel:
    """A random model of a family, whose weights are large enough for clear preferences among tokens."""
    *classes, shape = FAMILIES[family]
    configuration, architecture = (getattr(transformers, name) for name in classes)
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = configuration(**{"vocab_size": vocabulary, **shape, **special, **changes})
    torch.manual_seed(seed)
    return with_clear_preferences(architecture(config).eval())


def with_clear_preferences(model: PreTrainedModel, bias: float = 0.5) -> PreTrainedModel:
    """The model with random weights by torch's default generator, large enough to prefer some tokens clearly.

    Biases have the standard deviation `bias`; in some families large ones hide the influence of the text.
    """
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                # A tied head would repeat the last token if the layers were not larger than the embedding.
                spread = 0.5 if tied else 0.2
                parameter.copy_(
                    torch.randn_like(parameter) * (spread if parameter is not embedding else 1 - tied * 0.9)
                )
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * bias)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    return model


def perturbed(model: PreTrainedModel, noise: float = 0.05, seed: int = 100) -> PreTrainedModel:
    """A drafter that often agrees with the model: a copy with noise in units of each parameter's deviation."""
    drafter = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            spread = parameter.std() if parameter.numel() > 1 else 1.0
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * spread * noise)
    return drafter


def prompt(length: int = 12, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """int64 `[1, length]` of ordinary tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, vocabulary, (1, length), generator=generator)


def word_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries, in which token `i` is the word `t<i>`."""
    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{f"t{i}": i for i in range(3, size)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def character_tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries, each of one character, so that strings span tokens."""
    letters = {chr(ord("a") + i if i < 26 else 0x400 + i): i + 3 for i in range(size - 3)}
    backend = Tokenizer(models.BPE({"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **letters}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


class ForwardCounter:
    """Counts the forwards of modules while it is open."""

    def __init__(self, *modules: torch.nn.Module):
        self._modules = modules
        self.count = 0

    def __enter__(self) -> "ForwardCounter":
        self._hooks = [module.register_forward_pre_hook(self._add) for module in self._modules]
        return self

    def _add(self, module: torch.nn.Module, args: tuple) -> None:
        self.count += 1

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()


# Processors that remember --------------------------------------------------------------------------------------------


class Counting(LogitsProcessor):
    """Favours another token in each call, whatever the text is."""

    def __init__(self):
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.texts)) % (scores.shape[1] - 2)] += 3.0
        return scores


class Tiring(LogitsProcessor):
    """Lowers the scores of tokens that were likeliest before. Writes into the scores that it is given."""

    def __init__(self):
        self.weariness: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.weariness is None:
            self.weariness = torch.zeros_like(scores)
        scores -= self.weariness
        self.weariness.scatter_add_(1, scores.argmax(-1, keepdim=True), torch.full((1, 1), 1.5))
        return scores


# Processors that remember; each is made for a target.
REMEMBERING: dict[str, Callable[[PreTrainedModel], LogitsProcessor]] = {
    "counting": lambda target: Counting(),
    "tiring": lambda target: Tiring(),
    "guidance": lambda target: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.6, target),
    "watermark": lambda target: SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[654, 400, 836],
        sampling_table_size=2**12,
        sampling_table_seed=0,
        context_history_size=64,
        device=torch.device("cpu"),
    ),
}


# Policies ------------------------------------------------------------------------------------------------------------


class RandomShortlist(ShortlistPolicy):
    """A terrible policy: other random tokens at every draft step, whatever the context is."""

    name = "random"

    def __init__(self, size: int = 20, seed: int = 0):
        self.size = size
        self.seed = seed

    def start(self, vocabulary: VocabularyInfo) -> "RandomState":
        return RandomState(self.size, self.seed, vocabulary)


class RandomState(ShortlistState):
    def __init__(self, size: int, seed: int, vocabulary: VocabularyInfo):
        self._size = size
        self._vocabulary = vocabulary
        self._generator = torch.Generator().manual_seed(seed)
        self._version = 0

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        self._version += 1
        eos = torch.tensor(self._vocabulary.eos_token_ids, dtype=torch.int64)
        ids = torch.randperm(self._vocabulary.size, generator=self._generator)
        ids = torch.cat([eos, ids[~torch.isin(ids, eos)]])[: self._size]
        return Shortlist(ids.to(self._vocabulary.device), self._version, is_transient=True)


class EosOnlyShortlist(ShortlistPolicy):
    """The most terrible policy: it only drafts the end of the text."""

    name = "eos_only"

    def start(self, vocabulary: VocabularyInfo) -> "EosOnlyState":
        return EosOnlyState(vocabulary)


class EosOnlyState(ShortlistState):
    def __init__(self, vocabulary: VocabularyInfo):
        self._shortlist = Shortlist(torch.tensor(vocabulary.eos_token_ids, device=vocabulary.device), version=0)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        return self._shortlist


def random_router(clusters: int = 12, width: int = 32, seed: int = 7, vocabulary: int = VOCABULARY) -> Router:
    """An untrained router over clusters of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    group = (torch.rand(vocabulary, generator=generator) ** 2 * clusters).long()
    group[:clusters] = torch.arange(clusters)  # none is empty
    return Router(
        clusters=group.to(torch.int32),
        input_weight=torch.randn(24, 2 * width, generator=generator) / 4,
        input_bias=torch.randn(24, generator=generator),
        output_weight=torch.randn(clusters, 24, generator=generator),
        output_bias=torch.randn(clusters, generator=generator),
    )


def fitted_budgets(clusters: int = 12) -> torch.Tensor:
    """Budgets as training fits them, with fewer clusters at later draft steps."""
    first = torch.arange(1, clusters + 1)
    return torch.stack([first, 1 + first // 2, 1 + first // 3], dim=1)


def centroid_router(clusters: int = 12, width: int = 32, seed: int = 8) -> Router:
    """Random centroids for the clusters of `random_router`."""
    centroids = torch.randn(clusters, width, generator=torch.Generator().manual_seed(seed))
    return Router(random_router(clusters, width).clusters, centroids)


def layer_router(groups: int = 12, width: int = 32, seed: int = 9, vocabulary: int = VOCABULARY) -> Router:
    """An untrained router of one layer over groups of equal size."""
    generator = torch.Generator().manual_seed(seed)
    return Router(
        torch.arange(vocabulary) * groups // vocabulary,
        output_weight=torch.randn(groups, width, generator=generator),
        output_bias=torch.randn(groups, generator=generator),
    )


def successor_graph() -> CooccurrenceGraph:
    """A graph in which two tokens follow each."""
    ids = torch.arange(VOCABULARY)
    successors = torch.stack([(ids * 7 + 3) % VOCABULARY, (ids * 5 + 11) % VOCABULARY], dim=1)
    successors[:, 1] += (successors[:, 0] == successors[:, 1]) * 1
    successors %= VOCABULARY
    probabilities = torch.tensor([0.5, 0.25]).repeat(VOCABULARY)
    return CooccurrenceGraph(torch.arange(VOCABULARY + 1) * 2, successors.flatten(), probabilities)


# Settings of policies of the table: sizes for tiny vocabularies, and required arguments.
_SMALL: dict[str, Callable[[], ShortlistPolicy]] = {
    "frequency": lambda: POLICIES["frequency"](torch.arange(VOCABULARY).flip(0), size=90),
    "in_context": lambda: POLICIES["in_context"](window=40),
    "union": lambda: POLICIES["union"](FrequencyShortlist(size=25), InContextShortlist(30, 2, 2)),
    "hybrid": lambda: POLICIES["hybrid"](core_size=40, window=30),
    "router": lambda: POLICIES["router"](random_router(), max_clusters=3),
    "retrieval": lambda: POLICIES["retrieval"](size=40, dynamic=20, likely=8, prompt_positions=4, synchronous=True),
    "screen": lambda: POLICIES["screen"](rank=4, candidates=30),
    "coral": lambda: POLICIES["coral"](layer_router(), top_groups=3),
}
_MORE: dict[str, Callable[[], ShortlistPolicy]] = {
    "frequency, position-aware": lambda: FrequencyShortlist(size=120, position_aware=True),
    "hybrid, remembering": lambda: POLICIES["hybrid"](core_size=20, window=40, memory="assistant"),
    "union, remembering": lambda: POLICIES["union"](
        FrequencyShortlist(size=25), InContextShortlist(30, 2, 2, memory="assistant")
    ),
    "in_context, call by call": lambda: InContextShortlist(window=25, memory="call"),
    "in_context, lru": lambda: InContextShortlist(window=25, eviction="lru"),
    "in_context, nothing of the target": lambda: InContextShortlist(20, prompt_top_k=0, verify_top_k=0),
    "in_context, end of the prompt": lambda: InContextShortlist(60, prompt_top_k=5, prompt_positions=3),
    "router, pinned, by mass": lambda: RouterShortlist(
        random_router(), max_clusters=8, schedule="fixed", mass=0.5, ranking=torch.arange(VOCABULARY), pinned=20
    ),
    "router, fitted, not packed": lambda: RouterShortlist(
        random_router(), max_clusters=4, packed=False, budgets=fitted_budgets()
    ),
    "retrieval, by the token, with a graph": lambda: POLICIES["retrieval"](
        size=30, graph=successor_graph(), dynamic=12, semantic="token", trigger="oov", cache="arc", synchronous=True
    ),
    "retrieval, the best of its core": lambda: POLICIES["retrieval"](
        size=90, dynamic=12, likely=8, displaceable=9, candidates=9, synchronous=True
    ),
    "union with retrieval": lambda: POLICIES["union"](
        InContextShortlist(15, eviction="lru"),
        POLICIES["retrieval"](size=30, dynamic=12, likely=8, displaceable=9, synchronous=True),
    ),
    "router by centroids": lambda: RouterShortlist(centroid_router(), max_clusters=3),
    "coral, not packed": lambda: POLICIES["coral"](layer_router(), top_groups=2, packed=False),
    "native, not packed": lambda: POLICIES["native"](top_clusters=2, packed=False),
    "union with coral": lambda: POLICIES["union"](
        InContextShortlist(15, eviction="lru"), POLICIES["coral"](layer_router(), top_groups=2)
    ),
    "screen, with a factor of its own": lambda: ScreenShortlist.fitted(
        *torch.randn(2, VOCABULARY, 32, generator=torch.Generator().manual_seed(9)), rank=5, candidates=90
    ),
    "union with a screen": lambda: POLICIES["union"](
        InContextShortlist(15, eviction="lru"), ScreenShortlist(candidates=10)
    ),
    "union with a router": lambda: POLICIES["union"](
        InContextShortlist(15, eviction="lru"), RouterShortlist(random_router(), max_clusters=2)
    ),
    "union of three": lambda: POLICIES["union"](
        InContextShortlist(15, eviction="lru"),
        FrequencyShortlist(torch.arange(200, 290), size=30, position_aware=True),
        InContextShortlist(30),
    ),
}
# Every policy of the table, a new one with its defaults, and variants of some.
POLICY_CASES: dict[str, Callable[[], ShortlistPolicy]] = {
    **{name: _SMALL.get(name, policy) for name, policy in POLICIES.items()},
    **_MORE,
}
TERRIBLE: dict[str, Callable[[], ShortlistPolicy]] = {
    "random": RandomShortlist,
    "random with the EOS alone": lambda: RandomShortlist(size=1),
    "eos_only": EosOnlyShortlist,
    "union with random": lambda: POLICIES["union"](FrequencyShortlist(size=25), RandomShortlist()),
}
