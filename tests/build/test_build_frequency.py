"""Frequency rankings: counting, going on after a kill, ranking, and the command."""

import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke
from corpora import WORDS, make_documents, save_tokenizer, write_texts
from stopped_commands import RUN_SLOWLY, RUN_WITH_SMALL_BATCHES, start, stop_when
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hf_dynspec.artifacts import read_artifact, rebuild_policy
from hf_dynspec.build import corpus as corpus_module
from hf_dynspec.build import tokens
from hf_dynspec.build.corpus import find_corpus
from hf_dynspec.build.frequency import Tally, count_generated, count_tokens
from hf_dynspec.build.jobs import begin_job
from hf_dynspec.build.ranking import byte_ids, complete_ranking, coverage, pinned_ids, rank, vocabulary_size
from hf_dynspec.errors import ConfigurationError, DynSpecError
from hf_dynspec.vocabulary import fingerprint_tokenizer


def save_byte_fallback(folder: Path) -> Path:
    """As sentencepiece makes them: pieces with ▁ for a space, and `<0x0A>` for the bytes of unknown characters."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_only = [document.encode("ascii", "ignore").decode() for document in make_documents(60)]
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=200, special_tokens=["<unk>"])
    learner.train_from_iterator(ascii_only, trainer)
    model = json.loads(learner.to_str())["model"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", *in_bytes, *(piece for piece in model["vocab"] if piece != "<unk>")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Path:
    return save_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE_CHARACTERS", 500)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 2000)


def load(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def expected_counts(folder: Path, texts: list[str]) -> np.ndarray:
    """The plain twin of `count_tokens`: one text at a time, one id at a time."""
    tokenizer = load(folder)
    counts = np.zeros(vocabulary_size(tokenizer), np.int64)
    for text in texts:
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            counts[token_id] += 1
    return counts


# Counting


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_counts_are_those_of_counting_one_by_one(kind, tmp_path, request, small_batches):
    folder = request.getfixturevalue(kind)
    # Special tokens are not added to texts, but counted where a text has them.
    texts = write_texts(tmp_path, [*make_documents(79), f"return{load(folder).eos_token}return"])
    if kind == "byte_fallback":
        # Metaspace puts a space in front of each piece, so that it matters where plain text is cut.
        (tmp_path / "a.txt").unlink()
        texts = texts[1:]
    expected = expected_counts(folder, texts)
    tally, reports = Tally(len(expected)), []
    corpus = find_corpus([tmp_path])
    count_tokens(corpus, load(folder), tally, lambda *progress: reports.append(progress))
    assert np.array_equal(tally.counts, expected) and tally.counts[load(folder).eos_token_id] == 1
    assert tally.documents == len(texts) and len(reports) > 3
    assert reports == sorted(reports) and reports[-1] == (corpus.size, expected.sum())


@pytest.mark.parametrize("kind", ["truncating", "slow"])
def test_a_tokenizer_that_truncates_or_has_no_fast_twin_counts_all(byte_level, tmp_path, kind):
    texts = write_texts(tmp_path, make_documents(10))
    tokenizer = load(byte_level)
    tally = Tally(vocabulary_size(tokenizer))
    if kind == "truncating":
        tokenizer.backend_tokenizer.enable_truncation(3)
    # A function has nothing else of a tokenizer.
    counting = tokenizer if kind == "truncating" else partial(tokenizer)
    count_tokens(find_corpus([tmp_path]), counting, tally)
    assert np.array_equal(tally.counts, expected_counts(byte_level, texts))


def test_counting_goes_on_after_a_bad_line_is_mended(byte_level, tmp_path, small_batches):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in make_documents(60)]
    path.write_text("\n".join([*lines[:50], "{", *lines[51:]]))
    size = vocabulary_size(load(byte_level))
    with pytest.raises(DynSpecError, match=r"a\.jsonl, line 51"):
        count_tokens(find_corpus([path]), load(byte_level), Tally(size, tmp_path / "kept"))
    path.write_text("\n".join(lines))
    again = Tally(size, tmp_path / "kept")
    assert again.done > 1 and 0 < again.read < path.stat().st_size
    count_tokens(find_corpus([path]), load(byte_level), again)
    assert np.array_equal(again.counts, expected_counts(byte_level, make_documents(60)))


# Saved state


def ones(*token_ids: int) -> np.ndarray:
    return np.bincount(token_ids, minlength=10)


def test_a_folder_goes_on_with_its_own_job(tmp_path):
    job = {"inputs": "one", "tokenizer": "two"}
    begin_job(tmp_path, job)
    begin_job(tmp_path, {"other": "job"})  # there was nothing to lose
    begin_job(tmp_path, job)
    tally = Tally(10, tmp_path)
    tally.add(ones(2, 7), 1, read=5)
    tally.save()
    begin_job(tmp_path, job)
    again = Tally(10, tmp_path)
    assert (again.done, again.documents, again.tokens, again.read) == (1, 1, 2, 5)
    assert again.counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ConfigurationError, match=r"another job \(changed: inputs\).*--overwrite"):
        begin_job(tmp_path, {**job, "inputs": "other"})
    with pytest.raises(ConfigurationError, match=r"damaged.*sizes of this job"):
        Tally(11, tmp_path)
    begin_job(tmp_path, {"inputs": "other"}, fresh=True)
    assert Tally(10, tmp_path).done == 0
    with pytest.raises(ConfigurationError, match="a folder that all of them see"):
        begin_job(tmp_path / "elsewhere", job, is_main=False)
    (tmp_path / "job.json").write_text("[]")
    (tmp_path / "work").touch()
    with pytest.raises(ConfigurationError, match=r"job\.json: is damaged.*--overwrite"):
        begin_job(tmp_path, job)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", b"\x93NUMPY", "pickle"])
def test_a_damaged_tally_is_refused_and_no_pickle_is_loaded(tmp_path, content):
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(touched),)

    if content == "pickle":
        np.savez(tmp_path / Tally.FILE, state=np.array([Hostile()], dtype=object), allow_pickle=True)
    else:
        (tmp_path / Tally.FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match="damaged"):
        Tally(10, tmp_path)
    assert not touched.exists()


def test_savings_are_spaced_and_replace_the_file_in_one_step(tmp_path, monkeypatch):
    tally = Tally(10, tmp_path)
    tally.add(ones(1), 1)
    assert not list(tmp_path.iterdir())
    tally.save()
    before = (tmp_path / Tally.FILE).read_bytes()
    tally.add(ones(2), 1)

    def fail(*paths):
        raise OSError("the machine stopped here")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="stopped"):
        tally.save()
    assert (tmp_path / Tally.FILE).read_bytes() == before


def stop_between_savings(process, file: Path, how: signal.Signals) -> str:
    """Send a signal as soon as the counts were saved again; return what the command said."""
    before = saved_batches(file)
    return stop_when(lambda: saved_batches(file) != before, process, how)


def saved_batches(file: Path) -> int:
    if not file.exists():
        return 0
    with np.load(file) as saved:
        return int(saved["state"][0])


@pytest.mark.process
def test_a_stopped_command_goes_on_and_ends_with_the_same_ranking(byte_level, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(1500))
    arguments = ["build", "frequency", "--tokenizer", byte_level, "--text", tmp_path / "text", "--out", tmp_path / "o"]
    file = tmp_path / "o" / "partial" / Tally.FILE
    messages = stop_between_savings(start(RUN_SLOWLY, *arguments), file, signal.SIGINT)
    assert f"tokens are kept in {file.parent}; run the same command again to go on" in messages
    stop_between_savings(start(RUN_SLOWLY, *arguments), file, signal.SIGKILL)
    process = start(RUN_WITH_SMALL_BATCHES, *arguments)
    _, messages = process.communicate(timeout=600)
    assert process.returncode == 0, messages
    assert "continuing: " in messages
    config, tensors = read_artifact(tmp_path / "o")
    expected = expected_counts(byte_level, texts)
    assert config.provenance["tokens_counted"] == expected.sum()
    assert config.provenance["documents"] == len(texts)
    assert tensors["ranking"].tolist() == rank(expected, load(byte_level)).tolist()
    assert not (tmp_path / "o" / "partial").exists()


# Ranking


def test_the_ranking_of_a_byte_level_vocabulary(byte_level):
    tokenizer = load(byte_level)
    size = len(tokenizer)
    counts = np.random.default_rng(1).integers(0, 5, size)
    ranking = rank(counts, tokenizer).tolist()
    assert sorted(ranking) == list(range(size))
    ids = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>", "<tool>"])
    letters = tokenizer.convert_tokens_to_ids(pre_tokenizers.ByteLevel.alphabet())
    assert ranking[: 3 + 256] == [ids[0], *sorted(ids[1:]), *sorted(letters)]
    rest = ranking[3 + 256 :]
    assert rest == sorted(rest, key=lambda token_id: (-counts[token_id], token_id))
    assert pinned_ids(tokenizer, eos_token_ids=[ids[2]])[:2] == [ids[2], ids[0]]


def test_the_ranking_of_a_vocabulary_that_falls_back_to_bytes(byte_fallback):
    tokenizer = load(byte_fallback)
    fallback = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
    assert byte_ids(tokenizer) == sorted(fallback)
    ranking = rank(np.zeros(vocabulary_size(tokenizer), np.int64), tokenizer).tolist()
    assert ranking[0] == tokenizer.eos_token_id
    assert set(ranking[:258]) == {tokenizer.eos_token_id, tokenizer.unk_token_id, *fallback}
    assert sorted(ranking) == list(range(len(tokenizer)))
    # What no piece covers is spelled out in bytes, all of which a small shortlist has.
    spelled = set(tokenizer.encode("東", add_special_tokens=False)) - {tokenizer.convert_tokens_to_ids("▁")}
    assert len(spelled) == 3
    assert spelled <= set(ranking[:258])


def test_letters_are_not_bytes_where_a_vocabulary_has_neither():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "é": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert byte_ids(tokenizer) == []
    assert rank(np.array([0, 1, 5]), tokenizer).tolist() == [0, 2, 1]


def test_large_families_of_numbered_tokens_are_not_pinned(byte_level):
    tokenizer = load(byte_level)
    size = len(tokenizer)
    tokenizer.add_tokens([f"<h{level}>" for level in range(1, 7)])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<unused{index}>" for index in range(100)]})
    pinned = set(pinned_ids(tokenizer))
    assert {token_id for token_id in pinned if token_id >= size} == set(range(size, size + 6))
    assert sorted(rank(np.zeros(size + 106, np.int64), tokenizer)) == list(range(size + 106))


def test_a_list_that_is_cut_off_is_continued(byte_level):
    tokenizer = load(byte_level)
    ranking = complete_ranking([300, 5, 301], tokenizer).tolist()
    assert ranking[:4] == [300, 5, 301, tokenizer.eos_token_id]
    assert sorted(ranking) == list(range(len(tokenizer)))


def test_coverage_is_the_share_of_counted_tokens():
    shares = coverage(np.array([0, 6, 1, 3]), np.array([1, 3, 2, 0]), [1, 2, 3, 4, 5])
    assert shares == {1: 0.6, 2: 0.9, 3: 1.0, 4: 1.0}


# What a target generates


@pytest.fixture(scope="module")
def target(byte_level, tmp_path_factory) -> Path:
    """A random model whose head is padded past the tokenizer, saved beside its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = load(byte_level)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer) + 100, **shape, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(target) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)


PROMPTS = [("speculative decoding", "drafts tokens"), ("return x",), ("Größe 1024 ()",)]


def generated_counts(target: Path, tally: Tally, **settings) -> np.ndarray:
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    count_generated(model, load(target), PROMPTS, tally, max_new_tokens=20, **settings)
    return tally.counts


def test_greedy_generation_is_counted_turn_by_turn(target, model):
    tokenizer, expected = load(target), Counter()
    for turns in PROMPTS:
        context: list[int] = []
        for turn in turns:
            context += tokenizer.encode(turn)
            answer = model.generate(torch.tensor([context]), max_new_tokens=20, do_sample=False)[0, len(context) :]
            expected.update(answer.tolist())
            # An end-of-sequence token ends an answer, not the conversation.
            context += answer.tolist()[: -1 if len(answer) < 20 else None]
    size, reports = len(tokenizer), []
    counts = generated_counts(target, Tally(size), report=lambda _, tokens: reports.append(tokens))
    assert counts.tolist() == [expected[token_id] for token_id in range(size)]
    assert reports == sorted(reports) and reports[-1] == counts.sum()


def test_padding_rows_are_generated_by_this_target_and_not_counted(target):
    """Keeps the test above honest: sampling from a random model does reach the padding."""
    counts = generated_counts(target, Tally(len(load(target))), temperature=1.0)
    assert 0 < counts.sum() < 4 * 20


def test_sampling_continues_with_the_same_tokens(target, tmp_path):
    size, settings = len(load(target)), {"temperature": 0.8, "seed": 3}
    whole = generated_counts(target, Tally(size), **settings)
    assert not np.array_equal(whole, generated_counts(target, Tally(size), temperature=0.8, seed=4))
    calls: list[int] = []

    def stop_in_the_second_prompt(prompts: int, tokens: int) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        generated_counts(target, Tally(size, tmp_path), **settings, report=stop_in_the_second_prompt)
    continued = Tally(size, tmp_path)
    assert continued.done == 1
    assert np.array_equal(generated_counts(target, continued, **settings), whole)


def test_a_conversation_ends_where_the_context_is_full(target, model):
    tokenizer, long = load(target), " ".join(WORDS * 7)
    tally = Tally(len(tokenizer))
    room = 128 - len(tokenizer.encode(long))
    assert 0 < room < 50
    count_generated(model, tokenizer, [(long, "more", "and more")], tally, max_new_tokens=50)
    assert 0 < tally.tokens <= room


def test_a_chat_template_is_applied_where_there_is_one(target, model):
    tokenizer, seen, generate = load(target), [], model.generate
    tokenizer.chat_template = "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}x"
    model.generate = lambda input_ids, **settings: seen.append(input_ids[0]) or generate(input_ids, **settings)
    count_generated(model, tokenizer, PROMPTS[:1], Tally(len(tokenizer)), max_new_tokens=4)
    assert tokenizer.decode(seen[0]) == "uspeculative decodingx"
    assert tokenizer.decode(seen[1]).startswith("uspeculative decodinga")
    assert tokenizer.decode(seen[1]).endswith("udrafts tokensx")


# The command


def test_the_command_makes_an_artifact(byte_level, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(60))
    paths, out = sorted((tmp_path / "text").iterdir()), tmp_path / "made" / "here"
    words = ["--tokenizer", byte_level, "--text", *paths, "--out", out, "--size", 300]
    result = invoke("build", "frequency", *words)
    assert result.exit_code == 0, result.output
    size = sum(path.stat().st_size for path in paths)
    assert "--policy frequency:ranking=" in result.output and f"{size}/{size}" in result.output
    config, tensors = read_artifact(out, tokenizer_fingerprint=fingerprint_tokenizer(load(byte_level)))
    expected = expected_counts(byte_level, texts)
    assert tensors["ranking"].tolist() == rank(expected, load(byte_level)).tolist()
    policy = rebuild_policy(config, tensors)
    assert (policy.name, policy.size) == ("frequency", 300)
    record = config.provenance
    assert record["tokens_counted"] == expected.sum() and record["distinct_tokens"] == (expected > 0).sum()
    assert (record["documents"], record["input_files"]) == (len(texts), 2)
    assert record["input_bytes"] == size
    assert record["inputs"][0] == f"a.txt ({paths[0].stat().st_size} bytes)"
    assert record["command"].startswith("hf-dynspec build frequency --out here --tokenizer ")
    assert record["command"].endswith("--text a.txt --size 300 b.jsonl")
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), "a stranger must not learn the layout of this disk"


def test_commands_do_not_replace_what_they_should_not(byte_level, tmp_path):
    torch.save([5, 6, 7], tmp_path / "list.pt")
    (tmp_path / "a.txt").write_text("speculative decoding")
    commands = [
        ["build", "frequency", "--text", tmp_path / "a.txt", "--tokenizer", byte_level],
        ["build", "frequency-import", tmp_path / "list.pt", "--tokenizer", byte_level],
    ]
    foreign, out = tmp_path / "foreign", tmp_path / "out"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "qwen3"}')
    assert invoke(*commands[1], "--out", out).exit_code == 0
    for command in commands:
        with pytest.raises(ConfigurationError, match="something else than hf_dynspec"):
            raise invoke(*command, "--out", foreign, "--overwrite").exception
        with pytest.raises(ConfigurationError, match=r"already holds an artifact.*--overwrite"):
            raise invoke(*command, "--out", out).exception
        with pytest.raises(ConfigurationError, match="is a file; give --out a folder"):
            raise invoke(*command, "--out", tmp_path / "a.txt").exception
    assert (foreign / "config.json").read_text() == '{"model_type": "qwen3"}'
    assert invoke(*commands[1], "--out", out, "--overwrite", "--size", 2).exit_code == 0
    assert read_artifact(out)[0].policy.settings["size"] == 2


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--size", 10**8, "--size must be a whole number from 1 to 4194304"),
        ("--seed", 2**63, "--seed must be a whole number from 0 to 9223372036854775807"),
    ],
)
def test_what_no_artifact_may_have_is_refused_before_anything_is_counted(byte_level, tmp_path, option, value, problem):
    (tmp_path / "a.txt").write_text("speculative decoding")
    torch.save([5, 6, 7], tmp_path / "list.pt")
    commands = [["build", "frequency", "--text", tmp_path / "a.txt"]]
    commands += [["build", "frequency-import", tmp_path / "list.pt"]] if option == "--size" else []
    for command in commands:
        with pytest.raises(ConfigurationError, match=problem):
            raise invoke(*command, "--tokenizer", byte_level, "--out", tmp_path / "out", option, value).exception
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "tokenizer", "problem"),
    [
        ('{"text": ""}\n', None, "all texts are empty"),
        ('{"text": "speculative"}\n', "nothing", "nothing: there is no such folder"),
        ('\n{"texd": "b"}\n', None, r"^\S+a\.jsonl, line 2: no field 'text' or 'turns'; there are \['texd'\][^\n]*$"),
    ],
)
def test_what_cannot_be_counted_is_refused(byte_level, tmp_path, text, tokenizer, problem):
    (tmp_path / "a.jsonl").write_text(text)
    words = ["--tokenizer", tmp_path / tokenizer if tokenizer else byte_level, "--text", tmp_path / "a.jsonl"]
    with pytest.raises(DynSpecError, match=problem):
        raise invoke("build", "frequency", *words, "--out", tmp_path / "out").exception
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_command_counts_what_a_target_generates(target, tmp_path):
    prompts = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    prompts[0].write_text(json.dumps({"question_id": 81, "category": "code", "turns": PROMPTS[0]}))
    prompts[1].write_text("\n".join(json.dumps({"text": turns[0]}) for turns in PROMPTS[1:]))
    arguments = ["build", "frequency", "--from-target", target, "--prompts", *prompts, "--max-new-tokens", 20]
    result = invoke(*arguments, "--out", tmp_path / "out", "--device", "cpu", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    config, tensors = read_artifact(tmp_path / "out")
    expected = generated_counts(target, Tally(len(load(target))))
    assert tensors["ranking"].tolist() == rank(expected, load(target)).tolist()
    assert config.provenance["prompts"] == 3
    assert config.target.architecture == "Qwen3ForCausalLM"
    assert (config.target.name_or_path, config.target.local) == (target.name, True)
    assert config.target.vocab_size == len(load(target)) + 100
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "T"], "either --text or --from-target"),
        (["--text", "a.txt"], "--text needs --tokenizer"),
        (["--text", "a.txt", "--tokenizer", "T", "--prompts", "b"], "--from-target and --prompts go together"),
        (["--from-target", "T"], "--from-target and --prompts go together"),
    ],
)
def test_arguments_that_do_not_go_together_are_usage_errors(tmp_path, monkeypatch, arguments, message):
    for name in ("a.txt", "b"):
        (tmp_path / name).write_text("a")
    monkeypatch.chdir(tmp_path)
    result = invoke("build", "frequency", "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
