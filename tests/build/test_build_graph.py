"""The co-occurrence graph: counting out of core and on several machines, pruning, looking up, storing, the command."""

import json
import signal
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke
from corpora import make_documents, save_tokenizer, write_texts
from launched_processes import launch_command
from safetensors.torch import load_file
from stopped_commands import RUN_SLOWLY, RUN_WITH_SMALL_BATCHES, SMALL_BATCHES, start, stop_when
from transformers import PreTrainedTokenizerFast

from hf_dynspec.artifacts import read_artifact, read_graph, rebuild_policy, write_artifact
from hf_dynspec.artifacts.config import DynSpecConfig, PolicyConfig
from hf_dynspec.build import corpus as corpus_module
from hf_dynspec.build import graph as graph_module
from hf_dynspec.build import tokens
from hf_dynspec.build.corpus import find_corpus
from hf_dynspec.build.graph import BigramCounts, Pruning, build_graph, graph_coverage, special_ids
from hf_dynspec.build.ranking import vocabulary_size
from hf_dynspec.errors import ArtifactError, ConfigurationError, DynSpecError
from hf_dynspec.shortlists import CooccurrenceGraph
from hf_dynspec.shortlists.retrieval.graph import WantedSuccessors
from hf_dynspec.vocabulary import fingerprint_tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)


@pytest.fixture
def small_parts(monkeypatch):
    """Texts go on in the next piece, batch and part."""
    monkeypatch.setattr(corpus_module, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(graph_module, "BATCHES_OF_A_PART", 3)


def plain_counts(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Counter:
    """The plain twin of `BigramCounts`: one text at a time, one bigram at a time."""
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


def counted(tokenizer, paths, folder: Path, *, known: int | None = None, memory: int = 1 << 26) -> BigramCounts:
    counts = BigramCounts(folder, known or vocabulary_size(tokenizer), memory)
    counts.count(find_corpus(paths), tokenizer)
    return counts


# Counting


@pytest.mark.parametrize("seed", range(2))
def test_the_graph_is_that_of_counting_one_by_one(tokenizer, tmp_path, small_parts, seed):
    """A plain text in many parts, documents of their own, special tokens, turns and empty texts."""
    texts = write_texts(tmp_path / "text", make_documents(40, seed=seed))
    odd = [f"x{tokenizer.eos_token}return decoding<tool>x", "", "drafts"]
    turns = [["decoding return", "", "x x x"], ["tokens"]]
    rows = [json.dumps({"text": text}) for text in odd] + [json.dumps({"turns": one}) for one in turns]
    (tmp_path / "text" / "c.jsonl").write_text("\n".join(rows))
    all_texts = [*texts, *odd, *(turn for one in turns for turn in one)]
    expected = plain_counts(tokenizer, all_texts)
    pruning = Pruning(minimum_count=2, threshold=0.01, largest_degree=5)
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts")
    assert len(counts.parts) > 5 and counts.documents == 1 + 20 + 2 + 2
    assert counts.tokens == sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in all_texts)
    graph = build_graph(counts, pruning)
    assert_same_rows(graph, plain_graph(expected, pruning))
    assert (graph.edges, graph.sources) == (len(graph.successors), len(rows_of(graph)))


def test_other_text_is_compared_with_a_graph(tokenizer, tmp_path, small_parts):
    write_texts(tmp_path / "text", make_documents(40))
    others = write_texts(tmp_path / "others", make_documents(40, seed=7))
    graph = build_graph(counted(tokenizer, [tmp_path / "text"], tmp_path / "counts"), Pruning(2, 0.001, 12))
    rows = {source: [after for after, _ in row] for source, row in rows_of(graph).items()}
    expected = plain_counts(tokenizer, others)
    found = graph_coverage(graph, counted(tokenizer, [tmp_path / "others"], tmp_path / "held-out"))
    assert found["bigrams"] == expected.total()
    for share, most in ((found["in_expansion"], 8), (found["in_graph"], 12)):
        assert share == sum(expected[bigram] for bigram in expected if bigram[1] in rows.get(bigram[0], [])[:most])
    assert 0 < found["in_expansion"] < found["in_graph"] < found["bigrams"]


def test_ids_past_the_vocabulary_and_special_tokens_break_a_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x<tool>x<|end|>return\n" * 9)
    size, tool = vocabulary_size(tokenizer), tokenizer.convert_tokens_to_ids("<tool>")
    assert tool == size - 1 and special_ids(tokenizer) == sorted([tokenizer.eos_token_id, tokenizer.pad_token_id])
    for known, is_source in ((size, True), (size - 1, False)):
        counts = counted(tokenizer, [tmp_path / "a.txt"], tmp_path / str(known), known=known)
        graph = build_graph(counts, Pruning(1, 0.0))
        assert (tool in rows_of(graph)) == is_source
        assert tokenizer.eos_token_id not in {after for row in rows_of(graph).values() for after, _ in row}
        assert tokenizer.eos_token_id not in rows_of(graph)
        assert graph_coverage(graph, counts)["in_graph"] < counts.tokens


def bytes_of(graph: CooccurrenceGraph) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in graph.tensors().values()]


def test_counts_that_memory_does_not_hold_go_to_the_disk(tokenizer, tmp_path, monkeypatch):
    """A million bigrams, nearly all different, in 64 MiB and in 1 GiB; and in no memory at all."""
    draw, size = np.random.default_rng(0), 100_000
    whole, spilled = (BigramCounts(tmp_path / name, size, memory) for name, memory in (("1", 1 << 30), ("2", 1 << 26)))
    for part in range(2):
        bigrams = draw.integers(0, size, (2, 500_000), dtype=np.int32)
        bigrams[:, :1000] = 5
        for counts in (whole, spilled):
            counts._write(part, bigrams, 500_000, 1)
    graphs = [build_graph(counts, Pruning(2, 0.0)) for counts in (whole, spilled)]
    assert bytes_of(graphs[0]) == bytes_of(graphs[1])
    assert graphs[0].successors[graphs[0].offsets[5]] == 5 and graphs[0].edges > 1
    with pytest.raises(DynSpecError, match="--memory"):
        BigramCounts(tmp_path / "3", size, 1 << 20)._write(0, bigrams, 500_000, 1)


def test_the_error_without_duckdb_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(DynSpecError, match=r"pip install 'hf-dynspec\[build\]'"):
        BigramCounts(tmp_path, 10)


# Going on


def test_parts_that_are_there_are_not_counted_again(tokenizer, tmp_path, small_parts):
    write_texts(tmp_path / "text", make_documents(60))
    counts = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts")
    whole = bytes_of(build_graph(counts, Pruning(2, 1e-3)))
    (tmp_path / "counts" / "00000001.parquet").unlink()
    (tmp_path / "counts" / ".00000003.parquet.12345678.writing").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "counts").glob("*.parquet")}
    again = counted(tokenizer, [tmp_path / "text"], tmp_path / "counts")
    assert (again.tokens, again.documents, again.parts) == (counts.tokens, counts.documents, counts.parts)
    assert len(kept) > 3 and all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert bytes_of(build_graph(again, Pruning(2, 1e-3))) == whole


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut" * 20])
def test_damaged_counts_are_refused(tokenizer, tmp_path, content):
    (tmp_path / "00000000.parquet").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"damaged.*--overwrite"):
        BigramCounts(tmp_path, 10)


def test_a_bad_line_keeps_the_parts_before_it(tokenizer, tmp_path, small_parts):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine, this is a line"}\n' * 150 + "{\n")
    with pytest.raises(DynSpecError, match=r"a\.jsonl, line 151"):
        counted(tokenizer, [path], tmp_path / "counts")
    assert BigramCounts(tmp_path / "counts", vocabulary_size(tokenizer)).parts


@pytest.mark.process
def test_a_stopped_command_goes_on_and_ends_with_the_same_graph(tokenizer, tokenizer_folder, tmp_path):
    texts = write_texts(tmp_path / "text", make_documents(1000))
    arguments = ["build", "graph", "--tokenizer", tokenizer_folder, "--text", tmp_path / "text"]
    arguments += ["--out", tmp_path / "out"]
    partial = tmp_path / "out" / "partial"

    def stop_between_parts(how: signal.Signals) -> str:
        before = set(partial.glob("*.parquet"))
        return stop_when(lambda: bool(set(partial.glob("*.parquet")) - before), start(RUN_SLOWLY, *arguments), how)

    said = stop_between_parts(signal.SIGINT)
    assert f"tokens are kept in {partial}; run the same command again to go on" in said
    assert "Traceback" not in said
    stop_between_parts(signal.SIGKILL)
    process = start(RUN_WITH_SMALL_BATCHES, *arguments, "--minimum-count", 3)
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


def command(tokenizer_folder: Path, text: Path, out: Path, *more: object) -> list[object]:
    return ["build", "graph", "--tokenizer", tokenizer_folder, "--text", text, "--out", out, *more]


def test_the_command_makes_an_artifact(tokenizer, tokenizer_folder, tmp_path):
    texts, out = write_texts(tmp_path / "text", make_documents(200)), tmp_path / "out"
    result = invoke(*command(tokenizer_folder, tmp_path / "text", out, "--memory", 64))
    assert result.exit_code == 0, result.output
    graph, _ = read_graph(out)
    expected = plain_counts(tokenizer, texts)
    assert_same_rows(graph, plain_graph(expected, Pruning()))
    edges = graph.edges
    assert f"{edges:,} edges from {len(rows_of(graph)):,} of {vocabulary_size(tokenizer):,} tokens" in result.output
    assert "--policy retrieval:core=RANKING,graph=" in result.output
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
        (tmp_path / "a.txt", ["--tokenizer", tmp_path / "nothing"], "nothing: there is no such folder"),
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
    assert result.exit_code == 0 and "continuing: 2 tokens were counted before" in result.output, result.output


def test_a_disk_that_is_too_small_is_told(tokenizer_folder, tmp_path, monkeypatch):
    from hf_dynspec.commands import running

    (tmp_path / "a.txt").write_text("x return " * 1000)
    full = running.shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr(running.shutil, "disk_usage", lambda folder: full)
    result = invoke(*command(tokenizer_folder, tmp_path / "a.txt", tmp_path / "out"))
    assert "the counts take about" in str(result.exception) and "free some space" in str(result.exception)


@pytest.mark.process
def test_several_machines_build_the_same_graph(tokenizer_folder, tmp_path):
    write_texts(tmp_path / "text", make_documents(400))
    alone = invoke(*command(tokenizer_folder, tmp_path / "text", tmp_path / "one"))
    assert alone.exit_code == 0, alone.output
    words = command(tokenizer_folder, tmp_path / "text", tmp_path / "two")
    run = launch_command(tmp_path, *words, before=SMALL_BATCHES)
    assert run.stdout.count(" edges from ") == 1, "only the first process reports"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one) and set(one) == set(two)
    assert not (tmp_path / "two" / "partial").exists()
