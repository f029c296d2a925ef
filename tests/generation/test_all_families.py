"""Every family of transformers in each role: the output is the target's own and drafts are the drafter's own, or the
family is refused for a stated reason."""

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import image_models
import pytest
import torch
from cases import representatives
from families import LONG_ROPE, SETTINGS, SWITCH, model_of
from models import SLIDING_WINDOW, VOCABULARY, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig, UnsupportedError
from hf_dynspec.drafters import CausalLMDrafter, Drafter, DrafterState
from hf_dynspec.drafters.base import UnrolledStep
from hf_dynspec.modeling.head import DynamicLMHead
from hf_dynspec.protocol import Needs, VocabularyInfo
from hf_dynspec.shortlists import ShortlistState
from hf_dynspec.shortlists.full import FullShortlist

ROOT = Path(__file__).parents[2]
PROMPT_LENGTH, NEW_TOKENS = 10, 34
TREE = TreeConfig(total_tokens=16, depth=3, top_k=4)
# All nodes that the drafter scores at four levels.
WHOLE_TREE = TreeConfig(total_tokens=53, depth=3, top_k=4)
# fp32 logits of these models, up to 20, by one forward and by several.
CLOSE = {"atol": 1e-3, "rtol": 1e-4}

_STATE_ELSEWHERE = {
    "deepseek_v4": "recurrent state in layers of its own",
    **dict.fromkeys(("recurrent_gemma", "rwkv"), "recurrent state in a place of its own"),
}
_RECURRENT = "bamba falcon_h1 granitemoehybrid kimi_linear mamba2 nemotron_h olmo_hybrid qwen3_5_text qwen3_5_moe_text"
_RECURRENT = (*_RECURRENT.split(), "qwen3_next", "zamba2")
# In transformers, these forget their state when they read several tokens at once.
_ONE_BY_ONE = "falcon_mamba", "jamba", "mamba"
# Patterns of the refusals' messages: of families that cannot be a target at all, …
NO_TARGET = {
    **_STATE_ELSEWHERE,
    **dict.fromkeys(_ONE_BY_ONE, "several tokens read at once than after the same tokens read one by one"),
    **{"minimax": "roll", "openai-gpt": "cache", "xlnet": "cache"},
}
# … that verify chains, but no trees, …
NO_TREE_TARGET = {
    **dict.fromkeys("bart mpt roberta roformer trocr".split(), "position|changes with the others|change each other"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "index|change each other|changes with the others"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "conv"),
    **dict.fromkeys((*_RECURRENT, *_ONE_BY_ONE), "recurrent state"),
    "bloom": "mask|position",
    "gpt_neo": "window|local",
    "llama4_text": "chunk",
}
_HEAD = "between its decoder and its logits"
# … that cannot draft, …
NO_DRAFTER = _STATE_ELSEWHERE | {
    **dict.fromkeys("bert electra modernbert-decoder roberta roformer".split(), _HEAD),
    **dict.fromkeys(("openai-gpt", "xlnet"), "cache"),
    "minimax": "roll|recurrent|cache",
}
# … and that draft chains, but no trees.
NO_TREE_DRAFTER = NO_TREE_TARGET
# No message may blame these: all tests here pass one prompt and ask for no particular cache.
BLAMELESS = "pass one prompt|leave use_cache|leave it unset"

# MPT's configuration says that no cache is used unless a call asks for one.
CALLS = {"mpt": {"use_cache": True}}


# Plain; sliding windows; no trees; recurrent; no drafter; nothing at all.
BY_DEFAULT = ("llama", "gemma3_text", "bloom", "lfm2", "mamba", "bert", "openai-gpt")
ALL = representatives("families", dict.fromkeys([*BY_DEFAULT, *SETTINGS]), keep=len(BY_DEFAULT))


@pytest.fixture(scope="module", params=ALL)
def model(request) -> PreTrainedModel:
    """A random model of each family; `family` is its name in the table. Its texts do not end early."""
    model = without_end(model_of(request.param))
    model.family = request.param
    return model


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    return model


def generate(target: PreTrainedModel, assistant: DynSpecAssistant | None, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **CALLS.get(getattr(target, "family", None), {})}
    return target.generate(prompt(PROMPT_LENGTH), assistant_model=assistant, **named | arguments)


@pytest.fixture(scope="module")
def plain(model) -> torch.Tensor:
    return generate(model, None)


def assert_names(refusal: pytest.ExceptionInfo, cause: str) -> None:
    message = str(refusal.value)
    assert re.search(cause, message), message
    assert not re.search(BLAMELESS, message), message


# A drafter that takes no part in what is tested ----------------------------------------------------------------------


class WellInformed(Drafter):
    """Knows the text, and prefers another token at every third position. So drafts are accepted and rejected with any
    target."""

    def __init__(self, text: torch.Tensor, vocabulary: int = VOCABULARY):
        self.head = DynamicLMHead(torch.eye(vocabulary))
        positions = torch.arange(text.shape[0])
        others = torch.randn(text.shape[0], vocabulary, generator=torch.Generator().manual_seed(5)) / 10
        self.scores = others.index_put((positions, text), torch.tensor(4.0))
        wrong = (text + 1) % vocabulary
        self.scores[positions, wrong] = torch.where(positions % 3 == 0, 5.0, 3.0)

    @property
    def num_embeddings(self) -> int:
        return self.head.weight.shape[0]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head.weight[token_ids]

    def unroll(self, token_ids: torch.Tensor, features: torch.Tensor | None, depth: int) -> Iterator[UnrolledStep]:
        raise NotImplementedError

    def start(self) -> "WellInformedState":
        return WellInformedState(self.scores)


class WellInformedState(DrafterState):
    def __init__(self, scores: torch.Tensor):
        self._scores = scores
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def advance(self, prefix, features=None, observe_draft_inputs=None):
        self._length = prefix.shape[0]
        return self._next(1)

    def draft(self, token_ids, parents=None, observe_draft_inputs=None):
        self._length += 1
        return self._next(token_ids.shape[0])

    def truncate(self, length):
        self._length = length

    def _next(self, width: int) -> torch.Tensor:
        return self._scores[min(self._length, self._scores.shape[0] - 1)].expand(width, -1)


# Targets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
def test_the_output_is_the_targets_own(model, plain, tree):
    cause = NO_TARGET.get(model.family) or (tree and NO_TREE_TARGET.get(model.family))
    drafter = WellInformed(plain[0])
    if cause:
        with pytest.raises(UnsupportedError) as refusal:
            DynSpecAssistant(drafter, target=model, tree=tree)
        assert_names(refusal, cause)
        assert "generate" not in vars(model)
        return
    assistant = DynSpecAssistant(drafter, target=model, tree=tree)
    assert torch.equal(generate(model, assistant), plain)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assistant.unbind()


class Listener(FullShortlist):
    """Scores everything, and keeps what policies observe of prompts."""

    needs = Needs(prompt_top_k=3)

    def __init__(self):
        self.top_ids: list[torch.Tensor] = []

    def start(self, vocabulary: VocabularyInfo) -> ShortlistState:
        state = super().start(vocabulary)
        state.observe_prompt = lambda prompt: prompt.top_ids is None or self.top_ids.append(prompt.top_ids)
        return state


def test_policies_observe_the_targets_likeliest_tokens_in_the_prompt(model, plain):
    """Families differ in how many hidden states they return, in their shapes, and in what the head is given."""
    # RoBERTa's forward, with which this compares, counts positions from another number if nobody passes them.
    if model.family in NO_TARGET or model.family == "roberta":
        return
    listener = Listener()
    assistant = DynSpecAssistant(WellInformed(plain[0]), listener, target=model)
    generate(model, assistant, max_new_tokens=9)
    assistant.unbind()
    with torch.no_grad():
        expected = model(plain[:, :PROMPT_LENGTH]).logits[0].topk(3).indices
    (observed,) = listener.top_ids
    assert torch.equal(observed.sort(-1).values, expected.sort(-1).values)


def test_the_page_says_what_these_tests_expect():
    """Of each family whether it is a target and a drafter, of chains and of trees."""
    lines = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    pages = {family: [cell == "yes" for cell in row] for family, *row in cells}
    assert set(SETTINGS) | set(image_models.FAMILIES) == set(pages)
    for family in SETTINGS:
        chains, trees, _, drafts, drafts_trees = pages[family]
        assert (chains, drafts) == (family not in NO_TARGET, family not in NO_DRAFTER), family
        assert trees == (chains and family not in NO_TREE_TARGET), family
        assert drafts_trees == (drafts and family not in NO_TREE_DRAFTER), family


# Drafters ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Iterator[PreTrainedModel]:
    """A target that stays bound, as making one ready takes longer than these tests do."""
    target = without_end(tiny())
    resident = DynSpecAssistant(WellInformed(prompt()[0]), target=target)
    yield target
    resident.unbind()


@pytest.fixture(scope="module")
def drafter(model) -> CausalLMDrafter | None:
    return None if model.family in NO_DRAFTER else CausalLMDrafter(model)


def test_chains_are_drafted_as_from_scratch(model, drafter, llama, rounds):
    """Round after round, from a cache that was rolled back, the drafter's own logits of one forward over it all."""
    if drafter is None:
        with pytest.raises(UnsupportedError) as refusal:
            DynSpecAssistant(model, target=llama)
        assert_names(refusal, NO_DRAFTER[model.family])
        return
    assistant = DynSpecAssistant(drafter, "full", target=llama, num_assistant_tokens=4)
    output = generate(llama, assistant, max_new_tokens=SLIDING_WINDOW)
    assistant.unbind()
    assert torch.equal(output, generate(llama, None, max_new_tokens=SLIDING_WINDOW))
    for prefix, _, candidates in (*rounds[:2], *rounds[-2:]):
        with torch.no_grad():
            expected = model(torch.cat([prefix, candidates.token_ids])[None], use_cache=False).logits[0]
        for step, (own, shortlist) in enumerate(zip(candidates.logits, candidates.shortlists, strict=True)):
            row = expected[prefix.shape[0] - 1 + step, shortlist.scored_slots]
            torch.testing.assert_close(own, row.float(), **CLOSE)


def test_trees_are_drafted_as_from_scratch(model, drafter, llama):
    """Every node of four levels has the probability of its path in the drafter's view, whatever lies beside it."""
    if drafter is None:
        return
    if model.family in NO_TREE_DRAFTER:
        with pytest.raises(UnsupportedError) as refusal:
            DynSpecAssistant(drafter, target=llama, tree=TREE)
        assert_names(refusal, NO_TREE_DRAFTER[model.family])
        return
    assistant = DynSpecAssistant(drafter, "full", target=llama, tree=WHOLE_TREE)
    text = prompt(SLIDING_WINDOW + 4)
    candidates = assistant.draft_round(text)
    assistant.unbind()
    paths: list[list[int]] = []
    for token, parent in zip(candidates.token_ids.tolist(), candidates.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    deepest = [index for index, path in enumerate(paths) if len(path) == WHOLE_TREE.depth + 1]
    assert len(deepest) == 16
    tokens = torch.tensor([paths[index] for index in deepest])
    with torch.no_grad():
        logits = model(torch.cat([text.expand(16, -1), tokens], dim=1), use_cache=False).logits
    steps = logits[:, text.shape[1] - 1 : -1].float().log_softmax(-1)
    expected = steps.gather(2, tokens.unsqueeze(-1)).sum((1, 2))
    torch.testing.assert_close(candidates.scores[deepest], expected, **CLOSE)


# Variants of families ------------------------------------------------------------------------------------------------

_DYNAMIC_ROPE = {
    "max_position_embeddings": SWITCH,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}
LONG = representatives("families", itertools.product(["phi3", "llama", "phimoe"], [TREE, False]))
_TWICE = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(("family", "tree"), LONG)
def test_a_rope_that_changes_at_a_length(family, tree):
    """What the target says of a token depends on how far the forward that reads it reaches."""
    model = without_end(model_of(family, **LONG_ROPE))
    expected = generate(model, None)
    assert expected.shape[1] > SWITCH + 10
    assistant = DynSpecAssistant(WellInformed(expected[0]), target=model, tree=tree)
    assert torch.equal(generate(model, assistant), expected)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
def test_no_round_is_drafted_over_the_length_at_which_a_rope_changes(tree):
    model = without_end(model_of("phi3", **LONG_ROPE))
    assistant = DynSpecAssistant(copy.deepcopy(model), target=model, tree=tree)
    assert assistant.draft_round(prompt(6)).token_ids.numel()
    with pytest.raises(UnsupportedError, match=f"a text of {SWITCH} tokens"):
        assistant.draft_round(prompt(SWITCH))


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
def test_a_rope_that_changes_with_every_length(tree):
    """The model remembers the longest text that it has read, so that plain generation has a copy of its own."""
    model = without_end(model_of("llama", **_DYNAMIC_ROPE))
    expected = generate(copy.deepcopy(model), None)
    try:
        assistant = DynSpecAssistant(WellInformed(expected[0]), target=model, tree=tree)
    except UnsupportedError as refusal:
        assert re.search("rope|rotary", str(refusal), re.IGNORECASE)
        return
    assert torch.equal(generate(model, assistant), expected)


VARIANTS = {
    "keys and values shared between layers": ("gemma4_text", _TWICE | {"num_kv_shared_layers": 2}),
    "none shared in gemma3n": ("gemma3n_text", {"num_kv_shared_layers": 0}),
    "local attention nowhere": ("gpt_neo", {"attention_types": [[["global"], 2]]}),
    "chunked attention nowhere": ("llama4_text", {"layer_types": ["full_attention"] * 2}),
    "windows by number of layers": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
    ),
    "eager attention": ("gpt_oss", {"attn_implementation": "eager"}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": SWITCH,
            }
        },
    ),
    "one head of keys": ("falcon", {"multi_query": True}),
    "new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "embeddings of another width": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize(("name", "tree"), representatives("families", itertools.product(VARIANTS, [TREE, False])))
def test_variants(name, tree):
    family, changes = VARIANTS[name]
    model = without_end(model_of(family, **changes))
    expected = generate(model, None)
    assistant = DynSpecAssistant(perturbed(model), target=model, tree=tree)
    assert torch.equal(generate(model, assistant), expected)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_distances_by_columns_take_no_trees(role):
    model = without_end(model_of("falcon", alibi=True))
    with pytest.raises(UnsupportedError, match=r"mask|position"):
        pair = (WellInformed(prompt()[0]), model) if role == "target" else (model, tiny())
        DynSpecAssistant(pair[0], target=pair[1], tree=TREE)


def test_a_model_whose_own_settings_say_that_no_cache_is_used():
    """The user did not say so, and the cache is used as every assistant needs it."""
    model = without_end(model_of("mpt"))
    assert model.generation_config.use_cache is False
    expected = model.generate(prompt(), max_new_tokens=20, do_sample=False)
    assistant = DynSpecAssistant(WellInformed(expected[0]), target=model)
    for more in ({}, {"use_cache": True}):
        output = model.generate(prompt(), max_new_tokens=20, do_sample=False, assistant_model=assistant, **more)
        assert torch.equal(output, expected)
