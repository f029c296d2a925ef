"""Online alignment in real `generate` calls: the drafter gets better, the output stays the target's own."""

import copy
import gc
import hashlib
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import psutil
import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from huggingface_hub import HfApi
from local_hub import running_hub
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_dynspec import (
    ArtifactError,
    ConfigurationError,
    DynSpecAssistant,
    EagleDrafter,
    OnlineAlignment,
    TreeConfig,
)
from hf_dynspec.alignment.live_weights import DraftingLock
from hf_dynspec.alignment.recording import Recorder
from hf_dynspec.alignment.replay import Trajectory

pytestmark = pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")

# Learns fast, always the same, and is served as soon as there is anything.
QUICK = {"synchronous": True, "learning_rate": 3e-3, "steps": 4, "rank": 8, "gate": False}
TREE = TreeConfig(20, 3, 4)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def drafter(target) -> PreTrainedModel:
    return perturbed(target, 0.3)


def generated(target, assistant=None, seed=0, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 24, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(seed=seed), **named | arguments)


def digest(model: torch.nn.Module) -> str:
    tensors = (one.detach().contiguous().view(torch.uint8).numpy() for one in model.state_dict().values())
    return hashlib.sha256(b"".join(one.tobytes() for one in tensors)).hexdigest()


def stream(target, assistant, requests: int, **arguments) -> list[float]:
    """The acceptance length of each of so many requests about three texts."""
    lengths = []
    for index in range(requests):
        output = generated(target, assistant, index % 3, **arguments)
        lengths.append(assistant.stats.acceptance_length)
        if not arguments.get("do_sample"):
            assert torch.equal(output, generated(target, None, index % 3, **arguments))
    return lengths


# What it is for ------------------------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target)
    before = digest(drafter)
    generated(target, assistant)
    assert assistant.alignment is None
    assert digest(drafter) == before


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
def test_drafts_get_better_and_the_target_is_never_touched(tree, target, drafter):
    targets, own = digest(target), digest(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=tree, alignment=OnlineAlignment(**QUICK))
    lengths = stream(target, assistant, 15)
    assert sum(lengths[-3:]) > 1.15 * sum(lengths[:3])
    stats = assistant.alignment.stats
    assert stats.requests == stats.updates == stats.kept == 15
    assert stats.is_served and stats.loss > 0 and stats.error is None
    assert 0 < stats.buffer_bytes and 0 < stats.training_bytes and 0 < stats.seconds and 0 < stats.longest_swap
    assert digest(drafter) != own
    assert all(one.grad is None and one.grad_fn is None for one in drafter.parameters())
    assert digest(target) == targets


@pytest.mark.parametrize("layout", ["eagle2", "eagle3", "speculators"])
def test_eagle_heads_learn_too(layout):
    target = soft()
    targets = digest(target)
    head = drafter_of(agreeing_head(layout), target)
    own = digest(head.module)
    settings = OnlineAlignment(**QUICK | {"learning_rate": 1e-2})
    assistant = DynSpecAssistant(head, "full", target=target, tree=TREE, alignment=settings)
    stream(target, assistant, 12)
    scored = assistant.alignment.update_now()
    assert scored is not None and assistant.alignment.stats.updates == 13
    assert digest(head.module) != own
    assistant.alignment.reset()
    assert digest(head.module) == own and digest(target) == targets


@pytest.mark.parametrize("preset", ["paper", "osd"])
def test_presets_learn(preset, target, drafter):
    own = digest(drafter)
    settings = getattr(OnlineAlignment, preset)(synchronous=True, learning_rate=1e-3)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    stream(target, assistant, 5)
    stats = assistant.alignment.stats
    assert digest(drafter) != own and 0 < stats.updates == stats.kept
    assistant.unbind()
    assert digest(drafter) == own


def test_a_drafter_of_16_bits_learns_what_its_bits_cannot_hold(target):
    """A hundredth of a bit at a time, which the copy remembers."""
    drafter = perturbed(target, 0.3).to(torch.bfloat16)
    own = digest(drafter)
    settings = OnlineAlignment(**QUICK | {"learning_rate": 1e-4, "steps": 1})
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    seen = []
    for _ in range(12):
        stream(target, assistant, 1)
        seen.append(digest(drafter))
    assert seen[-1] != own and len(set(seen)) > 3
    assert {one.dtype for one in drafter.parameters()} == {torch.bfloat16}
    learnt = assistant.alignment._training.learner.adapter_state().values()
    assert {one.dtype for one in learnt} == {torch.float32}
    assistant.unbind()
    assert digest(drafter) == own


# Exactness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_CASES)
def test_every_policy_with_chains_and_trees(name, target, drafter):
    for tree in (False, TREE):
        settings = OnlineAlignment(**QUICK)
        assistant = DynSpecAssistant(drafter, POLICY_CASES[name](), target=target, tree=tree, alignment=settings)
        stream(target, assistant, 3, max_new_tokens=12)
        assert assistant.alignment.stats.kept == 3
        assistant.unbind()


def test_sampling_stays_exact_in_what_it_draws_first(target, drafter):
    """Of a drafter that learns, the distribution of a sampled token is the target's. The odds of a false alarm are
    below one in a million, by Hoeffding's inequality."""
    assistant = DynSpecAssistant(
        drafter, "full", target=target, num_assistant_tokens=2, alignment=OnlineAlignment(**QUICK | {"steps": 1})
    )
    text, draws = prompt(), 200
    with torch.no_grad():
        first = target(text).logits[0, -1].softmax(-1)
    best = first.argmax()
    torch.manual_seed(0)
    seen = [
        int(target.generate(text, do_sample=True, max_new_tokens=2, top_k=0, assistant_model=assistant)[0, 12])
        for _ in range(draws)
    ]
    share = sum(token == best for token in seen) / draws
    assert abs(share - float(first[best])) < 0.2


def test_after_reset_drafts_are_those_of_the_untouched_drafter(target, drafter):
    untouched = DynSpecAssistant(copy.deepcopy(drafter), "full", target=target, tree=TREE)
    expected = untouched.draft_round(prompt(20, seed=3))
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=TREE, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 4)
    learnt = assistant.draft_round(prompt(20, seed=3))
    assert learnt.scores.shape != expected.scores.shape or not torch.equal(learnt.scores, expected.scores)
    assistant.alignment.reset()
    again = assistant.draft_round(prompt(20, seed=3))
    assert torch.equal(again.token_ids, expected.token_ids) and torch.equal(again.scores, expected.scores)
    stats = assistant.alignment.stats
    assert stats.buffer_bytes == stats.updates == stats.requests == 0 and stats.loss is None


def test_a_round_drafts_with_one_set_of_weights(target, drafter, monkeypatch):
    """Weights are swapped by another thread all the time; each draft is that of the old ones or that of the new."""
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(gate=False))
    assistant.alignment.pause()
    live = assistant.alignment._training.live
    others = {name: one.detach() * 1.1 for name, one in drafter.named_parameters() if "proj" in name}
    sets = [copy.deepcopy(drafter), copy.deepcopy(drafter)]
    sets[1].load_state_dict(others, strict=False)
    is_done = threading.Event()

    def swap() -> None:
        with torch.no_grad():
            while not is_done.is_set():
                live.serve(others)
                live.restore()

    drafts = []
    from hf_dynspec.drafting.session import DraftSession

    draft = DraftSession.draft_chain

    def remembering(self, prefix, *args, **kwargs):
        drafts.append((prefix.clone(), draft(self, prefix, *args, **kwargs)))
        return drafts[-1][1]

    monkeypatch.setattr(DraftSession, "draft_chain", remembering)
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for seed in range(6):
            generated(target, assistant, seed)
    finally:
        is_done.set()
        thread.join()
    used = set()
    for prefix, candidates in drafts:
        text = torch.cat([prefix, candidates.token_ids])
        with torch.no_grad():
            expected = [one(text[None]).logits[0, prefix.shape[0] - 1 : -1] for one in sets]
        agrees = [torch.allclose(torch.stack(candidates.logits), one, rtol=1e-3, atol=1e-3) for one in expected]
        assert any(agrees)
        used.add(agrees.index(True))
    assert used == {0, 1}


def test_who_swaps_waits_for_drafts_and_drafts_wait_for_who_swaps():
    lock, order = DraftingLock(), []
    drafting, may_end = threading.Event(), threading.Event()

    def draft() -> None:
        with lock:
            drafting.set()
            assert may_end.wait(20)
            order.append("draft")

    with ThreadPoolExecutor(2) as pool:
        drafts = pool.submit(draft)
        assert drafting.wait(20)

        def swap() -> None:
            with lock.writing():
                order.append("swap")

        swaps = pool.submit(swap)
        with lock:  # another one may draft as long as nobody has lost patience
            order.append("other draft")
        may_end.set()
        drafts.result(20)
        swaps.result(20)
    assert order == ["other draft", "draft", "swap"]


# What is recorded ----------------------------------------------------------------------------------------------------


def recorded(assistant: DynSpecAssistant) -> list[Trajectory]:
    training = assistant.alignment._training
    return list(training.adapters[training.active].buffer)


def assert_is_what_the_target_says(target, trajectory: Trajectory, whole: torch.Tensor, reads=()) -> None:
    """The trajectory is the end of a text, and holds what the target says of it.

    Args:
        whole: int64 `[n]`: the text.
    """
    n, v = trajectory.token_ids.shape[0], trajectory.log_probabilities.shape[0]
    assert torch.equal(trajectory.token_ids, whole[-n:]) and n == trajectory.first + v
    with torch.no_grad():
        outputs = target(whole[None], output_hidden_states=True)
    logits = outputs.logits[0, -v - 1 : -1]
    k = trajectory.top_ids.shape[1]
    torch.testing.assert_close(trajectory.top_logits, logits.topk(k).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.gather(1, trajectory.top_ids), trajectory.top_logits, rtol=1e-4, atol=1e-4)
    scaled = logits / (trajectory.temperature or 1.0)
    torch.testing.assert_close(trajectory.log_normalisers, scaled.logsumexp(-1), rtol=1e-4, atol=1e-4)
    expected = scaled.log_softmax(-1).gather(1, whole[-v:, None])[:, 0]
    torch.testing.assert_close(trajectory.log_probabilities, expected, rtol=1e-4, atol=1e-4)
    if reads:
        states = torch.cat([outputs.hidden_states[index][0, -n:] for index in reads], -1)
        torch.testing.assert_close(trajectory.features[:-1], states[:-1], rtol=1e-3, atol=1e-3)
    else:
        assert trajectory.features is None


@pytest.mark.parametrize("policy", ["full", "hybrid", "router", "in_context, nothing of the target"])
@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_request_leaves_what_the_target_said(mode, tree, policy, target, drafter):
    settings = OnlineAlignment(**QUICK | {"top_k": 7, "context": 9})
    assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=target, tree=tree, alignment=settings)
    with mode():
        output = generated(target, assistant)
    (trajectory,) = recorded(assistant)
    assert_is_what_the_target_says(target, trajectory, output[0])
    assert trajectory.first == 9 and trajectory.top_ids.shape[1] == 7
    assert int(trajectory.is_wrong.sum()) == assistant.stats.rounds and trajectory.is_wrong[-1]
    assert trajectory.shortlist_ids.unique().shape == trajectory.shortlist_ids.shape
    assert trajectory.nbytes == assistant.alignment.stats.buffer_bytes
    assert trajectory.temperature == 0.0
    with mode():
        output = generated(target, assistant, do_sample=True, temperature=0.7)
    assert recorded(assistant)[-1].temperature == 0.7
    assert_is_what_the_target_says(target, recorded(assistant)[-1], output[0])


@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_a_request_leaves_what_an_eagle_head_reads(layout):
    target = soft()
    head = drafter_of(agreeing_head(layout), target)
    assistant = DynSpecAssistant(head, target=target, alignment=OnlineAlignment(**QUICK | {"context": 6}))
    output = generated(target, assistant)
    (trajectory,) = recorded(assistant)
    assert_is_what_the_target_says(target, trajectory, output[0], head.reads)
    # The next turn has a cache, whose tokens the target does not read again: the text begins behind them.
    cache = DynamicCache()
    with torch.no_grad():
        target(prompt(30), past_key_values=cache)
    text = torch.cat([prompt(30), prompt(4, seed=9)], 1)
    output = target.generate(
        text, past_key_values=cache, do_sample=False, max_new_tokens=12, assistant_model=assistant
    )
    trajectory = recorded(assistant)[-1]
    assert trajectory.first == 4
    assert_is_what_the_target_says(target, trajectory, output[0], head.reads)


def test_conversations_and_long_requests(target, drafter, monkeypatch):
    from hf_dynspec.alignment import recording

    monkeypatch.setattr(recording, "MOST_VERIFIED", 20)
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK | {"context": 16}))
    conversation = assistant.conversation()
    text = prompt(10)
    for turn in range(3):
        output = target.generate(text, do_sample=False, max_new_tokens=60, assistant_model=conversation)
        assert torch.equal(output, target.generate(text, do_sample=False, max_new_tokens=60))
        trajectory = recorded(assistant)[-1]
        assert 20 <= trajectory.log_probabilities.shape[0] < 30 and trajectory.first == 16
        assert_is_what_the_target_says(target, trajectory, output[0])
        text = torch.cat([output, prompt(5, seed=turn)], 1)


def test_transformers_own_loop_leaves_its_requests_to_the_next_call(target, drafter):
    from transformers import GenerationMixin

    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    output = GenerationMixin.generate(target, prompt(), do_sample=False, max_new_tokens=16, assistant_model=assistant)
    gc.collect()
    assert torch.equal(output, generated(target, max_new_tokens=16))
    assert assistant.alignment.stats.updates == 0
    generated(target, assistant, 1)
    assert assistant.alignment.stats.updates == 2
    trajectory = recorded(assistant)[0]
    # The verdict on its last round is not told in that loop.
    assert_is_what_the_target_says(target, trajectory, output[0, : 12 + trajectory.log_probabilities.shape[0]])


def test_an_interrupted_request_leaves_nothing(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))

    def interrupts(input_ids, scores, **kwargs):
        if input_ids.shape[1] > 20:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        generated(target, assistant, stopping_criteria=[interrupts])
    assert assistant.alignment.stats.requests == 0 and recorded(assistant) == []
    generated(target, assistant)
    assert assistant.alignment.stats.requests == 1


# When it learns ------------------------------------------------------------------------------------------------------


def test_synchronous_learning_is_reproducible_to_the_bit(target, drafter):
    digests = []
    for _ in range(2):
        own = copy.deepcopy(drafter)
        settings = OnlineAlignment(**QUICK | {"batch": 2})
        assistant = DynSpecAssistant(own, target=target, alignment=settings)
        torch.manual_seed(len(digests))  # nothing is drawn from the generator that users seed
        state = torch.get_rng_state()
        stream(target, assistant, 5)
        assert torch.equal(torch.get_rng_state(), state)
        digests.append(digest(own))
    assert digests[0] == digests[1]


def test_training_stays_within_its_share_of_the_time(target, drafter):
    settings = OnlineAlignment(max_overhead=0.05, gate=False)
    assistant = DynSpecAssistant(drafter, target=target, alignment=settings)
    for index in range(15):
        generated(target, assistant, index)
    stats = assistant.alignment.stats
    assert 1 <= stats.updates < 15
    # An update begins when its like can be paid for, so that the last one may overdraw by little.
    assert stats.overhead <= 0.05 + 2 * stats.seconds / (stats.updates * stats.generation_seconds)


def test_pause_resume_and_update_now(target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))
    alignment = assistant.alignment
    assert alignment.update_now() is None
    alignment.pause()
    generated(target, assistant)
    assert alignment.stats.requests == 0
    alignment.resume()
    generated(target, assistant)
    assert alignment.stats.updates == 1
    assert alignment.update_now() > 0
    assert alignment.stats.updates == 2


@pytest.mark.parametrize("background", [False, True])
def test_threads_share_an_aligner(background, target, drafter):
    own = digest(drafter)
    settings = OnlineAlignment(
        background=background, gate=False, max_overhead=1.0, learning_rate=3e-3, steps=2, rank=8
    )
    assistant = DynSpecAssistant(drafter, target=target, alignment=settings)
    expected = [generated(target, None, seed) for seed in range(4)]

    def run(worker: int) -> None:
        for index in range(8):
            seed = (worker + index) % 4
            assert torch.equal(generated(target, assistant, seed), expected[seed])

    with warnings.catch_warnings(), ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("error")
        list(pool.map(run, range(3), timeout=300))
    if background:
        assistant.alignment._job.result(60)
    stats = assistant.alignment.stats
    assert stats.updates > 3 and stats.kept > 0 and stats.error is None
    assistant.alignment.reset()
    assert digest(drafter) == own


def test_an_error_turns_learning_off_and_not_generation(target, drafter, monkeypatch):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    assert digest(drafter) != own

    def fails(trajectories):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(assistant.alignment._training.learner, "step", fails)
    with pytest.warns(UserWarning, match=r"alignment failed.*no memory left"):
        generated(target, assistant)
    assert digest(drafter) == own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream(target, assistant, 2)
    assert "no memory left" in assistant.alignment.stats.error
    monkeypatch.undo()
    assistant.policy = "full"
    assert digest(drafter) == own, "binding anew is no reason to serve it"
    assistant.alignment.reset()
    stream(target, assistant, 1)
    assert assistant.alignment.stats.error is None and digest(drafter) != own


def test_an_error_while_recording_does_not_stop_generation(target, drafter, monkeypatch):
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))

    def fails(recorder):
        raise MemoryError("no room for another round")

    monkeypatch.setattr(Recorder, "_forget_beginning", fails)
    with pytest.warns(UserWarning, match="no room for another round"):
        output = generated(target, assistant)
    assert torch.equal(output, generated(target))


def test_an_error_while_recording_keeps_no_draft_waiting_for_itself(target, drafter):
    """The garbage collector ends a request that was given up, in whatever thread, perhaps in the middle of a draft."""
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    recorder = assistant.alignment.recorder()
    recorder._failure = MemoryError("no room for another round")

    def draft_and_collect():
        with assistant.alignment.drafting_lock:
            assistant.alignment.take(recorder, 0.1)

    thread = threading.Thread(target=draft_and_collect, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.warns(UserWarning, match="no room for another round"):
        generated(target, assistant)
    assert digest(drafter) == own


def test_memory_stays_where_it_was(target, drafter):
    settings = OnlineAlignment(**QUICK | {"steps": 1, "buffer": 4, "top_k": 4, "context": 4})
    assistant = DynSpecAssistant(drafter, target=target, alignment=settings)
    for index in range(10):
        generated(target, assistant, index % 4, max_new_tokens=6)
    gc.collect()
    before = psutil.Process(os.getpid()).memory_info().rss
    bytes_before = assistant.alignment.stats.buffer_bytes
    for _ in range(1000):
        assistant.alignment.update_now()
    gc.collect()
    assert psutil.Process(os.getpid()).memory_info().rss - before < 16 * 2**20
    assert assistant.alignment.stats.buffer_bytes == bytes_before


def test_the_interpreter_ends_while_a_thread_learns(tmp_path):
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from models import perturbed, prompt, tiny
from hf_dynspec import DynSpecAssistant, OnlineAlignment
target = tiny()
alignment = OnlineAlignment(background=True, gate=False, max_overhead=1.0, steps=30)
assistant = DynSpecAssistant(perturbed(target, 0.3), target=target, alignment=alignment)
target.generate(prompt(), do_sample=False, max_new_tokens=24, assistant_model=assistant)
assert assistant.alignment._job is not None and not assistant.alignment._job.done()
print("done")
"""
    run = [sys.executable, "-W", "ignore", "-c", code, os.path.dirname(__file__)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# What is served ------------------------------------------------------------------------------------------------------


def test_what_is_learnt_is_served_when_it_has_earned_that(target, drafter):
    own = digest(drafter)
    settings = OnlineAlignment(**QUICK | {"gate": True, "gate_least": 4})
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    for index in range(5):
        assert digest(drafter) == own, "served before four requests were scored"
        generated(target, assistant, index % 3)
    stats = assistant.alignment.stats
    assert stats.acceptance_after > stats.acceptance_before
    assert stats.is_served and stats.kept == 1 and digest(drafter) != own


@pytest.mark.parametrize("learning_rate", [0.3, 3.0])
def test_a_learning_rate_that_is_far_too_high_is_never_served(learning_rate, target):
    """The drafter is the target itself, so that every change is for the worse."""
    drafter = copy.deepcopy(target)
    own = digest(drafter)
    settings = OnlineAlignment(**QUICK | {"gate": True, "learning_rate": learning_rate})
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    for index in range(14):
        generated(target, assistant, index)
        assert digest(drafter) == own
    stats = assistant.alignment.stats
    assert stats.kept == 0 and stats.updates == 14
    assert stats.rolled_back >= 1, "what was learnt was hopeless, and was given up"


def test_numbers_that_are_none_are_never_served(target, drafter):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment(**QUICK))
    state = assistant.alignment.state_dict()
    assert state["adapters"]["default"]["updates"] == 0
    stream(target, assistant, 1)
    for parameter in assistant.alignment._training.learner._trained.values():
        parameter.data.fill_(torch.inf)
    generated(target, assistant)
    assert digest(drafter) == own


@pytest.mark.parametrize("change", ["in place", "loaded"])
def test_a_drafter_that_somebody_changes_is_learnt_anew(change, target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    if change == "in place":
        assistant.alignment.reset()
        with torch.no_grad():
            drafter.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    else:
        drafter.load_state_dict(perturbed(target, 0.2, seed=5).state_dict())
    changed = copy.deepcopy(drafter)
    with pytest.warns(UserWarning, match="weights were changed"):
        stream(target, assistant, 1)
    stream(target, assistant, 1)
    assistant.alignment.reset()
    for name, one in drafter.named_parameters():
        assert torch.equal(one, changed.get_parameter(name)), name


@pytest.mark.parametrize("change", ["in place", "another parameter", "cast"])
@pytest.mark.parametrize("taken_up_by", ["bind", "set_adapter", "load_state_dict", "load"])
def test_a_drafter_that_somebody_changes_is_not_drafted_with_what_was_learnt_before(
    taken_up_by, change, target, drafter, tmp_path
):
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    alignment = assistant.alignment
    stream(target, assistant, 2)
    state = alignment.state_dict()
    alignment.save_pretrained(tmp_path)
    alignment.add_adapter("law")
    alignment.reset() if taken_up_by.startswith("load") else alignment.set_adapter("law")
    if taken_up_by == "bind":
        alignment.set_adapter("default")
        assistant.unbind()
    projection = drafter.model.layers[0].self_attn.q_proj
    if change == "in place":
        with torch.no_grad():
            projection.weight.mul_(1.5)
    elif change == "another parameter":
        projection.weight = torch.nn.Parameter(projection.weight.detach() * 1.5)
    else:
        drafter.to(torch.bfloat16)
    changed = digest(drafter)
    with pytest.warns(UserWarning, match="learning begins anew"):
        if taken_up_by == "bind":
            assistant.bind(target)
            assert digest(drafter) == changed
        elif taken_up_by == "set_adapter":
            alignment.set_adapter("default")
            assert digest(drafter) == changed
        elif taken_up_by == "load_state_dict":
            alignment.load_state_dict(state)
        else:
            alignment.load(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the drafter's weights")
        stream(target, assistant, 1)
    assert digest(drafter) != changed and len({one.dtype for one in drafter.parameters()}) == 1
    assistant.unbind()
    assert digest(drafter) == changed


def test_a_drafter_that_is_cast_while_others_weights_stand_in_it(target, drafter):
    own = {name: one.detach().clone() for name, one in drafter.named_parameters()}
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    drafter.double()
    assistant.alignment.reset()
    for name, one in drafter.named_parameters():
        assert torch.equal(one, own[name].double()), name
    with pytest.warns(UserWarning, match="weights were changed"):
        stream(target, assistant, 1)


@pytest.mark.parametrize("end", ["unbind", "del", "another drafter", "alignment error"])
def test_the_drafter_gets_its_own_weights_back(end, target, drafter, monkeypatch):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    assert digest(drafter) != own
    if end == "unbind":
        assistant.unbind()
    elif end == "del":
        del assistant
        gc.collect()
    elif end == "another drafter":
        other = perturbed(target, 0.3, seed=3)
        others = digest(other)
        assistant.drafter = other
        stream(target, assistant, 2)
        assert digest(other) != others
    else:
        monkeypatch.setattr(assistant.alignment._training.learner, "weights", lambda: 1 / 0)
        with pytest.warns(UserWarning, match="alignment failed"):
            generated(target, assistant)
    assert digest(drafter) == own


@pytest.mark.parametrize("kind", ["causal", "eagle3"])
def test_a_drafter_can_be_trained_after_its_assistant_was_dropped_in_inference_mode(kind, drafter):
    target = tiny() if kind == "causal" else soft()
    drafter = drafter if kind == "causal" else drafter_of(agreeing_head(kind), target)
    module = drafter if kind == "causal" else drafter.module
    own = digest(module)
    with torch.inference_mode():
        assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
        generated(target, assistant)
        assert digest(module) != own
        del assistant
        gc.collect()
    assert digest(module) == own
    assert not any(one.is_inference() for one in module.parameters())


def test_binding_again_serves_again(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    learnt = digest(drafter)
    assistant.unbind()
    assert digest(drafter) != learnt
    assistant.bind(target)
    assert digest(drafter) == learnt


def test_copies_of_an_assistant_share_what_is_learnt(target, drafter):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    twin = copy.deepcopy(assistant)
    assert twin.alignment is assistant.alignment
    stream(target, twin, 2)
    assistant.unbind()
    assert digest(drafter) != own, "the copy still drafts with it"
    twin.unbind()
    assert digest(drafter) == own


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_copy_that_gets_another_drafter_leaves_the_others_what_they_learn(is_bound, target, drafter):
    own = digest(drafter)
    settings = OnlineAlignment(**QUICK)
    assistant = DynSpecAssistant(drafter, "full", target=target if is_bound else None, alignment=settings)
    twin = copy.deepcopy(assistant)
    if is_bound:
        stream(target, assistant, 2)
    learnt = digest(drafter)
    twin.drafter = perturbed(target, 0.3, seed=3)
    assert twin.alignment is not assistant.alignment and digest(drafter) == learnt
    stream(target, assistant.bind(target), 2)
    assert assistant.alignment.stats.requests == (4 if is_bound else 2) and digest(drafter) != own
    assistant.unbind()
    assert digest(drafter) == own


def test_a_drafter_that_is_refused_leaves_everything_as_it_was(target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    learnt, alignment = digest(drafter), assistant.alignment
    with pytest.raises(ConfigurationError, match="target's too"):
        assistant.drafter = target
    assert digest(drafter) == learnt and assistant.alignment is alignment
    stream(target, assistant, 1)
    assert alignment.stats.updates == 3


def test_an_adapter_that_somebody_injects_ends_learning_and_not_generation(target, drafter):
    own = {id(one): one.detach().clone() for one in drafter.parameters()}
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), drafter, "one")
    with pytest.warns(UserWarning, match="merge_and_unload"):
        generated(target, assistant)
    assert "adapters of peft" in assistant.alignment.stats.error
    stream(target, assistant, 2)
    for parameter in drafter.parameters():
        assert id(parameter) not in own or torch.equal(parameter, own[id(parameter)])


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_drafter_that_shares_weights_with_the_target_is_refused(target):
    drafter = perturbed(target, 0.1)
    drafter.set_input_embeddings(target.get_input_embeddings())
    with pytest.raises(ConfigurationError, match=r"embed_tokens.*target's too"):
        DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment.osd())
    DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment()).unbind()


def test_two_assistants_do_not_align_one_drafter(target, drafter):
    first = DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment())
    with pytest.raises(ConfigurationError, match="another assistant aligns"):
        DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment())
    DynSpecAssistant(drafter, target=target)
    del first
    gc.collect()
    DynSpecAssistant(drafter, target=target, alignment=OnlineAlignment())


def test_a_drafter_with_adapters_is_refused(target, drafter):
    model = peft.get_peft_model(drafter, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match="merge_and_unload"):
        DynSpecAssistant(model, target=target, alignment=OnlineAlignment())


@pytest.mark.parametrize("wrong", [True, "paper", {"rank": 4}])
def test_what_is_no_setting_is_refused(wrong, target, drafter):
    with pytest.raises(ConfigurationError, match="OnlineAlignment"):
        DynSpecAssistant(drafter, target=target, alignment=wrong)


# Adapters and files --------------------------------------------------------------------------------------------------


def test_adapters_are_switched_between_calls(target, drafter):
    own = digest(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    alignment = assistant.alignment
    stream(target, assistant, 2)
    first = digest(drafter)
    alignment.add_adapter("law")
    assert digest(drafter) == first and alignment.adapters == ("default", "law")
    alignment.set_adapter("law")
    assert alignment.active_adapter == "law" and digest(drafter) == own
    assert recorded(assistant) == [], "one user's requests are not learnt from for another"
    stream(target, assistant, 1)
    law = digest(drafter)
    alignment.set_adapter("default")
    assert digest(drafter) == first
    alignment.set_adapter("law")
    assert digest(drafter) == law
    with pytest.raises(ConfigurationError, match="no adapter 'med'"):
        alignment.set_adapter("med")
    with pytest.raises(ConfigurationError, match="already"):
        alignment.add_adapter("law")
    with pytest.raises(ConfigurationError, match="not active"):
        alignment.delete_adapter("law")
    alignment.delete_adapter("default")
    assert alignment.adapters == ("law",)


def test_a_state_is_taken_up_by_another_assistant(target, drafter):
    own = copy.deepcopy(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    assistant.alignment.add_adapter("law")
    other = DynSpecAssistant(own, "full", target=target, alignment=OnlineAlignment(**QUICK))
    other.alignment.load_state_dict(assistant.alignment.state_dict())
    assert digest(own) == digest(drafter) and other.alignment.adapters == ("default", "law")
    for wrong in ({}, {"active": "x", "adapters": {}}, {"active": "a", "adapters": {"a": {"weights": {"b": 1}}}}):
        with pytest.raises(ConfigurationError):
            other.alignment.load_state_dict(wrong)
        assert digest(own) == digest(drafter)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_peft_loads_what_is_saved(family, tmp_path):
    """And says the same: a wrong prefix would only be warned of."""
    target = tiny(family)
    drafter = perturbed(target, 0.3)
    plain = copy.deepcopy(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 3)
    assistant.alignment.save_pretrained(tmp_path)
    text = prompt(20, seed=5)
    with torch.no_grad():
        expected, before = drafter(text).logits, plain(text).logits
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = peft.PeftModel.from_pretrained(plain, tmp_path)
        actual = model(text).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, before, atol=1e-2)


def test_what_is_saved_is_loaded(target, drafter, tmp_path):
    own = copy.deepcopy(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    folder = assistant.alignment.save_pretrained(tmp_path / "adapter")
    other = DynSpecAssistant(own, "full", target=target, alignment=OnlineAlignment(**QUICK))
    other.alignment.load(folder)
    assert digest(own) == digest(drafter)
    another = DynSpecAssistant(perturbed(target), target=target, alignment=OnlineAlignment(**QUICK | {"rank": 4}))
    with pytest.raises(ArtifactError, match=r"adapter_config.json: r: is 8"):
        another.alignment.load(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="is a pickle"):
        other.alignment.load(folder)


@pytest.mark.parametrize("layout", ["eagle2", "eagle3", "speculators"])
def test_an_eagle_head_is_saved_in_its_own_layout(layout, tmp_path):
    target = soft()
    head = drafter_of(agreeing_head(layout), target)
    assistant = DynSpecAssistant(head, "full", target=target, tree=TREE, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 3)
    assistant.alignment.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path, target=target)
    for name, one in loaded.module.named_parameters():
        torch.testing.assert_close(one, head.module.get_parameter(name), rtol=1e-5, atol=1e-5)
    again = drafter_of(agreeing_head(layout), target)
    other = DynSpecAssistant(again, "full", target=target, alignment=OnlineAlignment(**QUICK))
    other.alignment.load(tmp_path)
    assert digest(again.module) == digest(head.module)


def test_a_model_that_was_trained_whole_is_saved_whole(target, drafter, tmp_path):
    own = copy.deepcopy(drafter)
    settings = OnlineAlignment.osd(synchronous=True)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=settings)
    stream(target, assistant, 2)
    assistant.alignment.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert digest(loaded) == digest(drafter)
    other = DynSpecAssistant(own, "full", target=target, alignment=settings)
    other.alignment.load(tmp_path)
    assert digest(own) == digest(drafter)


def test_what_is_learnt_is_published_and_fetched(target, drafter, monkeypatch, tmp_path):
    own = copy.deepcopy(drafter)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 2)
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        api = HfApi(endpoint=hub.endpoint, token="secret")
        assistant.alignment.push_to_hub("acme/aligned", api=api)
        names = ("adapter_config.json", "adapter_model.safetensors")
        paths = [Path(api.hf_hub_download("acme/aligned", name)) for name in names]
    other = DynSpecAssistant(own, "full", target=target, alignment=OnlineAlignment(**QUICK))
    other.alignment.load(paths[0].parent)
    assert digest(own) == digest(drafter)


def test_no_text_is_written(target, drafter, tmp_path):
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=OnlineAlignment(**QUICK))
    stream(target, assistant, 1)
    assistant.alignment.save_pretrained(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    integers = [one for one in _tensors_in(assistant.alignment.state_dict()) if not one.is_floating_point()]
    assert integers == []


def _tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [one for item in value.values() for one in _tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []
