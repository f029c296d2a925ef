"""What requests leave to learn from, and when it is learnt from."""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from aligned import QUICK, TREE, digest, generated, quick_assistant, recorded, stream, taught
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, prompt
from transformers import DynamicCache

from hf_dynspec import DynSpecAssistant, OnlineAlignment
from hf_dynspec.alignment.recording import Recorder
from hf_dynspec.alignment.replay import Trajectory
from hf_dynspec.cache_names import CACHE

# What is recorded ----------------------------------------------------------------------------------------------------


def assert_is_what_the_target_says(target, trajectory: Trajectory, whole: torch.Tensor, reads=()) -> None:
    """The trajectory is the end of a text, and holds what the target says of it.

    Args:
        whole: int64 `[n]`: the text.
    """
    n, v = trajectory.token_ids.shape[0], trajectory.log_normalisers.shape[0]
    assert torch.equal(trajectory.token_ids, whole[-n:]) and n == trajectory.first + v
    with torch.no_grad():
        outputs = target(whole[None], output_hidden_states=True)
    logits = outputs.logits[0, -v - 1 : -1]
    k = trajectory.top_ids.shape[1]
    torch.testing.assert_close(trajectory.top_logits, logits.topk(k).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.gather(1, trajectory.top_ids), trajectory.top_logits, rtol=1e-4, atol=1e-4)
    scaled = logits / (trajectory.temperature or 1.0)
    torch.testing.assert_close(trajectory.log_normalisers, scaled.logsumexp(-1), rtol=1e-4, atol=1e-4)
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
        target(prompt(30), **{CACHE: cache})
    text = torch.cat([prompt(30), prompt(4, seed=9)], 1)
    output = target.generate(text, **{CACHE: cache}, do_sample=False, max_new_tokens=12, assistant_model=assistant)
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
        assert 20 <= trajectory.log_normalisers.shape[0] < 30 and trajectory.first == 16
        assert_is_what_the_target_says(target, trajectory, output[0])
        text = torch.cat([output, prompt(5, seed=turn)], 1)


def test_transformers_own_loop_leaves_its_requests_to_the_next_call(target, drafter):
    from transformers import GenerationMixin

    assistant = quick_assistant(drafter, target)
    output = GenerationMixin.generate(target, prompt(), do_sample=False, max_new_tokens=16, assistant_model=assistant)
    gc.collect()
    assert torch.equal(output, generated(target, max_new_tokens=16))
    assert assistant.alignment.stats.updates == 0
    generated(target, assistant, 1)
    assert assistant.alignment.stats.updates == 2
    trajectory = recorded(assistant)[0]
    # The verdict on its last round is not told in that loop.
    assert_is_what_the_target_says(target, trajectory, output[0, : 12 + trajectory.log_normalisers.shape[0]])


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


def test_training_stays_within_its_share_of_the_time(target, drafter, monkeypatch):
    # What other work on the machine takes is no cost of an update.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
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
def test_threads_share_an_aligner(background, target, drafter, monkeypatch):
    # Each in its own time, so that no update which was held up forbids all others.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
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
        list(pool.map(run, range(3), timeout=900))
    if background:
        assistant.alignment._job.result(600)
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

    monkeypatch.setattr(assistant.alignment.learner, "step", fails)
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
    assistant = taught(2, drafter, target)
    recorder = assistant.alignment.recorder()
    recorder._failure = MemoryError("no room for another round")

    def draft_and_collect():
        with assistant.alignment.drafting_lock:
            assistant.alignment.take(recorder, 0.1)

    thread = threading.Thread(target=draft_and_collect, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    with pytest.warns(UserWarning, match="no room for another round"):
        generated(target, assistant)
    assert digest(drafter) == own


@pytest.mark.simulation
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


def run_alone(code: str, **environment: str) -> str:
    """What Python prints in a process of its own, which ends well and says nothing else."""
    words = [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parents[1])]
    environment = {**os.environ, **environment}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


IN_BACKGROUND = """
import os, sys, threading
sys.path.insert(0, sys.argv[1])
import torch
from models import perturbed, prompt, tiny
from hf_dynspec import DynSpecAssistant, OnlineAlignment
from hf_dynspec.alignment import Learner
target = tiny()
alignment = OnlineAlignment(background=True, gate=False, max_overhead=1.0, steps=30)
assistant = DynSpecAssistant(perturbed(target, 0.3), target=target, alignment=alignment)
"""


def test_the_interpreter_ends_while_a_thread_learns():
    code = """
step, may_go_on = Learner.step, threading.Event()
Learner.step = lambda *arguments: may_go_on.wait(120) and step(*arguments)
target.generate(prompt(), do_sample=False, max_new_tokens=24, assistant_model=assistant)
assert assistant.alignment._job is not None and not assistant.alignment._job.done()
print("done")
may_go_on.set()
"""
    assert run_alone(IN_BACKGROUND + code) == "done\n"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the threads of a process as Linux tells them")
def test_a_thread_that_learns_brings_no_threads_of_its_own():
    """They and those of the thread that generates would be more than cores, and OpenMP then lets all of them sleep."""
    code = """
torch.set_num_threads(2)
numbers, counts = torch.randn(2000, 2000), []

def operate(*arguments):
    weights = numbers.clone().requires_grad_()
    (weights @ numbers).exp().add(1).softmax(-1).sum().backward()
    counts.append(len(os.listdir("/proc/self/task")))

Learner.step = operate
operate()
target.generate(prompt(), do_sample=False, max_new_tokens=24, assistant_model=assistant)
assistant.alignment._job.result(600)
print(*counts)
"""
    said = run_alone(IN_BACKGROUND + code, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2")
    before, within = map(int, said.split()[:2])
    assert within == before + 1
