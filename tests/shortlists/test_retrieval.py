"""EvoSpec's dynamic vocabulary: what is retrieved when, where it is kept, and the thread that does it."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from calls import assert_same, generate
from models import VOCABULARY, successor_graph

from hf_dynspec import ConfigurationError, DynSpecAssistant, RetrievalShortlist, UnsupportedError, devices
from hf_dynspec.kernels.cpu_waiting import wait_for_change
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.protocol import BackgroundWork, HeadRows, JoinedShortlist, Prompt, Shortlist, Verdict, VocabularyInfo
from hf_dynspec.shortlists import ScreenFactor
from hf_dynspec.shortlists.retrieval import index as index_module
from hf_dynspec.shortlists.retrieval import worker as worker_module
from hf_dynspec.shortlists.retrieval.cache import CACHES
from hf_dynspec.shortlists.retrieval.index import IndexSettings, SemanticIndex
from hf_dynspec.shortlists.retrieval.neighbours import TokenNeighbours
from hf_dynspec.shortlists.retrieval.retriever import RetrievalEvent, Retriever
from hf_dynspec.shortlists.retrieval.worker import Worker
from hf_dynspec.shortlists.screen.factor import usual_rank

EOS = (2, 77)
CORE, CANDIDATES = 40, 4
IDS, HIDDEN = torch.arange(VOCABULARY), torch.zeros(1, 16)
needs_hnswlib = pytest.mark.skipif(not find_spec("hnswlib"), reason="hnswlib is not installed")


def rows_of_head(width: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(seed))


def vocabulary(rows: torch.Tensor | None = None) -> VocabularyInfo:
    rows = None if rows is None else HeadRows(rows)
    return VocabularyInfo(VOCABULARY, EOS, torch.device("cpu"), target_rows=rows)


def policy(**settings) -> RetrievalShortlist:
    return RetrievalShortlist(**{"size": CORE, "dynamic": 16, "displaceable": 0, "synchronous": True, **settings})


def verdict(verified: list[int], missed: list[int] = (), top_ids: list[list[int]] | None = None, states=None):
    return Verdict(
        torch.empty(0, dtype=torch.int64),
        torch.tensor(verified),
        start=5,
        out_of_vocabulary=torch.tensor([one in missed for one in verified]),
        top_ids=None if top_ids is None else torch.tensor(top_ids),
        hidden_states=states,
    )


def select(state, hidden: torch.Tensor = HIDDEN) -> Shortlist | JoinedShortlist:
    """The first shortlist of a round."""
    state.begin_round()
    return state.select(0, torch.tensor([0]), hidden)


def held(state) -> set[int]:
    """What the cache has beside the core."""
    ids = select(state).ids().tolist()
    assert len(set(ids)) == len(ids) and set(EOS) <= set(ids)
    return set(ids) - core_of()


def core_of() -> set[int]:
    return set(policy().core_ids(vocabulary()).tolist())


# What is retrieved -----------------------------------------------------------------------------------------------


def test_every_position_brings_the_targets_likeliest_tokens_that_the_core_does_not_hold():
    state = policy(likely=3).start(vocabulary())
    assert held(state) == set()
    state.observe(verdict([90, 91], top_ids=[[90, 100, 5], [91, 101, VOCABULARY + 7]]))
    assert held(state) == {90, 91, 100, 101}


def test_the_paper_retrieves_where_a_token_was_out_of_the_shortlist():
    state = policy(likely=2, trigger="oov").start(vocabulary())
    state.observe(verdict([90, 91], missed=[91], top_ids=[[90, 100], [91, 101]]))
    assert held(state) == {91, 101}
    state.observe(verdict([90], top_ids=[[90, 100]]))
    assert held(state) == {91, 101}


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_what_triggers_nothing_wakes_nobody_and_counts_all_the_same(cache):
    """That a token is of use, and that steps go by, decides what stays, in whichever order it is heard of."""
    state, told = (policy(likely=3, trigger="oov", cache=cache, dynamic=12).start(vocabulary()) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for turn in range(300):
        is_triggering = turn % 5 == 4
        verified, *top_ids = torch.randint(0, VOCABULARY, (4, 3), generator=generator).tolist()
        shown = verdict(verified, verified[:1] if is_triggering else (), top_ids)
        state.observe(shown)
        told._give(RetrievalEvent(shown.verified, shown.out_of_vocabulary, shown.top_ids, is_verified=True))
        if turn % 40 == 7:
            for one in (state, told):
                one.observe_prompt(Prompt(torch.tensor(verified), start=8))
        if is_triggering:
            assert held(state) == held(told)
    prompts = 8
    assert state.take_background_work().jobs == 60 + prompts
    assert told.take_background_work().jobs == 300 + prompts


def test_what_triggers_nothing_is_told_from_time_to_time():
    state = policy(trigger="oov").start(vocabulary())
    for _ in range(650):
        state.observe(verdict([90]))
    assert held(state) == set() and state.take_background_work().jobs == 10


@pytest.fixture
def index_folder(tmp_path, monkeypatch) -> None:
    """Where indexes are kept."""
    monkeypatch.setattr(index_module, "_default_folder", lambda: tmp_path)


@pytest.mark.parametrize("semantic", ["token", pytest.param("index", marks=needs_hnswlib)])
def test_neighbours_are_those_of_the_token_itself_or_of_the_targets_hidden_state(semantic, index_folder):
    rows, states = rows_of_head(), torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
    state = policy(semantic=semantic, trigger="oov", likely=0, neighbours=4).start(vocabulary(rows))
    state.observe(verdict([90, 91], missed=[91], states=states if semantic == "index" else None))
    products = states[1] @ rows.T if semantic == "index" else (rows[91] @ rows.T).index_fill(0, IDS[91], -torch.inf)
    assert held(state) == {91, *products.topk(4).indices.tolist()} - core_of()


def test_what_was_not_said_to_be_likely_is_worth_what_the_least_likely_is():
    state = policy(semantic="token", neighbours=4, likely=3, dynamic=2).start(vocabulary(rows_of_head()))
    shown = verdict([90], top_ids=[[100, 101, 102]])
    state.observe(replace(shown, top_logits=torch.tensor([[3.0, 2.0, 1.0]])))
    assert held(state) == {100, 101}


def test_to_read_a_prompt_is_no_decoding_step():
    """What came in a step ago stays, however many tokens are read in between."""
    state = policy(cache="arc", likely=1, dynamic=2).start(vocabulary())
    state.observe(verdict([90], top_ids=[[100]]))
    state.observe_prompt(Prompt(torch.tensor(20 * [min(core_of())]), start=6))
    state.observe(verdict([110], top_ids=[[111]]))
    assert held(state) == {90, 100}


def test_a_prompt_fills_the_cache_unless_none_of_it_is_wanted():
    text = Prompt(torch.tensor([90, 3, 91]), start=0)
    state = policy(likely=2).start(vocabulary())
    state.observe_prompt(text)
    state.observe_prompt(Prompt(torch.empty(0, dtype=torch.int64), 3, torch.tensor([[100, 4], [101, 102]])))
    assert held(state) == {90, 91, 100, 101, 102}
    state = policy(prompt_positions=0).start(vocabulary())
    state.observe_prompt(text)
    assert held(state) == set()


def test_slots_keep_their_place_and_say_what_was_replaced():
    state = policy(likely=6, dynamic=8).start(vocabulary())
    generator = torch.Generator().manual_seed(0)
    before = select(state)
    for _ in range(60):
        top_ids = torch.randint(0, VOCABULARY, (3, 6), generator=generator)
        state.observe(verdict(top_ids[:, 0].tolist(), top_ids=top_ids.tolist()))
        after = select(state)
        if after.version != before.version:
            assert after.version == before.version + 1
            changed = (after.slots != before.slots).nonzero().squeeze(1)
            assert set(changed.tolist()) <= set(after.replaced.tolist())
        held(state)
        before = after


@pytest.mark.parametrize("is_screened", [False, True])
def test_a_new_text_begins_with_the_core_and_a_version_of_its_own(is_screened):
    known = with_drafter(rows_of_head()) if is_screened else vocabulary()
    state = policy(likely=2, candidates=CANDIDATES if is_screened else None).start(known)
    for token in (290, 110):
        state.observe(verdict([token], top_ids=[[token + 1, token + 2]]))
        before = select(state)
        assert set(before.ids().tolist()) - core_of() == {token, token + 1, token + 2}
        state.restart()
        after = select(state)
        assert after.version > before.version and set(after.ids().tolist()) <= core_of()


@pytest.mark.parametrize("cache", CACHES)
def test_retrieved_tokens_displace_the_rarest_of_the_core_where_there_are_more_than_places(cache):
    state = policy(likely=2, dynamic=3, displaceable=5, cache=cache).start(vocabulary())
    core = policy().core_ids(vocabulary()).tolist()

    def on_shortlist() -> set[int]:
        ids = select(state).ids().tolist()
        assert len(set(ids)) == len(ids) <= CORE + 3
        return set(ids)

    assert on_shortlist() == set(core)
    # One that may be displaced is no other token where it is retrieved, and stays for longer than those before it.
    state.observe(verdict([core[-1]], top_ids=[[90, 91]]))
    assert on_shortlist() == {*core, 90, 91}
    state.observe(verdict([92], top_ids=[[93, 94]]))
    assert on_shortlist() == {*core, 90, 91, 92, 93, 94} - set(core[-3:-1])
    for first in range(100, 130, 3):
        state.observe(verdict([first], top_ids=[[first + 1, first + 2]]))
    assert set(core[:-5]) <= on_shortlist() and len(on_shortlist()) == CORE + 3
    version = select(state).version
    state.restart()
    assert on_shortlist() == set(core) and select(state).version > version


def test_the_eos_ids_are_always_there():
    assert set(select(policy(size=0, likely=1).start(vocabulary())).ids().tolist()) == set(EOS)
    state = policy(size=4, dynamic=1, displaceable=100, likely=1).start(vocabulary())
    for token_id in range(100, 140):
        state.observe(verdict([token_id], top_ids=[[token_id + 50]]))
    assert len(held(state)) == 3


@pytest.mark.parametrize(
    "settings", [{"semantic": "magic"}, {"trigger": "never"}, {"cache": "fifo"}, {"dynamic": 0}, {"likely": 2000}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        policy(**settings)


def test_the_papers_setting():
    ways = {"semantic": "index", "trigger": "oov", "cache": "arc", "candidates": None, "synchronous": False}
    counts = {"size": 32000, "dynamic": 256, "likely": 10, "neighbours": 10, "successors": 8, "displaceable": 0}
    assert RetrievalShortlist.paper().settings() == {**ways, **counts, "prompt_positions": 0}


# The core that is screened ---------------------------------------------------------------------------------------


def screened(**settings) -> RetrievalShortlist:
    return policy(**{"candidates": CANDIDATES, "likely": 2, "displaceable": 5, **settings})


def with_drafter(rows: torch.Tensor, token_ids: torch.Tensor | None = None) -> VocabularyInfo:
    """A vocabulary whose drafter's head has these rows."""
    head = HeadRows(rows, token_ids=token_ids)
    return VocabularyInfo(VOCABULARY, EOS, torch.device("cpu"), token_ids, rows.shape[1], drafter_rows=head)


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["whole head", "head of its own tokens"])
def test_of_a_large_core_the_best_for_the_step_are_scored_and_all_that_was_retrieved(is_trimmed):
    rows, token_ids = rows_of_head(32), None
    if is_trimmed:
        token_ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[:200]
        token_ids = torch.cat([token_ids[~torch.isin(token_ids, torch.tensor(EOS))], torch.tensor(EOS)])
        rows = rows[token_ids]
    known = with_drafter(rows, token_ids)
    state, core = screened().start(known), policy().core_ids(known)
    kept, displaceable = core[len(EOS) : -5], set(core[-5:].tolist())
    likely = [one for one in reversed(range(VOCABULARY)) if known.can_draft(torch.tensor(one)) and one not in core]
    state.observe(verdict(likely[:1], top_ids=[likely[1:3]]))
    head = DynamicLMHead(rows, token_ids=token_ids)
    # Of twice the rank that a factor of a whole head has.
    rough = ScreenFactor.of_head(rows[head.rows_of(kept)], usual_rank(2 * 32))
    packed = PackedRows()
    for hidden in torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(3)):
        shortlist = select(state, hidden)
        rest = {*EOS, *displaceable, *likely[:3]}
        assert set(shortlist.rest.ids().tolist()) == rest
        chosen = shortlist.chosen.ids()
        estimates = rough.rows.float() @ (rough.projection @ hidden[0]) + rough.residuals * hidden.square().sum()
        best = kept[estimates.topk(CANDIDATES).indices].tolist()
        # The factor is read in 8 bits, by which few may change places.
        assert len(set(chosen.tolist()) & set(best)) >= CANDIDATES - 1
        assert set(chosen.tolist()) <= set(kept.tolist()) and shortlist.count == CANDIDATES + len(rest)
        scores = head.scores(hidden, shortlist, packed)
        torch.testing.assert_close(scores, (hidden @ rows.T)[:, head.rows_of(shortlist.slots)])


def test_a_core_is_screened_where_that_leaves_out_most_of_it_and_the_drafters_rows_are_known():
    known = with_drafter(rows_of_head())
    assert isinstance(select(screened().start(known), torch.ones(1, 16)), JoinedShortlist)
    for settings in ({"candidates": 5}, {"candidates": None}, {"size": 0}):
        assert type(select(screened(**settings).start(known), torch.ones(1, 16))) is Shortlist
    assert type(select(screened().start(vocabulary()), torch.ones(1, 16))) is Shortlist
    elsewhere = replace(known, device=torch.device("meta"))
    assert screened().core_screen(elsewhere, torch.arange(CORE)) is None


def test_sessions_share_the_factor_of_a_core_until_the_heads_weights_change(monkeypatch):
    made, of_head = [], ScreenFactor.of_head
    monkeypatch.setattr(ScreenFactor, "of_head", lambda *one: made.append(one) or of_head(*one))
    shared, known, hidden = screened(), with_drafter(rows_of_head()), torch.ones(1, 16)
    states = [shared.start(known) for _ in range(2)]
    assert len(made) == 1
    before, changed = select(states[0], hidden), with_drafter(rows_of_head(seed=4))
    states[0].follow_weights(changed)
    after = select(states[0], hidden)
    assert len(made) == 2 and after.version > before.version
    fresh = select(screened().start(changed), hidden)
    assert torch.equal(after.ids(), fresh.ids()) and not torch.equal(after.ids(), before.ids())
    # Tokens that end a text elsewhere leave another core to choose from.
    made.clear()
    other = replace(changed, eos_token_ids=(5,))
    assert 5 in select(shared.start(other), hidden).rest.ids() and len(made) == 1


def test_what_a_step_did_not_choose_of_the_core_is_no_reason_to_retrieve():
    known = with_drafter(rows_of_head())
    state, core = screened(trigger="oov", likely=1).start(known), policy().core_ids(known).tolist()
    select(state, torch.ones(1, 16))
    state.observe(verdict([core[9], 290, VOCABULARY + 3], missed=[core[9], 290], top_ids=[[200], [201], [202]]))
    ids = select(state, torch.ones(1, 16)).rest.ids().tolist()
    assert {290, 201} <= set(ids) and not {200, 202} & set(ids)


def test_whoever_learns_from_a_request_knows_that_all_of_the_core_could_be_drafted():
    known = with_drafter(rows_of_head())
    state, core = screened().start(known), policy().core_ids(known).tolist()
    state.observe(verdict([290], top_ids=[[291, 292]]))
    reachable = select(state, torch.ones(1, 16)).reachable_ids().tolist()
    assert sorted(reachable) == sorted([*core, 290, 291, 292])


def test_a_head_with_numbers_that_are_not_finite_is_not_screened_and_keeps_its_screen():
    rows = rows_of_head()
    state = screened().start(with_drafter(rows))
    before = select(state, torch.ones(1, 16))
    broken = rows.clone()
    broken[policy().core_ids(vocabulary())[9]] = torch.nan
    assert type(select(screened().start(with_drafter(broken)), torch.ones(1, 16))) is Shortlist
    state.follow_weights(with_drafter(broken))
    assert torch.equal(select(state, torch.ones(1, 16)).ids(), before.ids())


def test_what_was_stored_before_cores_were_screened_scores_all_of_its_core():
    stored = screened().settings()
    del stored["candidates"]
    assert RetrievalShortlist.from_settings(stored, {}).candidates is None
    assert RetrievalShortlist.from_settings(screened().settings(), {}).candidates == CANDIDATES


# The index -------------------------------------------------------------------------------------------------------


@needs_hnswlib
def test_an_index_is_built_once_and_found_again(tmp_path):
    rows, reports = rows_of_head(), []
    made = SemanticIndex.of_head(rows, report=lambda done, of: reports.append((done, of)), folder=tmp_path)
    assert reports[-1] == (VOCABULARY, VOCABULARY) and made.recall > 0.9
    # Whoever asks for it while it is open gets the same one, and later what was kept of it.
    assert SemanticIndex.of_head(rows.clone(), folder=tmp_path) is made
    queries = rows_of_head(seed=9)[:20]
    recall, found = made.recall, made.search(queries, 5)
    del made
    again = SemanticIndex.of_head(rows.clone(), report=lambda *_: pytest.fail("it was built again"), folder=tmp_path)
    assert again.recall == recall and torch.equal(again.search(queries, 5), found)
    # Other weights and other settings are other indexes.
    SemanticIndex.of_head(rows * 2, folder=tmp_path)
    SemanticIndex.of_head(rows, IndexSettings(links=16), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@needs_hnswlib
def test_norm_augmentation_finds_the_largest_products():
    rows = rows_of_head() * torch.linspace(0.1, 3, VOCABULARY).unsqueeze(1)
    queries = rows_of_head(seed=5)[:50]
    found = SemanticIndex.build(rows).search(queries, 10)
    exact = (queries @ rows.T).topk(10).indices
    assert (found.unsqueeze(1) == exact.unsqueeze(2)).any(2).float().mean() > 0.9


@needs_hnswlib
def test_a_damaged_index_is_built_again(tmp_path):
    rows = rows_of_head()
    SemanticIndex.of_head(rows, folder=tmp_path)
    (folder,) = tmp_path.iterdir()
    data = (folder / "index.bin").read_bytes()
    (folder / "index.bin").write_bytes(data[: len(data) // 2])
    reports = []
    made = SemanticIndex.of_head(rows, report=lambda *one: reports.append(one), folder=tmp_path)
    assert reports and made.recall > 0.9
    assert (folder / "index.bin").read_bytes() == data


def test_without_hnswlib_the_exact_ways_work(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hnswlib", None)
    with pytest.raises(UnsupportedError, match=r"hf-dynspec\[retrieval\]"):
        policy(semantic="index").start(vocabulary(rows_of_head()))
    state = policy(semantic="token").start(vocabulary(rows_of_head()))
    state.observe(verdict([90], top_ids=[[100] * 50]))
    assert {90, 100} <= held(state)


@needs_hnswlib
def test_an_index_is_opened_once_for_all_sessions(index_folder, monkeypatch):
    rows = rows_of_head()
    policy(semantic="index").start(vocabulary(rows)).close()
    read = []
    monkeypatch.setattr(SemanticIndex, "_read", lambda *one: read.append(one))
    for one in [policy(semantic="index"), policy(semantic="index", dynamic=8)] * 2:
        one.start(vocabulary(rows)).close()
    assert len(read) == 1


@needs_hnswlib
def test_another_head_at_the_same_address_has_an_index_of_its_own(index_folder):
    """As that of a target that was loaded where one lay that is gone."""
    shared, memory = policy(semantic="index"), rows_of_head().numpy()
    first = shared.semantic_of(torch.from_numpy(memory), VOCABULARY)
    memory[:] = rows_of_head(seed=1).numpy()
    second = torch.from_numpy(memory)
    queries = rows_of_head(seed=9)[:20]
    found = shared.semantic_of(second, VOCABULARY)
    assert found is not first and shared.semantic_of(second, VOCABULARY) is found
    assert torch.equal(found.search(queries, 1)[:, 0], (queries @ second.T).argmax(1))


def test_neighbours_are_exact_and_computed_once():
    rows = rows_of_head()
    neighbours = TokenNeighbours(rows, 7)
    asked = torch.tensor([3, 99, 3])
    products = (rows @ rows.T).fill_diagonal_(-torch.inf)
    assert torch.equal(neighbours.of(asked), products.topk(7).indices[asked])
    rows.zero_()
    assert torch.equal(neighbours.of(asked[:1]), products.topk(7).indices[asked[:1]])


# The thread ------------------------------------------------------------------------------------------------------


# Seconds until something is taken to hang: many, as other work on the machine may hold it up.
PATIENCE = 120


def threads() -> int:
    return sum("hf_dynspec retrieval" in one.name for one in threading.enumerate())


def run_script(script: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which has to end well."""
    paths = [Path(__file__).parents[1], Path(__file__).parents[2]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **(variables or {})}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert holds()


@pytest.fixture(params=[False, True], ids=["woken", "looking"])
def looks(request) -> bool:
    return request.param


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_slow_answer_delays_no_round(looks, has_compiler, monkeypatch):
    """Without a compiler no thread can look for jobs, and it is woken."""
    if not has_compiler:
        monkeypatch.setattr(worker_module, "wait_for_change", lambda: None)
    worker, release, taken = Worker(is_synchronous=False, polls=looks), threading.Event(), []
    worker.give(lambda: release.wait(PATIENCE) and "late")
    worker.give(lambda: "next")
    # Whoever waited for it would find it.
    assert worker.take() == []
    release.set()
    wait_until(lambda: taken.extend(worker.take()) or len(taken) == 2)
    assert taken == ["late", "next"]
    worker.close()
    assert threads() == 0


def test_what_a_job_raises_is_raised_when_it_is_taken(looks):
    worker = Worker(is_synchronous=False, polls=looks)
    worker.give(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        while True:
            worker.take()
    worker.close()


def test_a_worker_that_is_closed_by_its_own_thread_ends(looks):
    worker = Worker(is_synchronous=False, polls=looks)
    worker.give(worker.close)
    wait_until(lambda: threads() == 0)


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_nobody_waits_for_jobs_of_a_worker_that_was_closed(is_synchronous, looks):
    worker, has_begun, release = Worker(is_synchronous, looks), threading.Event(), threading.Event()
    if not is_synchronous:
        worker.give(lambda: has_begun.set() or (release.wait(PATIENCE) and "begun"))
        worker.give(lambda: "not begun")
        assert has_begun.wait(PATIENCE)
        _, _, (_, _, is_ending), _ = worker._ending.peek()
        threading.Thread(target=lambda: is_ending.wait(PATIENCE) and release.set(), daemon=True).start()
    worker.close()
    worker.give(lambda: "too late")
    worker.wait()
    assert worker.take() == ([] if is_synchronous else ["begun"])
    finishing = threading.Thread(target=worker.finish, daemon=True)
    finishing.start()
    finishing.join(PATIENCE)
    assert not finishing.is_alive() and worker.take_work().late_rounds == 0


def multiply_for(seconds: float) -> None:
    """Be busy, with the interpreter free for others."""
    matrix, end = torch.randn(300, 300), time.thread_time() + seconds
    while time.thread_time() < end:
        matrix @ matrix


def test_time_that_the_generating_thread_does_not_spend_is_hidden(monkeypatch, looks):
    # What holds up the machine is no time of this thread.
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    hidden, exposed, release = (
        Worker(is_synchronous=False, polls=looks),
        Worker(is_synchronous=True),
        threading.Event(),
    )
    hidden.give(lambda: release.wait(PATIENCE) and multiply_for(0.2))
    assert hidden.take() == []
    release.set()
    wait_until(lambda: not hidden._done.empty())
    assert hidden.take() == [None]
    work = hidden.take_work()
    assert work.jobs == 1 and work.seconds >= 0.2 and work.exposed_seconds < 0.1 and work.hidden_share > 0.5
    assert work.late_rounds >= 1
    exposed.give(lambda: multiply_for(0.2))
    assert exposed.take() == [None]
    work = exposed.take_work()
    assert work.jobs == 1 and work.exposed_seconds >= work.seconds >= 0.2
    assert work.hidden_share == 0 and work.late_rounds == 0
    # What was told is not told again.
    assert hidden.take_work() == exposed.take_work() == BackgroundWork()
    hidden.close()


def test_waiting_for_the_thread_is_not_hidden(monkeypatch, looks):
    worker, is_waited_for, now = Worker(is_synchronous=False, polls=looks), threading.Event(), [0.0]

    def take_long() -> None:
        assert is_waited_for.wait(PATIENCE)
        now[0] += 10.0

    def read() -> float:
        said = now[0]
        is_waited_for.set()
        return said

    worker.give(take_long)
    monkeypatch.setattr(time, "perf_counter", read)
    worker.finish()
    work = worker.take_work()
    assert work.jobs == 1 and work.exposed_seconds >= 10.0 and work.late_rounds == 0
    worker.close()


@pytest.fixture
def waits(monkeypatch, compiled_kernels) -> list[int]:
    """A thread that looks for jobs gives up soon. Tells how often it has."""
    given_up, wait = [], wait_for_change()
    assert wait is not None

    def give_up_soon(number, seen, pause, most_looks):
        has_changed = wait(number, seen, pause, most_looks)
        if not has_changed:
            given_up.append(most_looks)
        return has_changed

    monkeypatch.setattr(worker_module, "_MOST_POLLS", 20)
    monkeypatch.setattr(worker_module, "wait_for_change", lambda: give_up_soon)
    return given_up


def test_a_thread_that_looks_for_jobs_sleeps_after_a_while_and_is_woken(waits):
    worker, taken = Worker(is_synchronous=False, polls=True), []
    for place in range(5):
        slept = len(waits)
        worker.give(lambda place=place: place)
        wait_until(lambda place=place: taken.extend(worker.take()) or taken == list(range(place + 1)))
        wait_until(lambda slept=slept: len(waits) > slept and worker._given._sleeps)
    worker.close()
    assert threads() == 0


def test_no_job_is_lost_whether_the_thread_looks_or_sleeps(waits, monkeypatch):
    """Where it falls asleep as jobs come."""
    monkeypatch.setattr(worker_module, "_MOST_POLLS", 2)
    worker, taken = Worker(is_synchronous=False, polls=True), []
    for place in range(400):
        worker.give(lambda place=place: place)
        time.sleep(0.0001 * (place % 13))
        if place % 3 == 0:
            wait_until(lambda place=place: taken.extend(worker.take()) or len(taken) == place + 1)
    wait_until(lambda: taken.extend(worker.take()) or len(taken) == 400)
    assert taken == list(range(400)) and waits
    worker.close()
    assert threads() == 0


def test_waiting_for_a_change_lets_others_run_and_ends_with_it(compiled_kernels):
    wait, number, has_begun = wait_for_change(), ctypes.c_int64(7), threading.Event()

    def change() -> None:
        has_begun.wait(PATIENCE)
        number.value = 8

    other = threading.Thread(target=change, daemon=True)
    other.start()
    assert not wait(number, 7, 1_000_000, 10)
    has_begun.set()
    assert wait(number, 7, 1_000_000, 1000 * PATIENCE)
    assert wait(number, 7, 1_000_000, 0)
    other.join()


@pytest.mark.parametrize(("threads_of_torch", "leaves"), [(1, True), (2, False), (3, False)])
def test_jobs_are_looked_for_where_a_core_is_idle(threads_of_torch, leaves, monkeypatch, compiled_kernels):
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)
    state = policy(synchronous=False).start(vocabulary())
    assert isinstance(state._worker._given, worker_module._PolledQueue) == leaves
    state.close()


def test_what_is_retrieved_while_the_drafter_reads_is_used_in_the_same_round():
    state = policy(likely=1, synchronous=False).start(vocabulary())
    state.observe(verdict([90], top_ids=[[100]]))
    state.begin_round()
    wait_until(lambda: not state._worker._done.empty())
    asked = (torch.tensor([0]), torch.zeros(1, 16))
    assert {90, 100} <= set(state.select(0, *asked).ids().tolist())
    # Within a round nothing changes any more.
    state.observe(verdict([110], top_ids=[[111]]))
    state._worker.finish()
    assert not {110, 111} & set(state.select(1, *asked).ids().tolist())
    state.close()


def test_an_error_in_the_thread_ends_the_call_and_leaves_no_thread(target, drafter, monkeypatch):
    assistant = DynSpecAssistant(drafter, policy(synchronous=False, prompt_positions=4), target=target)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Retriever, "retrieve", lambda self, event, passed: 1 / 0)
        generate(target, assistant, max_new_tokens=64)
    assert threads() == 0
    assert_same(target, assistant)
    assistant.unbind()
    assert threads() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the threads of a process as Linux tells them")
def test_operations_in_the_thread_bring_no_threads_of_their_own():
    """They and those of the thread that generates would be more than cores, and OpenMP then lets all of them sleep."""
    script = """
import os
import torch
from hf_dynspec.shortlists.retrieval.worker import Worker
torch.set_num_threads(2)
numbers = torch.randn(2000, 2000)

def operate():
    [numbers + 1, numbers.exp(), numbers @ numbers, numbers[torch.arange(500)], numbers.softmax(-1)]
    return threads()

def threads():
    return len(os.listdir("/proc/self/task"))

operate()
before, worker = threads(), Worker(is_synchronous=False)
worker.give(operate)
worker.wait()
print(before, *worker.take(), torch.get_num_threads())
"""
    done = run_script(script, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"})
    before, within, threads_of_torch = map(int, done.stdout.split())
    assert within == before + 1 and threads_of_torch == 2


def test_a_process_with_a_live_session_exits():
    script = """
import torch
from models import perturbed, prompt, tiny
from hf_dynspec import DynSpecAssistant, Prompt, RetrievalShortlist
target = tiny()
policy = RetrievalShortlist(size=40, dynamic=16)
assistant = DynSpecAssistant(perturbed(target), policy, target=target)
conversation = assistant.conversation()
for one in (assistant, conversation):
    target.generate(prompt(), assistant_model=one, max_new_tokens=8)
state = policy.start(assistant.take_session((2,)).vocabulary)
state.observe_prompt(Prompt(torch.arange(9), 0))
"""
    run_script(script)


def test_successors_are_looked_up_once_for_all_sessions_and_anew_for_other_settings():
    one = policy(graph=successor_graph(), successors=2)
    wanted = torch.ones(VOCABULARY + 1, dtype=torch.bool)
    made = one.successors_among(wanted)
    assert one.successors_among(wanted.clone()) is made
    asked = torch.tensor([3]).numpy()
    assert made.of(asked)[1].tolist() == [2]
    one.successors = 1
    assert one.successors_among(wanted).of(asked)[1].tolist() == [1]
    assert one.successors_among(~wanted).of(asked)[1].tolist() == [0]
    one.graph = None
    assert one.successors_among(wanted) is None


def test_synchronous_runs_are_the_same(target, drafter):
    runs = []
    for _ in range(2):
        assistant = DynSpecAssistant(drafter, policy(likely=5), target=target)
        for _ in range(2):
            torch.manual_seed(0)
            output = generate(target, assistant, max_new_tokens=40, do_sample=True)
            runs.append((output.tolist(), {**assistant.stats.to_dict(), "background_work": None}))
        assistant.unbind()
    assert all(run == runs[0] for run in runs)


def test_sessions_leave_no_threads():
    def begun():
        state = policy(likely=1, synchronous=False).start(vocabulary())
        state.observe(verdict([90], top_ids=[[100]]))
        return state

    for _ in range(200):
        begun().close()
    assert threads() == 0
    state = begun()
    assert threads() == 1
    del state
    gc.collect()
    wait_until(lambda: threads() == 0)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("semantic", ["logits", "token"])
def test_generation_is_the_targets_own_and_leaves_no_thread(semantic, tree, synchronous, target, drafter):
    own = policy(semantic=semantic, synchronous=synchronous, prompt_positions=4)
    assistant = DynSpecAssistant(drafter, own, target=target, tree=tree, validate=True)
    for _ in range(2):
        assert_same(target, assistant)
    assistant.unbind()
    assert threads() == 0
