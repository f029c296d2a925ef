"""Online alignment in real `generate` calls: the drafter gets better, the output stays the target's own."""

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from aligned import QUICK, TREE, digest, generated, quick_assistant, stream, taught
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt

from hf_dynspec import ConfigurationError, DynSpecAssistant, OnlineAlignment
from hf_dynspec.alignment import live_weights
from hf_dynspec.alignment.live_weights import DraftingLock

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
    assistant = quick_assistant(drafter, target, tree=tree)
    lengths = stream(target, assistant, 15)
    assert sum(lengths[-3:]) > 1.15 * sum(lengths[:3])
    stats = assistant.alignment.stats
    assert stats.requests == stats.updates == stats.kept == 15
    assert stats.is_served and stats.loss > 0 and stats.error is None
    assert 0 < stats.buffer_bytes and 0 < stats.training_bytes and 0 < stats.seconds
    assert 0 < stats.longest_swap_work < 0.05 and 0 < stats.longest_swap
    assert digest(drafter) != own
    assert all(one.grad is None and one.grad_fn is None for one in drafter.parameters())
    assert digest(target) == targets


@pytest.mark.parametrize("layout", ["eagle2", "eagle3", "speculators"])
def test_eagle_heads_learn_too(layout):
    target = soft()
    targets = digest(target)
    head = drafter_of(agreeing_head(layout), target)
    own = digest(head.module)
    assistant = taught(12, head, target, tree=TREE, learning_rate=1e-2)
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
    assistant = quick_assistant(drafter, target, learning_rate=1e-4, steps=1)
    seen = []
    for _ in range(12):
        stream(target, assistant, 1)
        seen.append(digest(drafter))
    assert seen[-1] != own and len(set(seen)) > 3
    assert {one.dtype for one in drafter.parameters()} == {torch.bfloat16}
    learnt = assistant.alignment.learner.adapter_state().values()
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
    assistant = taught(4, drafter, target, tree=TREE)
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
    live = assistant.alignment.live
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


def test_who_swaps_waits_for_drafts_and_drafts_wait_for_who_swaps(monkeypatch):
    monkeypatch.setattr(live_weights, "_PATIENCE", 600.0)
    lock, order = DraftingLock(), []
    drafting, may_end = threading.Event(), threading.Event()

    def draft() -> None:
        with lock:
            drafting.set()
            assert may_end.wait(120)
            order.append("draft")

    with ThreadPoolExecutor(2) as pool:
        drafts = pool.submit(draft)
        assert drafting.wait(120)

        def swap() -> None:
            with lock.writing():
                order.append("swap")

        swaps = pool.submit(swap)
        with lock:  # another one may draft as long as nobody has lost patience
            order.append("other draft")
        may_end.set()
        drafts.result(120)
        swaps.result(120)
    assert order == ["other draft", "draft", "swap"]


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
