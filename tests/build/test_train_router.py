"""Routers: draft steps recorded along texts, training on them, and the command that does both."""

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from calls import assert_same
from cases import pairwise, representatives
from command_line import invoke
from draft_inputs import DraftInputs
from eagle_heads import random_head
from launched_processes import launch_command
from models import BOS, VOCABULARY, perturbed, prompt, random_router, tiny, word_tokenizer
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from hf_dynspec import ConfigurationError, CoralShortlist, DynSpecAssistant
from hf_dynspec.artifacts import read_artifact
from hf_dynspec.build.corpus import CorpusError, find_corpus
from hf_dynspec.build.draft_steps import StepRecorder
from hf_dynspec.build.recording import Recording, RecordingSettings
from hf_dynspec.build.router_judging import HeldOutSteps
from hf_dynspec.build.router_training import RouterTraining, TrainingSettings, TrainingState
from hf_dynspec.build.tokens import prefix_ids
from hf_dynspec.build.windows import Windows, kept_windows, sample_windows
from hf_dynspec.drafters import EagleDrafter, as_drafter
from hf_dynspec.protocol import VocabularyInfo
from hf_dynspec.shortlists.router import Router, RouterShortlist
from hf_dynspec.shortlists.router.policy import SCHEDULES, position_aware_clusters

SETTINGS = RecordingSettings(steps=1500, held_out=300, window=24, depth=4, top_k=5, target_top_k=20, draws=40, seed=1)
TRAINING = TrainingSettings(hidden=32, batch_size=64, max_steps=60, evaluate_every=10, patience=50, seed=3)
CORAL = replace(TRAINING, hidden=None)
CLUSTERS = torch.arange(VOCABULARY) % 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a drafter, an EAGLE head, and texts that the target might have written."""
    root = tmp_path_factory.mktemp("pair")
    target, tokenizer = tiny("llama", num_hidden_layers=6), word_tokenizer()
    for name, model in (("target", target), ("drafter", perturbed(target))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    random_head("eagle3", vocabulary=VOCABULARY).write(root / "eagle3")
    torch.manual_seed(0)
    texts = [
        target.generate(prompt(3, seed=seed), do_sample=True, max_new_tokens=60, eos_token_id=None, pad_token_id=0)
        for seed in range(40)
    ]
    lines = [json.dumps({"text": tokenizer.decode(text[0])}) for text in texts]
    (root / "texts.jsonl").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def target(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target").eval()


@pytest.fixture(scope="module", params=["drafter", "eagle3"])
def drafter(request, folder, target):
    if request.param == "eagle3":
        return EagleDrafter.from_pretrained(folder / "eagle3", target=target)
    return as_drafter(AutoModelForCausalLM.from_pretrained(folder / "drafter").eval())


def windows(folder: Path, settings: RecordingSettings = SETTINGS) -> Windows:
    return sample_windows(find_corpus([folder / "texts.jsonl"]), word_tokenizer(), VOCABULARY, settings)


def recorded(folder, target, drafter, out: Path, settings: RecordingSettings) -> Recording:
    return StepRecorder(target, drafter, VOCABULARY, settings, out).record(windows(folder))


@pytest.fixture(scope="module")
def recording(folder, target, drafter, tmp_path_factory) -> Recording:
    return recorded(folder, target, drafter, tmp_path_factory.mktemp("steps"), SETTINGS)


@pytest.fixture(scope="module")
def recording_of_hidden(folder, target, drafter, tmp_path_factory) -> Recording:
    return recorded(folder, target, drafter, tmp_path_factory.mktemp("steps"), replace(SETTINGS, of_hidden=True))


# Windows and draft steps ---------------------------------------------------------------------------------------------


def test_windows_are_a_seeded_sample_of_the_texts_and_are_kept(folder, tmp_path):
    sampled, again = windows(folder), windows(folder)
    assert np.array_equal(sampled.token_ids, again.token_ids) and np.array_equal(sampled.ends, again.ends)
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    text_ids = [word_tokenizer()(text)["input_ids"] for text in texts]
    assert sampled.counts.tolist() == np.bincount(np.concatenate(text_ids), minlength=VOCABULARY).tolist()
    pieces = {tuple(ids[i : i + SETTINGS.window]) for ids in text_ids for i in range(0, len(ids), SETTINGS.window)}
    chosen = [tuple(sampled[index].tolist()) for index in range(len(sampled))]
    assert len(set(chosen)) == len(chosen) > 60 and set(chosen) <= pieces
    other = windows(folder, replace(SETTINGS, seed=2))
    assert not np.array_equal(sampled.token_ids, other.token_ids)
    kept_windows(tmp_path / "windows.npz", lambda: sampled)
    kept = kept_windows(tmp_path / "windows.npz", lambda: pytest.fail("they are there"))
    assert all(np.array_equal(vars(kept)[name], array) for name, array in vars(sampled).items())


def test_windows_begin_as_the_tokenizer_begins_texts(folder):
    """Targets such as Gemma say nothing of use without the token that their texts begin with."""
    without, tokenizer = windows(folder), word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    begun = sample_windows(find_corpus([folder / "texts.jsonl"]), tokenizer, VOCABULARY, SETTINGS)
    assert prefix_ids(tokenizer) == [BOS] and prefix_ids(word_tokenizer()) == []
    assert all(begun[index].tolist() == [BOS, *without[index].tolist()] for index in range(len(without)))
    assert np.array_equal(begun.counts, without.counts)


@pytest.mark.statistical
def test_a_large_corpus_is_sampled_evenly(tmp_path):
    """Each of 2,000 windows is as likely to be among the sampled ones, whatever its place in the corpus."""
    lines = [json.dumps({"text": " ".join(f"t{3 + number % 298}" for _ in range(16))}) for number in range(2000)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    settings = RecordingSettings(steps=3000, held_out=300, window=16)
    sampled = sample_windows(find_corpus([tmp_path / "texts.jsonl"]), word_tokenizer(), VOCABULARY, settings)
    assert 3300 <= sampled.ends[-1] - len(sampled) <= 3300 + 3 * 16
    # The first token tells the place in each block of 298 lines: its mean over 220 windows is off by 4 standard
    # errors, 4 · 298 / √(12 · 220) = 23, with a probability of 6e-5.
    first = [int(sampled[index][0]) for index in range(len(sampled))]
    assert abs(np.mean(first) - (3 + 297 / 2)) < 23


def test_texts_too_short_for_a_window_are_refused(tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "t3 t4"}))
    with pytest.raises(CorpusError, match="0 windows of 16 tokens"):
        sample_windows(find_corpus([tmp_path]), word_tokenizer(), VOCABULARY, SETTINGS)


def test_recorded_steps_are_those_of_rounds(recording, target, drafter, folder):
    """Every recorded step is repeated by itself: a session's drafter after the step's prefix."""
    held_out, window = recording.shard(recording.held_out[0]), windows(folder)[0]
    states = target(window[None], output_hidden_states=True)
    features = None
    if drafter.reads:
        features = torch.cat([states.hidden_states[layer][0] for layer in drafter.reads], -1)
    seen = set()
    drafted, counts = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
    for row in range(len(window) - 1):
        depth, token = int(held_out["depths"][row]), int(held_out["token_ids"][row])
        seen.add(depth)
        newest = [i for i in range(1 + depth, len(window)) if int(window[i]) == token]
        matches = []
        for place in newest:
            start = place - depth
            state, taken_in = drafter.start(), DraftInputs()
            read = None if features is None else features[:start]
            hidden = state.advance(window[: start + 1], read, taken_in)
            for one in window[start + 1 : place + 1]:
                hidden = state.draft(one[None], observe_draft_inputs=taken_in)
            # fp16 keeps three digits.
            if torch.allclose(taken_in.features[-1][0], held_out["features"][row].float(), rtol=1e-3, atol=1e-3):
                matches.append((place, hidden[-1]))
        assert matches, f"step {row} of depth {depth} is nowhere in the text"
        place, hidden = matches[0]
        of_drafter, of_target = drafter.head.weight @ hidden, states.logits[0, place]
        assert held_out["top_ids"][row].tolist() == of_drafter.topk(SETTINGS.top_k).indices.tolist()
        likely = of_target.softmax(-1).topk(SETTINGS.target_top_k)
        assert held_out["target_ids"][row].tolist() == likely.indices.tolist()
        probabilities = held_out["target_probabilities"][row].float()
        torch.testing.assert_close(probabilities, likely.values, rtol=1e-3, atol=1e-4)
        drawn = held_out["drawn_ids"][row].long()
        assert drawn.shape == (SETTINGS.draws,)
        of_drafter, of_target = ((one / SETTINGS.temperature).softmax(-1) for one in (of_drafter, of_target))
        ratios = (of_target / of_drafter)[drawn]
        torch.testing.assert_close(held_out["drawn_ratios"][row].float(), ratios, rtol=2e-3, atol=1e-4)
        drafted += of_drafter
        counts += drawn.bincount(minlength=VOCABULARY)
    # The draws are the drafter's: their counts are as far from what is expected as chance takes them.
    expected = drafted * SETTINGS.draws
    errors = ((counts - expected) / expected.sqrt())[expected > 2]
    assert len(errors) > 50 and 0.7 < errors.std() < 1.3
    assert seen == set(range(SETTINGS.depth))


def test_for_coral_the_hidden_states_of_the_same_steps_are_recorded(recording, recording_of_hidden, drafter):
    for number in (recording.train[0], recording.held_out[0]):
        shard, other = recording_of_hidden.shard(number), recording.shard(number)
        is_held_out = number in recording.held_out
        assert ("features" in shard) == ("hidden" in other) == is_held_out and "top_shares" not in other
        for name in set(shard) & set(other):
            assert torch.equal(shard[name], other[name]), name
        logits = drafter.head.weight @ shard["hidden"].float().T
        likeliest = logits.T.topk(SETTINGS.top_k)
        # fp16 keeps three digits, so that tokens that are nearly as likely may change places.
        of_recorded = logits.T.gather(1, shard["top_ids"].long())
        torch.testing.assert_close(of_recorded, likeliest.values, rtol=5e-3, atol=5e-3)
        shares = (of_recorded / SETTINGS.temperature).softmax(-1)
        torch.testing.assert_close(shard["top_shares"].float(), shares, rtol=0.02, atol=2e-3)
    assert recording_of_hidden.width == recording.width == drafter.head.weight.shape[1]


@pytest.mark.parametrize("family", representatives("families", ["gemma2", "llama", "cohere", "granite"]))
def test_a_target_that_drafts_for_itself_likes_all_of_its_drafts(family, tmp_path):
    """Its probabilities are what it does to its logits after its head, too, as the drafter's are."""
    target = tiny(family)
    recorder = StepRecorder(target, as_drafter(target), VOCABULARY, SETTINGS, tmp_path)
    window = prompt(SETTINGS.window, seed=4)[0]
    recorded = recorder.steps(window, 0, is_held_out=True)
    assert recorded["drawn_ratios"].shape == (SETTINGS.window - 1, SETTINGS.draws)
    ratios = recorded["drawn_ratios"].float()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=2e-3, atol=0)
    with torch.no_grad():
        largest = target(window[None]).logits[0].softmax(-1).amax(-1)
    # Whichever of the window's positions a step is at.
    nearest = (recorded["target_probabilities"][:, :1].float() - largest).abs().amin(1)
    assert (nearest < 1e-3 * largest.max()).all()


class Stopped(Exception):
    pass


def test_recording_goes_on_where_it_was_stopped(recording, target, drafter, folder, tmp_path):
    """And several processes share the shards."""

    def stop(done: int, total: int) -> None:
        if list(tmp_path.glob("steps-*.safetensors")):
            raise Stopped

    small = replace(SETTINGS, held_out=60)
    recorder = StepRecorder(target, drafter, VOCABULARY, small, tmp_path)
    with pytest.raises(Stopped):
        recorder.record(windows(folder, small), report=stop)
    first = sorted(tmp_path.glob("steps-*.safetensors"))
    assert len(first) == 1 and not list(tmp_path.glob("*.writing"))
    stamp = first[0].stat().st_mtime_ns
    for process in range(2):
        again = recorder.record(windows(folder, small), process=process, processes=2)
    assert first[0].stat().st_mtime_ns == stamp
    assert {again.path(number) for number in (*again.held_out, *again.train)} == set(tmp_path.glob("steps-*"))
    recorded = windows(folder, small)
    most = recorded.covering(small.steps, recorded.covering(small.held_out))
    assert again.count(again.train) + again.count(again.held_out) == recorded.ends[most - 1] - most


# Training ------------------------------------------------------------------------------------------------------------


def training(recording, drafter, checkpoint: Path, settings: TrainingSettings = TRAINING, **changes) -> RouterTraining:
    pinned = changes.pop("pinned", torch.zeros(VOCABULARY, dtype=torch.bool))
    return RouterTraining(recording, CLUSTERS, drafter.embed, pinned, settings, checkpoint, Accelerator(cpu=True))


def assert_better_than_chance(recording: Recording, drafter, policy_of, router: Router) -> None:
    """Than the same router with its clusters' tokens shuffled."""
    shuffled = Router(**{**router.tensors(), "clusters": router.clusters[torch.randperm(VOCABULARY)]})
    trained, chance = (HeldOutSteps(recording, drafter.embed).figures(policy_of(one)) for one in (router, shuffled))
    assert trained.likeliest_recall > chance.likeliest_recall + 0.05
    assert trained.cluster_recall > chance.cluster_recall + 0.02


def test_a_router_learns_where_likely_tokens_are(recording, drafter, tmp_path):
    states: list[TrainingState] = []
    router = training(recording, drafter, tmp_path / "state.pt").run(states.append)
    losses = [loss for _, _, loss in states[-1].history]
    assert len(losses) == 6 and min(losses) < losses[0]
    assert_better_than_chance(recording, drafter, lambda one: RouterShortlist(one, 4, "fixed"), router)


def test_corals_layer_learns_where_likely_tokens_are(recording_of_hidden, drafter, tmp_path):
    states: list[TrainingState] = []
    router = training(recording_of_hidden, drafter, tmp_path / "state.pt", CORAL).run(states.append)
    losses = [loss for _, _, loss in states[-1].history]
    assert min(losses) < losses[0] < math.log(15)
    # The layer's probabilities, of the hidden states as they are, are those that it was trained to give.
    total, count = 0.0, 0
    for shard in recording_of_hidden.shards(recording_of_hidden.held_out):
        logs = router.scores_of_hidden(shard["hidden"]).log_softmax(-1)
        total -= float((logs.gather(1, CLUSTERS[shard["top_ids"].long()]) * shard["top_shares"]).sum())
        count += len(logs)
    assert total / count == pytest.approx(min(losses), rel=1e-3)
    assert_better_than_chance(recording_of_hidden, drafter, lambda one: CoralShortlist(one, 4), router)


@pytest.mark.parametrize("scale", representatives("families", [1e3, 1e-3]))
def test_corals_layer_learns_as_well_from_hidden_states_of_any_length(recording_of_hidden, drafter, tmp_path, scale):
    """fp16 holds them within these bounds."""
    for number in (*recording_of_hidden.train, *recording_of_hidden.held_out):
        shard = recording_of_hidden.shard(number)
        hidden = (shard["hidden"].float() * scale).half()
        assert hidden.isfinite().all()
        save_file({**shard, "hidden": hidden}, tmp_path / recording_of_hidden.path(number).name)
    scaled = replace(recording_of_hidden, folder=tmp_path)
    losses = []
    for steps in (recording_of_hidden, scaled):
        one = training(steps, drafter, tmp_path / f"state-{len(losses)}.pt", CORAL)
        one.run()
        losses.append(one.state.best)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("method", ["dynaspec", "coral"])
def test_training_goes_on_where_it_was_stopped(recording, recording_of_hidden, drafter, tmp_path, method):
    recording, settings = (recording_of_hidden, CORAL) if method == "coral" else (recording, TRAINING)

    def stop(state: TrainingState) -> None:
        if state.step == 30:
            raise Stopped

    whole = training(recording, drafter, tmp_path / "whole.pt", settings).run()
    with pytest.raises(Stopped):
        training(recording, drafter, tmp_path / "cut.pt", settings).run(stop)
    resumed = training(recording, drafter, tmp_path / "cut.pt", settings)
    assert resumed.state.step == 30
    for name, tensor in resumed.run().tensors().items():
        assert torch.equal(tensor, whole.tensors()[name]), name
    done = training(recording, drafter, tmp_path / "cut.pt", settings)
    done.run(lambda state: pytest.fail("there is nothing left to do"))


def test_the_state_of_another_training_is_refused(recording, drafter, tmp_path):
    training(recording, drafter, tmp_path / "state.pt").run()
    with pytest.raises(ConfigurationError, match="another training"):
        training(recording, drafter, tmp_path / "state.pt", replace(TRAINING, seed=4))
    (tmp_path / "state.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        training(recording, drafter, tmp_path / "state.pt")


def test_a_plateau_lowers_the_rate_and_then_ends():
    state = TrainingState()
    goes_on = [state.look(1.0, loss, patience=2) for loss in (3.0, 2.0, 2.0, 2.0, 1.9999, 2.0, 2.0, 2.0)]
    assert goes_on == [True] * 7 + [False]
    assert state.decays == 3 and state.best == 1.9999


def test_pinned_tokens_need_no_cluster(recording, drafter, tmp_path):
    """A cluster whose likely tokens are all pinned is no label, so the router learns never to choose it."""
    pinned = CLUSTERS == 3
    router = training(recording, drafter, tmp_path / "state.pt", pinned=pinned).run()
    shard = recording.shard(recording.held_out[0])
    chosen = router.scores(drafter.embed(shard["token_ids"].long()), shard["features"]).topk(8).indices
    assert not (chosen == 3).any()


def acceptance(shard: dict[str, torch.Tensor], row: int, shortlist: set[int]) -> float:
    """`Σ min(p, q)` on a shortlist (equation 3), were the drafter's distribution as its draws are."""
    drawn, ratios = shard["drawn_ids"][row].tolist(), shard["drawn_ratios"][row].tolist()
    of_target = {token: drawn.count(token) / len(drawn) * ratio for token, ratio in zip(drawn, ratios, strict=True)}
    held = [token for token in drawn if token in shortlist]
    return sum(min(of_target[token], held.count(token) / len(held)) for token in set(held))


def selections(policy: RouterShortlist, shard: dict[str, torch.Tensor], embed, draftable=None) -> Iterator:
    """Row by row, the policy's own shortlist."""
    state = policy.start(VocabularyInfo(VOCABULARY, (), torch.device("cpu"), draftable))
    for row in range(shard["token_ids"].shape[0]):
        part = slice(row, row + 1)
        state.observe_draft_inputs(embed(shard["token_ids"][part].long()), shard["features"][part])
        yield row, state.select(int(shard["depths"][row]), shard["token_ids"][part], shard["features"][part])


@pytest.mark.parametrize(("mass", "pinned"), representatives("families", [(0.6, 20), (1.0, 20), (0.6, 0), (1.0, 0)]))
def test_figures_are_those_of_the_policys_own_shortlists(recording, drafter, tmp_path, mass, pinned):
    router = training(recording, drafter, tmp_path / "state.pt").run()
    policy = RouterShortlist(router, 6, "dynaspec", mass, torch.randperm(VOCABULARY), pinned)
    figures = HeldOutSteps(recording, drafter.embed).figures(policy)
    sizes, likeliest, covered, total = [], [], 0.0, 0.0
    accepted: dict[int, list[tuple[float, float]]] = {}
    for number in recording.held_out:
        shard = recording.shard(number)
        for row, shortlist in selections(policy, shard, drafter.embed):
            sizes.append(shortlist.ids().shape[0])
            likeliest.append(bool(shortlist.contains(shard["top_ids"][row, 0])))
            mass_of = shard["target_probabilities"][row].double()
            covered += float(mass_of[shortlist.contains(shard["target_ids"][row])].sum())
            total += float(mass_of.sum())
            both = [acceptance(shard, row, ids) for ids in (set(shortlist.ids().tolist()), set(range(VOCABULARY)))]
            accepted.setdefault(int(shard["depths"][row]), []).append(tuple(both))
    assert figures.size == pytest.approx(np.mean(sizes))
    assert figures.likeliest_recall == pytest.approx(np.mean(likeliest))
    assert figures.target_mass == pytest.approx(covered / total)
    by_depth = np.array([np.mean(accepted[depth], axis=0) for depth in sorted(accepted)])
    length, of_all = 1 + by_depth.cumprod(axis=0).sum(axis=0)
    assert figures.relative_acceptance_length == pytest.approx(length / of_all) and length < of_all


@pytest.mark.parametrize(("mass", "schedule"), pairwise("families", [1.0, 0.6], SCHEDULES))
def test_the_largest_budget_for_a_size(tmp_path, mass, schedule):
    """Against the size of every budget."""
    router = random_router(clusters=9)
    recording = judged_by_hand(tmp_path, router)
    given = {"ranking": torch.arange(VOCABULARY), "pinned": 20}
    budgets = torch.tensor([[first, first, min(first, 2 + first // 2)] for first in range(1, 10)])
    policy = RouterShortlist(router, 3, schedule, mass, budgets=budgets, **given)
    sizes = [HeldOutSteps(recording, embedded).figures(policy.with_budget(first)).size for first in range(1, 10)]
    assert len(set(sizes)) > 4
    for size in (0.0, sizes[0], sizes[0] + 1, sizes[3], sizes[3] - 0.01, sizes[6], 1e9):
        fitting = [first for first in range(1, 10) if sizes[first - 1] <= size + 1e-9]
        assert HeldOutSteps(recording, embedded).largest_budget(policy, size + 1e-9) == max(fitting, default=1)


DEPTHS, TOKENS, DRAWS = 4, 20, 50


def judged_by_hand(folder: Path, router: Router) -> Recording:
    """Held-out steps of a pair that agrees well, whose tokens come from the clusters that the router likes best."""
    random = torch.Generator().manual_seed(4)
    count = 600
    token_ids = torch.randint(0, VOCABULARY, (count,), generator=random)
    features, depths = torch.randn(count, 32, generator=random), torch.arange(count) % DEPTHS
    order = router.scores(EMBEDDINGS[token_ids], features.half()).argsort(-1, descending=True)
    ranks = torch.rand(count, VOCABULARY, generator=random).argsort(-1)
    liked = order.argsort(-1).gather(1, router.clusters.long()[ranks])
    # Later steps are harder to foresee.
    noise = (1 + depths.unsqueeze(1)) * torch.randn(ranks.shape, generator=random)
    target_ids = ranks.gather(1, (liked + noise).argsort(-1)[:, :TOKENS])
    probabilities = (0.3 * (0.8 + 0.2 * torch.rand(count, 1, generator=random)) * 0.7 ** torch.arange(TOKENS)).half()
    # The drafter's distribution is flatter; it has nothing but these tokens.
    drawn = (0.8 ** torch.arange(TOKENS)).repeat(count, 1).multinomial(DRAWS, replacement=True, generator=random)
    of_drafter = torch.zeros(count, TOKENS).scatter_add_(1, drawn, torch.ones(drawn.shape)) / DRAWS
    shard = {
        "token_ids": token_ids.int(),
        "features": features.half(),
        "depths": depths.to(torch.uint8),
        "target_ids": target_ids.int(),
        "target_probabilities": probabilities,
        "top_ids": target_ids[:, :5].flip(1).int().contiguous(),
        "drawn_ids": target_ids.gather(1, drawn).int(),
        "drawn_ratios": (probabilities.gather(1, drawn) / of_drafter.gather(1, drawn)).half(),
    }
    # Of rounds, steps after a rejected draft tell nothing.
    is_unreached = (depths > 0) & (torch.rand(count, generator=random) < 0.1 * depths)
    for name in ("target_probabilities", "drawn_ratios"):
        shard[name][is_unreached] = 0
    recording = Recording(folder, range(0), range(2))
    save_file(shard, recording.path(0))
    # Texts may end before there is a step.
    save_file({name: tensor[:0].clone() for name, tensor in shard.items()}, recording.path(1))
    return recording


EMBEDDINGS = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(3))


def embedded(token_ids: torch.Tensor) -> torch.Tensor:
    return EMBEDDINGS[token_ids]


def seen(shard: dict[str, torch.Tensor], policy: RouterShortlist) -> tuple[np.ndarray, np.ndarray]:
    """Row by row, for each depth and each number of clusters the size of the shortlists, and the acceptance."""
    count, depths = policy.router.num_clusters, shard["depths"].long()
    rows, reached = (
        depths[which].bincount(minlength=DEPTHS).unsqueeze(1).numpy()
        for which in (depths >= 0, shard["target_probabilities"][:, 0] > 0)
    )
    assert (reached < rows).sum() == DEPTHS - 1
    sizes, accepted = np.zeros((DEPTHS, count)), np.zeros((DEPTHS, count))
    pinned, clusters = set(policy.ranking[: policy.pinned].tolist()), policy.router.clusters.tolist()
    scores = policy.router.scores(EMBEDDINGS[shard["token_ids"].long()], shard["features"])
    for row, depth in enumerate(depths.tolist()):
        shortlist = set(pinned)
        for place, cluster in enumerate(scores[row].argsort(descending=True).tolist()):
            shortlist |= {token for token in range(VOCABULARY) if clusters[token] == cluster}
            sizes[depth, place] += len(shortlist)
            accepted[depth, place] += acceptance(shard, row, shortlist)
    return sizes / rows, accepted / reached


def test_steps_that_were_not_reached_do_not_count_as_rejected(tmp_path):
    router = random_router(clusters=9)
    recording = judged_by_hand(tmp_path, router)
    policy = RouterShortlist(router, 3, "fixed", ranking=torch.randperm(VOCABULARY), pinned=20)
    _, accepted = seen(recording.shard(0), policy)
    length, of_all = 1 + accepted[:, [2, -1]].cumprod(0).sum(0)
    figures = HeldOutSteps(recording, embedded).figures(policy)
    assert figures.relative_acceptance_length == pytest.approx(length / of_all, rel=1e-3) and length < 0.98 * of_all


def test_fitted_budgets_lose_the_least_for_their_size(tmp_path):
    """Against all budgets that there are."""
    router = random_router(clusters=9)
    recording = judged_by_hand(tmp_path, router)
    policy = RouterShortlist(router, 1, ranking=torch.randperm(VOCABULARY), pinned=20)
    budgets = HeldOutSteps(recording, embedded).fit_budgets(policy).numpy()
    sizes, accepted = seen(recording.shard(0), policy)
    assert 0.2 < accepted.min() and accepted.max() < 0.9

    def size(budget: np.ndarray) -> np.ndarray:
        return sum(sizes[depth, budget[..., depth] - 1] for depth in range(DEPTHS))

    def length(budget: np.ndarray) -> np.ndarray:
        """The drafts that a round accepts."""
        kept = [accepted[depth, budget[..., depth] - 1] for depth in range(DEPTHS)]
        return np.cumprod(np.stack(kept), axis=0).sum(0)

    every = np.stack(np.meshgrid(*[np.arange(1, 10)] * DEPTHS, indexing="ij"), -1).reshape(-1, DEPTHS)
    sizes_of_all, lengths = size(every), length(every)

    def shares(budgets: np.ndarray) -> np.ndarray:
        return length(budgets) / [lengths[sizes_of_all <= size(budget) + 1e-9].max() for budget in budgets]

    assert shares(budgets).min() > 0.998
    # What else there is would not do.
    by_formula = [[position_aware_clusters(first, depth) for depth in range(DEPTHS)] for first in range(1, 10)]
    assert (
        shares(np.array(by_formula)).min() < 0.95
        and shares(np.array([[k] * DEPTHS for k in range(2, 9)])).min() < 0.995
    )


def test_what_cannot_be_drafted_counts_for_nothing(tmp_path):
    """A drafter with tokens of its own: sizes are those of its shortlists, and no shortlist has the others."""
    router = random_router(clusters=9)
    recording = judged_by_hand(tmp_path, router)
    draftable = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(6))[:100]
    policy = RouterShortlist(router, 3, "fixed", ranking=torch.arange(VOCABULARY), pinned=20)
    steps, shard = HeldOutSteps(recording, embedded, draftable), recording.shard(0)
    figures, sizes, covered = steps.figures(policy), [], 0.0
    for row, shortlist in selections(policy, shard, embedded, draftable):
        sizes.append(int(shortlist.count))
        is_covered = shortlist.contains(shard["target_ids"][row].long())
        covered += float(shard["target_probabilities"][row].double()[is_covered].sum())
    assert figures.size == pytest.approx(np.mean(sizes))
    assert figures.target_mass == pytest.approx(covered / float(shard["target_probabilities"].double().sum()))
    others = HeldOutSteps(recording, embedded).largest_budget(policy, figures.size)
    assert steps.largest_budget(policy, figures.size) == 3 > others
    assert steps.fit_budgets(policy)[:, 0].tolist() == list(range(1, 10))


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        *((RecordingSettings, one) for one in ({"steps": 0}, {"window": 8}, {"top_k": True}, {"seed": -1})),
        *((RecordingSettings, one) for one in ({"seed": 2**31}, {"temperature": math.inf}, {"temperature": True})),
        *((TrainingSettings, one) for one in ({"hidden": 0}, {"batch_size": 1.5}, {"learning_rate": 0.0})),
    ],
)
def test_impossible_settings_are_refused(settings, change):
    with pytest.raises(ConfigurationError, match=next(iter(change))):
        settings(**change)


# The command ---------------------------------------------------------------------------------------------------------

SMALL = "--steps 1200 --held-out 200 --window 24 --depth 4 --likeliest 5 --hidden 16 --batch-size 64 --max-batches 20 "
SMALL += "--evaluate-every 10 --num-clusters 12 --pinned 10 --share 0.4 --seed 3"


def words(folder: Path, out: Path, *more: object, drafter: str = "eagle3", method: str = "dynaspec") -> list[str]:
    models = ["--target", folder / "target", "--eagle" if drafter == "eagle3" else "--drafter", folder / drafter]
    small = SMALL if method == "dynaspec" else SMALL.replace("--hidden 16", "").replace("--pinned 10", "")
    texts = ["--data", folder / "texts.jsonl", "--out", out, "--method", method]
    return list(map(str, ["train", "router", *models, *texts, *small.split(), *more]))


def require_drafting(router: Path, head: Path, target) -> None:
    """A stored router drafts, for the same text as plain generate's."""
    is_head = head.name == "eagle3"
    loaded = EagleDrafter.from_pretrained(head, target=target) if is_head else type(target).from_pretrained(head)
    assistant = DynSpecAssistant.from_pretrained(router, target=target, drafter=loaded)
    assert_same(target, assistant, prompt(8), max_new_tokens=30)
    assert assistant.stats.active_vocabulary < VOCABULARY / 2
    assistant.unbind()


def done(*given: object) -> str:
    """The output of a command that ends well."""
    result = invoke(*given)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("drafter", ["drafter", "eagle3"])
def test_the_command_makes_an_artifact_that_drafts(folder, target, drafter, tmp_path):
    out = tmp_path / "router"
    output = done(*words(folder, out, drafter=drafter))
    assert "1,200 draft steps take about" in output and "a router over 12 clusters" in output
    assert "the data gives" not in output
    assert re.search(r"cluster recall [\d.]+%, target's mass [\d.]+% on \d+ tokens", " ".join(output.split()))
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    metrics = read_artifact(out)[0].provenance["metrics"]
    assert 0 < metrics["size"] <= 0.4 * VOCABULARY and 0 < metrics["cluster_recall"] <= 1
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card and "hf-dynspec train router --target target" in card
    assert ("EagleDrafter.from_pretrained(" in card) == (drafter == "eagle3")
    require_drafting(out, folder / drafter, target)
    # The folder is full now.
    again = invoke(*words(folder, out, drafter=drafter))
    assert again.exit_code != 0 and "already holds an artifact" in str(again.exception)
    # Both methods are compared, at the steps of either.
    output = done(*words(folder, tmp_path / "coral", "--compare", out, drafter=drafter, method="coral"))
    assert "a router over 12 groups, 4 chosen at most" in output and "--policy coral:router=" in output
    config, tensors = read_artifact(tmp_path / "coral")
    assert config.policy.name == "coral" and config.policy.settings == {"top_groups": 4, "packed": True}
    assert set(tensors) == {"clusters", "output_weight", "output_bias"}
    sizes = tensors["clusters"].bincount()
    assert len(sizes) == 12 and sizes.max() - sizes.min() <= 1
    metrics = config.provenance["metrics"]
    assert metrics["size"] <= 0.4 * VOCABULARY and [one["router"] for one in metrics["compared"]] == ["router"]
    done(*words(folder, tmp_path / "back", "--compare", tmp_path / "coral", drafter=drafter))
    assert read_artifact(tmp_path / "back")[0].provenance["metrics"]["compared"][-1]["router"] == "coral"
    require_drafting(tmp_path / "coral", folder / drafter, target)


@pytest.mark.process
@pytest.mark.parametrize("mode", [["dynaspec"], ["dynaspec", "--rounds"], ["coral"]], ids=" ".join)
def test_several_processes_train_the_same_router(folder, tmp_path, mode):
    method, *more = mode
    done(*words(folder, tmp_path / "one", *more, method=method))
    launch_command(tmp_path, *words(folder, tmp_path / "two", *more, method=method))
    (_, one), (_, two) = (read_artifact(tmp_path / name) for name in ("one", "two"))
    # Gradients are summed in another order, and AdamW's first steps are as long for small ones as for large.
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)


REFUSED = [
    ("--share 0", "--share"),
    ("--mass 1.5", "--mass"),
    ("--drafter x", "one drafter"),
    ("--clusters /nowhere", "nowhere"),
    ("--data /nowhere", "nowhere"),
    ("--steps 0", "steps"),
    ("--method medusa", "--method must be one of dynaspec, coral"),
    ("--pinned 200", "--pinned 200 leaves no room for clusters"),
    ("--num-clusters 5000", "301"),
    ("--temperature -1", "temperature must be a number of at least 0"),
]
NOT_CORAL = [
    (f"{option} {value}", f"{option} is not for --method coral")
    for option, value in (("--pinned", 10), ("--hidden", 512), ("--schedule", "fixed"), ("--mass", 1))
]


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [*(("dynaspec", *case) for case in REFUSED), *(("coral", *case) for case in NOT_CORAL)],
)
def test_bad_input_is_refused_before_anything_is_recorded(folder, tmp_path, method, changes, says):
    result = invoke(*words(folder, tmp_path / "router", *changes.split(), method=method))
    assert result.exit_code != 0 and says in str(result.exception), result.output
    assert not (tmp_path / "router").exists()


def test_coral_goes_on_where_it_was_stopped_and_not_in_a_folder_of_dynaspec(folder, tmp_path):
    done(*words(folder, tmp_path / "coral", "--keep-steps", method="coral"))
    for name in ("again", "other"):
        shutil.copytree(tmp_path / "coral" / "partial", tmp_path / name / "partial")
    (tmp_path / "again" / "partial" / "training.pt").unlink()
    done(*words(folder, tmp_path / "again", "--keep-steps", method="coral"))
    (_, one), (_, two) = (read_artifact(tmp_path / name) for name in ("coral", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = invoke(*words(folder, tmp_path / "other"))
    assert other.exit_code != 0 and "holds unfinished work of another job" in str(other.exception)


def test_stored_clusters_are_used_and_corals_must_be_of_equal_size(folder, tmp_path):
    equal, free = tmp_path / "equal", tmp_path / "free"
    for out, more in ((equal, ["--balanced"]), (free, [])):
        done("build", "clusters", "--target", folder / "target", "--num-clusters", 9, "--out", out, *more)
    refused = invoke(*words(folder, tmp_path / "coral", "--clusters", free, method="coral"))
    assert refused.exit_code != 0 and "--balanced" in str(refused.exception)
    done(*words(folder, tmp_path / "coral", "--clusters", equal, method="coral"))
    clusters = CoralShortlist(tmp_path / "coral").router.clusters
    assert torch.equal(clusters.long(), RouterShortlist(equal).router.clusters.long())
    output = done(*words(folder, tmp_path / "router", "--clusters", free, "--steps", 900_000))
    recorded = read_artifact(tmp_path / "router")[0].provenance["draft_steps"]
    assert f"the data gives {recorded:,} draft steps to train on, and not 900,000" in output
    assert "a router over 9 clusters" in output


@pytest.mark.process
def test_lines_that_are_printed_above_a_bar_on_a_terminal_are_whole(folder, tmp_path):
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "hf_dynspec.commands", *words(folder, tmp_path / "router")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", "TERM": "xterm"}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, env=environment, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the terminal's other end is closed when the command has ended
        while part := os.read(control, 65536):
            shown += part
    os.close(control)
    assert process.wait(timeout=600) == 0, shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    # The bar's line is left by a carriage return, and erased.
    said = [line for line in re.split(r"[\r\n]+", plain) if "batch 10 of at most" in line]
    assert said and all(line.startswith("batch 10 of at most") for line in said)
