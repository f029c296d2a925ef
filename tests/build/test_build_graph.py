"""The co-occurrence graph: counting out of core, in processes and on machines, pruning, looking up, storing, and the
command."""

import json
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from launched_processes import launch_command
from safetensors.torch import load_file
from stopped_commands import RUN_SLOWLY, RUN_WITH_SMALL_UNITS, start, stop_when
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_dynspec.artifacts import read_artifact, read_graph, rebuild_policy, write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.build import bigram_runs
from hf_dynspec.build.bigram_counts import BigramCounts, count_bigrams, merge_counts, special_ids
from hf_dynspec.build.bigram_runs import FAN_IN
from hf_dynspec.build.cooccurrence import Pruning, build_graph, graph_coverage
from hf_dynspec.build.corpus import plan_corpus
from hf_dynspec.build.ranking import vocabulary_size
from hf_dynspec.commands import app
from hf_dynspec.errors import ArtifactError, ConfigurationError, DynSpecError
from hf_dynspec.shortlists import CooccurrenceGraph
from hf_dynspec.shortlists.retrieval.graph import WantedSuccessors
from hf_dynspec.vocabulary import fingerprint_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = ["speculative", "decoding", "drafts", "tokens", "Größe", "東京", "🙂", "return", "x", "1024", "(", ")"]


def make_documents(count: int, words: int = 40, seed: int = 0) -> list[str]:
    """Sentences over several lines. Line breaks follow no white space, so that text has the same tokens whether it is
    cut at them or not."""
    draw = np.random.default_rng(seed)
    share = np.arange(1, len(WORDS) + 1) ** -1.0
    return [
        "\n".join(" ".join(draw.choice(WORDS, 8, p=share / share.sum())) for _ in range(words // 8))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(show_progress=False, vocab_size=300, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(make_documents(60), trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    wrapped.add_tokens(["<tool>"])
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


def plain_counts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Counter:
    """The plain twin of `count_bigrams`: one text at a time, one bigram at a time."""
    counts: Counter = Counter()
    special = set(special_ids(tokenizer))
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for before, after in pairwise(token_ids):
            if not {before, after} & special:
                counts[before, after] += 1
    return counts


def plain_graph(counts: Counter, pruning: Pruning) -> dict[int, list[tuple[int, float]]]:
    """The plain twin of `build_graph`: the successors of each token and their probabilities, the likeliest first."""
    followers: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (before, after), count in counts.items():
        followers[before].append((-count, after))
    rows = {}
    for before, row in followers.items():
        total = -sum(count for count, _ in row)
        kept = [(after, -count / total) for count, after in sorted(row) if -count >= pruning.minimum_count]
        kept = [edge for edge in kept if edge[1] >= pruning.threshold][: pruning.largest_degree]
        if kept:
            rows[before] = kept
    return rows


def rows_of(graph: CooccurrenceGraph) -> dict[int, list[tuple[int, float]]]:
    rows = {}
    for source in range(graph.vocabulary_size):
        part = slice(int(graph.offsets[source]), int(graph.offsets[source + 1]))
        row = list(zip(graph.successors[part].tolist(), graph.probabilities[part].tolist(), strict=True))
        if row:
            rows[source] = row
    return rows


def assert_same_rows(graph: CooccurrenceGraph, expected: dict[int, list[tuple[int, float]]]) -> None:
    found = rows_of(graph)
    assert {source: [after for after, _ in row] for source, row in found.items()} == {
        source: [after for after, _ in row] for source, row in expected.items()
    }
    for source, row in expected.items():
        assert [share for _, share in found[source]] == pytest.approx([share for _, share in row], rel=1e-6)


def counted(
    tokenizer, paths, folder: Path, *, unit_bytes: int = 1000, processes: int = 1, memory: int = 1 << 24, **options
) -> BigramCounts:
    units = plan_corpus(paths, unit_bytes=unit_bytes).units
    counts = BigramCounts(folder, len(units), {})
    settings = {"processes": processes, "memory": memory}
    count_bigrams(tokenizer, units, counts, vocabulary_size=vocabulary_size(tokenizer), **settings, **options)
    return counts


def graph_of(tokenizer, counts: BigramCounts, pruning: Pruning, memory: int = 1 << 24) -> CooccurrenceGraph:
    merge_counts(counts, processes=1, memory=memory)
    return build_graph(counts, vocabulary_size(tokenizer), pruning, memory=memory)


def write_texts(folder: Path, documents: list[str]) -> list[str]:
    """Documents as plain text in one file and as JSON lines; return the texts that this makes."""
    folder.mkdir(exist_ok=True)
    half = len(documents) // 2
    (folder / "a.txt").write_text("\n".join(documents[:half]), encoding="utf-8")
    rows = [json.dumps({"text": document}, ensure_ascii=False) for document in documents[half:]]
    (folder / "b.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return ["\n".join(documents[:half]), *documents[half:]]


# Counting


@pytest.mark.parametrize("seed", range(3))
def test_the_graph_is_that_of_counting_one_by_one(tokenizer, tmp_path, seed):
    """A plain text that is cut into many units, documents of their own, special tokens, turns and empty texts."""
    documents = make_documents(40, seed=seed)
    texts = write_texts(tmp_path / "text", documents)
    odd = [f"x{tokenizer.eos_token}return decoding<tool>x", "", "drafts"]
    turns = [["decoding return", "", "x x x"], ["tokens"]]
    rows = [json.dumps({"text": text}) for text in odd] + [json.dumps({"turns": one}) for one in turns]
    (tmp_path / "text" / "c.jsonl").write_text("\n".join(rows))
    expected = plain_counts(tokenizer, [*texts, *odd, *(turn for one in turns for turn in one)])
    pruning = Pruning(minimum_count=2, threshold=0.01, largest_degree=5)
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts", unit_bytes=300)
    assert len(counts.finished) > 2 * FAN_IN
    graph = graph_of(tokenizer, counts, pruning)
    assert_same_rows(graph, plain_graph(expected, pruning))
    assert (graph.edges, graph.sources) == (len(graph.successors), len(rows_of(graph)))
    assert counts.documents == 1 + 20 + 2 + 2


@pytest.mark.parametrize("memory", [1, 1 << 24])
def test_other_text_is_held_against_a_graph(tokenizer, tmp_path, memory):
    write_texts(tmp_path / "text", make_documents(40))
    others = write_texts(tmp_path / "others", make_documents(40, seed=7))
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts")
    graph = graph_of(tokenizer, counts, Pruning(2, 0.001, 12))
    rows = {source: [after for after, _ in row] for source, row in rows_of(graph).items()}
    expected = plain_counts(tokenizer, others)
    held_out = counted(tokenizer, [tmp_path / "others"], tmp_path / "held-out")
    merge_counts(held_out, processes=1)
    found = graph_coverage(graph, held_out, memory=memory)
    assert found.bigrams == expected.total()
    for share, most in ((found.in_expansion, 8), (found.in_graph, 12)):
        assert share == sum(expected[bigram] for bigram in expected if bigram[1] in rows.get(bigram[0], [])[:most])
    assert 0 < found.in_expansion < found.in_graph < found.bigrams


@pytest.mark.parametrize("piece", [3, 20])
def test_a_text_in_many_pieces_is_one_text(tokenizer, tmp_path, monkeypatch, piece):
    """Also where it goes on in the next unit, behind a unit that holds no piece because a line reaches over it."""
    from hf_dynspec.build import texts

    monkeypatch.setattr(texts, "PIECE_CHARACTERS", piece)
    text = "x" * 90 + "\n" + "( 1024 x )" * 30
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    for name, unit_bytes in (("a.txt", 7), ("a.txt", 100), ("b.jsonl", 1000)):
        units = plan_corpus([tmp_path / name], unit_bytes=unit_bytes).units
        pieces = [part.text for unit in units for part in texts.read_pieces(unit)]
        assert "".join(pieces) == text and len(pieces) > 5
        tokens = [token for part in pieces for token in tokenizer.encode(part, add_special_tokens=False)]
        expected = Counter(pairwise(tokens))
        # In this process, which knows the small pieces.
        size = vocabulary_size(tokenizer)
        runs = [count_here(tokenizer, unit, index, tmp_path / name[0]) for index, unit in enumerate(units)]
        found: Counter = Counter()
        for bigrams, numbers in merged(runs):
            found.update({divmod(int(b), size): int(n) for b, n in zip(bigrams, numbers, strict=True)})
        assert found == expected


def count_here(tokenizer, unit, index: int, folder: Path) -> bigram_runs.Run:
    """What a process does with a unit, done in this one."""
    from multiprocessing import get_context

    from hf_dynspec.build import bigram_counts, text_workers

    folder.mkdir(exist_ok=True)
    context = get_context("spawn")
    before = dict(text_workers._worker)
    text_workers._worker.update(
        tokenizer=tokenizer.backend_tokenizer, text_field="text", counted=context.Value("q", 0), stop=context.Event()
    )
    try:
        setting = (str(folder), vocabulary_size(tokenizer), special_ids(tokenizer), 1 << 20)
        return bigram_counts._count_unit(index, unit, *setting)[0]
    finally:
        text_workers._worker.clear()
        text_workers._worker.update(before)


def merged(runs: list[bigram_runs.Run]):
    """All runs at once, or in groups of neighbours first."""
    while len(runs) > FAN_IN:
        groups = [runs[start : start + FAN_IN] for start in range(0, len(runs), FAN_IN)]
        runs = [
            bigram_runs.write_run(
                group[0].path.parent,
                bigram_runs.merged_blocks(group, 1 << 20),
                bigram_runs.joined_head([run.head for run in group]),
            )
            for group in groups
        ]
    return bigram_runs.merged_blocks(runs, 1 << 20)


def test_ids_past_the_vocabulary_and_special_tokens_break_a_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x<tool>x<|end|>return\n" * 9)
    size = vocabulary_size(tokenizer)
    tool = tokenizer.convert_tokens_to_ids("<tool>")
    assert tool == size - 1 and special_ids(tokenizer) == sorted([tokenizer.eos_token_id, tokenizer.pad_token_id])
    units = plan_corpus([tmp_path / "a.txt"]).units
    for known, sources in ((size, True), (size - 1, False)):
        counts = BigramCounts(tmp_path / str(known), 1, {})
        count_bigrams(tokenizer, units, counts, vocabulary_size=known, processes=1)
        graph = build_graph(counts, known, Pruning(1, 0.0))
        assert (tool in rows_of(graph)) == sources
        assert not {tokenizer.eos_token_id} & ({after for row in rows_of(graph).values() for after, _ in row})
        assert tokenizer.eos_token_id not in rows_of(graph)
        assert graph_coverage(graph, counts).in_graph < counts.tokens


def bytes_of(graph: CooccurrenceGraph) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in graph.tensors().values()]


def test_processes_and_memory_do_not_change_a_byte(tokenizer, tmp_path):
    """Down to so little memory that each unit is spilled in more runs than are merged at once."""
    write_texts(tmp_path / "text", make_documents(200))
    spills = []
    whole = None
    for processes, memory in ((1, 1 << 24), (2, 1 << 24), (3, 1 << 24), (1, 1000), (2, 30_000)):
        folder = tmp_path / f"{processes}-{memory}"
        counts = counted(tokenizer, [tmp_path / "text"], folder, unit_bytes=6000, processes=processes, memory=memory)
        assert counts.finished.all() and not list(folder.glob("*.spill")) and not list(folder.glob("*.writing"))
        spills.append(memory // processes // 64)
        graph = graph_of(tokenizer, counts, Pruning(2, 1e-3), memory)
        whole = whole or bytes_of(graph)
        assert bytes_of(graph) == whole
    tokens_of_a_unit = counts.tokens / len(counts.finished)
    assert tokens_of_a_unit / max(64, min(spills)) > FAN_IN, "no unit was spilled in many runs"


def test_runs_are_merged_while_others_are_counted(tokenizer, tmp_path):
    write_texts(tmp_path / "text", make_documents(100))
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts", unit_bytes=300, processes=2)
    units = len(counts.finished)
    assert units > 3 * FAN_IN
    names = sorted(path.name for path in (tmp_path / "counts").glob("*.bigrams"))
    assert len(names) == units // FAN_IN + units % FAN_IN
    assert sum(run.head.end - run.head.start for run in counts.runs()) == units


@pytest.mark.parametrize("trial", range(8))
def test_buffers_spill_and_merge_to_the_same_counts(tmp_path, trial):
    """Random streams with breaks, in random portions, against a dictionary."""
    draw = np.random.default_rng(trial)
    size, memory = int(draw.integers(2, 40)), int(draw.choice([1, 5000, 1 << 24]))
    expected: Counter = Counter()
    before, runs = bigram_runs.BREAK, []
    for unit in range(int(draw.integers(1, 9))):
        buffer = bigram_runs.BigramBuffer(tmp_path, unit, size, memory)
        for _ in range(int(draw.integers(0, 4))):
            tokens = draw.integers(-1, size, int(draw.integers(0, 2000)))
            for token in tokens.tolist():
                if before >= 0 and token >= 0:
                    expected[before * size + token] += 1
                before = token
            buffer.add(tokens)
        runs.append(buffer.finish(0, 0))
        buffer.clear()
    blocks = list(bigram_runs.merged_blocks(runs, memory))
    keys = np.concatenate([bigrams for bigrams, _ in blocks]).tolist() if blocks else []
    assert keys == sorted(expected)
    assert [int(n) for _, counts in blocks for n in counts] == [expected[key] for key in keys]


@pytest.mark.parametrize("memory", [1 << 20, 8 << 20])
def test_counting_and_merging_stay_within_their_memory(tmp_path, memory):
    """numpy tells tracemalloc what it takes. Most bigrams are different ones, which is the worst case."""
    draw, size, tokens = np.random.default_rng(0), 150_000, 400_000
    small = 20_000  # tokens that are handed over at once
    tracemalloc.start()
    runs = []
    for unit in range(2):
        buffer = bigram_runs.BigramBuffer(tmp_path, unit, size, memory)
        for _ in range(tokens // small):
            buffer.add(draw.integers(0, size, small))
        runs.append(buffer.finish(0, 0))
        del buffer
    assert sum(len(bigrams) for bigrams, _ in bigram_runs.merged_blocks(runs, memory)) > 1.9 * tokens
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(list(tmp_path.iterdir())) >= 2 and tokens * 8 > memory / 4
    assert peak < memory + 60 * small


# Going on


def test_what_a_kill_left_between_two_files_is_counted_once(tokenizer, tmp_path):
    """A merged run beside those that it was made of, a half-written one, and a spill."""
    write_texts(tmp_path / "text", make_documents(60))
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts", unit_bytes=2000)
    pruning = Pruning(2, 1e-3)
    kept = {run.path: run.path.read_bytes() for run in counts.runs()}
    assert 2 < len(kept) <= FAN_IN
    whole = bytes_of(graph_of(tokenizer, counts, pruning))
    runs = counts.runs()
    bigram_runs.write_run(
        counts.folder,
        bigram_runs.merged_blocks(runs[:2], 1 << 20),
        bigram_runs.joined_head([r.head for r in runs[:2]]),
    )
    (counts.folder / "00000001.000000.spill").write_bytes(b"spilled")
    (counts.folder / "00000001-00000002.bigrams.7.writing").write_bytes(b"half")
    again = BigramCounts(counts.folder, len(counts.finished), {})
    assert again.finished.all() and len(again.runs()) == len(runs) - 1
    assert again.tokens == counts.tokens and again.documents == counts.documents
    assert {path.suffix for path in counts.folder.iterdir()} == {".bigrams", ".json"}
    assert bytes_of(graph_of(tokenizer, again, pruning)) == whole
    again.delete()
    assert not counts.folder.exists()


def test_counts_of_another_job_are_refused(tmp_path):
    BigramCounts(tmp_path, 3, {"inputs": "one", "tokenizer": "two"})
    with pytest.raises(ConfigurationError, match=r"another job \(changed: inputs\).*--overwrite"):
        BigramCounts(tmp_path, 3, {"inputs": "other", "tokenizer": "two"})
    assert BigramCounts(tmp_path, 3, {"inputs": "other"}, fresh=True).unfinished() == [0, 1, 2]
    with pytest.raises(ConfigurationError, match="a folder that all of them see"):
        BigramCounts(tmp_path / "elsewhere", 3, {}, is_main=False)


@pytest.mark.parametrize("name", ["job.json", "run"])
@pytest.mark.parametrize("content", [b"", b"[]", b"HFDSBG01", b"PK\3\4 cut" * 20])
def test_damaged_counts_are_refused(tokenizer, tmp_path, name, content):
    (tmp_path / "a.txt").write_text("x return " * 30)
    counts = counted(tokenizer, [tmp_path / "a.txt"], tmp_path / "counts")
    (counts.folder / "job.json" if name == "job.json" else counts.runs()[0].path).write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"damaged.*--overwrite"):
        BigramCounts(counts.folder, 1, {"inputs": "x"} if name == "job.json" else {})


def test_a_run_that_was_cut_or_renamed_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x return " * 30)
    (run,) = counted(tokenizer, [tmp_path / "a.txt"], tmp_path / "counts").runs()
    whole = run.path.read_bytes()
    run.path.write_bytes(whole[:-3])
    with pytest.raises(ConfigurationError, match="damaged"):
        BigramCounts(run.path.parent, 1, {})
    run.path.unlink()
    run.path.with_name("00000001-00000002.bigrams").write_bytes(whole)
    with pytest.raises(ConfigurationError, match="damaged"):
        BigramCounts(run.path.parent, 2, {})
    run.path.with_name("00000001-00000002.bigrams").unlink()
    run.path.write_bytes(whole)
    with pytest.raises(ConfigurationError, match="not those of this job"):
        BigramCounts(run.path.parent, 0, {})


def test_a_bad_line_stops_the_processes_and_keeps_what_is_finished(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 50 + "{\n" + '{"text": "fine"}\n' * 50)
    with pytest.raises(DynSpecError, match=r"a\.jsonl, line 51"):
        counted(tokenizer, [path], tmp_path / "counts", unit_bytes=100, processes=2)
    again = BigramCounts(tmp_path / "counts", len(plan_corpus([path], unit_bytes=100).units), {})
    assert again.finished.any() and not again.finished.all()


def test_counting_processes_start_fast():
    """What they import must not bring in torch and transformers, which cost seconds and hundreds of megabytes each."""
    check = "import sys, hf_dynspec.build.cooccurrence; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def stop_between_units(process: subprocess.Popen, folder: Path, how: signal.Signals) -> str:
    """Send a signal as soon as there are more runs; return what the command said."""
    before = set(folder.glob("*.bigrams"))
    return stop_when(lambda: bool(set(folder.glob("*.bigrams")) - before), process, how)


def test_a_stopped_command_continues_and_ends_with_the_same_graph(tokenizer, tokenizer_folder, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(2000))
    arguments = ["build", "graph", "--tokenizer", tokenizer_folder, "--text", tmp_path / "text"]
    arguments += ["--out", tmp_path / "out", "--processes", 2]
    partial = tmp_path / "out" / "partial"
    said = stop_between_units(start(RUN_SLOWLY, *arguments), partial, signal.SIGINT)
    assert f"parts are kept in {partial}; run the same command again to go on" in said
    assert "Traceback" not in said
    stop_between_units(start(RUN_SLOWLY, *arguments), partial, signal.SIGKILL)
    process = start(RUN_WITH_SMALL_UNITS, *arguments, "--minimum-count", 3)
    _, messages = process.communicate(timeout=600)
    assert process.returncode == 0, messages
    assert "continuing: " in messages
    graph, fingerprint = read_graph(tmp_path / "out")
    assert_same_rows(graph, plain_graph(plain_counts(tokenizer, texts), Pruning(3)))
    assert fingerprint == fingerprint_tokenizer(tokenizer)
    assert not partial.exists()


# The graph


def small_graph() -> CooccurrenceGraph:
    """0 → 2, 1; 2 → 0; 1 and 3 lead nowhere."""
    return CooccurrenceGraph(
        torch.tensor([0, 2, 2, 3, 3]), torch.tensor([2, 1, 0], dtype=torch.int32), torch.tensor([0.5, 0.25, 1.0])
    )


def wanted_successors(count: int, *wanted: int) -> WantedSuccessors:
    """Of the small graph, over a vocabulary of 2 tokens: the graph knows more."""
    return WantedSuccessors(small_graph(), count, np.isin(np.arange(3), wanted))


def test_successors_are_looked_up_for_many_tokens_at_once():
    asked = np.array([2, 0, 1, 0, 4, 99, -1])
    ids, counts = WantedSuccessors(small_graph(), 2, np.ones(5, dtype=bool)).of(asked)
    assert (ids.dtype, counts.dtype) == (np.int64, np.int64)
    assert (ids.tolist(), counts.tolist()) == ([0, 2, 1, 2, 1], [1, 2, 0, 2, 0, 0, 0])
    ids, counts = WantedSuccessors(small_graph(), 1, np.ones(5, dtype=bool)).of(asked)
    assert (ids.tolist(), counts.tolist()) == ([0, 2, 2], [1, 1, 0, 1, 0, 0, 0])
    ids, counts = WantedSuccessors(small_graph(), 2, np.ones(5, dtype=bool)).of(asked[:0])
    assert (ids.tolist(), counts.tolist()) == ([], [])


def test_only_successors_that_may_come_in_are_found():
    """What is unwanted takes a place among the likeliest all the same; ids past the vocabulary are never wanted."""
    asked = np.array([0, 2, 3])
    assert [one.tolist() for one in wanted_successors(2, 1).of(asked)] == [[1], [1, 0, 0]]
    assert [one.tolist() for one in wanted_successors(1, 1).of(asked)] == [[], [0, 0, 0]]
    assert [one.tolist() for one in wanted_successors(2, 0).of(asked)] == [[0], [0, 1, 0]]
    assert [one.tolist() for one in wanted_successors(2).of(asked)] == [[], [0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"offsets": torch.tensor([0, 2, 1, 3, 3])}, "rise from 0"),
        ({"offsets": torch.tensor([1, 2, 2, 3, 3])}, "rise from 0"),
        ({"offsets": torch.tensor([0, 2, 2, 3, 4])}, "rise from 0"),
        ({"offsets": torch.tensor([0])}, "at least 2 offsets"),
        ({"offsets": torch.tensor([0.0, 2.0, 2.0, 3.0, 3.0])}, "integer tensor"),
        ({"successors": torch.tensor([2, 4, 0])}, "ids from 0 to 3"),
        ({"successors": torch.tensor([2, -1, 0])}, "ids from 0 to 3"),
        ({"successors": torch.tensor([2, 2, 0])}, "repeat an edge"),
        ({"successors": torch.tensor([2, 1])}, "as many successors"),
        ({"successors": torch.tensor([[2, 1, 0]])}, "one-dimensional"),
        ({"probabilities": torch.tensor([0.25, 0.5, 1.0])}, "likeliest first"),
        ({"probabilities": torch.tensor([0.5, 0.0, 1.0])}, "above 0"),
        ({"probabilities": torch.tensor([0.5, 0.25, 1.5])}, "at most 1"),
        ({"probabilities": torch.tensor([0.5, float("nan"), 1.0])}, "above 0"),
        ({"probabilities": torch.tensor([1, 1, 1])}, "floating-point"),
    ],
)
def test_what_is_no_graph_is_refused(changes, says):
    sound = {"offsets": torch.tensor([0, 2, 2, 3, 3]), "successors": torch.tensor([2, 1, 0])}
    sound["probabilities"] = torch.tensor([0.5, 0.25, 1.0])
    with pytest.raises(ConfigurationError, match=says):
        CooccurrenceGraph(**{**sound, **changes})


# The artifact


def config_of(tokenizer, **changes) -> DynSpecConfig:
    return DynSpecConfig(PolicyConfig("cooccurrence_graph"), tokenizer=fingerprint_tokenizer(tokenizer), **changes)


def wide_graph(tokenizer) -> CooccurrenceGraph:
    size = vocabulary_size(tokenizer)
    offsets = torch.full((size + 1,), 3)
    offsets[:2] = torch.tensor([0, 2])
    return CooccurrenceGraph(offsets, torch.tensor([5, 4, 3]), torch.tensor([0.5, 0.25, 1.0]))


def test_a_graph_is_stored_and_is_no_policy(tokenizer, tmp_path):
    graph = wide_graph(tokenizer)
    write_artifact(tmp_path / "graph", config_of(tokenizer), graph.tensors())
    again, _ = read_graph(tmp_path / "graph", tokenizer_fingerprint=fingerprint_tokenizer(tokenizer))
    assert bytes_of(again) == bytes_of(graph)
    card = (tmp_path / "graph" / "README.md").read_text()
    assert "read_graph(" in card and "DynSpecAssistant" not in card and "co-occurrence graph" in card
    with pytest.raises(ArtifactError, match="no policy by itself"):
        rebuild_policy(*read_artifact(tmp_path / "graph"))
    union = PolicyConfig("union", {"policies": [{"name": "cooccurrence_graph", "settings": {}}]})
    with pytest.raises(ArtifactError, match="there is no policy 'cooccurrence_graph'"):
        write_artifact(tmp_path / "union", DynSpecConfig(union), {})
    ranking = DynSpecConfig(PolicyConfig("full"))
    write_artifact(tmp_path / "full", ranking, {})
    with pytest.raises(ArtifactError, match="holds no co-occurrence graph"):
        read_graph(tmp_path / "full")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("graph_offsets", lambda tensor: tensor[:-1], "gives .* tokens successors"),
        ("graph_offsets", lambda tensor: tensor.flip(0), "rise from 0"),
        ("graph_offsets", lambda tensor: tensor.int(), "dtype"),
        ("graph_successors", lambda tensor: tensor + 10_000, "ids run from 0"),
        ("graph_successors", lambda tensor: tensor - 9, "ids run from 0"),
        ("graph_successors", lambda tensor: tensor.long(), "dtype"),
        ("graph_successors", lambda tensor: tensor[:0], "shape"),
        ("graph_probabilities", lambda tensor: tensor / 0, "infinity"),
        ("graph_probabilities", lambda tensor: tensor.half(), "dtype"),
    ],
)
def test_hostile_graphs_are_not_written_and_not_read(tokenizer, tmp_path, name, change, says):
    tensors = wide_graph(tokenizer).tensors()
    tensors[name] = change(tensors[name]).contiguous()
    with pytest.raises(ArtifactError, match=says):
        write_artifact(tmp_path / "graph", config_of(tokenizer), tensors)


def test_other_tensors_are_refused(tokenizer, tmp_path):
    tensors = {**wide_graph(tokenizer).tensors(), "ranking": torch.arange(vocabulary_size(tokenizer))}
    with pytest.raises(ArtifactError, match="ranking: is not a tensor"):
        write_artifact(tmp_path / "graph", config_of(tokenizer), tensors)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"graph_successors": torch.tensor([5, 5, 3], dtype=torch.int32)}, "repeat an edge"),
        ({"graph_probabilities": torch.tensor([0.5, 0.5])}, "as many successors"),
        ({"graph_probabilities": torch.tensor([0.5, 0.25, 2.0])}, "at most 1"),
        ({"graph_probabilities": None}, "needs graph_probabilities"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_when_a_graph_is_read(tokenizer, tmp_path, changes, says):
    tensors = {**wide_graph(tokenizer).tensors(), **changes}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_artifact(tmp_path / "graph", config_of(tokenizer), tensors)
    with pytest.raises(ArtifactError, match=says):
        read_graph(tmp_path / "graph")


# The command


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(tokenizer_folder: Path, text: Path, out: Path, *more: object) -> list[object]:
    return ["build", "graph", "--tokenizer", tokenizer_folder, "--text", text, "--out", out, *more]


def test_the_command_makes_an_artifact(tokenizer, tokenizer_folder, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(200))
    made = {}
    for processes in (1, 3):
        out = tmp_path / f"out{processes}"
        result = invoke(*command(tokenizer_folder, tmp_path / "text", out, "--processes", processes, "--memory", 16))
        assert result.exit_code == 0, result.output
        made[processes] = (out / "model.safetensors").read_bytes()
    assert made[1] == made[3]
    graph, _ = read_graph(out)
    expected = plain_counts(tokenizer, texts)
    assert_same_rows(graph, plain_graph(expected, Pruning()))
    edges = graph.edges
    assert f"{edges:,} edges from {len(rows_of(graph)):,} of {vocabulary_size(tokenizer):,} tokens" in result.output
    assert "--policy retrieval:core=RANKING,graph=" in result.output
    assert "memory: at most" in result.output
    record = read_artifact(out)[0].provenance
    assert record["pruning"] == {"minimum_count": 5, "threshold": 1e-4, "largest_degree": 64}
    assert (record["edges"], record["sources"]) == (edges, graph.sources)
    (figures,) = record["metrics"]["successors"]
    assert (figures["text"], figures["documents"], figures["bigrams"]) == ("counted", 101, expected.total())
    assert figures["tokens"] == sum(len(tokenizer.encode(text)) for text in texts)
    assert 0 < figures["to 8 likeliest"] < figures["to all successors"] <= 1
    assert record["command"].startswith("hf-dynspec build graph --tokenizer ")
    for path in out.iterdir():
        assert path.name in ("config.json", "model.safetensors", "README.md")
        assert str(tmp_path).encode() not in path.read_bytes(), "a stranger must not learn the layout of this disk"
    with pytest.raises(ConfigurationError, match=r"already holds an artifact.*--overwrite"):
        raise invoke(*command(tokenizer_folder, tmp_path / "text", out)).exception
    again = invoke(*command(tokenizer_folder, tmp_path / "text", out, "--overwrite", "--largest-degree", 1))
    assert again.exit_code == 0, again.output
    assert int(read_graph(out)[0].offsets.diff().max()) == 1


def test_text_that_is_held_out_judges_the_graph_and_is_not_counted(tokenizer, tokenizer_folder, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(200))
    others = write_texts(tmp_path / "others", make_documents(50, seed=3))
    held_out = ["--held-out", tmp_path / "others" / "a.txt", "--held-out", tmp_path / "others" / "b.jsonl"]
    # As a run that was killed while it counted held-out text leaves them.
    (tmp_path / "out" / "partial" / "held-out").mkdir(parents=True)
    (tmp_path / "out" / "partial" / "held-out" / "job.json").write_text("{}")
    result = invoke(*command(tokenizer_folder, tmp_path / "text", tmp_path / "out", *held_out))
    assert result.exit_code == 0, result.output
    assert_same_rows(read_graph(tmp_path / "out")[0], plain_graph(plain_counts(tokenizer, texts), Pruning()))
    _, figures = read_artifact(tmp_path / "out")[0].provenance["metrics"]["successors"]
    assert (figures["text"], figures["bigrams"]) == ("held out", plain_counts(tokenizer, others).total())
    assert "held out" in result.output
    assert not (tmp_path / "out" / "partial").exists()
    result = invoke(*command(tokenizer_folder, tmp_path / "text", tmp_path / "new", "--held-out", tmp_path))
    assert "is in --text and in --held-out" in str(result.exception)


def test_an_artifact_of_a_graph_is_ready_to_be_pushed(tokenizer, tmp_path):
    write_artifact(tmp_path / "graph", config_of(tokenizer), wide_graph(tokenizer).tensors())
    result = invoke("push", tmp_path / "graph", "somebody/graph", "--dry-run")
    assert result.exit_code == 0, result.output
    assert 'read_graph("somebody/graph")' in result.output


def test_bad_input_is_told_before_any_work(tokenizer_folder, tmp_path):
    (tmp_path / "a.txt").write_text("x return")
    (tmp_path / "bad.jsonl").write_text("{")
    out = tmp_path / "out"
    for text, more, says in (
        (tmp_path / "nowhere", [], "no such file"),
        (tmp_path / "bad.jsonl", [], "line 1"),
        (tmp_path / "a.txt", ["--threshold", 1.0], "threshold must be"),
        (tmp_path / "a.txt", ["--threshold", -0.1], "threshold must be"),
        (tmp_path / "a.txt", ["--threshold", "nan"], "threshold must be"),
        (tmp_path / "a.txt", ["--tokenizer", tmp_path / "nothing"], "no tokenizer can be loaded"),
    ):
        result = invoke(*command(tokenizer_folder, text, out, *more))
        assert result.exit_code != 0 and says in str(result.exception), (says, result.output)
        assert not out.exists()
    for more, says in ((["--memory", 1], "--memory"), (["--minimum-count", 0], "--minimum-count")):
        result = invoke(*command(tokenizer_folder, tmp_path / "a.txt", out, *more))
        assert result.exit_code == 2 and says in result.output
    assert invoke("build", "graph", "--tokenizer", tokenizer_folder, "--out", out).exit_code == 2


def test_texts_without_tokens_or_edges_are_told(tokenizer_folder, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    result = invoke(*command(tokenizer_folder, tmp_path / "empty.jsonl", tmp_path / "out"))
    assert "all texts are empty" in str(result.exception)
    assert not (tmp_path / "out").exists()
    (tmp_path / "few.txt").write_text("x return")
    result = invoke(*command(tokenizer_folder, tmp_path / "few.txt", tmp_path / "out"))
    assert isinstance(result.exception, ConfigurationError) and "--minimum-count" in str(result.exception)
    # The counts are kept, so that a lower limit needs no second counting.
    result = invoke(*command(tokenizer_folder, tmp_path / "few.txt", tmp_path / "out", "--minimum-count", 1))
    assert result.exit_code == 0 and "continuing: 1 of 1 part and 5 tokens" in result.output, result.output


def test_a_disk_that_is_too_small_is_told(tokenizer_folder, tmp_path, monkeypatch):
    from hf_dynspec.commands import running

    (tmp_path / "a.txt").write_text("x return " * 1000)
    full = running.shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr(running.shutil, "disk_usage", lambda folder: full)
    result = invoke(*command(tokenizer_folder, tmp_path / "a.txt", tmp_path / "out"))
    assert "the counts take about" in str(result.exception) and "free some space" in str(result.exception)


# Files are read in many parts, of which both processes have some.
SMALL_UNITS = """
import functools
from hf_dynspec.build import corpus
corpus.plan_corpus = functools.partial(corpus.plan_corpus, unit_bytes=2_000)
"""


def test_several_machines_build_the_same_graph(tokenizer_folder, tmp_path):
    write_texts(tmp_path / "text", make_documents(400))
    units = len(plan_corpus([tmp_path / "text"], unit_bytes=2000).units)
    assert units > 2 * FAN_IN, "the second process has nothing to do"
    alone = invoke(*command(tokenizer_folder, tmp_path / "text", tmp_path / "one"))
    assert alone.exit_code == 0, alone.output
    words = command(tokenizer_folder, tmp_path / "text", tmp_path / "two", "--processes", 1)
    run = launch_command(tmp_path, *words, before=SMALL_UNITS)
    assert run.stdout.count(" edges from ") == 1, "only the first process reports"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one) and set(one) == set(two)
    assert not (tmp_path / "two" / "partial").exists()
