"""Screening: the factor is the best of its rank, its scores choose the shortlist, and everything around it holds."""

import gc
import json
from pathlib import Path

import pytest
import torch
from models import EOS, VOCABULARY, perturbed, prompt, tiny, word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dynspec import ConfigurationError, DynSpecAssistant, ScreenShortlist, TreeConfig
from hf_dynspec.kernels import cpu_best_rows, reference, tiled
from hf_dynspec.protocol import HeadRows, VocabularyInfo
from hf_dynspec.shortlists import ScreenFactor
from hf_dynspec.shortlists.screen import factor as factors
from hf_dynspec.shortlists.screen.factor import usual_rank

POCKET = Path(__file__).parents[2] / "examples" / "pocket"
SMALL = {"rank": 6, "candidates": 40}
TREE = TreeConfig(12, 2, 4)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_weight(rows: int = VOCABULARY, width: int = 32, seed: int = 0) -> torch.Tensor:
    """A head whose directions differ in strength, as those of real heads do."""
    return random(rows, width, seed=seed) @ (random(width, width, seed=seed + 1) * torch.linspace(0.05, 1, width))


def greedy(target, assistant=None, input_ids=None, **arguments) -> torch.Tensor:
    named = {"do_sample": False, "max_new_tokens": 32, "assistant_model": assistant}
    return target.generate(prompt() if input_ids is None else input_ids, **named | arguments)


# The factor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2**24, 700])
@pytest.mark.parametrize("rank", [1, 5, 32])
def test_a_plain_factor_is_the_truncated_svd(rank, chunk, monkeypatch):
    """Its scores are those of B · A · h, B · A being the best approximation of that rank."""
    monkeypatch.setattr(factors, "_CHUNK_NUMBERS", chunk)
    weight, hidden = head_weight(), random(4, 32, seed=7)
    factor = ScreenFactor.of_head(weight, rank)
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    best = u[:, :rank] * s[:rank] @ v[:rank]
    scores = factor.rows.double() @ (factor.projection.double() @ hidden.double().T)
    assert factor.rows.dtype == torch.bfloat16 and factor.rank == rank and factor.width == 32
    # bf16 rounds each product by up to 2⁻⁹ of it.
    torch.testing.assert_close(scores, best @ hidden.double().T, rtol=0, atol=0.03 * float(s[0]) / 17)
    left_out = (weight - best).square().sum(1) / (2 * 32)
    torch.testing.assert_close(factor.residuals.double(), left_out, rtol=1e-3, atol=1e-5)


def test_a_rank_is_a_sixteenth_of_the_columns_what_is_read_with_them_and_no_more_than_all():
    assert [usual_rank(width) for width in (128, 256, 1024, 4096)] == [11, 19, 67, 259]
    assert ScreenFactor.of_head(head_weight(width=64)).rank == 7
    assert ScreenFactor.of_head(head_weight(width=2)).rank == 2
    everything = ScreenFactor.of_head(head_weight(), 1000)
    assert everything.rank == 32 and float(everything.residuals.max()) < 1e-5


def test_hidden_states_make_the_factor_the_best_for_them():
    weight, mixing = head_weight(), random(32, 32, seed=3) * torch.linspace(0.1, 1.5, 32)
    seen, unseen = random(3000, 32, seed=4) @ mixing, random(500, 32, seed=5) @ mixing
    exact = unseen @ weight.T

    def error(factor: ScreenFactor) -> torch.Tensor:
        return exact - unseen @ factor.projection.T @ factor.rows.float().T

    plain, fitted = ScreenFactor.of_head(weight, 4), ScreenFactor.of_head(weight, 4, seen)
    assert float(error(fitted).square().mean()) < 0.9 * float(error(plain).square().mean())
    # The best of all, by the singular values of W · C½.
    values, vectors = torch.linalg.eigh((unseen.T @ unseen / 500).double())
    singular = torch.linalg.svdvals(weight.double() @ vectors @ values.clamp_min(0).sqrt().diag())
    assert float(error(fitted).square().mean()) < 1.1 * float(singular[4:].square().sum()) / VOCABULARY
    # Half the variance of what is left out of each row, at the mean length of the states.
    variances = 2 * fitted.residuals * unseen.square().sum(1).mean()
    ratio = variances.sum() / error(fitted).square().mean(0).sum()
    assert 0.9 < float(ratio) < 1.3, "the least variance of every direction adds some"


def test_the_leading_directions_of_a_wide_head_are_found_without_computing_all(monkeypatch):
    """The factor leaves out hardly more than the best one does."""
    width, rank = 256, 16
    weight = random(2000, width) @ (torch.linalg.qr(random(width, width, seed=1)).Q * 0.97 ** torch.arange(width))
    best = float(torch.linalg.svdvals(weight)[rank:].square().sum())
    eigenproblems, eigh = [], torch.linalg.eigh

    def recorded(matrix):
        eigenproblems.append(matrix.shape[0])
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", recorded)
    for widest, solved in ((1024, width), (128, rank + 32)):
        monkeypatch.setattr(factors, "_WIDEST_EXACT", widest)
        for states in (None, random(600, width, seed=2)):
            eigenproblems.clear()
            factor = ScreenFactor.of_head(weight, rank, states)
            assert eigenproblems == [solved]
            if states is None:
                left_out = float(factor.residuals.sum()) * 2 * width
                assert best * 0.999 < left_out < best * 1.01


def test_a_factor_that_takes_long_says_how_far_it_is(monkeypatch, caplog):
    ScreenFactor.of_head(head_weight(), 4)
    assert not caplog.messages
    monkeypatch.setattr(factors, "_SILENCE", -1.0)
    monkeypatch.setattr(factors, "_CHUNK_NUMBERS", 32 * 100)
    ScreenFactor.of_head(head_weight(300), 4)
    # Two passes through three chunks.
    shares = [message.split("%")[0].split()[-1] for message in caplog.messages]
    assert shares == ["17", "33", "50", "67", "83", "100"] and "s left" in caplog.messages[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_weight": torch.zeros(5)}, r"head_weight must be floating-point \[V, d\]; got float32 \[5\]"),
        ({"head_weight": torch.zeros(5, 4, dtype=torch.int64)}, "head_weight must be floating-point"),
        ({"hidden_states": torch.zeros(9, 31)}, r"hidden_states must be .* as the head has 32 columns; got .*31"),
        ({"hidden_states": torch.zeros(0, 32)}, "hidden_states must be"),
        ({"hidden_states": [1.0]}, r"got \[1.0\]"),
        ({"hidden_states": torch.zeros(9, 32)}, "all zero"),
        ({"hidden_states": torch.full((9, 32), torch.nan)}, "hidden_states holds numbers that are not finite"),
        ({"head_weight": torch.full((9, 32), torch.inf)}, "the head holds numbers that are not finite"),
        ({"rank": 0}, "rank must be a whole number"),
        ({"candidates": None}, "candidates must be a whole number"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ScreenShortlist.fitted(**{"head_weight": head_weight()} | arguments)


def test_factors_that_do_not_fit_are_refused(drafter, target):
    good = ScreenFactor.of_head(head_weight(), 4).tensors()
    for name, wrong in (
        ("rows", good["rows"][0]),
        ("projection", good["projection"][:3]),
        ("residuals", torch.ones(3)),
    ):
        with pytest.raises(ConfigurationError, match="of a screen must be"):
            ScreenFactor(**good | {name: wrong})
        with pytest.raises(ConfigurationError, match="of a screen must be"):
            ScreenShortlist.from_settings({"candidates": 9}, good | {name: wrong})
    with pytest.raises(ConfigurationError, match="is stored as rows, projection, residuals"):
        ScreenShortlist.from_settings({"candidates": 9}, {"rows": good["rows"]})
    with pytest.raises(ConfigurationError, match="rank is 5, and the factor's is 4"):
        ScreenShortlist(rank=5, factor=ScreenFactor(**good))
    with pytest.raises(ConfigurationError, match="must be a ScreenFactor"):
        ScreenShortlist(factor=good)
    for rows, width in ((VOCABULARY - 1, 32), (VOCABULARY, 24)):
        policy = ScreenShortlist.fitted(head_weight(rows, width), rank=3)
        with pytest.raises(ConfigurationError, match=f"a head of {rows} rows and {width} columns"):
            DynSpecAssistant(drafter, policy, target=target)


# What is selected ----------------------------------------------------------------------------------------------------


def expected_ids(factor: ScreenFactor, vocabulary: VocabularyInfo, hidden: torch.Tensor, count: int) -> set[int]:
    """By the formula, in an obvious way, with numbers of 8 bits."""
    head = vocabulary.drafter_rows
    ids = torch.arange(head.weight.shape[0]) if head.token_ids is None else head.token_ids
    n = factor.rows.shape[0]
    in_8_bits = tiled(torch.cat([factor.rows.float(), factor.residuals.float()[:, None]], dim=1)).rows()[:n].double()
    rows, residuals = in_8_bits[:, :-1], in_8_bits[:, -1]
    scores = hidden.double() @ factor.projection.double().T @ rows.T
    scores = (scores + residuals * hidden.double().square().sum(1, keepdim=True)).amax(0)
    if head.bias is not None:
        scores = scores + head.bias[:n]
    eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64)
    scores = scores.masked_fill(torch.isin(ids[:n], eos), -torch.inf)
    return set(ids[scores.topk(count).indices].tolist()) | set(vocabulary.eos_token_ids)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("given", [False, True])
def test_the_shortlist_is_what_the_factor_finds_best(given, rows, trimmed, with_bias):
    """Also for the tokens of a tree together, for heads that leave ids out, and for those that are padded."""
    token_ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:120] if trimmed else None
    count = 120 if trimmed else VOCABULARY
    eos = tuple(token_ids[[5, 50]].tolist()) if trimmed else (2, 77)
    weight = head_weight(count)
    factor = ScreenFactor.of_head(weight, 4, random(99, 32) if given else None)
    if not trimmed:
        weight = torch.cat([weight, torch.full((20, 32), torch.nan)])  # which nobody may read
    bias = 3 * random(weight.shape[0], seed=6) if with_bias else None
    vocabulary = VocabularyInfo(
        VOCABULARY, eos, torch.device("cpu"), token_ids, 32, drafter_rows=HeadRows(weight, bias, token_ids)
    )
    policy = ScreenShortlist(factor=factor, candidates=25) if given else ScreenShortlist(rank=4, candidates=25)
    state = policy.start(vocabulary)
    for seed in range(5):
        hidden = random(rows, 32, seed=20 + seed)
        shortlist = state.select(seed, torch.zeros(rows, dtype=torch.int64), hidden)
        ids = shortlist.ids().tolist()
        assert len(ids) == len(set(ids)) == 27
        assert set(ids) == expected_ids(factor, vocabulary, hidden, 25)
        assert shortlist.is_transient and shortlist.occupied is None


def test_where_all_tokens_are_candidates_all_are_on_the_shortlist():
    weight = head_weight(64)
    vocabulary = VocabularyInfo(64, (2,), torch.device("cpu"), None, 32, drafter_rows=HeadRows(weight))
    bias = torch.zeros(64).index_fill(0, torch.tensor([7, 8]), -torch.inf)
    barred = VocabularyInfo(64, (2,), torch.device("cpu"), None, 32, drafter_rows=HeadRows(weight, bias))
    for hidden in (random(1, 32), torch.full((1, 32), torch.nan)):
        for one in (vocabulary, barred):
            shortlist = ScreenShortlist(candidates=2048).start(one).select(0, torch.tensor([1]), hidden)
            assert sorted(shortlist.ids().tolist()) == list(range(64))


def test_a_head_of_eos_alone_has_it_on_the_shortlist():
    rows = HeadRows(head_weight(1), token_ids=torch.tensor([5]))
    vocabulary = VocabularyInfo(9, (5,), torch.device("cpu"), rows.token_ids, 32, drafter_rows=rows)
    assert ScreenShortlist().start(vocabulary).select(0, torch.tensor([1]), random(1, 32)).ids().tolist() == [5]


# Drafting ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted_factors(monkeypatch) -> list[int]:
    """The ranks of the factors that are made."""
    made, of_head = [], ScreenFactor.of_head.__func__

    def counting(cls, weight, rank=None, hidden_states=None):
        made.append(rank)
        return of_head(cls, weight, rank, hidden_states)

    monkeypatch.setattr(ScreenFactor, "of_head", classmethod(counting))
    return made


@pytest.mark.parametrize("family", ["gptj", "gemma2", "cohere", "granite", "qwen3"])
def test_heads_with_a_bias_a_scale_or_a_cap(family):
    target = tiny(family)
    assistant = DynSpecAssistant(perturbed(target, 0.02), ScreenShortlist(**SMALL), target=target, validate=True)
    assert torch.equal(greedy(target, assistant), greedy(target))
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("shape", [False, TREE])
def test_the_compiled_kernels_are_what_runs(shape, target, drafter, compiled_kernels, monkeypatch):
    assistant = DynSpecAssistant(drafter, ScreenShortlist(**SMALL), target=target, tree=shape)

    def must_not_run(*args, **kwargs):
        raise AssertionError("a plain twin ran")

    for name in ("best_rows", "scattered_scores"):
        monkeypatch.setattr(reference, name, must_not_run)
    assert torch.equal(greedy(target, assistant), greedy(target))
    assert assistant.stats.accepted > 0
    monkeypatch.setattr(cpu_best_rows, "_kernel", lambda: None)
    with pytest.raises(AssertionError, match="a plain twin ran"):
        greedy(target, assistant)


def test_sessions_share_one_factor(target, drafter, counted_factors):
    policy = ScreenShortlist(**SMALL)
    assistant = DynSpecAssistant(drafter, policy, target=target)
    assert counted_factors == [6], "the factor is made when the assistant is bound"
    greedy(target, assistant)
    greedy(target, assistant, eos_token_id=[EOS, 9])
    other = DynSpecAssistant(assistant.drafter, policy, target=target)
    greedy(target, other.conversation())
    assert counted_factors == [6]


def test_other_eos_ids_are_on_the_shortlists_of_their_call(target, drafter):
    assistant = DynSpecAssistant(drafter, ScreenShortlist(rank=2, candidates=5), target=target)
    for eos in ([EOS], [EOS, 9, 300], [EOS]):
        session = assistant.take_session(tuple(eos))
        shortlist = session._selector.state.select(0, torch.tensor([3]), random(1, 32))
        assert set(eos) <= set(shortlist.ids().tolist()) and shortlist.count == 5 + len(eos)


def test_weights_that_change_get_a_factor_of_their_own(target, counted_factors):
    drafter = perturbed(target)
    assistant = DynSpecAssistant(drafter, ScreenShortlist(**SMALL), target=target)
    conversation = assistant.conversation()
    greedy(target, conversation)
    with torch.no_grad():
        drafter.get_output_embeddings().weight.mul_(-1).add_(random(VOCABULARY, 32) / 9)
    for one in (assistant, conversation):
        assert torch.equal(greedy(target, one), greedy(target))
    assert counted_factors == [6, 6], "of the new weights there is one factor, which all sessions share"
    head, session = assistant.drafter.head, conversation.session
    hidden = random(1, 32, seed=4)
    actual = set(session._selector.state.select(0, torch.tensor([3]), hidden).ids().tolist())
    assert actual == expected_ids(ScreenFactor.of_head(head.weight, 6), session.vocabulary, hidden, 40)


def test_a_factor_outlives_no_head(target):
    """What a policy keeps of a head that nobody has any more is its factor alone."""
    policy = ScreenShortlist(**SMALL)
    assistant = DynSpecAssistant(perturbed(target), policy, target=target)
    assert policy._last.weight() is not None
    assistant.drafter = perturbed(target, seed=5)
    first = policy._last.weight()
    del assistant, first
    gc.collect()
    assert policy._last.weight() is None


def test_nearly_always_the_drafters_choice_is_on_the_shortlist():
    """Of a trained pair: 98,304 tokens with 80 columns, of which a screen finds 2,048."""
    model = AutoModelForCausalLM.from_pretrained(POCKET / "drafter", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "drafter")
    texts = [json.loads(line)["turns"][0] for line in (POCKET / "prompts.jsonl").read_text().splitlines()]
    with torch.no_grad():
        states = [model.model(**tokenizer(text, return_tensors="pt"))[0][0] for text in texts]
    half = len(states) // 2
    head = HeadRows(model.get_output_embeddings().weight.detach())
    size = len(tokenizer)
    vocabulary = VocabularyInfo(size, (0,), torch.device("cpu"), None, 64, drafter_rows=head)
    unseen = torch.cat(states[half:])
    choices = (unseen @ head.weight[:size].T).argmax(1)
    found = {}
    for name, policy in {
        "plain": ScreenShortlist(),
        "fitted": ScreenShortlist.fitted(head.weight, torch.cat(states[:half])),
    }.items():
        state = policy.start(vocabulary)
        is_found = [
            bool(state.select(0, choice[None], hidden[None]).contains(choice))
            for hidden, choice in zip(unseen, choices, strict=True)
        ]
        found[name] = sum(is_found) / len(is_found)
    assert len(choices) > 100 and min(found.values()) > 0.97, found


# Storage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [None, random(50, 32)])
def test_a_factor_is_stored_with_the_policy(states, target, drafter, tmp_path, counted_factors):
    weight = drafter.get_output_embeddings().weight.detach()
    policy = ScreenShortlist.fitted(weight, states, rank=6, candidates=30)
    assistant = DynSpecAssistant(drafter, policy, target=target, tokenizer=word_tokenizer())
    folder = assistant.save_pretrained(tmp_path / "screen")
    loaded = DynSpecAssistant.from_pretrained(folder, target=target, drafter=drafter, tokenizer=word_tokenizer())
    by_name = ScreenShortlist(candidates=30, factor=folder)
    assert counted_factors == [6], "a stored factor is not made again"
    hidden = random(1, 32, seed=8)
    expected = assistant.take_session((EOS,))._selector.state.select(0, torch.tensor([3]), hidden)
    for own in (loaded.policy, by_name):
        assert own.settings() == policy.settings() == {"rank": 6, "candidates": 30}
        assert all(torch.equal(own.tensors()[name], tensor) for name, tensor in policy.tensors().items())
        session = DynSpecAssistant(drafter, own, target=target, tokenizer=word_tokenizer()).take_session((EOS,))
        assert torch.equal(session._selector.state.select(0, torch.tensor([3]), hidden).slots, expected.slots)
    assert by_name.tokenizer_fingerprints
    assert torch.equal(greedy(target, loaded), greedy(target))


def test_without_a_factor_nothing_is_stored_but_settings(target, drafter, tmp_path):
    assistant = DynSpecAssistant(drafter, ScreenShortlist(**SMALL), target=target, tokenizer=word_tokenizer())
    folder = assistant.save_pretrained(tmp_path / "screen")
    loaded = DynSpecAssistant.from_pretrained(folder, target=target, drafter=drafter, tokenizer=word_tokenizer())
    assert loaded.policy.settings() == SMALL and not loaded.policy.tensors()
    assert torch.equal(greedy(target, loaded), greedy(target)) and loaded.stats.accepted > 0
