"""Traces of real runs: the tokens stay the target's, the trace is true, and pages hold hostile text."""

import json
import re
import threading
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import representatives
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
from hf_dynspec.evaluation.trace.report import shown_lines, shown_token, text_report, to_dict, write_page
from hf_dynspec.evaluation.trace.result import WAYS, Trace
from hf_dynspec.evaluation.trace.settings import TraceSettings
from hf_dynspec.protocol import VocabularyInfo
from hf_dynspec.shortlists import ShortlistPolicy
from hf_dynspec.shortlists.retrieval import index, retriever
from hf_dynspec.shortlists.retrieval.neighbours import TokenNeighbours
from hf_dynspec.shortlists.retrieval.worker import Worker
from hf_dynspec.stats import SECTIONS

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
NEW_TOKENS = 40
# Policies that select from scratch at each draft step, so that no token enters and stays.
SCRATCH = ("router", "screen", "random", "coral")
SHAPES = {"chains": None, "trees": "16/3/4"}


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Any]]:
    """By name a target and a drafter for it."""
    target, of_heads = tiny(seed=0), soft(seed=1)
    heads = {name: (of_heads, drafter_of(agreeing_head(name), of_heads)) for name in ("eagle2", "eagle3")}
    return {"independent": (target, perturbed(target)), **heads}


def retrieval(**settings: Any) -> RetrievalShortlist:
    given = {"size": 40, "dynamic": 24, "likely": 6, "prompt_positions": 4, "synchronous": True}
    return RetrievalShortlist(**{**given, **settings})


def traced(pair: tuple[Any, Any], policy: ShortlistPolicy, tokenizer: Any = None, **settings: Any) -> Trace:
    text = "a b c d e f g" if tokenizer else " ".join(f"t{i}" for i in prompt()[0].tolist())
    given = {"max_new_tokens": NEW_TOKENS, "num_assistant_tokens": 3, "device": "cpu"}
    return trace_prompt(
        TraceSettings(policies={"policy": policy}, **{**given, **settings}),
        target=pair[0],
        drafter=pair[1],
        tokenizer=tokenizer or word_tokenizer(),
        prompts=[WorkloadPrompt("words/1", "words", text)],
    )


def require_same_tokens(
    trace: Trace, pair: tuple[Any, Any], policy: ShortlistPolicy, tree: str | None = None, **sampling: float
) -> DynSpecAssistant:
    """Compare with the same call without a trace, and return its assistant."""
    shape = TraceSettings(tree=tree).resolved_tree() or False
    assistant = DynSpecAssistant(pair[1], policy, target=pair[0], num_assistant_tokens=3, tree=shape)
    assistant.generation_config.update(**CONSTANT_DRAFT_LENGTH)
    config = generation_config(pair[0], NEW_TOKENS, sampling.get("temperature", 0.0), 50)
    torch.manual_seed(sampling.get("seed", 0))
    output = pair[0].generate(prompt(), generation_config=config, assistant_model=assistant)
    assistant.unbind()
    assert [token.token_id for token in trace.tokens] == output[0, prompt().shape[1] :].tolist()
    return assistant


def require_consistent(trace: Trace) -> None:
    """Compare the parts of a trace with each other."""
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


def shown(trace: Trace) -> str:
    console = Console(width=80, file=StringIO(), force_terminal=False)
    for part in text_report(trace):
        console.print(part)
    return console.file.getvalue()


# Truth ---------------------------------------------------------------------------------------------------------------

NAMES = [name for name in POLICY_CASES if name not in ("full", "auto")]
# Each policy with one of the shapes first.
CASES = [(name, list(SHAPES)[(place + more) % 2]) for more in (0, 1) for place, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "shape"), representatives("families", CASES, keep=len(NAMES)))
def test_every_policy_can_be_traced_without_a_change(name, shape, pairs):
    policy, tree = POLICY_CASES[name](), SHAPES[shape]
    trace = traced(pairs["independent"], policy, tree=tree)
    stats, summary = require_same_tokens(trace, pairs["independent"], policy, tree).stats, trace.summary
    assert (summary.rounds, summary.accepted, summary.tokens) == (stats.rounds, stats.accepted, len(trace.tokens))
    assert summary.out_of_vocabulary / summary.checked == pytest.approx(stats.oov_rate)
    assert summary.active_vocabulary == pytest.approx(stats.active_vocabulary)
    if any(one in name for one in SCRATCH):
        assert summary.entered is None and not trace.entries
    else:
        require_consistent(trace)


@pytest.mark.parametrize(("name", "shape"), representatives("families", [("eagle3", "trees"), ("eagle2", "chains")]))
def test_eagle_heads_are_traced_too(name, shape, pairs):
    policy = retrieval(semantic="token", graph=successor_graph())
    trace = traced(pairs[name], policy, tree=SHAPES[shape])
    require_same_tokens(trace, pairs[name], policy, SHAPES[shape])
    require_consistent(trace)
    assert trace.useful


def test_sampling_draws_the_same_with_a_trace(pairs):
    trace = traced(pairs["independent"], retrieval(), temperature=0.9, seed=3)
    require_same_tokens(trace, pairs["independent"], retrieval(), temperature=0.9, seed=3)
    require_consistent(trace)


def test_retrieved_tokens_have_the_ways_by_which_they_were_found(pairs):
    target, graph = pairs["independent"][0], successor_graph()
    policy = retrieval(trigger="oov", semantic="token", neighbours=3, graph=graph, successors=2, displaceable=0)
    trace = traced(pairs["independent"], policy)
    vocabulary = VocabularyInfo(VOCABULARY, (target.generation_config.eos_token_id,), torch.device("cpu"))
    core = set(policy.core_ids(vocabulary).tolist())
    rows = target.get_output_embeddings().weight.detach()
    plain = target.generate(
        prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert len(trace.triggers) > 3
    missed = {token.position for token in trace.tokens if token.out_of_vocabulary}
    assert {event.position for event in trace.events if not event.in_prompt} == missed
    held: set[int] = set()
    for event in trace.triggers:
        place = event.position - prompt().shape[1]
        assert event.token_id == trace.tokens[place].token_id
        assert event.found["text"] == [event.token_id]
        assert set(event.found["likely"]) == set(plain.logits[place][0].topk(6).indices.tolist())
        near = TokenNeighbours(rows, 3).of(torch.tensor([event.token_id]))[0].tolist()
        assert event.found["near"] == near
        # Two of each, see the graph; those in the core need not enter.
        seeds = torch.tensor([event.token_id, *event.found["likely"], *near])
        following = set(graph.successors.view(-1, 2)[seeds].flatten().tolist())
        assert set(event.found["following"]) == following - core
        held |= following & core
        assert event.context.endswith("".join(token.text for token in trace.tokens[max(0, place - 3) : place]))
    assert held
    assert {way for entry in trace.entries for way in entry.ways} == WAYS.keys() - {"unknown"}
    assert all(entry.event is not None for entry in trace.entries)


def test_parts_of_a_union(pairs):
    parts = retrieval(trigger="oov", prompt_positions=0, likely=2), POLICY_CASES["in_context"]()
    trace = traced(pairs["independent"], UnionShortlist(*parts))
    require_consistent(trace)
    assert {entry.event is None for entry in trace.entries} == {True, False}
    parts = retrieval(trigger="oov", prompt_positions=0), retrieval(size=50, semantic="token")
    trace = traced(pairs["independent"], UnionShortlist(*parts))
    require_consistent(trace)
    assert trace.summary.late == 0 < trace.summary.results and all(entry.event is not None for entry in trace.entries)


@pytest.mark.parametrize("shape", representatives("families", SHAPES))
def test_late_results_are_counted_and_change_no_token(shape, pairs, monkeypatch):
    at_once = traced(pairs["independent"], retrieval(), tree=SHAPES[shape])
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
    late = traced(pairs["independent"], retrieval(synchronous=False), tree=SHAPES[shape])
    assert 0 < late.summary.late <= late.summary.results and late.summary.retrieval_milliseconds > 0
    assert [one.token_id for one in late.tokens] == [one.token_id for one in at_once.tokens]
    require_consistent(late)


@pytest.mark.skipif(not find_spec("hnswlib"), reason="hnswlib is not installed")
def test_retrieval_as_in_the_paper(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_default_folder", lambda: tmp_path)
    policy = RetrievalShortlist.paper(size=40, dynamic=24, graph=successor_graph(), synchronous=True)
    trace = traced(pairs["independent"], policy)
    require_consistent(trace)
    assert trace.triggers and not any(event.in_prompt for event in trace.events)
    for event in trace.triggers:
        assert [len(event.found[way]) for way in ("text", "likely", "near")] == [1, 10, 10]
        assert event.found["following"]


def test_a_call_without_a_trace_pays_nothing(pairs, monkeypatch):
    """The policy stays as it was, and its session reads no clock and keeps nothing."""
    policy = retrieval()
    trace = traced(pairs["independent"], policy)
    assert policy.listener is None
    monkeypatch.setattr(retriever, "time", None)
    monkeypatch.setattr(retriever, "Retrieval", None)
    require_same_tokens(trace, pairs["independent"], policy)


def test_a_policy_of_ones_own_that_selects_at_random(pairs):
    trace = traced(pairs["independent"], RandomShortlist())
    assert trace.summary.entered is None and trace.summary.out_of_vocabulary > 0 and trace.triggers
    assert "selects from scratch" in shown(trace)


# Text, page and files ------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_text_add_up_to_it():
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    texts = [tokenizer("def main():\n    print('a b')  # comment\n\n")["input_ids"], prompt(40)[0].tolist()]
    for made, ids in zip((tokenizer, word_tokenizer()), texts, strict=True):
        pieces = text_pieces(made, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == made.decode(ids)


HOSTILE = (
    "<script>alert(1)</script>",
    '"onmouseover="alert(1)',
    "'><img/src=x>",
    "</title></style></pre>",
    "&lt;b&gt;",
    "[bold][link=http://evil]x[/link]",
    "\x1b[31m\x07",
    "a\u202eb\u200b",
    "[/]",
)
INVISIBLE = {"\x1b", "\x07", "\u202e", "\u200b"}


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    """Every token is hostile, so that any text is."""
    words = {f"{HOSTILE[i % len(HOSTILE)]}{i}": i for i in range(VOCABULARY) if not 250 <= i < 257}
    words |= {letter: 250 + i for i, letter in enumerate("abcdefg")}
    backend = Tokenizer(models.WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


class Page(HTMLParser):
    """What a browser would find on a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag, tuple(name for name, _ in attrs)] += 1
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_tokens_are_nothing_but_text_on_a_page_and_on_a_terminal(pairs, tmp_path):
    trace = traced(pairs["independent"], retrieval(semantic="token"), tokenizer=hostile_tokenizer())
    assert trace.useful and trace.triggers
    write_page(tmp_path / "page.html", trace)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Page(page)
    assert found.open == []
    attributes = {"html": "lang", "pre": "style", "span": "class"}
    plain = {(tag, (name,)) for tag, name in attributes.items()}
    plain |= {("meta", ("charset",)), ("meta", ("http-equiv", "content"))}
    assert found.tags.keys() == plain | {(one, ()) for one in ("head", "title", "style", "body")}
    assert "<script>alert(1)</script>" in found.text and "&lt;b&gt;" in found.text
    assert not INVISIBLE & set(page) and "default-src 'none'" in page
    for event in trace.triggers:
        assert f"\n{event.position:>6}  " in found.text

    terminal = shown(trace)
    assert all(len(line) <= 80 for line in terminal.splitlines()) and not INVISIBLE & set(terminal)
    assert "[link=http://evil]" in terminal.replace("\n", "")
    assert f"{trace.summary.out_of_vocabulary} of {trace.summary.checked}" in terminal
    for event in trace.triggers[:5]:
        assert f"\n{event.position:>6}  " in terminal


@pytest.mark.parametrize(("tokens", "before"), [(40, ""), (41, "…")])
def test_dots_stand_for_the_rest_of_the_prompt(pairs, tokens, before):
    trace = traced(pairs["independent"], retrieval(semantic="token"), max_new_tokens=5)
    trace = replace(trace, prompt={**trace.prompt, "tokens": tokens}, prompt_end="the end")
    assert f"\n{before}the end" in shown(trace)


def test_spaces_and_breaks_of_a_token_can_be_seen():
    tokens = {" the": "␣the", "a b": "a b", "\n\n": "\\n\\n", "  ": "␣␣", "": "(nothing)", "x" * 99: "x" * 23 + "…"}
    assert {text: shown_token(text) for text in tokens} == tokens
    assert shown_lines("§\u2002 1\u202f000\n\u3000a\u200bb\u2028") == "§\u2002 1\u202f000\n\u3000a\\u200bb\\u2028"


def test_the_file_holds_everything_and_what_it_names(pairs):
    trace = traced(pairs["independent"], retrieval(semantic="token", graph=successor_graph()))
    data = json.loads(json.dumps(to_dict(trace, ["hf-dynspec", "trace"]), allow_nan=False))
    assert data["schema_version"] == 2 and data["provenance"]["versions"]
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


# The command ---------------------------------------------------------------------------------------------------------


def invoke(*words: object):
    given = ["trace", "--target", POCKET / "target", "--device", "cpu", "--threads", 1, "--max-new-tokens", 12]
    return CliRunner().invoke(app, list(map(str, [*given, *words])))


DRAFTER = ("--drafter", POCKET / "drafter")
WITH_DRAFTER = (*DRAFTER, "--prompts", POCKET / "prompts.jsonl")


def test_the_command_writes_page_file_and_timeline(tmp_path):
    page, file, timeline = (tmp_path / name for name in ("page.html", "trace.json", "timeline.json"))
    files = "--html", page, "--json", file, "--timeline", timeline
    result = invoke(*WITH_DRAFTER, "--policy", "retrieval:size=64", *files)
    assert result.exit_code == 0, result.exception
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["policy"]["label"] == "retrieval:size=64" and len(data["tokens"]) == 12
    assert "out of vocabulary" in result.output and f"{data['summary']['rounds']} rounds" in result.output
    assert re.search(r"new tokens: .*12 in", Page(page.read_text(encoding="utf-8")).text)
    events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
    threads = {(one["name"], one["tid"]) for one in events if one.get("cat") == "user_annotation"}
    assert {name for name, _ in threads} == {*SECTIONS, "retrieval"}
    # Retrieval has a thread of its own.
    assert len({tid for _, tid in threads}) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "timeline.json", "trace.json"]


def test_the_command_takes_a_text_and_sampling():
    result = invoke(*DRAFTER, "--prompt", "def main():", "--temperature", 0.8, "--policy", "hybrid")
    assert result.exit_code == 0, result.exception
    assert "hybrid on prompt/1" in result.output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*WITH_DRAFTER, "--policy", "full"), "'full' holds every token"),
        ((*WITH_DRAFTER, "--policy", "retrieved"), "retrieved"),
        ((*WITH_DRAFTER, "--prompt", "both"), "name one prompt"),
        ((*DRAFTER, "--prompt", ""), "--prompt is empty"),
        (DRAFTER, "name one prompt"),
        ((*WITH_DRAFTER, "--prompt-id", "prompts/none"), "there is no prompt 'prompts/none'; there are prompts/"),
        ((*WITH_DRAFTER, "--eagle", "head"), "not both"),
        (("--prompts", POCKET / "prompts.jsonl"), "name the drafter"),
        ((*WITH_DRAFTER, "--tree", "wide"), "total_tokens/depth/top_k"),
        ((*WITH_DRAFTER, "--temperature", -1), "temperature"),
        ((*WITH_DRAFTER, "--max-new-tokens", 2), "--max-new-tokens must be a whole number of at least 3"),
        ((*WITH_DRAFTER, "--timeline", "round.svg"), "name a .json file, not round.svg"),
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
