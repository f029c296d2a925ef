"""Drafters that are trained for a target which has none: EAGLE heads, small models, and the commands for both."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke
from launched_processes import launch_command
from models import VOCABULARY, prompt, tiny, word_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from hf_dynspec import ConfigurationError, DynSpecAssistant, EagleDrafter, UnsupportedError
from hf_dynspec.build import drafter_job, drafter_training
from hf_dynspec.build.corpus import find_corpus
from hf_dynspec.build.drafter_job import train_drafter
from hf_dynspec.build.drafter_losses import DraftLosses, ScoredTokens, target_states
from hf_dynspec.build.drafter_training import DrafterTraining, DrafterTrainingSettings
from hf_dynspec.build.exports.vllm import read_head
from hf_dynspec.build.new_drafters import hidden_states_read, new_eagle_head, new_small_drafter
from hf_dynspec.build.self_written import SelfWriter
from hf_dynspec.build.windows import Windows
from hf_dynspec.commands import train_drafter as train_drafter_command

TEXT = torch.arange(5, 25) * 13 % VOCABULARY
# Small enough for seconds.
SMALL = ("--steps", 9, "--batch-tokens", 96, "--window", 24, "--save-every", 3, "--learning-rate", 0.01)


@pytest.fixture(autouse=True)
def few_looks(monkeypatch):
    monkeypatch.setattr(drafter_training, "_LOOKS", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, and texts that it might have written."""
    root = tmp_path_factory.mktemp("family")
    target, tokenizer = tiny("llama", num_hidden_layers=5), word_tokenizer()
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    torch.manual_seed(0)
    start = torch.cat([prompt(3, seed=seed) for seed in range(40)])
    texts = target.generate(start, do_sample=True, max_new_tokens=60, eos_token_id=None, pad_token_id=0)
    (root / "texts.jsonl").write_text("\n".join(json.dumps({"text": tokenizer.decode(text)}) for text in texts))
    return root


@pytest.fixture(scope="module")
def target(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target").eval()


def command(kind: str, folder: Path, out: Path, *more: object) -> tuple:
    return (
        "train",
        kind,
        "--target",
        folder / "target",
        "--data",
        folder / "texts.jsonl",
        "--out",
        out,
        *SMALL,
        *more,
    )


def train(kind: str, folder: Path, out: Path, *more: object) -> str:
    result = invoke(*command(kind, folder, out, *more))
    assert result.exit_code == 0, result.exception
    return result.output


def same_files(*folders: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stopping(method: Callable, calls: int) -> Callable:
    """The method, which is interrupted at the end of one of its calls."""
    done = []

    def call(*arguments: object) -> None:
        method(*arguments)
        done.append(None)
        if len(done) == calls:
            raise KeyboardInterrupt

    return call


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["eagle3", "eagle2"])
def test_a_head_is_trained_loads_again_and_drafts(layout, folder, target, tmp_path):
    said = train("eagle", folder, tmp_path / "head", "--layout", layout, "--intermediate-size", 48)
    assert "expected acceptance length" in said and "--eagle" in said
    assert {path.name for path in (tmp_path / "head").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    head = EagleDrafter.from_pretrained(tmp_path / "head", target=target)
    assert head.settings.generation == int(layout[-1]) and head.settings.intermediate_size == 48
    assert head.head.token_ids is None
    card = (tmp_path / "head" / "README.md").read_text()
    assert "hf-dynspec train eagle --target target" in card and "| 5 | " in card and str(folder) not in card
    # The card's code runs as it stands, with the user's folders.
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    places = {"path/to/this/folder": tmp_path / "head", "path/to/target": folder / "target"}
    for place, path in places.items():
        code = code.replace(place, str(path))
    names: dict = {}
    exec(code, names)
    assert names["output"].shape[1] > names["inputs"].input_ids.shape[1]
    assistant = DynSpecAssistant(head, target=target)
    text = prompt(6)
    expected = target.generate(text, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(text, max_new_tokens=12, do_sample=False, assistant_model=assistant), expected)
    # Another run in the same folder is refused, unless it may replace what this package wrote.
    assert "already holds" in str(invoke(*command("eagle", folder, tmp_path / "head")).exception)
    if layout == "eagle3":
        assert read_head(tmp_path / "head").settings.target_layer_ids == (1, 2, 4)
        train("eagle", folder, tmp_path / "head", "--overwrite", "--self-written", 0, "--schedule", "constant")


def test_a_target_of_two_layers_gets_a_head_that_reads_one_state_and_a_line_says_so(folder, tmp_path):
    target = tiny()
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    shallow = ("--target", tmp_path / "target")
    refused = invoke(*command("eagle", folder, tmp_path / "head", "--layout", "eagle3", *shallow))
    assert "2 layers" in str(refused.exception)
    assert "the target's 2 layers are too few for an EAGLE-3 head" in train(
        "eagle", folder, tmp_path / "head", *shallow
    )
    assert EagleDrafter.from_pretrained(tmp_path / "head", target=target).settings.generation == 2


def test_too_few_minutes_and_a_head_of_little_use_are_told(folder, tmp_path, monkeypatch):
    said = train("eagle", folder, tmp_path / "head", "--minutes", 0.5)
    assert "use it by --eagle" in said and f"work is kept in {tmp_path / 'head' / 'partial'}" in said
    monkeypatch.setattr(train_drafter_command, "_WORTH_IT", 9.0)
    monkeypatch.setattr(drafter_job, "_FEWEST_BATCHES", 10**6)
    said = train("eagle", folder, tmp_path / "other", "--minutes", 0.5)
    assert re.search(
        r"a batch takes [\d.]+ s, so that 0\.5 minutes have about .* give this target about --minutes \d+", said
    )
    assert "hardly worth it: below 9" in said and "use it by" not in said


def test_a_small_drafter_is_trained_loads_again_and_drafts(folder, target, tmp_path):
    train("drafter", folder, tmp_path / "drafter", "--layers", 1, "--width", 16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
    assert model.config.hidden_size == 16 and model.config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "drafter").get_vocab() == word_tokenizer().get_vocab()
    assert target.generate(prompt(4), max_new_tokens=4, assistant_model=DynSpecAssistant(model, target=target)).numel()


@pytest.mark.parametrize("kind", ["eagle", "drafter"])
def test_a_stopped_training_goes_on_to_the_same_bits(kind, folder, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(kind, folder, whole)
    for owner, name, calls in ((SelfWriter, "write", 1), (DrafterTraining, "_save", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping(getattr(owner, name), calls))
            result = invoke(*command(kind, folder, stopped))
        assert result.exit_code == 130 and "what was finished is kept" in result.output
        assert not (stopped / "config.json").exists()
    changed = invoke(*command(kind, folder, stopped, "--depth", 4))
    assert isinstance(changed.exception, ConfigurationError) and "another job" in str(changed.exception)
    train(kind, folder, stopped)
    assert same_files(whole, stopped) and not (stopped / "partial").exists()


@pytest.mark.process
def test_two_processes_train_the_same_head(folder, tmp_path):
    train("eagle", folder, tmp_path / "one")
    launch_command(tmp_path, *command("eagle", folder, tmp_path / "two"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name].float(), two[name].float(), rtol=0.05, atol=0.01)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--layout", "eagle1"), "layout"),
        (("--schedule", "linear"), "schedule"),
        (("--depth", 0), "depth"),
        (("--self-written", 2), "self-written"),
        (("--learning-rate", 1), "learning-rate"),
        (("--minutes", 0), "minutes"),
        (("--window", 4), "window"),
        (("--batch-tokens", 100_000), "give more texts"),
        (("--dtype", "float99"), "dtype"),
    ],
)
def test_options_out_of_range_are_refused(words, problem, folder, tmp_path):
    result = invoke(*command("eagle", folder, tmp_path / "head", *words))
    assert isinstance(result.exception, ConfigurationError), result.exception
    assert problem in str(result.exception)


def test_targets_that_cannot_be_learnt_from_are_refused_before_any_work(folder, tmp_path, target):
    tiny("llama").save_pretrained(tmp_path / "shallow" / "target")
    T5Config().save_pretrained(tmp_path / "encoder" / "target")
    shutil.copytree(folder / "target", tmp_path / "quantised" / "target")
    config = json.loads((folder / "target" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "quantised" / "target" / "config.json").write_text(json.dumps(config))
    problems = {"shallow": "has 2 layers", "encoder": "encoder-decoder", "quantised": "is quantised"}
    for name, problem in problems.items():
        (tmp_path / name / "texts.jsonl").write_text('{"text": "w1"}')
        result = invoke(*command("eagle", tmp_path / name, tmp_path / "head", "--layout", "eagle3"))
        assert isinstance(result.exception, UnsupportedError) and problem in str(result.exception)
    assert not (tmp_path / "head").exists()
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "notes.txt").write_text("mine")
    assert "not of this command" in str(invoke(*command("eagle", folder, tmp_path / "head")).exception)
    with pytest.raises(ConfigurationError, match="width"):
        new_small_drafter(target, width=48)


# Parts ---------------------------------------------------------------------------------------------------------------


def head_for(target, layout: str = "eagle3") -> EagleDrafter:
    return new_eagle_head(target, lambda: [(TEXT, target_states(target, TEXT))], layout)


@pytest.mark.parametrize("kind", ["eagle3", "eagle2", "drafter"])
def test_agreement_rises_and_minutes_end_a_training(kind, folder, target, tmp_path):
    looks = []
    settings = DrafterTrainingSettings(steps=60, minutes=0.1, batch_tokens=128, learning_rate=0.02)
    head = partial(new_eagle_head, target, layout=kind)
    made = train_drafter(
        target,
        word_tokenizer(),
        find_corpus([folder / "texts.jsonl"]),
        (lambda states: new_small_drafter(target)) if kind == "drafter" else head,
        settings,
        tmp_path / "work",
        window=32,
        look=lambda state, figures: looks.append((state.step, figures)),
    )
    first, last = looks[0][1], looks[-1][1]
    assert last.loss < first.loss and sum(last.agreement) > sum(first.agreement)
    assert last.acceptance_length > first.acceptance_length
    assert made.figures.loss == min(figures.loss for _, figures in looks)
    assert made.state.step == 60 or made.state.seconds > 6


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gptj"])
@pytest.mark.parametrize("kind", ["eagle3", "drafter"])
def test_gradients_are_those_of_the_divergence(kind, family):
    target = tiny(family, **({} if family == "gptj" else {"num_hidden_layers": 3}))
    if kind == "eagle3" and family == "gptj":
        kind = "eagle2"
    drafter = new_small_drafter(target, 1) if kind == "drafter" else head_for(target, kind)
    losses = DraftLosses(target, drafter, VOCABULARY, 3, 0.5)
    losses._rows = 7
    ids, weights = ScoredTokens(torch.arange(VOCABULARY), 120).draw([TEXT], 3)
    predictions = losses.predictions([TEXT])
    found = losses.backward([TEXT], ids, weights, predictions)
    parameters = dict(drafter.module.named_parameters())
    gradients = {name: one.grad.clone() for name, one in parameters.items()}
    drafter.module.zero_grad()
    states = target_states(target, TEXT)
    features = torch.cat([states[layer] for layer in drafter.reads], -1) if drafter.reads else None
    wanted = DraftLosses(target, drafter, VOCABULARY, 3, 0.5)._head.token_logits(states[-1], ids) + weights
    expected = 0.0
    for step, unrolled in enumerate(drafter.unroll(TEXT, features, 3 if drafter.reads else 1)):
        drafted = (drafter.token_logits(unrolled.hidden, ids) + weights).log_softmax(-1)
        its = wanted[1 + step :].log_softmax(-1)
        expected = expected + 0.5**step * (its.exp() * (its - drafted)).sum() / predictions
    expected.backward()
    torch.testing.assert_close(found.float(), expected.detach(), rtol=1e-4, atol=1e-5)
    for name, one in parameters.items():
        torch.testing.assert_close(gradients[name], one.grad, rtol=1e-3, atol=1e-5)


def test_a_batch_is_scored_by_its_own_tokens_the_frequent_ones_and_a_sample():
    scored = ScoredTokens(torch.arange(VOCABULARY).flip(0), 100)
    ids, weights = scored.draw([torch.tensor([3, 7])], seed=1)
    assert {3, 7} | set(range(VOCABULARY - 50, VOCABULARY)) <= set(ids[weights == 0].tolist())
    assert ids.tolist() == sorted(set(ids.tolist())) and ids.shape[0] == 102
    # Each of the sample stands for as many others.
    assert float(weights.exp().sum()) == pytest.approx(VOCABULARY, rel=1e-4)
    assert torch.equal(ids, scored.draw([torch.tensor([3, 7])], seed=1)[0])
    assert ScoredTokens(torch.arange(VOCABULARY), VOCABULARY + 5).draw([], 0) == (None, None)


def test_the_target_writes_after_beginnings_and_texts_are_kept(target, tmp_path):
    ids, ends = np.arange(5, 165, dtype=np.int32), np.array([40, 43, 83, 120, 160])
    windows = Windows(ids, ends, np.zeros(VOCABULARY, np.int64))
    writer = SelfWriter(target, windows, range(5), 24, tmp_path, 3, seed=0)
    writer.write(range(2), lambda number: number < 1)
    assert writer.batches == [[0, 2, 3], [4]]
    texts = writer.written()
    assert len(texts) == 3 and all(len(text) <= 24 for text in texts)
    assert [text[:6].tolist() for text in texts] == [windows[index][:6].tolist() for index in (0, 2, 3)]
    again = SelfWriter(target, windows, range(5), 24, tmp_path / "again", 3, seed=0)
    again.write(range(1), lambda number: True)
    assert all(map(torch.equal, again.written(), texts)) and again.seconds() > 0
    writer.path(0).write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match="damaged"):
        writer.written()


def test_shallow_targets_are_read_at_three_different_places():
    assert hidden_states_read(32) == (2, 16, 29)
    for layers in range(3, 40):
        reads = hidden_states_read(layers)
        assert len(set(reads)) == 3 and 0 <= min(reads) and max(reads) < layers
    head = head_for(tiny("llama", num_hidden_layers=4))
    assert head.reads == (1, 2, 3) and head.checkpoint.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        0,
        1,
        2,
    ]
