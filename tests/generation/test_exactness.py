"""Output is the target's own under every policy: greedily in fp32 to the token, sampled by its distribution."""

import functools
import hashlib
import itertools

import pytest
import torch
from calls import SHAPES, assert_same, assert_two_threads_agree, generate
from cases import pairwise, representatives
from eagle_heads import agreeing_head, drafter_of, soft
from models import EOS, POLICY_CASES, TERRIBLE, VOCABULARY, ForwardCounter, perturbed, prompt, tiny
from sampled_texts import FALSE_ALARM, processors_of, uniform_numbers, uniformity
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, InContextShortlist
from hf_dynspec.drafters import Drafter
from hf_dynspec.shortlists import POLICIES

ALL_POLICIES = POLICY_CASES | TERRIBLE
# The default of the other tests here: chains and trees, the default policy and one that is no use.
CASES = [("hybrid", "chain"), ("random", "tree"), ("random", "chain"), ("hybrid", "tree")]


# Every policy --------------------------------------------------------------------------------------------------------


DRAFTERS = ("independent", "eagle2", "eagle3")
# The second one has sliding windows, which the texts pass.
FAMILIES = ("llama", "gemma3")


@functools.cache
def pair(kind: str, family: str) -> tuple[PreTrainedModel, PreTrainedModel | Drafter]:
    """A target and what drafts for it: a noisy copy, or an EAGLE head that often agrees."""
    if kind == "independent":
        target = tiny(family)
        return target, perturbed(target)
    target = soft(family)
    return target, drafter_of(agreeing_head(kind), target)


AXES = (DRAFTERS, FAMILIES, tuple(SHAPES), ("greedy", "sampled"))
CASES_OF_POLICIES = pairwise("families", tuple(POLICIES), *AXES)
# Of other settings of policies and of terrible policies one case each runs by default, another one for each.
for place, variant in enumerate(sorted(ALL_POLICIES.keys() - POLICIES.keys())):
    combinations = [(variant, *case) for case in itertools.product(*AXES)]
    start = 7 * place % len(combinations)
    CASES_OF_POLICIES += representatives("families", [*combinations[start:], *combinations[:start]])


@pytest.mark.parametrize(("policy", "kind", "family", "shape", "mode"), CASES_OF_POLICIES)
def test_output_is_the_targets_own(policy, kind, family, shape, mode):
    """The drafter's full vocabulary is never scored but by the head of this package, nor is its `generate` called."""
    target, drafter = pair(kind, family)
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[policy](), target=target, tree=SHAPES[shape])
    own = [drafter, drafter.get_output_embeddings()] if kind == "independent" else []
    with ForwardCounter(*own) as forbidden:
        check = greedy_is_identical if mode == "greedy" else sampled_follows_the_target
        check(target, assistant)
    assert forbidden.count == 0
    stats = assistant.stats_total
    assert stats.accepted < stats.drafted, "no draft was ever rejected, so rejection was not exercised"
    if own and policy in POLICY_CASES:
        assert stats.accepted > 0, "no draft was ever accepted, so acceptance was not exercised"
    assistant.unbind()


def greedy_is_identical(target: PreTrainedModel, assistant: DynSpecAssistant) -> None:
    lengths = [assert_same(target, assistant, prompt(seed=seed), eos_token_id=300).shape[1] for seed in range(2)]
    assert assistant.stats_total.tokens == sum(lengths) - 24


def sampled_follows_the_target(target: PreTrainedModel, assistant: DynSpecAssistant) -> None:
    """A user's own processor among transformers' ones would be another case: see `test_sampling`."""
    arguments = {"temperature": 3.0, "top_k": 8, "eos_token_id": 300, "suppress_tokens": [300]}
    processors = processors_of(target, **arguments)
    torch.manual_seed(3)
    text = generate(target, assistant, max_new_tokens=80, do_sample=True, **arguments)
    numbers = uniform_numbers(target, perturbed(target), processors, text, 12)
    # There are some hundred of these cases.
    assert uniformity(numbers) > FALSE_ALARM / 10


def test_the_guard_sees_a_projection_and_a_forward(target):
    with ForwardCounter(target, target.get_output_embeddings()) as forwards:
        target.generate(prompt(), max_new_tokens=1)
    assert forwards.count == 2


def test_policies_differ_in_what_they_draft(target, drafter):
    """Exactness would be trivial if the policy had no say: it decides what is accepted and what is missed."""
    acceptance = {}
    for name in ("full", "in_context", "random", "eos_only"):
        assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target)
        generate(target, assistant)
        acceptance[name] = assistant.stats.acceptance_rate, assistant.stats.oov_rate
    assert acceptance["full"][0] > acceptance["in_context"][0] > acceptance["eos_only"][0] == 0.0
    assert acceptance["full"][1] == 0.0 < acceptance["in_context"][1] < acceptance["eos_only"][1] == 1.0
    assert acceptance["random"][1] > 0.5


def test_a_drafter_equal_to_the_target_is_always_right_on_the_full_vocabulary(target):
    assistant = DynSpecAssistant(target, "full", target=target, num_assistant_tokens=4)
    assert_same(target, assistant)
    assert assistant.stats.acceptance_rate == 1.0 and assistant.stats.oov_rate == 0.0


@pytest.mark.parametrize(("name", "shape"), representatives("families", CASES, keep=2))
def test_an_unrelated_drafter_changes_nothing_but_the_speed(name, shape, target):
    stranger = tiny("qwen2", seed=5, num_hidden_layers=1, hidden_size=16)
    assistant = DynSpecAssistant(stranger, ALL_POLICIES[name](), target=target, tree=SHAPES[shape])
    assert_same(target, assistant)
    assert assistant.stats.accepted_per_round == [] or assistant.stats.accepted_per_round[0] < 0.2


# Calls that follow one another ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("hybrid", "chain"), ("in_context", "tree")])
@pytest.mark.parametrize("earlier", ["calls that ended", "a call that failed"])
def test_a_call_does_not_depend_on_earlier_ones(earlier, name, shape, target, drafter):
    """It drafts what a new assistant drafts, though it finds buffers of the calls before it."""

    def fails_in_the_third_round(input_ids, scores, **kwargs):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    asked: list[int] = []
    used, fresh = (DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPES[shape]) for _ in "ab")
    if earlier == "calls that ended":
        for seed, length in ((7, 30), (8, 3)):
            generate(target, used, prompt(length, seed))
    else:
        with pytest.raises(KeyboardInterrupt):
            generate(target, used, prompt(seed=4), stopping_criteria=[fails_in_the_third_round])
    assert torch.equal(assert_same(target, used), generate(target, fresh))
    assert used.stats.to_dict() == fresh.stats.to_dict()


@pytest.mark.parametrize(("name", "shape"), [("in_context, lru", "chain"), ("hybrid", "tree")])
def test_two_threads_on_one_assistant(name, shape, target, drafter):
    assert_two_threads_agree(
        target, lambda: DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPES[shape])
    )


# 16-bit --------------------------------------------------------------------------------------------------------------

# A bf16 number has 8 significant bits, so that rounding moves a logit by up to 2⁻⁹ of its size, and sums of rounded
# terms in a batch of several rows and in one of one row come out a few such steps apart. Eight steps of the largest
# logit bound what is seen here tenfold; a wrong token lies farther away than that, as the control below shows.
ROUNDING_STEPS = 8


def log_probability_gaps(target: PreTrainedModel, output: torch.Tensor) -> tuple[float, float]:
    """How far below the argmax's log-probability the worst token of the output lies, and what rounding explains."""
    with torch.no_grad():
        logits = target(output).logits[0, 11:-1].float()
    log_probabilities = logits.log_softmax(-1)
    emitted = log_probabilities.gather(1, output[0, 12:, None])[:, 0]
    gap = (log_probabilities.amax(-1) - emitted).max()
    return float(gap), ROUNDING_STEPS * 2**-8 * float(logits.abs().max())


@pytest.mark.parametrize(("name", "shape"), representatives("families", CASES, keep=2))
def test_in_bf16_every_token_is_an_argmax_up_to_rounding(name, shape, target, drafter):
    target_16, drafter_16 = tiny().to(torch.bfloat16), perturbed(target).to(torch.bfloat16)
    assistant = DynSpecAssistant(drafter_16, ALL_POLICIES[name](), target=target_16, tree=SHAPES[shape])
    output = generate(target_16, assistant)
    gap, explained = log_probability_gaps(target_16, output)
    assert gap <= explained
    wrong = output.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % VOCABULARY
    assert log_probability_gaps(target_16, wrong)[0] > explained


def test_a_bf16_drafter_for_an_fp32_target(target):
    drafter_16 = perturbed(target).to(torch.bfloat16)
    assistant = DynSpecAssistant(drafter_16, ALL_POLICIES["hybrid"](), target=target)
    assert_same(target, assistant)
    assert assistant.stats.accepted > 0


# Conversations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), list(zip(ALL_POLICIES, itertools.cycle(SHAPES))))
def test_a_conversation_stays_exact(name, shape, target, drafter):
    """Each turn's input is everything before it and a few new tokens."""
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[name](), target=target, tree=SHAPES[shape])
    conversation, text = assistant.conversation(), prompt(10)
    for turn in range(3):
        output = assert_same(target, conversation, text, max_new_tokens=8)
        text = torch.cat([output, prompt(5, seed=50 + turn)], dim=1)


def test_a_conversation_keeps_the_window_and_the_drafters_cache(target, drafter):
    assistant = DynSpecAssistant(drafter, InContextShortlist(1000), target=target)
    conversation = assistant.conversation()
    first_reads: list[int] = []
    fed: list[int] = []

    def record(module, args, kwargs):
        fed.append(kwargs["input_ids"].shape[1])

    with drafter.get_decoder().register_forward_pre_hook(record, with_kwargs=True):
        text = prompt(10)
        for turn in range(3):
            first = len(fed)
            text = generate(target, conversation, text, max_new_tokens=20)
            first_reads.append(fed[first])
            text = torch.cat([text, prompt(5, seed=50 + turn)], dim=1)
    # In later turns the drafter reads the five new tokens and the few that it had not read when the last turn ended.
    assert first_reads[0] == 10
    assert all(5 <= length <= 5 + 2 for length in first_reads[1:])
    window = set(conversation.session._selector.state.select(0, text[0, -1:], torch.empty(0)).ids().tolist())
    assert set(text[0, :-5].tolist()) <= window


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_conversation_may_change_its_past(family, shape):
    """What the drafter knew of an edited earlier turn is dropped, also if sliding windows have left it behind."""
    target, length = tiny(family), 30
    assistant = DynSpecAssistant(perturbed(target), "full", target=target, tree=SHAPES[shape])
    conversation, text = assistant.conversation(), prompt(length)
    for position in (29, 12, 0):
        generate(target, conversation, text, max_new_tokens=12)
        text = text.clone()
        text[0, position] = 3 + (int(text[0, position]) + 1) % (VOCABULARY - 3)
        assert_same(target, conversation, text)
        assert assistant.stats.accepted > 0
    assert_same(target, conversation, text[:, :7])


def test_a_conversation_in_which_the_eos_ids_change(target, drafter):
    """Shortlists must contain the EOS ids of the call, not those of the first turn."""
    conversation = DynSpecAssistant(drafter, InContextShortlist(50), target=target).conversation()
    generate(target, conversation, max_new_tokens=10)
    other = int(generate(target, None, prompt(seed=3))[0, -5])
    assert_same(target, conversation, prompt(seed=3), eos_token_id=[EOS, other])
    shortlist = conversation.session._selector.state.select(0, prompt()[0, -1:], torch.empty(0))
    assert {EOS, other} <= set(shortlist.ids().tolist())


# The models ----------------------------------------------------------------------------------------------------------


def fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_no_weight_of_either_model_is_touched(target, drafter):
    before = fingerprint(target), fingerprint(drafter)
    assistant = DynSpecAssistant(drafter, ALL_POLICIES["hybrid"](), target=target)
    generate(target, assistant)
    generate(target, assistant, do_sample=True, top_k=20)
    assert (fingerprint(target), fingerprint(drafter)) == before
    changed = perturbed(drafter, 0.0)
    with torch.no_grad():
        changed.get_output_embeddings().weight[5, 5] += 1e-3
    assert fingerprint(changed) != before[1], "the fingerprint does not see a changed weight"
