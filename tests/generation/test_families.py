"""Families of models: exact output, and drafts that the drafter itself would make from scratch, round after round."""

import functools
import itertools

import pytest
import torch
from calls import SHAPES, assert_same, generate
from cases import representatives
from draft_trees import assert_same_tree, slow_draft
from models import FAMILIES, SLIDING_WINDOW, VOCABULARY, perturbed, prompt, tiny
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig, UnsupportedError
from hf_dynspec.cache_names import CACHE
from hf_dynspec.drafters import CausalLMDrafter
from hf_dynspec.modeling.head import DynamicLMHead

WINDOWED = ("gemma3", "mistral", "gemma2", "cohere2")
# The incremental and the batched forward of these fp32 models differ by less than 2e-4 where logits reach about 30.
CLOSE = {"atol": 1e-3, "rtol": 1e-4}


@functools.cache
def pair(family: str, noise: float = 0.05) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny(family, seed=3 if noise > 0.05 else 0)
    return target, perturbed(target, noise)


@torch.no_grad()
def assert_drafted_as_from_scratch(drafter: PreTrainedModel, rounds: list) -> None:
    """Each chain has the drafter's own logits, of one forward over all tokens before each candidate."""
    assert rounds
    for prefix, _, drafted in rounds:
        text = torch.cat([prefix, drafted.token_ids])
        expected = drafter(text[None], use_cache=False).logits[0, prefix.shape[0] - 1 : -1].float()
        for token, own, shortlist, row in zip(
            drafted.token_ids, drafted.logits, drafted.shortlists, expected, strict=True
        ):
            occupied = torch.isfinite(own)
            ids = shortlist.scored_slots[occupied]
            torch.testing.assert_close(own[occupied], row[ids], **CLOSE)
            assert bool(shortlist.contains(token)) and set(ids.tolist()) == set(shortlist.ids().tolist())
            # The restricted argmax, except where two logits are closer than rounding.
            assert row[token] >= row[ids].max() - CLOSE["atol"]


EAGER = [("gemma2", "eager"), ("llama", "eager"), ("gpt2", "eager"), ("gemma3", "eager")]


@pytest.mark.parametrize(
    ("family", "attention"),
    representatives("families", [*EAGER[:1], *((one, "sdpa") for one in FAMILIES if one != "gemma2"), *EAGER[1:]], 2),
)
def test_output_and_trees(family, attention):
    """With windows shorter than the text; as a target, and as a drafter that drafts what it would from scratch."""
    target = tiny(family)
    target.set_attn_implementation(attention)
    drafter = perturbed(target)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=TreeConfig(24, 4, 4))
    output = assert_same(target, assistant, prompt(14), eos_token_id=VOCABULARY - 1)
    assert len(assistant.stats.tokens_per_round) > 2, "no path was ever accepted"
    text, assistant.tree = output[:, :32], TreeConfig(10, 2, 3)
    expected = slow_draft(drafter, text, assistant.tree)
    assert_same_tree(assistant.draft_round(text), expected, tolerance=2e-3)


@pytest.mark.parametrize(
    ("family", "prompt_length"),
    representatives("families", itertools.product(WINDOWED, (SLIDING_WINDOW, SLIDING_WINDOW - 1, 40))),
)
def test_sliding_windows_are_rolled_back(family, prompt_length, rounds):
    """A rejected draft pushes states out of the window that the next round needs again."""
    target, drafter = pair(family, 0.1)
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=9)
    assert_same(target, assistant, prompt(prompt_length), max_new_tokens=36, eos_token_id=VOCABULARY - 1)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assert_drafted_as_from_scratch(drafter, rounds)
    assistant.unbind()


def test_the_sliding_window_matters():
    """The windows above are short enough to change what the models say; otherwise the tests would show nothing."""
    for family in WINDOWED:
        with torch.no_grad():
            first, second = (model(prompt(40)).logits[0] for model in (tiny(family), tiny(family, sliding_window=400)))
        torch.testing.assert_close(first[: SLIDING_WINDOW - 1], second[: SLIDING_WINDOW - 1], **CLOSE)
        assert not torch.allclose(first[-1], second[-1], atol=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_follows_the_model(family):
    """Scale, soft-cap and bias are read off the model; the families are here because each has one of them."""
    model = tiny(family)
    head = DynamicLMHead.from_model(model)
    assert (head.soft_cap is not None) == (family == "gemma2")
    assert (head.bias is not None) == (family in ("gptj", "phi"))
    assert (head.logit_scale != 1.0) == (family in ("cohere", "cohere2", "granite"))
    CausalLMDrafter(model)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_that_prepares_its_inputs_under_the_older_name(shape):
    """As models from elsewhere may."""

    class Older(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **inputs):
            prepared = super().prepare_inputs_for_generation(input_ids, **inputs)
            return {"past_key_values" if name == CACHE else name: value for name, value in prepared.items()}

    target = tiny()
    older = Older(target.config).eval()
    older.load_state_dict(target.state_dict())
    older.generation_config = target.generation_config
    assistant = DynSpecAssistant(perturbed(target), target=older, tree=SHAPES[shape])
    assert torch.equal(generate(older, assistant), generate(target))
    assert assistant.stats.drafted > 0


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"])
def test_damaged_weights_are_refused_by_name(place, number):
    """A tree is looked at more closely than a chain. Nothing compares a target's head before it generates."""
    for role in ("drafter", "target")[: 1 if place == "lm_head" else 2]:
        models = {"target": tiny(), "drafter": perturbed(tiny())}
        with torch.no_grad():
            models[role].get_submodule(place).weight[-1, -1] = number
        with pytest.raises(UnsupportedError, match=f"holds NaN or infinity in {place}.weight"):
            DynSpecAssistant(models["drafter"], target=models["target"], tree=True)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = tiny()
    model.register_forward_hook(lambda module, args, output: output.__setitem__("logits", output.logits * 1.5))
    with pytest.raises(UnsupportedError, match="does something between its decoder and its logits"):
        CausalLMDrafter(model)
