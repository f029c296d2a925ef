"""Every model family: exact output, and a fast path that drafts what the drafter itself would draft from scratch."""

import pytest
import torch
from models import FAMILIES, POLICY_CASES, SLIDING_WINDOW, VOCABULARY, RandomShortlist, perturbed, prompt, tiny

from hf_dynspec import DynSpecAssistant, UnsupportedError
from hf_dynspec.drafters import CausalLMDrafter
from hf_dynspec.drafting.session import DraftSession
from hf_dynspec.modeling.head import DynamicLMHead

POLICIES = {name: POLICY_CASES[name] for name in ("full", "hybrid", "in_context")} | {"random": RandomShortlist}
NEW_TOKENS = 40
# The incremental and the batched forward of these fp32 models differ by less than 2e-4 where logits reach about 30.
CLOSE = {"atol": 1e-3, "rtol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """A target of each family and a drafter that agrees with it in part."""
    target = tiny(request.param)
    return target, perturbed(target)


@pytest.fixture
def rounds(monkeypatch) -> list:
    """The (prefix, candidates) of every round that any session drafts."""
    recorded = []
    draft = DraftSession.draft_chain

    def recording(self, prefix, count, choose, threshold=0.0):
        candidates = draft(self, prefix, count, choose, threshold)
        recorded.append((prefix.clone(), candidates))
        return candidates

    monkeypatch.setattr(DraftSession, "draft_chain", recording)
    return recorded


def recompute(drafter, prefix: torch.Tensor, candidates) -> list[torch.Tensor]:
    """For each candidate the drafter's own full-vocabulary logits, from one forward over all tokens before it."""
    text = torch.cat([prefix, candidates.token_ids])
    with torch.no_grad():
        logits = drafter(text.unsqueeze(0), use_cache=False).logits[0].float()
    return list(logits[prefix.shape[0] - 1 : -1])


def assert_drafted_as_from_scratch(drafter, rounds: list) -> None:
    for prefix, candidates in rounds:
        expected = recompute(drafter, prefix, candidates)
        for token, own, shortlist, full in zip(
            candidates.token_ids, candidates.logits, candidates.shortlists, expected, strict=True
        ):
            assert bool(shortlist.contains(token))
            occupied = torch.isfinite(own)
            ids = shortlist.scored_slots[occupied]
            torch.testing.assert_close(own[occupied], full[ids], **CLOSE)
            assert set(ids.tolist()) == set(shortlist.ids().tolist())
            # Equal to the restricted argmax, except where two logits are closer than rounding.
            assert full[token] >= full[ids].max() - CLOSE["atol"]


@pytest.mark.parametrize("name", POLICIES)
def test_output_and_drafts(name, pair, rounds):
    target, drafter = pair
    assistant = DynSpecAssistant(drafter, POLICIES[name](), target=target)
    input_ids = prompt(14)
    expected = target.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=VOCABULARY - 1)
    actual = target.generate(
        input_ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=VOCABULARY - 1, assistant_model=assistant
    )
    assert torch.equal(actual, expected)
    assert actual.shape[1] > SLIDING_WINDOW + 10, "the text never got past the sliding windows"
    stats = assistant.stats
    assert 0 < len(rounds) == stats.rounds - (stats.rounds > len(rounds))
    if name == "full":
        assert stats.accepted > 0
    else:
        assert stats.accepted < stats.drafted
    assert_drafted_as_from_scratch(drafter, rounds)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "cohere2"])
@pytest.mark.parametrize("prompt_length", [SLIDING_WINDOW - 1, SLIDING_WINDOW, 40])
def test_sliding_windows_are_rolled_back(family, prompt_length, rounds):
    """A rejected draft pushes states out of the window that the next round needs again."""
    target = tiny(family, seed=3)
    drafter = perturbed(target, noise=0.1)
    assistant = DynSpecAssistant(drafter, "full", target=target, num_assistant_tokens=9)
    input_ids = prompt(prompt_length)
    arguments = {"max_new_tokens": 36, "do_sample": False, "eos_token_id": VOCABULARY - 1}
    actual = target.generate(input_ids, assistant_model=assistant, **arguments)
    assert torch.equal(actual, target.generate(input_ids, **arguments))
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assert_drafted_as_from_scratch(drafter, rounds)


def test_the_sliding_window_matters():
    """The windows above are short enough to change what the models say; otherwise the tests would show nothing."""
    for family in ("mistral", "gemma2", "gemma3", "cohere2"):
        input_ids = prompt(40)
        windowed, whole = tiny(family), tiny(family, sliding_window=400)
        with torch.no_grad():
            first, second = windowed(input_ids).logits[0], whole(input_ids).logits[0]
        torch.testing.assert_close(first[: SLIDING_WINDOW - 1], second[: SLIDING_WINDOW - 1], **CLOSE)
        assert not torch.allclose(first[-1], second[-1], atol=0.1)


@pytest.mark.parametrize(
    "families", [("llama", "gpt2"), ("mistral", "llama"), ("gemma2", "qwen3"), ("phi", "mistral")]
)
def test_the_drafter_may_be_of_another_family(families, rounds):
    target, drafter = tiny(families[0]), tiny(families[1], seed=9)
    assistant = DynSpecAssistant(drafter, POLICIES["hybrid"](), target=target)
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": VOCABULARY - 1}
    assert torch.equal(
        target.generate(prompt(), assistant_model=assistant, **arguments), target.generate(prompt(), **arguments)
    )
    assert_drafted_as_from_scratch(drafter, rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_follows_the_model(family):
    """Scale, soft-cap and bias are read off the model; the families are here because each has one of them."""
    model = tiny(family)
    head = DynamicLMHead.from_model(model)
    assert (head.soft_cap is not None) == (family == "gemma2")
    assert (head.bias is not None) == (family in ("gptj", "phi"))
    assert (head.logit_scale != 1.0) == (family in ("cohere", "cohere2", "granite"))
    CausalLMDrafter(model)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"])
def test_damaged_weights_are_called_that(where, number):
    target, drafter = tiny(), perturbed(tiny())
    for model in (drafter, target):
        with torch.no_grad():
            model.get_submodule(where).weight[-1, -1] = number
        with pytest.raises(UnsupportedError, match=f"holds NaN or infinity in {where}.weight"):
            # A tree, as it is looked at more closely. Of a target's head nothing is compared before it generates.
            DynSpecAssistant(drafter, target=target, tree=True)
        drafter = perturbed(tiny())
        if where == "lm_head":
            break


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = tiny()
    model.register_forward_hook(lambda module, args, output: output.__setitem__("logits", output.logits * 1.5))
    with pytest.raises(UnsupportedError, match="does something between its decoder and its logits"):
        CausalLMDrafter(model)
