"""What a call of a batch, or with a static cache, says besides its prompts: honoured, or refused by its name."""

import copy

import pytest
import torch
from models import VOCABULARY, perturbed, tiny, with_clear_preferences
from transformers import DynamicCache

from hf_dynspec import ConfigurationError, DynSpecAssistant, HybridShortlist, UnsupportedError
from hf_dynspec.drafters.causal_lm_fixed import FixedCausalLM


@pytest.fixture
def target():
    model = with_clear_preferences(tiny())
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(params=[False, True], ids=["chain", "tree"])
def assistant(request, target):
    return DynSpecAssistant(perturbed(target), "full", target=target, tree=request.param)


def padded(*lengths):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[-length:] = torch.arange(3, 3 + length)
    return {"input_ids": ids, "attention_mask": (ids > 0).to(torch.int64), "do_sample": False}


BATCH = padded(5, 12)
CALLS = {"batch": BATCH, "static": padded(5, 12)}
CALLS["static"] = {name: one[:1] if isinstance(one, torch.Tensor) else one for name, one in BATCH.items()}
STATIC = {"batch": {}, "static": {"cache_implementation": "static"}}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    "own",
    [{"max_length": 22}, {"max_length": 30, "min_length": 25}, {"max_length": 40, "max_new_tokens": 6}],
    ids=["max_length", "min_length", "both"],
)
def test_the_targets_own_lengths_count_padding(kind, own, target, assistant):
    vars(target.generation_config).update(own)
    if "min_length" in own:
        # An end that plain generate would take at once.
        target.generation_config.eos_token_id = target.generate(**CALLS[kind], max_new_tokens=1)[0, -1].item()
    expected = target.generate(**CALLS[kind])
    assert torch.equal(target.generate(**CALLS[kind], **STATIC[kind], assistant_model=assistant), expected)


def hook_of_logits(target):
    bias = torch.randn(VOCABULARY) * 8
    target.register_forward_hook(lambda module, inputs, outputs: setattr(outputs, "logits", outputs.logits + bias))


def patch_of_attention(target):
    attention = target.model.layers[1].self_attn
    forward = attention.forward

    def patched(*args, **kwargs):
        return forward(*args, **kwargs)

    attention.forward = patched


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("change", [hook_of_logits, patch_of_attention])
def test_what_is_hung_on_a_target_after_a_call_is_seen(kind, change, target, assistant):
    arguments = {**CALLS[kind], **STATIC[kind], "max_new_tokens": 12}
    target.generate(**arguments, assistant_model=assistant)
    change(target)
    with pytest.raises(UnsupportedError):
        target.generate(**arguments, assistant_model=assistant)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cache_implementation": "offloaded"}, "^cache_implementation cannot be used in a batch"),
        ({"past_key_values": DynamicCache()}, "^past_key_values cannot be used in a batch"),
    ],
)
def test_refused_by_name(wrong, said, assistant, target):
    with pytest.raises(UnsupportedError, match=said):
        target.generate(**BATCH, **wrong, max_new_tokens=4, assistant_model=assistant)


@pytest.mark.parametrize("kind", CALLS)
def test_a_misspelled_argument_is_called_so(kind, assistant, target):
    with pytest.raises(ValueError, match="max_new_token"):
        target.generate(**CALLS[kind], **STATIC[kind], max_new_token=4, assistant_model=assistant)


@pytest.mark.parametrize("kind", ["batch", "one"])
def test_a_whole_number_may_be_a_float(kind, assistant, target):
    call = BATCH if kind == "batch" else {"input_ids": BATCH["input_ids"][1:], "do_sample": False}
    expected = target.generate(**call, max_new_tokens=8)
    assert torch.equal(target.generate(**call, max_new_tokens=8.0, assistant_model=assistant), expected)


def test_arguments_of_other_kinds_are_told(target):
    drafter = perturbed(target)
    with pytest.raises(ConfigurationError, match=r"AutoTokenizer\.from_pretrained\('a/b'\)"):
        DynSpecAssistant(drafter, target=target, tokenizer="a/b")
    with pytest.raises(ConfigurationError, match=r"HybridShortlist is a class: pass a policy"):
        DynSpecAssistant(drafter, HybridShortlist, target=target)


@pytest.mark.parametrize("kind", CALLS)
def test_a_drafter_that_is_the_target_is_always_right(kind, target):
    """So it has read all tokens that count, each in its place."""
    assistant = DynSpecAssistant(copy.deepcopy(target), "full", target=target, num_assistant_tokens=3)
    target.generate(**CALLS[kind], **STATIC[kind], max_new_tokens=25, assistant_model=assistant)
    assert assistant.stats.lane == "fixed memory" and assistant.stats.acceptance_rate == 1.0


def test_a_single_texts_tree_keeps_the_hidden_state_of_its_last_token(target, monkeypatch):
    """Which is the next round's draft input, if no draft is accepted."""
    kept, advance = [], FixedCausalLM.advance

    def compared(self, *args, **kwargs):
        hidden = advance(self, *args, **kwargs)
        kept.append(torch.equal(self._before, hidden))
        return hidden

    monkeypatch.setattr(FixedCausalLM, "advance", compared)
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=True)
    target.generate(**CALLS["static"], **STATIC["static"], max_new_tokens=16, assistant_model=assistant)
    assert len(kept) > 1 and all(kept)
