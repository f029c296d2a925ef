"""Frequency rankings: reading corpora, counting in processes, continuing after a kill, ranking, and the command."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from stopped_commands import RUN_SLOWLY, RUN_WITH_SMALL_UNITS, start, stop_when
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from hf_dynspec.artifacts import read_artifact, rebuild_policy
from hf_dynspec.build import texts as texts_module
from hf_dynspec.build.corpus import plan_corpus
from hf_dynspec.build.frequency import Tally, UnitCounts, count_generated, count_tokens
from hf_dynspec.build.prompts import read_prompts
from hf_dynspec.build.ranking import byte_ids, complete_ranking, coverage, pinned_ids, rank, vocabulary_size
from hf_dynspec.build.texts import read_unit
from hf_dynspec.commands import app
from hf_dynspec.errors import ConfigurationError, DynSpecError
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = [
    "speculative",
    "decoding",
    "drafts",
    "tokens",
    "Größe",
    "naïve",
    "東京",
    "🙂",
    "return",
    "x",
    "1024",
    "(",
    ")",
]
LETTERS = ["a", "b", "c", "d", "e", "f"]


def make_documents(count: int, words: int = 40) -> list[str]:
    """Sentences over several lines, in a fixed but irregular order. Line breaks follow no white space, so that text
    has the same tokens whether it is cut at them or not."""
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, 8)) + str(index % 97) for index in range(count * words // 8)]
    per_document = words // 8
    return ["\n".join(lines[start : start + per_document]) for start in range(0, len(lines), per_document)]


DOCUMENTS = make_documents(60)


def save_byte_level(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        DOCUMENTS, trainers.BpeTrainer(show_progress=False, vocab_size=400, initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.add_tokens(["<tool>"])
    wrapped.save_pretrained(folder)
    return folder


def save_byte_fallback(folder: Path) -> Path:
    """As sentencepiece makes them: pieces with ▁ for a space, and `<0x0A>` for the bytes of unknown characters."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_only = [document.encode("ascii", "ignore").decode() for document in DOCUMENTS]
    learner.train_from_iterator(
        ascii_only, trainers.BpeTrainer(show_progress=False, vocab_size=200, special_tokens=["<unk>"])
    )
    model = json.loads(learner.to_str())["model"]
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(piece for piece in model["vocab"] if piece != "<unk>"),
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Path:
    return save_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


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


def write_corpus(folder: Path, documents: list[str]) -> list[Path]:
    """A fifth of the documents in each format; plain text gets the rest as one file."""
    share = len(documents) // 5
    parts = [documents[start : start + share] for start in range(0, 4 * share, share)]
    rows = [[json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in part] for part in parts]
    (folder / "b").mkdir()
    paths = [folder / "a.jsonl", folder / "b" / "b.jsonl.gz", folder / "c.jsonl.xz", folder / "d.parquet"]
    paths[0].write_text("\n".join(rows[0]) + "\n\n", encoding="utf-8")
    paths[1].write_bytes(gzip.compress("\n".join(rows[1]).encode()))
    paths[2].write_bytes(lzma.compress("\n".join(rows[2]).encode()))
    pq.write_table(pa.table({"id": range(share), "text": parts[3]}), paths[3], row_group_size=3)
    paths.append(folder / "e.md")
    paths[4].write_text("\n".join(documents[4 * share :]), encoding="utf-8")
    return paths


def all_text(paths: list[Path], **kwargs) -> str:
    field = kwargs.get("text_field", "text")
    return "".join(text for unit in plan_corpus(paths, **kwargs).units for text, _ in read_unit(unit, field))


# Reading


def test_every_format_holds_the_same_documents(tmp_path):
    paths = write_corpus(tmp_path, DOCUMENTS)
    assert all_text(paths).replace("\n", "") == "".join(DOCUMENTS).replace("\n", "")
    by_folder = plan_corpus([tmp_path])
    assert by_folder == plan_corpus([*paths, paths[0], tmp_path]), "order and repeats must not matter"
    begun = sum(begins for unit in by_folder.units for _, begins in read_unit(unit))
    assert begun == len(DOCUMENTS) - len(DOCUMENTS) // 5 + 1, "a plain text file is one document"


def test_zstandard_is_read(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(json.dumps({"text": "hello"}).encode())
    assert all_text([path]) == "hello"


@pytest.mark.parametrize("unit_bytes", [1, 2, 3, 7, 64, 1000, 10**6])
@pytest.mark.parametrize("ending", ["", "\n", "\n\n"])
def test_units_partition_a_file_wherever_the_cuts_fall(tmp_path, unit_bytes, ending):
    text = "\n".join(["first", "", "é東🙂", "with\r", "x" * 100, "z"]) + ending
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert all_text([tmp_path / "a.txt"], unit_bytes=unit_bytes) == text
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in "abcdef") + ending)
    assert all_text([tmp_path / "b.jsonl"], unit_bytes=unit_bytes) == "abcdef"
    pq.write_table(pa.table({"text": list("abcdef")}), tmp_path / "c.parquet", row_group_size=2)
    assert all_text([tmp_path / "c.parquet"], unit_bytes=unit_bytes) == "abcdef"


def test_big_files_are_cut_and_small_files_are_put_together(tmp_path):
    (tmp_path / "big.txt").write_text("word\n" * 1000)
    assert [len(unit) for unit in plan_corpus([tmp_path], unit_bytes=1000).units] == [1] * 5
    for index in range(30):
        (tmp_path / f"small{index:02}.txt").write_text("word\n")
    units = plan_corpus([tmp_path], unit_bytes=1000).units
    assert len(units) == 6
    assert len(units[-1]) == 30


def test_nothing_is_read_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(texts_module, "PIECE_CHARACTERS", 50)
    text = "é" * 333 + " word" * 100 + "\n" + "tail\n" * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    for name in ("a.txt", "b.jsonl"):
        pieces = [piece for unit in plan_corpus([tmp_path / name]).units for piece in read_unit(unit)]
        assert "".join(piece for piece, _ in pieces) == text
        assert max(len(piece) for piece, _ in pieces) <= 50
        assert [begins for _, begins in pieces] == [True] + [False] * (len(pieces) - 1)


def test_odd_but_legal_input(tmp_path):
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfmarked")
    assert all_text([tmp_path / "mark.txt"]) == "marked"
    (tmp_path / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "marked"}\r\n')
    assert all_text([tmp_path / "mark.jsonl"]) == "marked"
    (tmp_path / "odd.jsonl").write_text('{"text": null}\n{"text": ""}\n{"text": "half \\ud83d of a pair"}\n')
    assert all_text([tmp_path / "odd.jsonl"]) == "half \ufffd of a pair"
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"]).dictionary_encode()}), tmp_path / "odd.parquet")
    assert all_text([tmp_path / "odd.parquet"]) == "ab"


def test_turns_are_read_where_there_is_no_text(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 81, "turns": ["one", "two"]}\n{"text": "three", "turns": ["never"]}\n')
    (unit,) = plan_corpus([path]).units
    assert list(read_unit(unit)) == [("one", True), ("two", False), ("three", True)]
    assert list(read_prompts([path])) == [("one", "two"), ("never",)], "prompts are those that would be measured on"
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": ""}\n')
    in_order = [("first",), ("one", "two"), ("never",)]
    assert list(read_prompts([path, tmp_path / "a.jsonl"])) == in_order, "a continued run counts on this order"
    (tmp_path / "a.jsonl").write_text('{"prompt": "first"}\n')
    assert list(read_prompts([path, tmp_path / "a.jsonl"])) == in_order, "what is measured on may be counted too"
    (tmp_path / "b.txt").write_text("where does a prompt end?")
    with pytest.raises(DynSpecError, match=r"b\.txt: prompts are read from JSON lines or Parquet"):
        list(read_prompts([tmp_path]))


def test_prompts_are_read_from_compressed_files_and_tables(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"turns": ["one", "two"]}\n'))
    pq.write_table(pa.table({"text": ["three", None]}), tmp_path / "b.parquet")
    assert list(read_prompts([tmp_path])) == [("one", "two"), ("three",)]
    pq.write_table(pa.table({"turns": [["four", "five"], []]}), tmp_path / "c.parquet")
    assert list(read_prompts([tmp_path / "c.parquet"])) == [("four", "five")]
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text": "half \\ud83d of a pair"}\n')
    with pytest.raises(DynSpecError, match=r"d\.jsonl, line 2: text holds half of a surrogate pair"):
        list(read_prompts([tmp_path / "d.jsonl"]))
    # Files in the Hub's cache are links to files whose names tell nothing.
    (tmp_path / "b.parquet").rename(tmp_path / "0123abcd")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "0123abcd")
    assert list(read_prompts([tmp_path / "link.parquet"])) == [("three",)]
    assert all_text([tmp_path / "link.parquet"]) == "three"


def test_folders_leave_out_what_is_not_text(tmp_path):
    (tmp_path / "a.py").write_text("print()")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "c.json").write_text('{\n "pretty": 1\n}')
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "d.svg").write_text("<svg/>")
    (tmp_path / "e.svg.gz").write_bytes(gzip.compress(b"<svg/>"))
    corpus = plan_corpus([tmp_path])
    assert [Path(path).name for path, _ in corpus.files] == ["a.py"]
    assert [Path(path).name for path in corpus.skipped] == ["b.png", "c.json", "d.svg", "e.svg.gz"]
    # Whoever names a drawing wants it read.
    assert len(plan_corpus([tmp_path / "d.svg"]).files) == 1
    with pytest.raises(DynSpecError, match=r"b\.png: not UTF-8 text"):
        plan_corpus([tmp_path / "b.png"])


BAD_AT_ONCE = {
    "broken.jsonl": (b'{"text": "a"\n', "line 1: not a JSON object"),
    "array.jsonl": (b"[1, 2]\n", "line 1: a JSON object is expected, this is a list"),
    "field.jsonl": (
        b'\n{"content": "a"}\n',
        r"line 2: no field 'text' or 'turns'; there are \['content'\].*--text-f",
    ),
    "number.jsonl": (b'{"text": 3}\n', "line 1: field 'text' must hold text or a list of texts, it holds 3"),
    "deep.jsonl": (b'{"text": ' + b"[" * 200_000 + b"\n", "line 1: not a usable JSON object"),
    "latin.txt": ("ab\nGröße".encode("latin-1"), "line 2: not UTF-8"),
    "latin.jsonl": ('{"text": "Größe"}'.encode("latin-1"), "line 1: not UTF-8 text"),
    "wide.txt": ("text".encode("utf-16"), "not UTF-8"),
    "fake.parquet": (b"PAR1 no parquet at all", "damaged or not what its suffix says"),
    "fake.jsonl.xz": (b"not xz", "damaged or not what its suffix says"),
    "fake.jsonl.gz": (b"not gzip", "damaged or not what its suffix says"),
    "fake.jsonl.zst": (b"not zstd", "damaged or not what its suffix says"),
    "empty.txt": (b"", "there is no text in"),
}


@pytest.mark.parametrize("name", BAD_AT_ONCE)
def test_bad_input_is_told_before_any_work(tmp_path, name):
    content, message = BAD_AT_ONCE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DynSpecError, match=message) as caught:
        plan_corpus([tmp_path / name])
    assert name in str(caught.value)


BAD_LATER = {
    "late.jsonl": (b'{"text": "a"}\n' * 9000 + b"{", "line 9001: not a JSON object"),
    "late.txt": (b"a\n" * 9000 + b"\xff\n", "line 9001: not UTF-8"),
    "cut.txt": (b"a\n" * 9000 + "é".encode()[:1], "line 9001: not UTF-8"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 9000)[:-20], "damaged"),
    "cut.jsonl.xz": (lzma.compress(b'{"text": "a"}\n' * 9000)[:-20], "damaged"),
}


@pytest.mark.parametrize("name", BAD_LATER)
@pytest.mark.parametrize("unit_bytes", [100, 10**6])
def test_bad_input_far_inside_names_the_line(tmp_path, name, unit_bytes):
    content, message = BAD_LATER[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DynSpecError, match=message):
        all_text([tmp_path / name], unit_bytes=unit_bytes)


def test_bad_columns_are_told_before_any_work(tmp_path):
    pq.write_table(pa.table({"content": ["a"], "size": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DynSpecError, match=r"no column 'text'; there are \['content', 'size'\].*--text-field"):
        plan_corpus([tmp_path])
    with pytest.raises(DynSpecError, match="column 'size' must hold text, it holds int64"):
        plan_corpus([tmp_path], text_field="size")
    assert all_text([tmp_path], text_field="content") == "a"


def test_missing_paths_and_a_missing_pyarrow_are_told(tmp_path, monkeypatch):
    with pytest.raises(DynSpecError, match="nowhere: no such file or directory"):
        plan_corpus([tmp_path / "nowhere"])
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DynSpecError, match=r"pip install 'hf-dynspec\[build\]'"):
        plan_corpus([tmp_path])


# Counting


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_counts_are_those_of_counting_one_by_one(kind, tmp_path, request):
    """Two processes, files of every format, cut into many units, all share one truth."""
    folder = request.getfixturevalue(kind)
    # Special tokens are not added to texts, but counted where a text has them.
    documents = [f"return{load(folder).eos_token}return", *DOCUMENTS[1:]]
    paths = write_corpus(tmp_path, documents)
    packed, plain = documents[:48], ["\n".join(documents[48:])]
    if kind == "byte_fallback":
        # Metaspace puts a space in front of each text that it is given, so that where plain text is cut does matter.
        paths, plain = paths[:4], []
    expected = expected_counts(folder, packed + plain)
    corpus = plan_corpus(paths, unit_bytes=500)
    assert len(corpus.units) >= 10
    tally = Tally(len(expected), len(corpus.units), {})
    reports = []
    count_tokens(load(folder), corpus.units, tally, processes=2, report=reports.append)
    assert np.array_equal(tally.counts, expected)
    assert tally.counts[load(folder).eos_token_id] == 1
    assert tally.finished.all()
    assert tally.documents == len(packed) + len(plain)
    assert reports[-1] == tally.tokens == expected.sum()


def test_counting_processes_start_fast():
    """What they import must not bring in torch and transformers, which cost seconds and hundreds of megabytes each."""
    check = "import sys, hf_dynspec.build.frequency; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_a_bad_line_stops_the_processes_and_keeps_what_is_finished(byte_level, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 50 + "{\n" + '{"text": "fine"}\n' * 50)
    corpus = plan_corpus([path], unit_bytes=100)
    tally = Tally(vocabulary_size(load(byte_level)), len(corpus.units), {}, tmp_path / "partial", save_every=1000)
    with pytest.raises(DynSpecError, match=r"a\.jsonl, line 51"):
        count_tokens(load(byte_level), corpus.units, tally, processes=2)
    again = Tally(len(tally.counts), len(corpus.units), {}, tmp_path / "partial")
    assert again.finished.any()
    assert not again.finished.all()
    assert np.array_equal(again.counts, tally.counts)


def test_a_process_that_dies_is_told(byte_level, tmp_path):
    (tmp_path / "a.txt").write_text("word\n" * 200_000)
    corpus = plan_corpus([tmp_path], unit_bytes=50_000)
    tally = Tally(vocabulary_size(load(byte_level)), len(corpus.units), {})

    def kill_one(tokens: int) -> None:
        if tokens and not killed:
            worker = next(child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline()))
            worker.kill()
            killed.append(worker)

    killed: list[psutil.Process] = []
    with pytest.raises(DynSpecError, match=r"a counting process died.*--processes"):
        count_tokens(load(byte_level), corpus.units, tally, processes=2, report=kill_one)


# Saved state


def a_unit(*token_ids: int) -> UnitCounts:
    return UnitCounts(np.array(token_ids), np.ones(len(token_ids), np.int64), 1)


def test_a_tally_continues_only_its_own_job(tmp_path):
    job = {"inputs": "one", "tokenizer": "two"}
    tally = Tally(10, 3, job, tmp_path, save_every=0)
    tally.add(1, a_unit(2, 7))
    again = Tally(10, 3, job, tmp_path)
    assert again.unfinished() == [0, 2]
    assert again.counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert (again.documents, again.tokens) == (1, 2)
    with pytest.raises(ConfigurationError, match=r"another job \(changed: inputs\).*--overwrite"):
        Tally(10, 3, {**job, "inputs": "other"}, tmp_path)
    with pytest.raises(ConfigurationError, match=r"damaged.*sizes of this job"):
        Tally(11, 3, job, tmp_path)
    assert Tally(10, 3, {}, tmp_path, fresh=True).unfinished() == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", b"\x93NUMPY"])
def test_a_damaged_tally_is_refused(tmp_path, content):
    (tmp_path / Tally.FILE).write_bytes(content)
    with pytest.raises(ConfigurationError, match="damaged"):
        Tally(10, 3, {}, tmp_path)


def test_a_tally_that_is_a_pickle_is_not_loaded(tmp_path):
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(touched),)

    np.savez(tmp_path / Tally.FILE, job=np.array([Hostile()], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigurationError, match="damaged"):
        Tally(10, 3, {}, tmp_path)
    assert not touched.exists()


def test_savings_are_spaced_and_replace_the_file_in_one_step(tmp_path, monkeypatch):
    tally = Tally(10, 3, {}, tmp_path, save_every=1000)
    tally.add(0, a_unit(1))
    assert not list(tmp_path.iterdir())
    tally.save()
    before = (tmp_path / Tally.FILE).read_bytes()
    tally.add(1, a_unit(2))

    def fail(*paths):
        raise OSError("the machine stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="stopped"):
            tally.save()
    assert (tmp_path / Tally.FILE).read_bytes() == before
    tally.delete()
    assert not tmp_path.exists()


def stop_between_units(process: subprocess.Popen, state: Path, how: signal.Signals) -> int:
    """Send a signal as soon as the saved state has grown; return how many units were finished by then."""
    before = finished_units(state)
    stop_when(lambda: finished_units(state) != before, process, how)
    return finished_units(state)


def finished_units(state: Path) -> int:
    if not state.exists():
        return 0
    with np.load(state) as saved:
        assert not saved["finished"].all(), "the command ended before it could be stopped; give it more to do"
        return int(saved["finished"].sum())


def test_a_stopped_command_continues_and_ends_with_the_same_ranking(byte_level, tmp_path):
    documents = make_documents(1500)
    (tmp_path / "a.txt").write_text("\n".join(documents), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    arguments = ["build", "frequency", "--tokenizer", byte_level, "--text", tmp_path / "a.txt", tmp_path / "b.jsonl"]
    arguments += ["--out", tmp_path / "out", "--processes", 2, "--save-every", 0]
    state = tmp_path / "out" / "partial" / Tally.FILE

    stop_between_units(start(RUN_SLOWLY, *arguments), state, signal.SIGINT)
    finished = stop_between_units(start(RUN_SLOWLY, *arguments), state, signal.SIGKILL)
    process = start(RUN_WITH_SMALL_UNITS, *arguments)
    _, messages = process.communicate(timeout=600)
    assert process.returncode == 0, messages
    assert f"continuing: {finished} of" in messages

    config, tensors = read_artifact(tmp_path / "out")
    expected = expected_counts(byte_level, ["\n".join(documents), *documents])
    assert config.provenance["tokens_counted"] == expected.sum()
    assert config.provenance["documents"] == 1501
    assert tensors["ranking"].tolist() == rank(expected, load(byte_level)).tolist()
    assert not (tmp_path / "out" / "partial").exists()


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
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = [("speculative decoding", "drafts tokens"), ("return x",), ("Größe 1024 ()",)]


def generated_counts(target: Path, tally: Tally, **settings) -> np.ndarray:
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    count_generated(model, load(target), PROMPTS, tally, max_new_tokens=20, **settings)
    return tally.counts


def test_greedy_generation_is_counted_turn_by_turn(target):
    tokenizer, model = load(target), Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected: Counter[int] = Counter()
    for turns in PROMPTS:
        context: list[int] = []
        for turn in turns:
            context += tokenizer.encode(turn)
            answer = model.generate(torch.tensor([context]), max_new_tokens=20, do_sample=False)[0, len(context) :]
            expected.update(answer.tolist())
            context += answer.tolist()
    size = len(tokenizer)
    reports = []
    counts = generated_counts(target, Tally(size, 3, {}), report=reports.append)
    assert {index: count for index, count in enumerate(counts.tolist()) if count} == {
        token_id: count for token_id, count in expected.items() if token_id < size
    }
    assert reports == sorted(reports)
    assert reports[-1] == counts.sum()


def test_padding_rows_are_generated_by_this_target_and_not_counted(target):
    """Keeps the test above honest: sampling from a random model does reach the padding."""
    counts = generated_counts(target, Tally(len(load(target)), 3, {}), temperature=1.0)
    assert 0 < counts.sum() < 4 * 20


def test_sampling_continues_with_the_same_tokens(target, tmp_path):
    size = len(load(target))
    whole = generated_counts(target, Tally(size, 3, {}), temperature=0.8, seed=3)
    assert not np.array_equal(whole, generated_counts(target, Tally(size, 3, {}), temperature=0.8, seed=4))

    class Stopped(Exception):
        pass

    def stop_in_the_second_prompt(tokens: int) -> None:
        calls.append(tokens)
        if len(calls) == 3:
            raise Stopped

    calls: list[int] = []
    with pytest.raises(Stopped):
        generated_counts(
            target, Tally(size, 3, {}, tmp_path), temperature=0.8, seed=3, report=stop_in_the_second_prompt
        )
    continued = Tally(size, 3, {}, tmp_path)
    assert continued.unfinished() == [1, 2]
    assert np.array_equal(generated_counts(target, continued, temperature=0.8, seed=3), whole)


def test_a_conversation_ends_where_the_context_is_full(target):
    tokenizer, model = load(target), Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    tally = Tally(len(tokenizer), 1, {})
    long = " ".join(WORDS * 7)
    room = 128 - len(tokenizer.encode(long))
    assert 0 < room < 50
    count_generated(model, tokenizer, [(long, "more", "and more")], tally, max_new_tokens=50)
    assert 0 < tally.tokens <= room


def test_a_chat_template_is_applied_where_there_is_one(target):
    tokenizer, model = load(target), Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role[0] + message.content }}{% endfor %}x"
    seen = []
    generate = model.generate
    model.generate = lambda input_ids, **settings: seen.append(input_ids[0]) or generate(input_ids, **settings)
    count_generated(model, tokenizer, PROMPTS[:1], Tally(len(tokenizer), 1, {}), max_new_tokens=4)
    assert tokenizer.decode(seen[0]) == "uspeculative decodingx"
    assert tokenizer.decode(seen[1]).startswith("uspeculative decodinga")
    assert tokenizer.decode(seen[1]).endswith("udrafts tokensx")


# The command


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_makes_an_artifact(byte_level, tmp_path):
    paths = write_corpus(tmp_path, DOCUMENTS)
    out = tmp_path / "made" / "here"
    result = invoke(
        "build",
        "frequency",
        "--tokenizer",
        byte_level,
        "--text",
        *paths,
        "--out",
        out,
        "--size",
        300,
        "--processes",
        1,
    )
    assert result.exit_code == 0, result.output
    assert "100.00%" in result.output or "1k" not in result.output
    assert "--policy frequency:ranking=" in result.output
    config, tensors = read_artifact(out, tokenizer_fingerprint=fingerprint_tokenizer(load(byte_level)))
    assert sorted(tensors["ranking"].tolist()) == list(range(len(load(byte_level))))
    policy = rebuild_policy(config, tensors)
    assert (policy.name, policy.size) == ("frequency", 300)
    record = config.provenance
    assert record["tokens_counted"] > 1000
    assert record["distinct_tokens"] > 100
    assert record["documents"] == 49
    assert record["input_files"] == 5
    assert record["input_bytes"] == sum(path.stat().st_size for path in paths)
    assert record["inputs"][0] == f"a.jsonl ({paths[0].stat().st_size} bytes)"
    assert record["command"].startswith("hf-dynspec build frequency --out here --tokenizer ")
    assert record["command"].endswith("--text a.jsonl --size 300 --processes 1 b.jsonl.gz c.jsonl.xz d.parquet e.md")
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


def test_a_corpus_without_tokens_is_told(byte_level, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    arguments = ["--tokenizer", byte_level, "--text", tmp_path / "a.jsonl", "--out", tmp_path / "out"]
    with pytest.raises(DynSpecError, match="all texts are empty"):
        raise invoke("build", "frequency", *arguments).exception
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_missing_tokenizer_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("speculative decoding")
    arguments = ["--tokenizer", tmp_path / "nothing", "--text", tmp_path / "a.txt", "--out", tmp_path / "out"]
    with pytest.raises(ConfigurationError, match=r"no tokenizer can be loaded from .*nothing"):
        raise invoke("build", "frequency", *arguments).exception


def test_the_command_counts_what_a_target_generates(target, tmp_path):
    prompts = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    prompts[0].write_text(json.dumps({"question_id": 81, "category": "code", "turns": PROMPTS[0]}))
    prompts[1].write_text("\n".join(json.dumps({"text": turns[0]}) for turns in PROMPTS[1:]))
    arguments = ["build", "frequency", "--from-target", target, "--prompts", *prompts, "--max-new-tokens", 20]
    result = invoke(*arguments, "--out", tmp_path / "out", "--device", "cpu", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    config, tensors = read_artifact(tmp_path / "out")
    expected = generated_counts(target, Tally(len(load(target)), 3, {}))
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
def test_arguments_that_do_not_go_together_are_usage_errors(tmp_path, arguments, message):
    result = invoke("build", "frequency", "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_errors_name_the_file_and_the_line(byte_level, tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"texd": "b"}\n')
    words = ["--tokenizer", byte_level, "--text", tmp_path / "a.jsonl", "--out", tmp_path / "o"]
    result = invoke("build", "frequency", *words)
    assert isinstance(result.exception, DynSpecError)
    said = f"{tmp_path / 'a.jsonl'}, line 2: no field 'text' or 'turns'; there are ['texd']"
    assert str(result.exception).startswith(said) and "\n" not in str(result.exception)
    assert not (tmp_path / "o" / "config.json").exists()
