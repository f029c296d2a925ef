"""Traces of real runs: the tokens stay the target's, what is told is what happened, and pages hold hostile text."""

import json
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import (
    POLICY_CASES,
    VOCABULARY,
    RandomShortlist,
    perturbed,
    prompt,
    successor_graph,
    tiny,
    word_tokenizer,
)
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_dynspec import ConfigurationError, DynSpecAssistant, DynSpecError, RetrievalShortlist, UnionShortlist
from hf_dynspec.commands import app
from hf_dynspec.evaluation.bench.systems import CONSTANT_DRAFT_LENGTH
from hf_dynspec.evaluation.pair import generation_config
from hf_dynspec.evaluation.prompts import WorkloadPrompt
from hf_dynspec.evaluation.trace.analysis import text_pieces
from hf_dynspec.evaluation.trace.measure import trace_prompt
from hf_dynspec.evaluation.trace.page import page_of
from hf_dynspec.evaluation.trace.recording import RecordedSpan, Recording
from hf_dynspec.evaluation.trace.report import SCHEMA_VERSION, shown_lines, shown_token, text_report, to_dict
from hf_dynspec.evaluation.trace.result import WAYS, Trace
from hf_dynspec.evaluation.trace.settings import TraceSettings
from hf_dynspec.evaluation.trace.timeline import COLORS, median_round
from hf_dynspec.protocol import Verdict, VocabularyInfo
from hf_dynspec.shortlists import ShortlistPolicy
from hf_dynspec.shortlists.retrieval import index, retriever
from hf_dynspec.shortlists.retrieval.neighbours import TokenNeighbours
from hf_dynspec.shortlists.retrieval.worker import Worker
from hf_dynspec.stats import SECTIONS

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
TREE = "16/3/4"
NEW_TOKENS = 40
# Policies that choose anew for each draft step, so that nothing comes in and stays.
ANEW = ("router", "screen", "random", "coral")


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Any]]:
    """By name a target and what drafts for it."""
    target, of_heads = tiny(seed=0), soft(seed=1)
    heads = {name: (of_heads, drafter_of(agreeing_head(name), of_heads)) for name in ("eagle2", "eagle3")}
    return {"independent": (target, perturbed(target)), **heads}


def retrieval(**settings: Any) -> RetrievalShortlist:
    given = {"size": 40, "dynamic": 24, "likely": 6, "prompt_positions": 4, "synchronous": True}
    return RetrievalShortlist(**{**given, **settings})


def traced(pair: tuple[Any, Any], policy: ShortlistPolicy, tokenizer: Any = None, **settings: Any) -> Trace:
    target, drafter = pair
    text = " ".join(f"t{i}" for i in prompt()[0].tolist())
    tokenizer = tokenizer or word_tokenizer()
    given = {"max_new_tokens": NEW_TOKENS, "num_assistant_tokens": 3, "device": "cpu"}
    return trace_prompt(
        TraceSettings(policies={"policy": policy}, **{**given, **settings}),
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        prompts=[WorkloadPrompt("words/1", "words", text if tokenizer.get_vocab().get("t3") else "a b c d e f g")],
    )


def untraced(
    pair: tuple[Any, Any], policy: ShortlistPolicy, tree: bool, temperature: float = 0.0, seed: int = 0
) -> tuple[list[int], DynSpecAssistant]:
    """The same call by an assistant that nobody traces."""
    target, drafter = pair
    shape = TraceSettings(tree=TREE).resolved_tree() if tree else False
    assistant = DynSpecAssistant(drafter, policy, target=target, num_assistant_tokens=3, tree=shape)
    for name, value in CONSTANT_DRAFT_LENGTH.items():
        setattr(assistant.generation_config, name, value)
    config = generation_config(target, NEW_TOKENS, temperature, 50)
    torch.manual_seed(seed)
    output = target.generate(prompt(), generation_config=config, assistant_model=assistant)
    assistant.unbind()
    return output[0, prompt().shape[1] :].tolist(), assistant


# What is told --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("name", [name for name in POLICY_CASES if name not in ("full", "auto")])
def test_every_policy_can_be_traced_and_nothing_changes_by_it(name, tree, pairs):
    policy = POLICY_CASES[name]()
    trace = traced(pairs["independent"], policy, tree=TREE if tree else None)
    tokens, assistant = untraced(pairs["independent"], policy, tree)
    assert [token.token_id for token in trace.tokens] == tokens
    summary, stats = trace.summary, assistant.stats
    assert (summary.rounds, summary.accepted, summary.tokens) == (stats.rounds, stats.accepted, len(tokens))
    assert summary.out_of_vocabulary / summary.checked == pytest.approx(stats.oov_rate)
    assert summary.active_vocabulary == pytest.approx(stats.active_vocabulary)
    if any(one in name for one in ANEW):
        assert summary.entered is None and not trace.entries
    else:
        require_consistent(trace)


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_eagle_heads_are_traced_too(name, tree, pairs):
    policy = retrieval(semantic="token", graph=successor_graph())
    trace = traced(pairs[name], policy, tree=TREE if tree else None)
    tokens, _ = untraced(pairs[name], policy, tree)
    assert [token.token_id for token in trace.tokens] == tokens
    require_consistent(trace)
    assert trace.useful


def require_consistent(trace: Trace) -> None:
    """What the parts of a trace say of each other."""
    accepted = {token.position: token for token in trace.tokens if token.by_context}
    assert accepted.keys() == {position for entry in trace.entries for position in entry.accepted}
    for position, token in accepted.items():
        entry = trace.entries[token.entry]
        assert token.drafted and not token.out_of_vocabulary
        assert entry.token_id == token.token_id and entry.drafted >= len(entry.accepted) > 0
        assert entry.round <= token.round and (entry.left is None or token.round < entry.left)
        if entry.event is not None:
            event = trace.events[entry.event]
            assert event.position < position and event.taken <= entry.round
    for place, entry in enumerate(trace.entries):
        assert set(entry.ways) <= set(WAYS)
        if entry.event is None:
            assert entry.ways == ["unknown"]
            continue
        event = trace.events[entry.event]
        assert entry.token_id in event.entered
        assert entry.ways == [name for name, ids in event.found.items() if entry.token_id in ids] != []
        same = [one for one in trace.entries[place + 1 :] if one.token_id == entry.token_id]
        assert not same or entry.left is not None
    positions = [event.position for event in trace.events]
    assert positions == sorted(positions)
    missed = [token.position for token in trace.tokens if token.out_of_vocabulary]
    assert len(missed) == trace.summary.out_of_vocabulary
    assert trace.summary.accepted_by_context == len(accepted)


def test_what_was_retrieved_is_told_by_its_way(pairs):
    target, _ = pairs["independent"]
    graph = successor_graph()
    policy = retrieval(trigger="oov", semantic="token", neighbours=3, graph=graph, successors=2, displaceable=0)
    trace = traced(pairs["independent"], policy)
    vocabulary = VocabularyInfo(VOCABULARY, (target.generation_config.eos_token_id,), torch.device("cpu"))
    core = set(policy.core_ids(vocabulary).tolist())
    rows = target.get_output_embeddings().weight.detach()
    plain = target.generate(
        prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    # The last round's comes too late for any other.
    assert len(trace.triggers) > 3
    assert {event.position for event in trace.events if not event.in_prompt} == {
        token.position for token in trace.tokens if token.out_of_vocabulary
    }
    held: set[int] = set()
    for event in trace.triggers:
        place = event.position - prompt().shape[1]
        assert event.token_id == trace.tokens[place].token_id
        assert event.found["text"] == [event.token_id]
        assert set(event.found["likely"]) == set(plain.logits[place][0].topk(6).indices.tolist())
        near = TokenNeighbours(rows, 3).of(torch.tensor([event.token_id]))[0].tolist()
        assert event.found["near"] == near
        # Two of each, see the graph; what the core holds need not come in.
        seeds = torch.tensor([event.token_id, *event.found["likely"], *near])
        following = set(graph.successors.view(-1, 2)[seeds].flatten().tolist())
        assert set(event.found["following"]) == following - core
        held |= following & core
        assert event.context.endswith("".join(token.text for token in trace.tokens[max(0, place - 3) : place]))
    assert held
    assert {way for entry in trace.entries for way in entry.ways} == {"text", "likely", "near", "following"}
    assert all(entry.event is not None for entry in trace.entries)


def test_retrieval_in_a_union_is_told_too_and_other_parts_are_not_its(pairs):
    policy = UnionShortlist(retrieval(trigger="oov", prompt_positions=0, likely=2), POLICY_CASES["in_context"]())
    trace = traced(pairs["independent"], policy)
    require_consistent(trace)
    assert {entry.event is None for entry in trace.entries} == {True, False}


def test_two_parts_of_a_union_may_retrieve(pairs):
    policy = UnionShortlist(retrieval(trigger="oov", prompt_positions=0), retrieval(size=50, semantic="token"))
    trace = traced(pairs["independent"], policy)
    require_consistent(trace)
    assert trace.summary.late == 0 < trace.summary.results and all(entry.event is not None for entry in trace.entries)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
def test_results_that_come_late_are_counted_and_change_no_token(tree, pairs, monkeypatch):
    at_once = traced(pairs["independent"], retrieval(), tree=tree)
    assert at_once.summary.late == 0 < at_once.summary.results
    take_in, take, is_asked = retriever.Retriever._take_in, Worker.take, threading.Event()

    def slowly(self: Any, event: Any) -> Any:
        # Until a round has looked for it in vain.
        assert is_asked.wait(120)
        return take_in(self, event)

    def asking(self: Worker) -> list[Any]:
        taken = take(self)
        if self._running:
            is_asked.set()
        return taken

    monkeypatch.setattr(retriever.Retriever, "_take_in", slowly)
    monkeypatch.setattr(Worker, "take", asking)
    late = traced(pairs["independent"], retrieval(synchronous=False), tree=tree)
    assert 0 < late.summary.late <= late.summary.results and late.summary.retrieval_milliseconds > 0
    assert [one.token_id for one in late.tokens] == [one.token_id for one in at_once.tokens]
    require_consistent(late)


@pytest.mark.parametrize("seed", [3, 4])
def test_sampling_draws_what_it_draws_without_a_trace(seed, pairs):
    trace = traced(pairs["independent"], retrieval(), temperature=0.9, seed=seed)
    tokens, _ = untraced(pairs["independent"], retrieval(), False, 0.9, seed)
    assert [one.token_id for one in trace.tokens] == tokens
    require_consistent(trace)


@pytest.mark.skipif(not find_spec("hnswlib"), reason="hnswlib is not installed")
def test_the_papers_way_is_told(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_default_folder", lambda: tmp_path)
    policy = RetrievalShortlist.paper(size=40, dynamic=24, graph=successor_graph(), synchronous=True)
    trace = traced(pairs["independent"], policy)
    require_consistent(trace)
    assert trace.triggers and not any(event.in_prompt for event in trace.events)
    for event in trace.triggers:
        assert [len(event.found[way]) for way in ("text", "likely", "near")] == [1, 10, 10]
        assert event.found["following"]


def test_nobody_pays_for_a_trace_that_is_not_made(pairs, monkeypatch):
    """The policy that was traced is as it was, and a session of it looks at no clock and keeps nothing."""
    policy = retrieval()
    traced(pairs["independent"], policy)
    assert policy.listener is None
    monkeypatch.setattr(retriever, "time", None)
    monkeypatch.setattr(retriever, "Retrieval", None)
    tokens, _ = untraced(pairs["independent"], policy, tree=False)
    assert len(tokens) == NEW_TOKENS


def test_a_random_policy_of_ones_own_chooses_anew(pairs):
    trace = traced(pairs["independent"], RandomShortlist())
    assert trace.summary.entered is None and trace.summary.out_of_vocabulary > 0 and trace.triggers


@pytest.mark.parametrize("tokenizer", ["words", "pocket"])
def test_the_pieces_of_a_text_make_it_up(tokenizer):
    if tokenizer == "words":
        made, ids = word_tokenizer(), prompt(40)[0].tolist()
    else:
        made = AutoTokenizer.from_pretrained(POCKET / "target")
        ids = made("def main():\n    print('a b')  # comment\n\n")["input_ids"]
    pieces = text_pieces(made, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == made.decode(ids)


# Time ----------------------------------------------------------------------------------------------------------------


def test_the_timeline_is_of_the_round_of_median_length():
    recording = Recording()
    nothing = torch.empty(0, dtype=torch.int64)
    for end, drafted in ((1.0, 3), (1.4, 3), (1.5, 3), (1.7, 3), (2.7, 1)):
        recording.rounds[-1].verdict = Verdict(torch.zeros(drafted, dtype=torch.int64), nothing, 0)
        recording.rounds[-1].end = end
        recording.rounds.append(type(recording.rounds[-1])())
        recording.stopwatch.spans += [
            RecordedSpan("verification", end - 0.09, end - 0.02),
            RecordedSpan("policy", end - 0.01, end + 0.001),
        ]
    timeline = median_round(recording)
    # Rounds 1 to 3 drafted as much as any and did not read the prompt; they took 0.4, 0.1 and 0.2 seconds.
    assert (timeline.round, timeline.compared) == (3, 3)
    assert timeline.milliseconds == pytest.approx(200)
    assert [(one.section, round(one.start), round(one.end)) for one in timeline.spans] == [
        ("verification", 110, 180),
        ("policy", 190, 201),
    ]


def test_the_spans_of_a_round_are_measured(pairs):
    for synchronous in (True, False):
        trace = traced(pairs["independent"], retrieval(synchronous=synchronous))
        timeline = trace.timeline
        own = [one for one in timeline.spans if one.thread == "generation"]
        assert {one.section for one in own} == set(SECTIONS)
        assert all(one.end <= other.start for one, other in pairwise(own))
        assert 0 <= own[0].start and own[-1].start <= timeline.milliseconds
        beside = [one for one in timeline.spans if one.thread == "retrieval"]
        assert beside and all(one.end > 0 and one.start < timeline.milliseconds for one in beside)
        if synchronous:
            assert any(one.start <= beside[-1].start and beside[-1].end <= one.end for one in own)
    assert set(COLORS) == {*SECTIONS, "retrieval"}


# Text, page and file -------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "'><img/src=x>",
    "</title></style></div>",
    "&lt;b&gt;",
    "[bold][link=http://evil]x[/link]",
    "\x1b[31m\x07",
    "a\u202eb\u200b",
    "[/]",
)


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    """Every token is hostile, so that any text is."""
    words = {f"{HOSTILE[i % len(HOSTILE)]}{i}": i for i in range(VOCABULARY)}
    words |= {letter: 250 + i for i, letter in enumerate("abcdefg")}
    words = {word: i for word, i in words.items() if not (250 <= i < 257 and len(word) > 1)}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Page(HTMLParser):
    """What a browser would find on a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_whole_and_nothing_in_a_token_is_more_than_text(pairs):
    trace = traced(pairs["independent"], retrieval(semantic="token"), tokenizer=hostile_tokenizer())
    page = page_of(trace)
    found = Page(page)
    assert found.open == [] and trace.useful and trace.triggers
    names = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(names)) == len(names) > 0
    for tag, attributes in found.tags:
        assert tag not in ("script", "img", "link", "iframe", "b")
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        if "href" in attributes:
            assert attributes["href"].removeprefix("#") in names
    assert "<script>alert(1)</script>" in found.text and "&lt;b&gt;" in found.text
    assert not {"\x1b", "\x07", "\u202e", "\u200b"} & set(page)
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "").replace("http://evil", "")


def test_a_terminal_of_80_columns_shows_everything_as_text(pairs):
    trace = traced(pairs["independent"], retrieval(semantic="token"), tokenizer=hostile_tokenizer())
    console = Console(width=80, file=StringIO(), force_terminal=False)
    for part in text_report(trace):
        console.print(part)
    shown = console.file.getvalue()
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert not {"\x1b", "\x07", "\u202e", "\u200b"} & set(shown)
    assert "[link=http://evil]" in shown.replace("\n", "")
    assert f"{trace.summary.out_of_vocabulary} of {trace.summary.checked}" in shown
    for event in trace.triggers[:5]:
        assert f"\n{event.position:>6}  " in shown


@pytest.mark.parametrize(("tokens", "before"), [(40, ""), (41, "…")])
def test_dots_stand_for_what_is_left_out_of_the_prompt(pairs, tokens, before):
    trace = traced(pairs["independent"], retrieval(semantic="token"))
    trace = replace(trace, prompt={**trace.prompt, "tokens": tokens}, prompt_end="the end")
    console = Console(width=80, file=StringIO(), force_terminal=False)
    for part in text_report(trace):
        console.print(part)
    assert f"\n{before}the end" in console.file.getvalue()
    assert f'<span class="prompt">{before}the end</span>' in page_of(trace)


def test_spaces_and_breaks_of_a_token_can_be_seen():
    assert [shown_token(text) for text in (" the", "a b", "\n\n", "  ", "", "x" * 99)] == [
        "␣the",
        "a b",
        "\\n\\n",
        "␣␣",
        "(nothing)",
        "x" * 23 + "…",
    ]


def test_spaces_of_every_width_are_spaces_in_a_text():
    assert shown_lines("§\u2002 1\u202f000\n\u3000a\u200bb\u2028") == "§\u2002 1\u202f000\n\u3000a\\u200bb\\u2028"


def test_the_file_holds_everything_and_what_it_names(pairs):
    trace = traced(pairs["independent"], retrieval(semantic="token", graph=successor_graph()))
    data = json.loads(json.dumps(to_dict(trace, ["hf-dynspec", "trace"]), allow_nan=False))
    assert data["schema_version"] == SCHEMA_VERSION and data["provenance"]["versions"]
    assert data["policy"]["settings"]["dynamic"] == 24
    texts, events, entries = data["texts"], data["events"], data["entries"]
    for token in data["tokens"]:
        assert str(token["token_id"]) in texts
        assert token["entry"] is None or token["position"] in entries[token["entry"]]["accepted"]
    for event in events:
        assert {str(one) for ids in event["found"].values() for one in ids} <= texts.keys()
        assert event["found"].keys() <= WAYS.keys()
    assert all(entry["event"] is None or entry["event"] < len(events) for entry in entries)
    assert data["summary"]["tokens"] == len(data["tokens"]) == NEW_TOKENS
    assert {one["thread"] for one in data["timeline"]["spans"]} == {"generation", "retrieval"}


# The command ---------------------------------------------------------------------------------------------------------


def invoke(*words: object):
    given = ["trace", "--target", POCKET / "target", "--device", "cpu", "--threads", 1, "--max-new-tokens", 12]
    return CliRunner().invoke(app, list(map(str, [*given, *words])))


WITH_DRAFTER = ("--drafter", POCKET / "drafter", "--prompts", POCKET / "prompts.jsonl")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_command_writes_page_file_and_picture(suffix, tmp_path):
    files = {name: tmp_path / name for name in ("page.html", "trace.json", f"round.{suffix}")}
    page, file, picture = files.values()
    result = invoke(
        *WITH_DRAFTER, "--policy", "retrieval:size=64", "--html", page, "--json", file, "--timeline", picture
    )
    assert result.exit_code == 0, result.exception
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["policy"]["label"] == "retrieval:size=64" and len(data["tokens"]) == 12
    assert "out of vocabulary" in result.output and f"{data['summary']['rounds']} rounds" in result.output
    assert Page(page.read_text(encoding="utf-8")).open == []
    drawn = picture.read_bytes()
    assert (
        drawn.startswith(b"\x89PNG") if suffix == "png" else b"generating thread" in drawn and b"verification" in drawn
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_a_long_title_of_the_timeline_goes_on_in_the_next_line(tmp_path):
    policy = "retrieval:size=64,dynamic=128,semantic=logits,trigger=every,cache=lrfu,displaceable=32,synchronous=True"
    result = invoke(*WITH_DRAFTER, "--policy", policy, "--timeline", tmp_path / "round.svg")
    assert result.exit_code == 0, result.exception
    texts = re.findall(r">([^<>]+)</text>", (tmp_path / "round.svg").read_text(encoding="utf-8"))
    assert max(map(len, texts)) <= 90 and "synchronous=True: round" in "".join(texts)


def test_the_command_takes_a_text_and_sampling():
    words = ("--drafter", POCKET / "drafter", "--prompt", "def main():", "--temperature", 0.8, "--policy", "hybrid")
    result = invoke(*words)
    assert result.exit_code == 0, result.exception
    assert "hybrid on prompt/1" in result.output


def test_a_picture_that_nothing_can_be_drawn_in_is_left_out_and_that_is_said(tmp_path):
    result = invoke(
        *WITH_DRAFTER, "--max-new-tokens", 3, "--html", tmp_path / "a.html", "--timeline", tmp_path / "a.svg"
    )
    assert result.exit_code == 0, result.exception
    assert "a.svg was not drawn" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*WITH_DRAFTER, "--policy", "full"), "'full' holds every token"),
        ((*WITH_DRAFTER, "--policy", "retrieved"), "retrieved"),
        ((*WITH_DRAFTER, "--prompt", "both"), "name one prompt"),
        (("--drafter", POCKET / "drafter", "--prompt", ""), "--prompt is empty"),
        (("--drafter", POCKET / "drafter"), "name one prompt"),
        ((*WITH_DRAFTER, "--prompt-id", "prompts/none"), "there is no prompt 'prompts/none'; there are prompts/"),
        ((*WITH_DRAFTER, "--eagle", "head"), "not both"),
        (("--prompts", POCKET / "prompts.jsonl"), "name the drafter"),
        ((*WITH_DRAFTER, "--tree", "wide"), "total_tokens/depth/top_k"),
        ((*WITH_DRAFTER, "--temperature", -1), "temperature"),
        ((*WITH_DRAFTER, "--max-new-tokens", 2), "--max-new-tokens must be a whole number of at least 3"),
        ((*WITH_DRAFTER, "--timeline", "round.txt"), "no suffix of an image"),
        ((*WITH_DRAFTER, "--html", "nowhere/page.html"), "existing folder"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(words, problem, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_dynspec.evaluation.pair.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    result = invoke(*words)
    assert result.exit_code == 1 and isinstance(result.exception, DynSpecError)
    assert problem in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_one_policy_is_traced():
    with pytest.raises(ConfigurationError, match="one policy"):
        TraceSettings(policies=("hybrid", "retrieval"))
