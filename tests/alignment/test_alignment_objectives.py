"""The objectives of online alignment, against drafts made a token at a time and against finite differences."""

import math
from dataclasses import replace

import pytest
import torch
from aligned import FIRST, KEPT, made_up_request
from drafters import LAYERS, drafter_named
from models import VOCABULARY, tiny
from transformers import PreTrainedModel

from hf_dynspec.alignment import OBJECTIVES, OnlineAlignment, Trajectory, acceptance_of, choose_places, loss_of
from hf_dynspec.drafters import Drafter

# Scaled logits; an EAGLE-2 and an EAGLE-3 head, and one that leaves most of the vocabulary out.
KINDS = ("llama", "granite", "eagle2", "eagle3", "eagle3-trimmed")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
# A directional derivative of a loss near 1 by central differences in fp64.
STEP, NEAR = 1e-6, {"rtol": 1e-5, "atol": 1e-8}
SETTINGS = OnlineAlignment(horizon=3)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=LAYERS).double()


def drafted_logits(drafter: Drafter, trajectory: Trajectory, start: int, steps: int) -> torch.Tensor:
    """`[steps, V]`: what a session drafts from the prefix of `start` tokens on, a token at a time."""
    text, state = trajectory.token_ids, drafter.start()
    features = None if trajectory.features is None else trajectory.features[: start - 1]
    hidden = [state.advance(text[:start], features)[-1]]
    hidden += [state.draft(token[None])[0] for token in text[start : start + steps - 1]]
    return drafter.token_logits(torch.stack(hidden), torch.arange(VOCABULARY))


def one_position(objective: str, logits: torch.Tensor, trajectory: Trajectory, at: int, settings: OnlineAlignment):
    """Loss and `Σ min(p, q)` of one draft step: `[V]` logits at the `at`-th verified token, over sets of ids."""
    can_propose = logits > -torch.inf
    kept = dict(zip(trajectory.top_ids[at].tolist(), trajectory.top_logits[at], strict=True))
    kept = {i: z for i, z in kept.items() if z > -torch.inf and i < VOCABULARY and can_propose[i]}
    everything = {*trajectory.top_ids.flatten().tolist(), *trajectory.shortlist_ids.tolist()}
    everything |= set(trajectory.token_ids[trajectory.first :].tolist())
    everything = {i for i in everything if i < VOCABULARY and can_propose[i]}
    support = sorted(kept if settings.support == "kept" else everything)
    ids, temperature = sorted(kept), settings.temperature
    p = torch.stack([kept[i] for i in ids]).div(temperature).softmax(0)
    q = (logits[support] / temperature).log_softmax(0)[[support.index(i) for i in ids]]
    whole = logits[sorted(everything)].log_softmax(0)
    divergence = (p * (p.log() - q)).sum()
    losses = {
        "horizon_kl": temperature**2 * divergence,
        "cross_entropy": -(temperature**2) * (p * q).sum() * trajectory.is_wrong[at],
        "total_variation": (p - torch.minimum(p, q.exp())).sum(),
    }
    token = int(trajectory.token_ids[trajectory.first + at])
    passes = token in trajectory.shortlist_ids.tolist() and (
        bool(trajectory.is_wrong[at]) or float(divergence.detach()) > settings.align_threshold
    )
    base = whole.logsumexp(0) - whole[sorted(everything).index(token)] if token in everything else torch.inf
    return losses[objective], base, passes


def naive_loss(drafter: Drafter, trajectory: Trajectory, settings: OnlineAlignment) -> torch.Tensor:
    n, total, drafts = trajectory.token_ids.shape[0], torch.zeros((), dtype=torch.float64), 0
    for start in range(trajectory.first, n):
        steps = min(settings.horizon, n - start)
        logits, base = drafted_logits(drafter, trajectory, start, steps), 0.0
        for step in range(steps):
            at = start + step - trajectory.first
            loss, here, passes = one_position(settings.objective, logits[step], trajectory, at, settings)
            if step == 0:
                if settings.fill == "gate" and not passes:
                    break
                base, drafts = float(torch.as_tensor(here).detach()), drafts + 1
            total = total + (1.0 if step == 0 else math.exp(-settings.decay * base * step)) * loss
    return total / drafts


def gradients_of(loss: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    drafter.module.zero_grad(set_to_none=True)
    loss.backward()
    return torch.cat([one.grad.flatten() for one in drafter.module.parameters() if one.grad is not None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"support": "kept", "temperature": 2.0, "decay": 0.1},
        {"fill": "gate", "align_threshold": 1.5, "temperature": 0.5},
        {"objective": "cross_entropy", "decay": 0.0, "horizon": 1},
        {"objective": "cross_entropy", "support": "kept"},
        {"objective": "total_variation"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "default",
)
def test_a_loss_is_that_of_drafts_made_a_token_at_a_time(kind, changes, target):
    drafter, settings = drafter_named(kind, target), replace(SETTINGS, **changes)
    trajectory = made_up_request(drafter)
    expected = naive_loss(drafter, trajectory, settings)
    loss = loss_of(drafter, choose_places(drafter, trajectory, settings), settings)
    assert float(loss) > 0
    torch.testing.assert_close(loss, expected.detach(), **CLOSE)
    if kind not in ("llama", "granite"):
        return  # a session of a head runs fused weights, without gradients
    ours = gradients_of(loss, drafter)
    torch.testing.assert_close(ours, gradients_of(expected, drafter), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", ["kept", "shortlist"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_those_of_differences(kind, support, objective, target):
    """Along a random direction through all weights. With weights of 1: through those of equation 4 none may run."""
    drafter = drafter_named(kind, target)
    settings = replace(SETTINGS, objective=objective, support=support, decay=0.0, temperature=1.5)
    trajectory = made_up_request(drafter)
    loss_of(drafter, trajectory, settings).backward()
    trained = [one for one in drafter.module.parameters() if one.grad is not None]
    random = torch.Generator().manual_seed(2)
    direction = [torch.randn(one.shape, generator=random, dtype=one.dtype) for one in trained]
    along = sum(float((one.grad * way).sum()) for one, way in zip(trained, direction, strict=True))
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for one, way in zip(trained, direction, strict=True):
                one.add_(way, alpha=sign * STEP)
        losses.append(float(loss_of(drafter, trajectory, settings)))
    assert along != 0
    torch.testing.assert_close(along, (losses[0] - losses[1]) / (2 * STEP), **NEAR)


@pytest.mark.parametrize("kind", ["llama", "granite", "eagle2", "eagle3"])
def test_where_everything_is_kept_it_is_the_divergence_over_the_vocabulary(kind, target):
    drafter = drafter_named(kind, target)
    trajectory = made_up_request(drafter, kept=VOCABULARY)
    settings = replace(SETTINGS, horizon=1)
    p = torch.empty_like(trajectory.top_logits).scatter(1, trajectory.top_ids, trajectory.top_logits).softmax(-1)
    (step,) = drafter.unroll(trajectory.token_ids, trajectory.features, 1)
    q = drafter.token_logits(step.hidden[FIRST - 2 : -1], torch.arange(VOCABULARY)).log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, reduction="batchmean")
    twin = gradients_of(expected, drafter)
    for support in ("kept", "shortlist"):
        loss = loss_of(drafter, trajectory, replace(settings, support=support))
        torch.testing.assert_close(loss, expected, **CLOSE)
        torch.testing.assert_close(gradients_of(loss, drafter), twin, rtol=1e-7, atol=1e-12)
    trajectory = replace(trajectory, shortlist_ids=torch.arange(VOCABULARY))
    rejected = loss_of(drafter, trajectory, replace(settings, objective="total_variation"))
    torch.testing.assert_close(rejected, 0.5 * (p - q.exp()).abs().sum(-1).mean(), **CLOSE)
    assert acceptance_of(drafter, trajectory, settings) == pytest.approx(1 - float(rejected))


def test_a_drafter_that_is_the_target_is_accepted_whole(target):
    drafter = drafter_named("llama", target)
    trajectory = made_up_request(drafter, kept=VOCABULARY)
    with torch.no_grad():
        logits = drafter.model(input_ids=trajectory.token_ids[None]).logits[0, FIRST - 1 : -1]
    top_logits, top_ids = logits.topk(VOCABULARY)
    everything = torch.arange(VOCABULARY)
    verdicts = {"top_ids": top_ids, "top_logits": top_logits, "log_normalisers": logits.logsumexp(-1)}
    trajectory = replace(trajectory, **verdicts, shortlist_ids=everything)
    assert acceptance_of(drafter, trajectory, SETTINGS) == pytest.approx(1.0)
    assert float(loss_of(drafter, trajectory, SETTINGS)) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", ["llama", "eagle3-trimmed"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("support", ["kept", "shortlist"])
def test_ids_that_no_draft_can_hold_change_nothing(kind, objective, support, target):
    """Padding, ids past the drafter's vocabulary, and those that a trimmed head leaves out."""
    drafter, settings = drafter_named(kind, target), replace(SETTINGS, objective=objective, support=support)
    draftable = torch.arange(VOCABULARY) if drafter.head.token_ids is None else drafter.head.token_ids
    plain = made_up_request(drafter)
    plain = replace(plain, top_ids=draftable[:KEPT].repeat(plain.top_ids.shape[0], 1))
    odd_ids, odd_logits = [VOCABULARY, 10**6, 3], [9.0, 3.0, -torch.inf]
    if kind == "eagle3-trimmed":
        outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, draftable, False).nonzero()[:2, 0]
        odd_ids, odd_logits = odd_ids + outside.tolist(), [*odd_logits, 7.0, 1.0]
    verified = plain.top_ids.shape[0]
    odd = replace(
        plain,
        top_ids=torch.cat([plain.top_ids, torch.tensor(odd_ids).repeat(verified, 1)], 1),
        top_logits=torch.cat([plain.top_logits, plain.top_logits.new_tensor(odd_logits).repeat(verified, 1)], 1),
        shortlist_ids=torch.cat([plain.shortlist_ids, torch.tensor(odd_ids)]),
    )
    # An id that one of the two has in its normaliser and the other has not would tell nothing.
    plain = replace(plain, shortlist_ids=torch.cat([plain.shortlist_ids, torch.tensor([3])]))
    expected, loss = loss_of(drafter, plain, settings), loss_of(drafter, odd, settings)
    torch.testing.assert_close(loss, expected, **CLOSE)
    wanted = gradients_of(expected, drafter)
    ours = gradients_of(loss, drafter)
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours, wanted, **CLOSE)
    assert acceptance_of(drafter, odd, settings) > 0


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("support", ["kept", "shortlist"])
def test_places_where_nothing_can_be_proposed_are_left_out(objective, support, target):
    drafter = drafter_named("llama", target)
    trajectory = made_up_request(drafter)
    hopeless = trajectory.top_ids.clone()
    hopeless[2] = torch.arange(KEPT) + VOCABULARY
    settings = replace(SETTINGS, objective=objective, support=support)
    loss = loss_of(drafter, replace(trajectory, top_ids=hopeless), settings)
    gradients = gradients_of(loss, drafter)
    assert bool(loss.isfinite()) and bool(gradients.isfinite().all()) and bool(gradients.any())


@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_a_request_may_be_short(kind, target):
    drafter = drafter_named(kind, target)
    for length, first in ((3, 2), (2, 1), (4, 1)):
        trajectory = made_up_request(drafter, length=length, first=first)
        scored = length - max(first, 2)
        loss = loss_of(drafter, trajectory, SETTINGS)
        assert (loss is None) == (scored < 1) == (acceptance_of(drafter, trajectory, SETTINGS) is None)
        if loss is not None and first > 1:
            torch.testing.assert_close(loss, naive_loss(drafter, trajectory, SETTINGS), **CLOSE)


def test_a_target_that_says_nothing_of_use_gives_no_finite_loss(target):
    """So that it is seen and dropped, and not taken for nothing."""
    drafter = drafter_named("llama", target)
    trajectory = made_up_request(drafter)
    trajectory.top_logits[3, 1] = torch.nan
    for objective in ("horizon_kl", "total_variation"):
        assert not bool(loss_of(drafter, trajectory, replace(SETTINGS, objective=objective)).isfinite())


@pytest.mark.parametrize("temperature", [0.5, 2.0, 0.0])
@pytest.mark.parametrize("kept", [VOCABULARY, KEPT], ids=["all", "few"])
def test_what_would_be_accepted_goes_by_the_temperature_of_the_request(kept, temperature, target):
    drafter = drafter_named("llama", target)
    whole = made_up_request(drafter, kept=VOCABULARY)
    p = torch.empty_like(whole.top_logits).scatter(1, whole.top_ids, whole.top_logits)
    trajectory = replace(
        whole,
        top_ids=whole.top_ids[:, :kept],
        top_logits=whole.top_logits[:, :kept],
        log_normalisers=(p / (temperature or 1.0)).logsumexp(-1),
        temperature=temperature,
        shortlist_ids=torch.arange(VOCABULARY),
    )
    (step,) = drafter.unroll(trajectory.token_ids, trajectory.features, 1)
    q = drafter.token_logits(step.hidden[FIRST - 2 : -1], torch.arange(VOCABULARY)).detach()
    if temperature:
        accepted = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1))
        # Of what is kept the target's own probabilities count, and not what they sum to.
        expected = accepted.gather(1, trajectory.top_ids).sum(-1).mean()
    else:
        expected = (p.argmax(-1) == q.argmax(-1)).double().mean()
    # Logits that lie close together share even the smallest temperature.
    near = pytest.approx(float(expected), abs=1e-9 if temperature else 0.1)
    assert acceptance_of(drafter, trajectory, replace(SETTINGS, horizon=1)) == near
