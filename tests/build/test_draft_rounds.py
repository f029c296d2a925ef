"""Draft steps recorded in rounds of generation, and trained routers compared at them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cases import representatives
from command_line import invoke
from draft_inputs import DraftInputs
from eagle_heads import agreeing_head, drafter_of, random_head, soft, target_features, trimmed_head
from models import VOCABULARY, perturbed, prompt, word_tokenizer
from safetensors.torch import load_file

from hf_dynspec import ArtifactError, ConfigurationError, DynSpecAssistant
from hf_dynspec.artifacts import read_artifact
from hf_dynspec.build.corpus import find_corpus
from hf_dynspec.build.draft_rounds import RoundRecorder
from hf_dynspec.build.recording import Recording, RecordingSettings
from hf_dynspec.build.router_judging import HeldOutSteps
from hf_dynspec.build.windows import Windows, sample_windows
from hf_dynspec.drafters import CausalLMDrafter, Drafter
from hf_dynspec.evaluation.pair import generation_config
from hf_dynspec.shortlists.router.policy import RouterShortlist

DEPTH = 4
SETTINGS = RecordingSettings(600, 120, window=40, depth=DEPTH, top_k=5, target_top_k=20, draws=30, seed=1)
# fp16 keeps three digits.
CLOSE = {"rtol": 2e-3, "atol": 2e-3}


@pytest.fixture(scope="module")
def target():
    return soft("llama")


@pytest.fixture(
    scope="module", params=representatives("families", ["causal", "trimmed eagle3", "eagle2", "eagle3"], keep=2)
)
def drafter(request, target) -> Drafter:
    if request.param == "causal":
        return CausalLMDrafter(perturbed(target, 0.3))
    is_trimmed = request.param.startswith("trimmed")
    return drafter_of(trimmed_head("eagle3", target) if is_trimmed else agreeing_head(request.param), target)


def recorder_of(target, drafter, folder=Path("unused"), temperature=0.8, eos=None, **changes) -> RoundRecorder:
    """`eos`: what ends a text, in place of the target's own."""
    config = generation_config(target, SETTINGS.window, temperature)
    config.eos_token_id = config.eos_token_id if eos is None else eos
    settings = RecordingSettings(**{**vars(SETTINGS), **changes})
    return RoundRecorder(target, drafter, VOCABULARY, settings, folder, word_tokenizer(), config)


@pytest.fixture
def recorder(target, drafter) -> RoundRecorder:
    """Records rounds of texts without an end."""
    return recorder_of(target, drafter, eos=[])


# One text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_accepted_steps_are_those_along_the_text(target, drafter, temperature):
    """Where its draft was accepted, a step of a round is the one that leading the drafter along the text gives."""
    recorder, depths, rejected = recorder_of(target, drafter, temperature=temperature, eos=[]), [], 0
    for index in range(4):
        window = prompt(40, seed=index)[0]
        rounds = recorder.rounds(window, index)
        assert torch.equal(rounds.text[:10], window[:10]) and rounds.token_ids.shape[0] <= 39
        states = target_features(target, rounds.text, drafter.reads) if drafter.reads else None
        along = list(drafter.unroll(rounds.text, states, DEPTH))
        for row in rounds.is_accepted.nonzero()[:, 0].tolist():
            depth, place = int(rounds.depths[row]), int(rounds.places[row])
            assert int(rounds.token_ids[row]) == int(rounds.text[place])
            step, after = along[depth], place - 1 - depth
            torch.testing.assert_close(rounds.features[row].float(), step.features[after].float(), **CLOSE)
            both, none = torch.stack([rounds.hidden[row], step.hidden[after]]), torch.zeros(2)
            likely = recorder._drafter_part(none, none, both, both, True)["top_ids"]
            assert torch.equal(likely[0], likely[1])
            depths.append(depth)
        rejected += int((~rounds.is_accepted).sum())
    # Greedy drafts of these heads are hardly ever accepted three times in a row.
    assert set(depths) >= set(range(DEPTH if temperature else 2)) and rejected > 10


def test_every_step_is_recorded_as_it_happened(recorder, target, drafter):
    """Also after a draft that was rejected: the drafter led along the round's own tokens gives the same."""
    rounds = recorder.rounds(prompt(40)[0], 0)
    starts = (rounds.depths == 0).nonzero()[:, 0].tolist()
    for first, end in zip(starts, [*starts[1:], len(rounds.depths)], strict=True):
        assert rounds.depths[first:end].tolist() == list(range(end - first))
        prefix = rounds.text[: int(rounds.places[first]) + 1]
        states = target_features(target, prefix, drafter.reads)[:-1] if drafter.reads else None
        state, taken_in = drafter.start(), DraftInputs()
        hidden = [state.advance(prefix, states, taken_in)[-1]]
        for token_id in rounds.token_ids[first + 1 : end]:
            hidden.append(state.draft(token_id[None], observe_draft_inputs=taken_in)[0])
        torch.testing.assert_close(rounds.features[first:end].float(), torch.cat(taken_in.features).float(), **CLOSE)
        torch.testing.assert_close(rounds.hidden[first:end], torch.stack(hidden), rtol=1e-4, atol=1e-4)
        drafted, says = rounds.token_ids[first + 1 : end], rounds.text[int(rounds.places[first]) + 1 :]
        is_same = [torch.equal(drafted[:count], says[:count]) for count in range(end - first)]
        assert rounds.is_accepted[first:end].tolist() == is_same


def test_the_rounds_are_those_of_an_ordinary_call(recorder, target, drafter):
    """A seed, the prompt and the full policy give the same text, as far as it goes."""
    window = prompt(40)[0]
    rounds = recorder.rounds(window, 5)
    text = rounds.text
    assert torch.equal(text, recorder.rounds(window, 5).text)
    assert not torch.equal(text, recorder.rounds(window, 6).text)
    assert "generate" not in vars(target)
    assistant = DynSpecAssistant(
        drafter, "full", target=target, tokenizer=word_tokenizer(), num_assistant_tokens=DEPTH
    )
    config = generation_config(target, 30, 0.8)
    config.eos_token_id = []
    torch.manual_seed(SETTINGS.seed * 1_000_003 + 5)
    usual = target.generate(window[None, :10], generation_config=config, assistant_model=assistant)[0]
    assert torch.equal(text, usual[: text.shape[0]])
    # What was accepted is known also of the last round, whose tokens came out before the text was ended.
    is_accepted: list[bool] = []
    for place, depth, token_id in zip(rounds.places, rounds.depths, rounds.token_ids, strict=True):
        is_accepted.append(bool(usual[place] == token_id) and (int(depth) == 0 or is_accepted[-1]))
    assert rounds.is_accepted.tolist() == is_accepted
    assistant.unbind()


def test_what_the_target_says_is_recorded_where_it_matters(recorder, target):
    window = prompt(40)[0]
    rounds = recorder.rounds(window, 7)
    steps, held_out = recorder.steps(window, 7, False), recorder.steps(window, 7, True)
    of_target = {"target_ids", "target_probabilities", "drawn_ids", "drawn_ratios"}
    assert set(held_out) - set(steps) == {"hidden", *of_target}
    torch.testing.assert_close(held_out["hidden"], rounds.hidden.half())
    assert torch.equal(steps["token_ids"], rounds.token_ids.int()) and torch.equal(
        steps["depths"], rounds.depths.byte()
    )
    assert torch.equal(steps["features"], rounds.features)
    assert all(torch.equal(held_out[name], tensor) for name, tensor in steps.items())
    with torch.no_grad():
        of_target = target(rounds.text[None]).logits[0][rounds.places.clamp_max(len(rounds.text) - 1)]
    says = of_target.softmax(-1).topk(SETTINGS.target_top_k)
    accepted = rounds.is_accepted
    assert 0 < accepted.sum() < len(accepted)
    assert torch.equal(held_out["target_ids"][accepted], says.indices[accepted].int())
    torch.testing.assert_close(
        held_out["target_probabilities"][accepted].float(), says.values[accepted], rtol=1e-3, atol=1e-4
    )
    drawn = held_out["drawn_ids"][accepted].long()
    of_drafter, of_target = (
        (one[accepted] / SETTINGS.temperature).softmax(-1)
        for one in (rounds.hidden @ recorder.drafter.head.weight.T, of_target)
    )
    own = recorder.drafter.head.token_ids
    slots = drawn if own is None else (own == drawn.unsqueeze(2)).int().argmax(2)
    ratios = of_target.gather(1, drawn) / of_drafter.gather(1, slots)
    torch.testing.assert_close(held_out["drawn_ratios"][accepted].float(), ratios, rtol=2e-3, atol=1e-4)
    assert not held_out["target_probabilities"][~accepted].any() and not held_out["drawn_ratios"][~accepted].any()


def test_texts_end_where_they_end(target, drafter):
    """At an end-of-sequence token, at the window's length, or when there are enough steps; even before any step."""
    window = prompt(16)[0]
    rounds = recorder_of(target, drafter, eos=list(range(VOCABULARY))).rounds(window, 0)
    assert len(rounds.text) == 5
    # An independent drafter drafts before the target has read the prompt, a head after that.
    assert rounds.depths.tolist() == ([] if drafter.reads else list(range(DEPTH)))
    assert rounds.is_accepted.sum() <= 2
    ended = recorder_of(target, drafter, eos=list(range(VOCABULARY)))
    steps = ended.steps(window, 0, True)
    count = len(rounds.depths)
    assert steps["top_ids"].shape == (count, 5) and steps["features"].shape == (count, 32)
    assert steps["target_ids"].shape == (count, 20) and steps["drawn_ratios"].shape == (count, 30)
    lengths = [recorder_of(target, drafter, eos=[]).rounds(prompt(16, seed=index)[0], index) for index in range(5)]
    assert all(len(one.text) <= 16 and 1 <= len(one.depths) <= 15 for one in lengths)
    assert any(len(one.depths) == 15 for one in lengths)


# Shards --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory) -> Path:
    """The target, a drafter, two EAGLE heads, and texts."""
    root = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("drafter", perturbed(target, 0.3))):
        model.save_pretrained(root / name)
        word_tokenizer().save_pretrained(root / name)
    agreeing_head("eagle3").write(root / "eagle3")
    lines = [json.dumps({"text": word_tokenizer().decode(prompt(50, seed=seed)[0])}) for seed in range(40)]
    (root / "texts.jsonl").write_text("\n".join(lines))
    return root


def windows(folder: Path) -> Windows:
    return sample_windows(find_corpus([folder / "texts.jsonl"]), word_tokenizer(), VOCABULARY, SETTINGS)


def same(one: Recording, other: Recording) -> bool:
    numbers = [*one.held_out, *one.train]
    shards = [(one.shard(number), other.shard(number)) for number in numbers]
    return numbers == [*other.held_out, *other.train] and all(
        set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)
        for left, right in shards
    )


def test_recording_goes_on_where_it_was_stopped(folder, target, drafter, tmp_path):
    """And several processes share the shards."""

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if len(list((tmp_path / "stopped").glob("steps-*.safetensors"))) == 2:
            raise Stopped

    def recorder(name: str) -> RoundRecorder:
        made = recorder_of(target, drafter, tmp_path / name)
        made.shard_steps = 100
        return made

    seen: list[tuple[int, int]] = []
    whole = recorder("whole").record(windows(folder), report=lambda *done: seen.append(done))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(seen) - 1
    assert len(whole.held_out) >= 1 and len(whole.train) >= 5
    # A text may end early, or too many drafts be accepted.
    assert 300 < whole.count(whole.train) <= 600 + 39
    with pytest.raises(Stopped):
        recorder("stopped").record(windows(folder), report=stop)
    assert "generate" not in vars(target) and not list((tmp_path / "stopped").glob("*.writing"))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").iterdir()}
    for process in range(2):
        resumed = recorder("stopped").record(windows(folder), process=process, processes=2)
    assert len(stamps) == 2 and all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert same(whole, resumed)
    # What is all there needs no model.
    done = recorder("whole")
    done.rounds = lambda *_: pytest.fail("there is nothing left to do")
    done.record(windows(folder))


# The command ---------------------------------------------------------------------------------------------------------

SMALL = "--steps 600 --held-out 120 --window 40 --depth 4 --likeliest 5 --hidden 16 --batch-size 64 --max-batches 20 "
SMALL += "--evaluate-every 10 --num-clusters 12 --pinned 10 --share 0.4 --seed 3"


def train(folder: Path, out: Path, *more: object, drafter: str = "eagle3"):
    models = ["--target", folder / "target", "--eagle" if drafter == "eagle3" else "--drafter", folder / drafter]
    return invoke("train", "router", *models, "--data", folder / "texts.jsonl", "--out", out, *SMALL.split(), *more)


@pytest.mark.parametrize("drafter", representatives("families", ["eagle3", "drafter"]), indirect=False)
def test_the_command_trains_on_rounds(folder, drafter, tmp_path):
    result = train(folder, tmp_path / "router", "--rounds", "--keep-steps", drafter=drafter)
    assert result.exit_code == 0, result.output
    config, tensors = read_artifact(tmp_path / "router")
    files = sorted((tmp_path / "router" / "partial").glob("steps-*.safetensors"))
    shards = [load_file(path) for path in files]
    (held_out, *others) = shards
    assert (held_out["target_probabilities"].sum(1) == 0).any() and "target_ids" not in others[0]
    assert config.provenance["draft_steps"] == sum(len(one["token_ids"]) for one in others)
    assert config.provenance["metrics"]["held_out_steps"] == len(held_out["token_ids"])
    assert 0 < config.provenance["metrics"]["size"] <= 0.4 * VOCABULARY and tensors["clusters"].shape == (VOCABULARY,)
    assert "--rounds" in config.provenance["command"]
    # The temperature is 0.8: the steps are another job's at another, and without rounds.
    shutil.copytree(tmp_path / "router" / "partial", tmp_path / "again" / "partial")
    stamps = [path.stat().st_mtime_ns for path in (tmp_path / "again" / "partial").glob("steps-*")]
    for changes in (["--rounds", "--temperature", "0"], []):
        other = train(folder, tmp_path / "again", *changes, drafter=drafter)
        assert isinstance(other.exception, ConfigurationError) and "holds unfinished work of another job" in str(
            other.exception
        )
    again = train(folder, tmp_path / "again", "--rounds", "--temperature", "0.8", "--keep-steps", drafter=drafter)
    assert again.exit_code == 0, again.output
    assert stamps == [path.stat().st_mtime_ns for path in (tmp_path / "again" / "partial").glob("steps-*")]
    for name, tensor in read_artifact(tmp_path / "again")[1].items():
        assert torch.equal(tensor, tensors[name]), name


def test_routers_are_compared_at_the_same_steps(folder, target, tmp_path):
    assert train(folder, tmp_path / "texts").exit_code == 0
    twin = train(folder, tmp_path / "twin", "--compare", str(tmp_path / "texts"))
    assert twin.exit_code == 0, twin.output
    metrics = read_artifact(tmp_path / "twin")[0].provenance["metrics"]
    own = {name: value for name, value in metrics.items() if name not in ("held_out_steps", "compared")}
    assert metrics["compared"][2:] == [{"router": "texts", **own}]
    shares = ["--num-clusters", "20", "--pinned", "0", "--share", "0.3", "--keep-steps"]
    # Two folders of one name are told apart by their places.
    shutil.copytree(tmp_path / "twin", tmp_path / "copy" / "texts")
    others = [tmp_path / "texts", tmp_path / "twin", tmp_path / "copy" / "texts"]
    compared = [word for other in others for word in ("--compare", str(other))]
    result = train(folder, tmp_path / "other", "--rounds", *shares, *compared)
    assert result.exit_code == 0, result.output
    config, _ = read_artifact(tmp_path / "other")
    *own, first, second, third = config.provenance["metrics"]["compared"]
    assert [one["router"] for one in own] == ["schedule dynaspec", "schedule fixed"]
    assert {**first, "router": "twin"} == second and third == first
    assert "--compare texts --compare twin" in config.provenance["command"]
    assert "| texts |" in (tmp_path / "other" / "README.md").read_text()
    rows = " ".join(result.output.split())
    assert all(f"│ {name} │" in rows for name in (tmp_path / "other", "texts", "twin"))
    assert rows.count(f"{first['target_mass']:.2%}") >= 2
    # By hand: its own clusters and pinned tokens, as many clusters as fit into this share.
    recording = Recording(tmp_path / "other" / "partial", range(1, 2), range(1))
    embed = drafter_of(agreeing_head("eagle3"), target).embed

    def filled(policy: RouterShortlist) -> dict[str, object]:
        policy = policy.with_budget(HeldOutSteps(recording, embed).largest_budget(policy, 0.3 * VOCABULARY))
        figures = vars(HeldOutSteps(recording, embed).figures(policy))
        return {name: pytest.approx(value) for name, value in figures.items()}

    policy = RouterShortlist(tmp_path / "texts")
    assert policy.pinned == 10 and policy.router.num_clusters == 12
    assert first == {"router": "texts", **filled(policy)}
    for one, schedule in zip(own, ("dynaspec", "fixed"), strict=True):
        expected = filled(RouterShortlist(tmp_path / "other", schedule=schedule))
        assert one == {"router": f"schedule {schedule}", **expected}
    assert own[0] != {**own[1], "router": own[0]["router"]}
    assert 0 < first["size"] <= 0.3 * VOCABULARY


def test_routers_that_do_not_fit_are_refused_before_anything_is_recorded(folder, tmp_path):
    def refused(router: Path) -> str:
        result = train(folder, tmp_path / "out", "--compare", router)
        assert isinstance(result.exception, ConfigurationError | ArtifactError), result.output
        assert not (tmp_path / "out").exists()
        return str(result.exception)

    assert "nowhere" in refused(tmp_path / "nowhere")
    words = ["--target", folder / "target", "--num-clusters", 9, "--out", tmp_path / "clusters"]
    assert invoke("build", "clusters", *words).exit_code == 0
    assert "no trained router" in refused(tmp_path / "clusters")

    def pair(name: str, target) -> Path:
        """A folder with another target, and a router for it."""
        size, root = target.config.vocab_size, tmp_path / name
        root.mkdir()
        for one in (target, word_tokenizer(size)):
            one.save_pretrained(root / "target")
        random_head("eagle3", vocabulary=size, hidden_size=target.config.hidden_size).write(root / "eagle3")
        shutil.copy(folder / "texts.jsonl", root)
        result = train(root, root / "router")
        assert result.exit_code == 0, result.output
        return root / "router"

    wide, larger = pair("wide", soft("llama", hidden_size=48)), pair("larger", soft("llama", vocabulary=320))
    assert "reads hidden states of 48 numbers, and the drafter's have 32" in refused(wide)
    problem = refused(larger)
    assert "--compare" in problem and "tokenizer of 320 ids, and this one has 301" in problem


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--rounds", "--temperature", "inf"], "temperature must be finite"),
        (["--batch-size", "5000"], "--batch-size 5,000"),
    ],
)
def test_bad_input_is_refused(folder, tmp_path, changes, says):
    result = train(folder, tmp_path / "router", *changes)
    assert isinstance(result.exception, ConfigurationError) and says in str(result.exception), result.output
    assert not (tmp_path / "router" / "config.json").exists()
