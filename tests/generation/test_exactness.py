"""Greedy output is the target's own under every policy: in fp32 token-identical to `generate` without an assistant."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import EOS, POLICY_CASES, TERRIBLE, VOCABULARY, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, InContextShortlist

ALL_POLICIES = POLICY_CASES | TERRIBLE
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def drafter(target) -> PreTrainedModel:
    return perturbed(target)


def greedy(target: PreTrainedModel, input_ids: torch.Tensor, **arguments) -> torch.Tensor:
    return target.generate(input_ids, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **arguments})


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_greedy_output_is_the_targets_own(name, target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    new_tokens = 0
    for seed in range(3):
        input_ids = prompt(seed=seed)
        output = greedy(target, input_ids, assistant_model=assistant)
        assert torch.equal(output, greedy(target, input_ids))
        new_tokens += output.shape[1] - input_ids.shape[1]
    stats = assistant.stats_total
    assert stats.tokens == new_tokens
    assert stats.drafted > 0
    if name in POLICY_CASES:
        assert stats.accepted > 0, "nothing of the draft was ever accepted, so acceptance was not exercised"
    assert stats.accepted < stats.drafted, "nothing of the draft was ever rejected, so rejection was not exercised"


def test_policies_differ_in_what_they_draft(target, drafter):
    """Exactness would be trivial if the policy had no say: here it decides what is accepted and what is missed."""
    acceptance = {}
    for name in ("full", "in_context", "random", "eos_only"):
        assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
        greedy(target, prompt(), assistant_model=assistant)
        acceptance[name] = assistant.stats.acceptance_rate, assistant.stats.oov_rate
    assert acceptance["full"][0] > acceptance["in_context"][0] > acceptance["eos_only"][0] == 0.0
    assert acceptance["full"][1] == 0.0 < acceptance["in_context"][1] < acceptance["eos_only"][1] == 1.0
    assert acceptance["random"][1] > 0.5


def test_a_drafter_equal_to_the_target_is_always_right_on_the_full_vocabulary(target):
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=4)
    assert torch.equal(greedy(target, prompt(), assistant_model=assistant), greedy(target, prompt()))
    assert assistant.stats.acceptance_rate == 1.0
    assert assistant.stats.oov_rate == 0.0


@pytest.mark.parametrize("name", ["full", "hybrid", "random"])
def test_an_unrelated_drafter_changes_nothing_but_the_speed(name, target):
    stranger = tiny("qwen2", seed=5, num_hidden_layers=1, hidden_size=16)
    assistant = DynSpecAssistant(stranger, ALL_POLICIES[name](), target=target)
    assert torch.equal(greedy(target, prompt(), assistant_model=assistant), greedy(target, prompt()))
    assert assistant.stats.acceptance_rate < 0.2


@pytest.mark.parametrize("name", ["hybrid", "in_context", "random"])
def test_calls_on_one_assistant_do_not_lean_on_each_other(name, target, drafter):
    """The second call finds buffers of the first. What it drafts is what a new assistant drafts."""
    used = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    for seed, length in ((7, 30), (8, 3)):
        greedy(target, prompt(length, seed), assistant_model=used)
    output = greedy(target, prompt(), assistant_model=used)
    assert torch.equal(output, greedy(target, prompt()))
    if name == "random":
        return  # draws other shortlists in every call
    fresh = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    greedy(target, prompt(), assistant_model=fresh)
    assert used.stats.to_dict() == fresh.stats.to_dict()


def test_a_failed_call_leaves_no_trace(target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES["hybrid"](), target=target)
    calls = 0

    def fails_in_the_third_round(input_ids, scores, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        greedy(target, prompt(seed=4), assistant_model=assistant, stopping_criteria=[fails_in_the_third_round])
    assert torch.equal(greedy(target, prompt(), assistant_model=assistant), greedy(target, prompt()))
    fresh = DynSpecAssistant(drafter, ALL_POLICIES["hybrid"](), target=target)
    greedy(target, prompt(), assistant_model=fresh)
    assert assistant.stats.to_dict() == fresh.stats.to_dict()


# 16-bit --------------------------------------------------------------------------------------------------------------

# A bf16 number has 8 significant bits, so that rounding moves a logit by up to 2⁻⁹ of its size, and a sum of rounded
# terms in a batch of several rows and in one of one row comes out a few such steps apart. Eight steps of the largest
# logit bound what is seen here tenfold; a wrong token lies farther away than that, as the control below shows.
ROUNDING_STEPS = 8


def log_probability_gaps(target: PreTrainedModel, output: torch.Tensor, prompt_length: int) -> tuple[float, float]:
    """How far below the argmax's log-probability the worst token of the output lies, and what rounding explains."""
    with torch.no_grad():
        logits = target(output).logits[0, prompt_length - 1 : -1].float()
    log_probabilities = logits.log_softmax(-1)
    emitted = log_probabilities.gather(1, output[0, prompt_length:, None])[:, 0]
    gap = (log_probabilities.amax(-1) - emitted).max()
    return float(gap), ROUNDING_STEPS * 2**-8 * float(logits.abs().max())


@pytest.mark.parametrize("name", ["full", "hybrid", "random"])
def test_in_bf16_every_token_is_an_argmax_up_to_rounding(name, target, drafter):
    target_16, drafter_16 = tiny().to(torch.bfloat16), perturbed(target).to(torch.bfloat16)
    assistant = DynSpecAssistant(drafter_16, ALL_POLICIES[name](), target=target_16)
    input_ids = prompt()
    output = greedy(target_16, input_ids, assistant_model=assistant)
    gap, explained = log_probability_gaps(target_16, output, input_ids.shape[1])
    assert gap <= explained
    wrong = output.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % VOCABULARY
    assert log_probability_gaps(target_16, wrong, input_ids.shape[1])[0] > explained


@pytest.mark.parametrize("name", ["full", "hybrid"])
def test_a_bf16_drafter_for_an_fp32_target(name, target):
    drafter_16 = perturbed(target).to(torch.bfloat16)
    assistant = DynSpecAssistant(drafter_16, ALL_POLICIES[name](), target=target)
    assert torch.equal(greedy(target, prompt(), assistant_model=assistant), greedy(target, prompt()))
    assert assistant.stats.accepted > 0


# Threads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hybrid", "in_context, lru", "random"])
def test_two_threads_on_one_assistant(name, target, drafter):
    prompts = [prompt(10 + seed, seed) for seed in range(6)]
    expected = [greedy(target, input_ids) for input_ids in prompts]
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    together = threading.Barrier(2)
    switched: set[int] = set()

    def run(half: int) -> list[torch.Tensor]:
        together.wait(timeout=600)
        outputs = []
        for input_ids in prompts[half::2]:
            switched.add(threading.get_ident())
            outputs.append(greedy(target, input_ids, assistant_model=assistant))
        return outputs

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(run, range(2), timeout=600))
    assert len(switched) == 2
    for half, outputs in enumerate(halves):
        for output, own in zip(outputs, expected[half::2], strict=True):
            assert torch.equal(output, own)
    total = assistant.stats_total
    assert total.calls == len(prompts)
    assert total.tokens == sum(own.shape[1] for own in expected) - sum(one.shape[1] for one in prompts)
    assert sum(total.tokens_per_round) == total.rounds
    assert sum(index * count for index, count in enumerate(total.tokens_per_round)) == total.tokens
    if name == "random":
        return  # one generator of random shortlists for each session: which call gets which depends on the threads
    alone = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    for input_ids in prompts:
        greedy(target, input_ids, assistant_model=alone)
    assert total.to_dict() == alone.stats_total.to_dict()


# Conversations -------------------------------------------------------------------------------------------------------


def turns_of(target: PreTrainedModel, assistant, turns: int = 3) -> list[torch.Tensor]:
    """A conversation in which each turn's input is everything before it and a few new tokens."""
    text, outputs = prompt(10), []
    for turn in range(turns):
        output = greedy(target, text, max_new_tokens=20, assistant_model=assistant)
        outputs.append(output)
        text = torch.cat([output, prompt(5, seed=50 + turn)], dim=1)
    return outputs


@pytest.mark.parametrize("name", ALL_POLICIES)
def test_a_conversation_stays_exact(name, target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    for actual, expected in zip(turns_of(target, assistant.conversation()), turns_of(target, None), strict=True):
        assert torch.equal(actual, expected)


def test_a_conversation_keeps_the_window_and_the_drafters_cache(target, drafter):
    assistant = DynSpecAssistant(drafter, InContextShortlist(1000), target=target)
    conversation = assistant.conversation()
    lengths: list[int] = []
    fed: list[int] = []

    def record(module, args, kwargs):
        fed.append(kwargs["input_ids"].shape[1])

    with drafter.get_decoder().register_forward_pre_hook(record, with_kwargs=True):
        text = prompt(10)
        for turn in range(3):
            first = len(fed)
            text = greedy(target, text, max_new_tokens=20, assistant_model=conversation)
            lengths.append(fed[first])
            text = torch.cat([text, prompt(5, seed=50 + turn)], dim=1)
    # In later turns the drafter reads the five new tokens and the few that it had not read when the last turn ended.
    assert lengths[0] == 10
    assert all(5 <= length <= 5 + 2 for length in lengths[1:])
    window = set(conversation.session._selector.state.select(0, text[0, -1:], torch.empty(0)).ids().tolist())
    assert set(text[0, :-5].tolist()) <= window


def test_a_conversation_may_change_its_past(target, drafter):
    """An edited earlier turn is found by comparing tokens, and what the drafter knew of it is dropped."""
    conversation = DynSpecAssistant(drafter, ALL_POLICIES["hybrid"](), target=target).conversation()
    text = prompt(30)
    for position in (29, 12, 0):
        greedy(target, text, max_new_tokens=12, assistant_model=conversation)
        text = text.clone()
        text[0, position] = 3 + (int(text[0, position]) + 1) % (VOCABULARY - 3)
        assert torch.equal(greedy(target, text, assistant_model=conversation), greedy(target, text))
    shorter = text[:, :7]
    assert torch.equal(greedy(target, shorter, assistant_model=conversation), greedy(target, shorter))


def test_a_conversation_beyond_the_sliding_window_may_change_its_past():
    target = tiny("mistral")
    conversation = DynSpecAssistant(perturbed(target), "full", target=target).conversation()
    text = prompt(40)
    for position in (39, 30, 3):
        greedy(target, text, max_new_tokens=30, assistant_model=conversation)
        text = text.clone()
        text[0, position] = 3 + (int(text[0, position]) + 1) % (VOCABULARY - 3)
        assert torch.equal(greedy(target, text, assistant_model=conversation), greedy(target, text))


def test_a_conversation_in_which_the_eos_ids_change(target, drafter):
    """Shortlists must contain the EOS ids of the call, not those of the first turn."""
    conversation = DynSpecAssistant(drafter, InContextShortlist(50), target=target).conversation()
    greedy(target, prompt(), max_new_tokens=10, assistant_model=conversation)
    other = int(greedy(target, prompt(seed=3))[0, -5])
    arguments = {"eos_token_id": [EOS, other], "max_new_tokens": 20}
    actual = greedy(target, prompt(seed=3), assistant_model=conversation, **arguments)
    assert torch.equal(actual, greedy(target, prompt(seed=3), **arguments))
    shortlist = conversation.session._selector.state.select(0, prompt()[0, -1:], torch.empty(0))
    assert {EOS, other} <= set(shortlist.ids().tolist())


# The target ----------------------------------------------------------------------------------------------------------


def fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["hybrid", "random"])
def test_no_weight_of_either_model_is_touched(name):
    target = tiny()
    drafter = perturbed(target)
    before = fingerprint(target), fingerprint(drafter)
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    greedy(target, prompt(), assistant_model=assistant)
    greedy(target, prompt(), assistant_model=assistant, do_sample=True, top_k=20)
    assert (fingerprint(target), fingerprint(drafter)) == before
    with torch.no_grad():
        drafter.get_output_embeddings().weight[5, 5] += 1e-3
    assert fingerprint(drafter) != before[1], "the fingerprint does not see a changed weight"


# What drafting must not do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_POLICIES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafting_neither_projects_to_the_full_vocabulary_nor_calls_generate(name, do_sample, monkeypatch):
    """The head is scored on shortlists only (on the full one, its real rows only), by the package's own loop."""
    target = tiny()
    drafter = perturbed(target)
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
    projections, forwards = [], []
    drafter.get_output_embeddings().register_forward_hook(lambda *_: projections.append(1))
    drafter.register_forward_pre_hook(lambda *_: forwards.append(1))

    def must_not_run(*args, **kwargs):
        raise AssertionError("drafter.generate was called")

    monkeypatch.setattr(drafter, "generate", must_not_run)
    target.generate(prompt(), max_new_tokens=12, do_sample=do_sample, assistant_model=assistant)
    assert assistant.stats.drafted > 0
    assert not projections and not forwards
    drafter(prompt())
    assert projections and forwards, "the guard does not see a projection"
