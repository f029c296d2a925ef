"""What breaks a contract is named, what a policy asks for it gets, and what it holds is ended."""

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_heads import agreeing_head, drafter_of, soft, trimmed_head
from models import VOCABULARY, perturbed, prompt
from transformers import PreTrainedModel

import hf_dynspec
from hf_dynspec import (
    ConfigurationError,
    DynSpecAssistant,
    FrequencyShortlist,
    InContextShortlist,
    Needs,
    PolicyError,
    Prompt,
    Shortlist,
    ShortlistPolicy,
    ShortlistState,
    TreeConfig,
    UnionShortlist,
    Verdict,
    VocabularyInfo,
)
from hf_dynspec.drafting import processors
from hf_dynspec.generation import feedback, verification
from hf_dynspec.kernels import best_ids, top_k_ids
from hf_dynspec.shortlists.forwarding import ForwardingState
from hf_dynspec.testing import check_policy

SHAPES = {"chain": False, "tree": TreeConfig(12, 2, 4)}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return soft()


def generate(target, assistant=None, seed=3, length=12, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 20, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(length, seed=seed), **named | arguments)


def watched(drafter, target, needs: Needs | None = None, **arguments) -> "tuple[Watching, DynSpecAssistant]":
    policy = Watching()
    policy.needs = policy.needs if needs is None else needs
    return policy, DynSpecAssistant(drafter, policy, target=target, **arguments)


# Broken contracts ----------------------------------------------------------------------------------------------------

# What a state selects at its n-th draft step, given the vocabulary and 40 ids that would do.
Select = Callable[[int, VocabularyInfo, torch.Tensor], Shortlist]


class Broken(ShortlistPolicy):
    """Selects whatever it was made with."""

    name = "broken"

    def __init__(self, select: Select):
        self.select = select

    def start(self, vocabulary: VocabularyInfo) -> "BrokenState":
        return BrokenState(self.select, vocabulary)


class BrokenState(ShortlistState):
    def __init__(self, select: Select, vocabulary: VocabularyInfo):
        self._select, self._vocabulary, self._steps = select, vocabulary, 0
        eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64)
        ids = torch.arange(vocabulary.size) if vocabulary.draftable is None else vocabulary.draftable.clone()
        self._good = torch.cat([eos, ids[~torch.isin(ids, eos)]])[:40]

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        self._steps += 1
        return self._select(self._steps, self._vocabulary, self._good)


def changed(ids: torch.Tensor, place: int, value: int) -> torch.Tensor:
    ids = ids.clone()
    ids[place] = value
    return ids


def rotated_in_place(ids: torch.Tensor) -> torch.Tensor:
    return ids.copy_(ids.roll(1))


# By what the message says.
BROKEN: dict[str, Select] = {
    "is in 2 of the scored, occupied slots": lambda n, info, ids: Shortlist(torch.cat([ids, ids[5:6]]), 0),
    f"the id {VOCABULARY}, and ids lie from 0 to": lambda n, info, ids: Shortlist(changed(ids, 9, info.size), 0),
    "the id -1, and ids lie from 0 to": lambda n, info, ids: Shortlist(changed(ids, 9, -1), 0),
    "end-of-sequence id 2 is not on": lambda n, info, ids: Shortlist(ids[ids != 2], 0),
    "the slots changed and the version did not": lambda n, info, ids: Shortlist(ids.roll(n), 3),
    "the version did not, it is still 4": lambda n, info, ids: Shortlist(rotated_in_place(ids), 4),
    "the version went back from 9 to 8": lambda n, info, ids: Shortlist(ids, 10 - n),
    "slot 6 changed, and `replaced` does not name it": lambda n, info, ids: Shortlist(
        changed(ids, 6, 100 + n), n, replaced=torch.tensor([7])
    ),
    "there are 41 slots where there were 40": lambda n, info, ids: Shortlist(
        torch.cat([ids, torch.arange(100, 99 + n)]), n, replaced=torch.tensor([7])
    ),
    "names slots outside of 0 to 39": lambda n, info, ids: Shortlist(ids, n, replaced=torch.tensor([40])),
    "`slots` is torch.int32": lambda n, info, ids: Shortlist(ids.int(), 0),
    r"`slots` is torch.int64\[1, 40\]": lambda n, info, ids: Shortlist(ids[None], 0),
    "`slots` is list": lambda n, info, ids: Shortlist(ids.tolist(), 0),
    "on meta": lambda n, info, ids: Shortlist(ids.to("meta"), 0),
    "`occupied` is torch.int64": lambda n, info, ids: Shortlist(ids, 0, occupied=torch.ones_like(ids)),
    "`occupied` has 39 entries": lambda n, info, ids: Shortlist(ids, 0, occupied=torch.ones(39).bool()),
    "`replaced` is torch.bool": lambda n, info, ids: Shortlist(ids, 0, replaced=ids > 5),
    "`is_prefix` says that slot i is row i": lambda n, info, ids: Shortlist(ids, 0, is_prefix=True),
    "0 of 40 slots are to be scored": lambda n, info, ids: Shortlist(ids, 0, size=0),
    "41 of 40 slots": lambda n, info, ids: Shortlist(ids, 0, size=41),
    "`select` returned Tensor": lambda n, info, ids: ids,
    "the version is float": lambda n, info, ids: Shortlist(ids, 1.0),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_broken_shortlist_is_named_where_it_breaks(says, target, drafter):
    policy = Broken(BROKEN[says])
    assistant = DynSpecAssistant(drafter, policy, target=target, validate=True)
    with pytest.raises(PolicyError, match=says) as caught:
        generate(target, assistant)
    # What compares versions sees it when the second one comes.
    compares = any(word in says for word in ("version did", "went back", "does not name", "where there were"))
    assert caught.value.policy == "Broken" and caught.value.depth == int(compares)
    assert f"draft step {caught.value.depth}" in str(caught.value)
    with pytest.raises(PolicyError, match=says):
        check_policy(policy)


@pytest.mark.parametrize("tree", SHAPES.values(), ids=SHAPES)
def test_a_broken_part_of_a_union_is_named(tree, target, drafter):
    """In the union itself repeats are gone."""
    broken = Broken(next(iter(BROKEN.values())))
    for union in (UnionShortlist(FrequencyShortlist(size=9), broken), UnionShortlist(UnionShortlist(broken), broken)):
        assistant = DynSpecAssistant(drafter, union, target=target, tree=tree, validate=True)
        with pytest.raises(PolicyError, match="Broken, at draft step 0: the id"):
            generate(target, assistant)


def test_ids_that_the_head_has_no_row_for_are_named(target):
    head = drafter_of(trimmed_head("eagle3", target), target)
    outside = int((~torch.isin(torch.arange(VOCABULARY), head.head.token_ids)).nonzero()[0])
    policy = Broken(lambda n, info, ids: Shortlist(changed(ids, 9, outside), 0))
    assistant = DynSpecAssistant(head, policy, target=target, validate=True)
    with pytest.raises(PolicyError, match=f"the id {outside}, which the drafter's head has no row for"):
        generate(target, assistant)


def test_what_looks_at_a_state_from_outside_passes_on_all_that_it_is_told():
    told = {name for name in vars(ShortlistState) if not name.startswith("_")}
    told -= {"layout", "carried", "observes_on_host", "is_constant", "parts"}
    assert told <= set(vars(ForwardingState))


def test_validation_is_off_unless_asked_for_and_may_be_turned_on(target, drafter):
    policy = Broken(BROKEN["the slots changed and the version did not"])
    assistant = DynSpecAssistant(drafter, policy, target=target)
    assert not assistant.validate
    for validates in (False, True, False):
        assistant.validate = validates
        with pytest.raises(PolicyError, match="the slots changed") if validates else nullcontext():
            assert torch.equal(generate(target, assistant), generate(target))


# Policies that only a whole suite sees through -----------------------------------------------------------------------


class Recent(ShortlistPolicy):
    """The core, and the last tokens that came out. Right as it is; what is broken is overridden."""

    name = "recent"
    state: type["RecentState"]

    def start(self, vocabulary: VocabularyInfo) -> "RecentState":
        return self.state(vocabulary)


class RecentState(ShortlistState):
    def __init__(self, vocabulary: VocabularyInfo):
        self._vocabulary, self._version = vocabulary, 0
        self._core = FrequencyShortlist(size=20).start(vocabulary).select(0, None, None).slots
        self.restart()

    def restart(self) -> None:
        self._recent = self._core[:0]

    def observe(self, verdict: Verdict) -> None:
        ids = torch.cat([self._recent, verdict.verified])
        self._recent = ids[self._vocabulary.can_draft(ids)].unique()[:50]

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        ids = torch.cat([self._core, self._recent[~torch.isin(self._recent, self._core)]])
        self._version += 1
        return Shortlist(ids, self._version, is_transient=True)


Recent.state = RecentState


class Constant(RecentState):
    """Has versions that do not change with every question."""

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        ids = super().select(depth, token_ids, features).slots
        if getattr(self, "_last", None) is None or not torch.equal(self._last.slots, ids):
            self._last = Shortlist(ids, self._version)
        return self._last


class Forgetless(Constant):
    def restart(self) -> None:
        if not hasattr(self, "_recent"):
            super().restart()


class Sharing(Constant):
    shared = torch.zeros(0, dtype=torch.int64)

    def observe(self, verdict: Verdict) -> None:
        super().observe(verdict)
        ids = torch.cat([self._recent, Sharing.shared]).unique()
        Sharing.shared = self._recent = ids[self._vocabulary.can_draft(ids)]


class Threaded(Constant):
    def __init__(self, vocabulary: VocabularyInfo):
        super().__init__(vocabulary)
        self._ended = threading.Event()
        threading.Thread(target=self._ended.wait, name="left behind", daemon=True, args=(60,)).start()


class LastToken(Constant):
    """Takes the last token of a verdict for a verified one."""

    carried = ("_recent",)

    def observe(self, verdict: Verdict) -> None:
        self._recent = verdict.verified[-1:][self._vocabulary.can_draft(verdict.verified[-1:])]


class Misnamed(Constant):
    carried = ("_recent", "_slots")


def policy_of(state: type[ShortlistState], needs: Needs | None = None, **attributes) -> ShortlistPolicy:
    members = {"state": state, **attributes} | ({} if needs is None else {"needs": needs})
    return type(state.__name__ + "Shortlist", (Recent,), members)()


class Unstored(Recent):
    """Does not say with what it was made."""

    state = Constant

    def __init__(self, size: int):
        self.size = size


SEEN_THROUGH = {
    "asked twice for one draft step": lambda: policy_of(RecentState),
    r"after restart\(\) it remembers": lambda: policy_of(Forgetless),
    "the observations of one state change what another": lambda: policy_of(Sharing),
    "the thread 'left behind' runs": lambda: policy_of(Threaded),
    "cannot be rebuilt from settings": lambda: Unstored(3),
    r"settings\(\) is not JSON": lambda: policy_of(Constant, settings=lambda self: {"ids": {1, 2}}),
    "given, and its state does not override": lambda: policy_of(Constant, Needs(draft_inputs=True)),
    "`observe_prompt` is given": lambda: policy_of(Constant, Needs(prompt_top_k=3)),
    "asks for logits of top tokens": lambda: policy_of(Constant, Needs(top_logits=True)),
    "counts that are none": lambda: policy_of(Constant, Needs(verify_top_k=-1)),
    "asks for the rows of a head": lambda: policy_of(Constant, Needs(drafter_rows=True)),
    "`needs` is dict": lambda: policy_of(Constant, needs={}),
    "in rounds over fixed memory": lambda: policy_of(LastToken),
    "`carried` names _slots": lambda: policy_of(Misnamed),
    "is no ShortlistPolicy": lambda: "full",
    "`start` returned NoneType": lambda: policy_of(Constant, start=lambda self, vocabulary: None),
}


@pytest.mark.parametrize("says", SEEN_THROUGH)
def test_check_policy_sees_through(says, monkeypatch):
    monkeypatch.setattr("hf_dynspec.testing.policies._PATIENCE", 0.2)
    with pytest.raises(PolicyError, match=says):
        check_policy(SEEN_THROUGH[says]())


@pytest.mark.parametrize("sizes", [{"vocabulary_size": 77}, {"hidden_size": 20}, {"hidden_size": 0}])
def test_sizes_of_which_there_are_no_models_are_not_blamed_on_the_policy(sizes):
    with pytest.raises(ConfigurationError, match=next(iter(sizes))):
        check_policy(policy_of(Constant), **sizes)


def test_check_policy_reports():
    report = check_policy(policy_of(Constant))
    assert report.policy == "ConstantShortlist" and "ConstantShortlist: in order" in str(report)
    assert report.acceptance_length > 1 and report.active_vocabulary > 20
    assert len(check_policy(Unstored(3), is_stored=False).checks) == len(report.checks) - 1


def test_the_suite_needs_no_test_framework():
    code = "import hf_dynspec.testing, sys; assert 'pytest' not in sys.modules"
    root = Path(hf_dynspec.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


class Failing(Constant):
    def observe(self, verdict: Verdict) -> None:
        raise KeyError("of the policy itself")


@pytest.mark.parametrize("validate", [False, True])
def test_errors_of_a_policy_come_out_as_they_are(validate, target, drafter):
    assistant = DynSpecAssistant(drafter, policy_of(Failing), target=target, validate=validate)
    with pytest.raises(KeyError, match="of the policy itself"):
        generate(target, assistant)


# What policies are told ----------------------------------------------------------------------------------------------

EVERYTHING = Needs(4, 3, 5, top_logits=True, out_of_vocabulary=True, hidden_states=True, prompt_hidden_states=True)
EVERYTHING |= Needs(drafter_rows=True, target_rows=True)
# Then the logits of a short stretch at the prompt's end are had with those of its last token.
WITHOUT_STATES = replace(EVERYTHING, hidden_states=False, prompt_hidden_states=False)


class Watching(ShortlistPolicy):
    """Writes down all that it is told of the first text, and selects a few tokens."""

    name = "watching"
    needs = EVERYTHING

    def __init__(self, size: int = 40):
        self.size = size
        self.states: list[WatchingState] = []

    def start(self, vocabulary: VocabularyInfo) -> "WatchingState":
        self.states.append(WatchingState(self.size, vocabulary))
        return self.states[-1]


class WatchingState(ShortlistState):
    def __init__(self, size: int, vocabulary: VocabularyInfo):
        self.vocabulary = vocabulary
        self.told: list[Prompt | Verdict | str] = []
        self.inner = FrequencyShortlist(size=size).start(vocabulary)
        self.closed = self.ended_calls = 0
        self.followed: list[VocabularyInfo] = []

    def begin_round(self) -> None:
        self.told.append("round")

    def observe_prompt(self, prompt: Prompt) -> None:
        self.told.append(prompt)

    def observe(self, verdict: Verdict) -> None:
        self.told.append(verdict)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        self.told.append("select")
        return self.inner.select(depth, token_ids, features)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        self.followed.append(vocabulary)

    def end_call(self) -> None:
        self.ended_calls += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def drafters(target, drafter) -> dict:
    heads = {name: drafter_of(agreeing_head(name), target) for name in ("eagle2", "eagle3")}
    return {"independent": drafter, **heads}


@pytest.mark.parametrize("needs", [EVERYTHING, WITHOUT_STATES], ids=["everything", "without states"])
@pytest.mark.parametrize("length", [1, 12], ids=["short", "long"])
@pytest.mark.parametrize("loop", [*SHAPES, "chunks", "transformers"])
@pytest.mark.parametrize("kind", ["independent", "eagle2", "eagle3"])
def test_a_policy_is_told_what_it_asked_for(kind, loop, length, needs, target, drafters):
    """Of every position, from the first round on: as a plain forward over the whole text has it."""
    generate_plainly = target.generate
    policy, assistant = watched(drafters[kind], target, needs, tree=SHAPES.get(loop, False))
    arguments = {"max_new_tokens": 20, "do_sample": False, "assistant_model": assistant}
    arguments |= {"prefill_chunk_size": 5} if loop == "chunks" else {}
    run = generate_plainly if loop == "transformers" else target.generate
    output = run(prompt(length, seed=3), **arguments)
    with torch.no_grad():
        plain = target(output, output_hidden_states=True)
    logits, states = plain.logits[0], plain.hidden_states[-1][0]

    def assert_shown(shown: Prompt | Verdict, rows: slice, k: int, has_states: bool) -> None:
        best = logits[rows].topk(k)
        assert torch.equal(shown.top_ids, best.indices)
        torch.testing.assert_close(shown.top_logits, best.values, rtol=1e-4, atol=1e-4)
        if has_states:
            torch.testing.assert_close(shown.hidden_states, states[rows], rtol=1e-4, atol=1e-4)

    told = policy.states[0].told
    first, end = (one for one in told if isinstance(one, Prompt))
    assert torch.equal(first.token_ids, output[0, :length]) and first.start == 0
    assert first.top_ids is first.hidden_states is None
    assert end.start == length and not end.token_ids.numel()
    assert_shown(end, slice(max(0, length - 5), length), 3, needs.prompt_hidden_states)

    verdicts = [one for one in told if isinstance(one, Verdict)]
    # Without a draft there is a round too: heads draft after the target has read the prompt.
    assert (verdicts[0].drafted.numel() == 0) == (kind != "independent" or loop == "tree")
    position, misses = length, 0
    listed = FrequencyShortlist(size=40).start(policy.states[0].vocabulary).select(0, None, None)
    for verdict in verdicts:
        count = verdict.verified.shape[0]
        assert verdict.start == position
        assert torch.equal(verdict.verified, output[0, position : position + count])
        assert_shown(verdict, slice(position - 1, position + count - 1), 4, needs.hidden_states)
        had_shortlist = torch.arange(count) < (2 + 1 if loop == "tree" else 5) * bool(verdict.drafted.numel())
        expected = ~listed.contains(verdict.verified) & had_shortlist
        if position + count < output.shape[1] - 6:  # drafts are cut short towards the end
            assert torch.equal(verdict.out_of_vocabulary, expected)
        misses += int(verdict.out_of_vocabulary.sum())
        position += count
    assert position >= output.shape[1] - 6 and misses > 0
    assert "round" in told and told[told.index("round") + 1] == "select"
    rounds, drafts = told.count("round"), sum(1 for one in verdicts if one.drafted.numel())
    # Nobody is told of the last round.
    assert drafts <= rounds <= drafts + 1


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 5}], ids=["greedy", "drawn"])
def test_rows_of_the_target_are_searched_once_a_round(sampling, target, drafter, monkeypatch):
    """For the target's own tokens and for what the policy is shown, in one pass over all rows."""
    searched = []

    for module, search in itertools.product((verification, feedback, processors), (top_k_ids, best_ids)):

        def counted(scores, k, search=search):
            searched.append((scores.shape, k))
            return search(scores, k)

        if hasattr(module, search.__name__):
            monkeypatch.setattr(module, search.__name__, counted)
    policy, assistant = watched(drafter, target, Needs(verify_top_k=9))
    torch.manual_seed(0)
    target.generate(prompt(6), assistant_model=assistant, max_new_tokens=30, **sampling)
    verdicts = [one for one in policy.states[0].told if isinstance(one, Verdict)]
    # Nobody is told of the last round.
    assert len(searched) == len(verdicts) + 1 > 2
    assert searched[:-1] == [((len(one.drafted) + 1, target.config.vocab_size), 9) for one in verdicts]


def test_nothing_is_computed_that_nobody_asked_for(target, drafter):
    policy, assistant = watched(drafter, target, Needs())
    generate(target, assistant)
    (state,) = policy.states
    for one in state.told:
        if isinstance(one, Verdict):
            assert one.top_ids is one.top_logits is one.hidden_states is one.out_of_vocabulary is None
    assert sum(isinstance(one, Prompt) for one in state.told) == 1
    assert state.vocabulary.drafter_rows is state.vocabulary.target_rows is None


@pytest.mark.parametrize("tree", SHAPES.values(), ids=SHAPES)
def test_a_part_of_a_union_knows_what_the_whole_missed(tree, target, drafter):
    part = Watching(size=30)
    union = UnionShortlist(part, InContextShortlist(60, verify_top_k=8))
    assistant = DynSpecAssistant(drafter, union, target=target, tree=tree)
    generate(target, assistant, max_new_tokens=80)
    verdicts = [one for one in part.states[0].told if isinstance(one, Verdict) and one.drafted.numel()]
    own = FrequencyShortlist(size=30).start(part.states[0].vocabulary).select(0, None, None)
    of_whole = torch.cat([one.out_of_vocabulary for one in verdicts])
    of_part = torch.cat([~own.contains(one.verified) for one in verdicts])
    assert (of_part & ~of_whole).any(), "the other part held nothing that this one missed"
    assert of_whole.any() and not (of_whole & ~of_part).any()
    # The same count as the statistics have, but for the last round, of which nobody is told.
    counted = round(assistant.stats.oov_rate * assistant.stats._checked)
    assert int(of_whole.sum()) <= counted <= int(of_whole.sum()) + 1


# The rows of heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["independent", "eagle3", "trimmed"])
def test_rows_are_those_of_the_models_and_not_copied(kind, target, drafters):
    own = drafters[kind] if kind != "trimmed" else drafter_of(trimmed_head("eagle3", target), target)
    policy, assistant = watched(own, target)
    info, head = policy.states[0].vocabulary, assistant.drafter.head
    for rows, weight in ((info.drafter_rows, head.weight), (info.target_rows, target.lm_head.weight)):
        assert rows.weight.data_ptr() == weight.data_ptr() and not rows.weight.requires_grad
    assert info.drafter_rows.token_ids is head.token_ids and (head.token_ids is None) == (kind != "trimmed")
    assert info.target_rows.token_ids is None
    assert generate(target, assistant).shape[1] > 12 and policy.states[0].followed == []


def test_a_state_follows_rows_that_change():
    target = soft()
    drafter = perturbed(target)
    policy, assistant = watched(drafter, target)
    generate(target, assistant)
    for changes, (model, name) in enumerate([(drafter, "drafter_rows"), (target, "target_rows")]):
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        assert torch.equal(generate(target, assistant), generate(target))
        (told,) = policy.states[0].followed[changes:]
        assert getattr(told, name).weight.data_ptr() == model.lm_head.weight.data_ptr()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert torch.equal(generate(target, assistant), generate(target))
    assert policy.states[0].followed[-1].target_rows.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert len(policy.states) == 1


# The end of sessions -------------------------------------------------------------------------------------------------


def closed(policy: Watching) -> list[int]:
    gc.collect()
    return [state.closed for state in policy.states]


def test_sessions_end_with_their_assistant(target, drafter):
    policy, assistant = watched(drafter, target)
    generate(target, assistant)
    generate(target, assistant, seed=4)
    assert closed(policy) == [0]
    assistant.unbind()
    assert closed(policy) == [1]
    assistant.bind(target)
    assert closed(policy) == [1, 0]
    assistant.policy = "full"
    assert closed(policy) == [1, 1]
    assistant.policy = policy
    assert closed(policy) == [1, 1, 0]
    del assistant
    assert closed(policy) == [1, 1, 1]


def test_sessions_that_the_pool_has_no_room_for_end(target, drafter):
    policy, assistant = watched(drafter, target)
    for eos in range(50, 57):
        generate(target, assistant, eos_token_id=eos, max_new_tokens=4)
    assert closed(policy) == [1, 1, 1, 1, 0, 0, 0, 0]
    assistant.unbind()
    assert closed(policy) == [1] * 8


@pytest.mark.parametrize("end", ["dropped", "unbound", "other EOS"])
def test_sessions_of_conversations_end(end, target, drafter):
    policy, assistant = watched(drafter, target)
    conversation = assistant.conversation()
    for _ in range(2):
        generate(target, conversation)
    assert closed(policy) == [0]
    if end == "dropped":
        del conversation
    elif end == "unbound":
        assistant.unbind()
    else:
        generate(target, conversation, eos_token_id=51)
    assert closed(policy)[0] == 1 and sum(closed(policy)) == 1
    assistant.unbind()
    assert set(closed(policy)) == {1}


def interrupt(*unused, **more) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["observe_prompt", "begin_round", "select", "observe"])
@pytest.mark.parametrize("in_conversation", [False, True])
def test_a_session_ends_with_an_error_and_the_next_call_has_another(method, in_conversation, target, drafter):
    policy, assistant = watched(drafter, target)
    called = assistant.conversation() if in_conversation else assistant
    generate(target, called)
    setattr(policy.states[0], method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(target, called)
    assert policy.states[0].closed == 1
    assert torch.equal(generate(target, called), generate(target))
    assert closed(policy) == [1, 0]
    assistant.unbind()
    assert closed(policy) == [1, 1]


def test_an_error_elsewhere_leaves_the_session_as_it_is(target, drafter):
    policy, assistant = watched(drafter, target)
    with pytest.raises(KeyboardInterrupt):
        generate(target, assistant, stopping_criteria=[interrupt])
    # Nothing that was learnt until then lasts for anybody else.
    assert closed(policy) == [0] and policy.states[0].ended_calls == 0
    assert torch.equal(generate(target, assistant), generate(target)) and len(policy.states) == 1
    assert policy.states[0].ended_calls == 1


def test_sessions_end_with_the_target():
    target = soft()
    policy, assistant = watched(perturbed(target), target)
    generate(target, assistant)
    del target
    gc.collect()
    assert assistant.target is None and closed(policy) == [1]


def test_all_parts_of_a_union_end(target, drafter):
    first, last = Watching(), Watching()
    assistant = DynSpecAssistant(drafter, UnionShortlist(first, UnionShortlist(last)), target=target)
    first.states[0].close = lambda: {}["cannot be closed"]
    with pytest.raises(KeyError, match="cannot be closed"):
        assistant.unbind()
    assert closed(last) == [1]


def test_parts_end_where_a_later_one_cannot_start(target, drafter):
    first = Watching()
    unions = UnionShortlist(first, policy_of(Constant, start=lambda self, vocabulary: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        DynSpecAssistant(drafter, unions, target=target)
    assert closed(first) == [1]


AT_EXIT = """
import sys, threading
sys.path[:0] = ["tests", "tests/shortlists"]
from models import perturbed, prompt, tiny
from test_policy_contracts import Watching, WatchingState
from hf_dynspec import DynSpecAssistant

class Working(Watching):
    def start(self, vocabulary):
        return WorkingState(self.size, vocabulary)

class WorkingState(WatchingState):
    def __init__(self, size, vocabulary):
        super().__init__(size, vocabulary)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.ended.wait, daemon=True)
        self.thread.start()

    def close(self):
        self.ended.set()
        self.thread.join()
        print("closed", flush=True)

target = tiny()
assistant = DynSpecAssistant(perturbed(target), Working(), target=target)
target.generate(prompt(), max_new_tokens=4, do_sample=False, assistant_model=assistant)
print("end of the program", flush=True)
"""


def test_sessions_end_with_the_interpreter():
    root = Path(hf_dynspec.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:3] == ["end of the program", "closed", ""]
