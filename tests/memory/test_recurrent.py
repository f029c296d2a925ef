"""Recurrent states are rolled back to the accepted tokens, and texts are the target's own."""

import threading

import pytest
import torch
from cases import representatives
from families import model_of
from models import perturbed, prompt
from transformers import DynamicCache, PreTrainedModel

from hf_dynspec import DynSpecAssistant, UnsupportedError
from hf_dynspec.cache_names import CACHE, cache_inputs
from hf_dynspec.memory import recurrent
from hf_dynspec.memory.recurrent import RecurrentStates, Rollback, RolledBack, positions_from

# Of each kind of mixer one family: gated delta rule, Mamba-2, Mamba-2 beside attention, Kimi's delta attention.
FAMILIES = ("qwen3_5_text", "mamba2", "falcon_h1", "kimi_linear")
OTHERS = "bamba granitemoehybrid nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_next zamba2".split()
ALL = representatives("families", [*FAMILIES, *OTHERS], keep=len(FAMILIES))
DRAFTED, PROMPT = 5, 11
# Of states and keys after some dozen tokens, in fp32.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module", params=ALL)
def target(request) -> PreTrainedModel:
    return without_end(model_of(request.param))


@pytest.fixture(scope="module")
def hybrid() -> PreTrainedModel:
    return without_end(model_of("qwen3_5_text"))


@torch.no_grad()
def read(model: PreTrainedModel, cache: DynamicCache, text: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The logits of some tokens of a text, `[1, n]`, whose beginning is cached."""
    inputs = cache_inputs(cache) | positions_from(model, start, end - start, text.device)
    return model(input_ids=text[:, start:end], **inputs).logits[0]


def stepped(model: PreTrainedModel, text: torch.Tensor) -> DynamicCache:
    """The cache after a prompt, and single steps from there to the end of the text."""
    cache = DynamicCache(config=model.config)
    read(model, cache, text, 0, PROMPT)
    for place in range(PROMPT, text.shape[1]):
        read(model, cache, text, place, place + 1)
    return cache


def assert_same(cache: DynamicCache, expected: DynamicCache) -> None:
    both = RecurrentStates(cache).tensors(), RecurrentStates(expected).tensors()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if getattr(layer, "keys", None) is not None:
            both[0].extend((layer.keys, layer.values))
            both[1].extend((other.keys, other.values))
    assert both[0]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def generate(model: PreTrainedModel, assistant=None, text: torch.Tensor | None = None, **arguments) -> torch.Tensor:
    text = prompt(PROMPT) if text is None else text
    # Without a mask, tokens that a text has generated may pass for padding in its next turn.
    named = {"max_new_tokens": 60, "do_sample": False, "attention_mask": torch.ones_like(text)}
    return model.generate(text, assistant_model=assistant, **named | arguments)


def assistant_of(model: PreTrainedModel, drafter: PreTrainedModel | None = None) -> DynSpecAssistant:
    """With drafts of which some are accepted."""
    drafter = perturbed(model, 0.02) if drafter is None else drafter
    return DynSpecAssistant(drafter, target=model, num_assistant_tokens=DRAFTED)


# A cache -------------------------------------------------------------------------------------------------------------


def verify(model: PreTrainedModel, rolled: RolledBack, text: torch.Tensor, start: int, accepted: int) -> torch.Tensor:
    """A round that accepts so many tokens of the text, followed by wrong ones. Returns the logits of the former."""
    drafted = text.clone()
    drafted[:, start + accepted + 1 :] += 1
    with rolled.reading(DRAFTED):
        logits = read(model, rolled.cache, drafted % 300, start, start + DRAFTED + 1)
    rolled.keep(accepted)
    return logits[: accepted + 1]


@pytest.mark.parametrize("accepted", range(DRAFTED + 1))
def test_a_rollback_leaves_what_single_steps_leave(target, accepted):
    """After one round, and in the next one, which goes on from there."""
    text = prompt(PROMPT + 2 * DRAFTED + 2) % 300
    cache, middle = DynamicCache(config=target.config), PROMPT + accepted + 1
    with Rollback(target).of(cache) as rolled:
        read(target, cache, text, 0, PROMPT)
        verify(target, rolled, text, PROMPT, accepted)
        logits = verify(target, rolled, text, middle, 2)
    expected = stepped(target, text[:, : middle + 3])
    assert_same(cache, expected)
    own = read(target, DynamicCache(config=target.config), text, 0, middle + 3)[-3:]
    torch.testing.assert_close(logits, own, atol=5e-3, rtol=1e-3)


def test_many_rounds_leave_what_single_steps_leave(target, monkeypatch):
    """The rows that mixers have yet to read are read when they are many, or alone with the next token."""
    text = prompt(PROMPT + 60) % 300
    cache, place = DynamicCache(config=target.config), PROMPT
    monkeypatch.setattr(recurrent, "_MOST_WAITING", 6)
    with Rollback(target).of(cache) as rolled:
        read(target, cache, text, 0, PROMPT)
        for accepted in (0, 3, 2, 1, 5, 0, 0, 4):
            verify(target, rolled, text, place, accepted)
            place += accepted + 1
        with rolled.reading(0):
            read(target, cache, text, place, place + 1)
        rolled.keep(0)
    assert_same(cache, stepped(target, text[:, : place + 1]))


def test_a_round_copies_the_states_once_and_calls_nothing_twice(hybrid):
    """A copy is made when the states have changed for good, and only mixers see hooks."""
    rolled, text = Rollback(hybrid).of(DynamicCache(config=hybrid.config)), prompt(PROMPT + 30)
    with rolled.reading(0):
        read(hybrid, rolled.cache, text, 0, PROMPT)
    rolled.keep(0)
    assert rolled._base is None
    calls = []
    hooks = [one.register_forward_hook(lambda module, *_: calls.append(module)) for one in hybrid.modules()]
    verify(hybrid, rolled, text, PROMPT, 2)
    once, base = len(calls), rolled._base
    verify(hybrid, rolled, text, PROMPT + 3, DRAFTED)
    assert len(calls) == 2 * once and rolled._base is base
    held = [one for layer in recurrent.layers_with_states(rolled.cache) for one in (layer.conv_states[0],)]
    held += [layer.recurrent_states[0] for layer in recurrent.layers_with_states(rolled.cache)]
    assert sum(one.nbytes for one in base.tensors()) == sum(one.nbytes for one in held)
    for hook in hooks:
        hook.remove()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in hybrid.modules())


def test_a_forward_without_hooks_is_noticed(hybrid):
    rolled = Rollback(hybrid).of(DynamicCache(config=hybrid.config))
    read(hybrid, rolled.cache, prompt(PROMPT), 0, PROMPT)
    with rolled.reading(2):
        pass
    with pytest.raises(UnsupportedError, match="compile"):
        rolled.keep(1)


# Refusals ------------------------------------------------------------------------------------------------------------


def forgetful(forward, cache_layer):
    """A mixer that begins anew if it reads several tokens."""

    def broken(hidden_states, **kwargs):
        cache = kwargs.get(CACHE)
        if cache is not None and hidden_states.shape[1] > 1:
            cache.layers[cache_layer].has_previous_state[0] = False
        return forward(hidden_states, **kwargs)

    return broken


def test_a_target_that_forgets_its_state_is_refused_and_drafts_one_by_one(hybrid):
    broken = without_end(model_of("qwen3_5_text"))
    mixer = broken.model.layers[0].linear_attn
    mixer.forward = forgetful(mixer.forward, 0)
    with pytest.raises(UnsupportedError, match=r"several tokens read at once .* one by one"):
        DynSpecAssistant(hybrid, target=broken)
    assistant = assistant_of(hybrid, broken)
    assert torch.equal(generate(hybrid, assistant), generate(hybrid))
    # It is the target itself, when it reads one by one.
    assert assistant.stats.accepted == assistant.stats.drafted > 0
    assistant.unbind()


def test_a_mixer_that_looks_past_its_arguments_is_refused():
    """Here at the number of tokens of the text, which rows that are read again do not change."""
    broken = without_end(model_of("qwen3_5_text"))
    mixer = broken.model.layers[0].linear_attn
    forward = mixer.forward

    def counting(hidden_states, **kwargs):
        length = kwargs[CACHE].get_seq_length() if kwargs.get(CACHE) is not None else 0
        return forward(hidden_states * (1 + (torch.arange(hidden_states.shape[1]) + length)[None, :, None]), **kwargs)

    mixer.forward = counting
    with pytest.raises(UnsupportedError, match="cannot read tokens again"):
        DynSpecAssistant(perturbed(broken), target=broken)


def test_batches_and_static_caches_are_refused(hybrid):
    assistant = assistant_of(hybrid)
    for arguments in ({"text": prompt(4).expand(2, -1)}, {"cache_implementation": "static"}):
        with pytest.raises(UnsupportedError, match="recurrent state, for which memory of fixed size has no place"):
            generate(hybrid, assistant, **arguments)
    assistant.unbind()


# Texts ---------------------------------------------------------------------------------------------------------------


def test_greedy_texts_are_the_targets_own(target):
    assistant = assistant_of(target)
    assert torch.equal(generate(target, assistant, max_new_tokens=200), generate(target, max_new_tokens=200))
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assert assistant.stats.lane == "general: the target keeps a recurrent state"
    assistant.unbind()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(hybrid, length):
    assistant = assistant_of(hybrid)
    text = prompt(length)
    assert torch.equal(generate(hybrid, assistant, text), generate(hybrid, text=text))
    assistant.unbind()


def test_chunks_passed_in_caches_padding_and_conversations(target):
    assistant = assistant_of(target)
    plain = generate(target)
    assert torch.equal(generate(target, assistant, prefill_chunk_size=4), plain)
    returned = generate(target, assistant, return_dict_in_generate=True)
    longer = torch.cat([returned.sequences, prompt(3, seed=4)], dim=1)
    if any(not one for one in getattr(returned, CACHE).is_linear):
        # Caches of recurrent layers alone do not know their length: plain generation reads the whole text again.
        expected = generate(target, text=longer)
        assert torch.equal(generate(target, assistant, longer, **{CACHE: getattr(returned, CACHE)}), expected)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt(PROMPT)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    both = [generate(target, one, padded, attention_mask=mask) for one in (assistant, None)]
    assert torch.equal(*both)
    conversation, text = assistant.conversation(), prompt(PROMPT)
    for turn in range(3):
        answer = generate(target, conversation, text)
        assert torch.equal(answer, generate(target, text=text))
        # The last turn goes back to the middle of the text.
        text = torch.cat([answer if turn < 1 else answer[:, :20], prompt(4, seed=turn)], dim=1)
    assistant.unbind()


def test_sampled_texts_accept_what_the_target_itself_draws(target):
    assistant = assistant_of(target, model_of(target.config.model_type))
    generate(target, assistant, do_sample=True)
    # The drafter is the target, so what its own state or the target's says wrongly would be rejected.
    assert assistant.stats.accepted > 0.95 * assistant.stats.drafted > 0
    assistant.unbind()


def test_an_interrupted_call_leaves_the_verified_text_in_the_cache(hybrid):
    class Interrupting:
        def __init__(self, after: int):
            self.left = after

        def put(self, tokens: torch.Tensor) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    assistant, plain = assistant_of(hybrid), generate(hybrid)
    for after in (1, 3, 6):
        cache = DynamicCache(config=hybrid.config)
        with pytest.raises(KeyboardInterrupt):
            generate(hybrid, assistant, streamer=Interrupting(after), **{CACHE: cache})
        held = cache.get_seq_length()
        text = plain[:, : held + 1]
        logits = read(hybrid, cache, text, held, held + 1)[-1]
        with torch.no_grad():
            torch.testing.assert_close(logits, hybrid(text, use_cache=False).logits[0, -1], atol=1e-4, rtol=1e-4)
    assistant.unbind()


def test_two_threads_share_a_target(hybrid):
    assistant = assistant_of(hybrid)
    texts = [prompt(PROMPT, seed=seed) for seed in range(2)]
    found: list[torch.Tensor | None] = [None, None]

    def run(index: int) -> None:
        found[index] = generate(hybrid, assistant, texts[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, one in zip(texts, found, strict=True):
        assert torch.equal(one, generate(hybrid, text=text))
    assistant.unbind()
