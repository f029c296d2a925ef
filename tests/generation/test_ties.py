"""Equal logits at the top: the token is `torch.argmax`'s, the lowest id, whatever else looked for the best tokens."""

import copy

import pytest
import torch
from calls import SHAPES
from cases import representatives
from models import PAD, POLICY_CASES, perturbed, prompt, tiny

from hf_dynspec import DynSpecAssistant, devices
from hf_dynspec.evaluation.operations import pretended_device as pretended
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.kernels import argmax_rows, best_ids, cpu_top_k
from hf_dynspec.rounds import recorded

# Policies that look at the best tokens of each round.
POLICIES = ("hybrid", "in_context", "union", "retrieval")


def twins(vocabulary: int) -> torch.nn.Module:
    """A target most of whose tokens have a twin of the same logit."""
    target = tiny("llama", vocabulary=vocabulary, tie_word_embeddings=False)
    # Products with columns are rounded alike at such a distance only.
    half = vocabulary // 2 // 64 * 64
    with torch.no_grad():
        rows = target.get_output_embeddings().weight
        rows[half : 2 * half] = rows[:half]
        rows[2 * half :] = 0.0
    return target


def capped() -> torch.nn.Module:
    """A target with so low a cap that many logits reach it."""
    return tiny("gemma2", final_logit_softcapping=0.5)


TARGETS = {"twins": lambda: twins(301), "capped": capped, "twins of many": lambda: twins(2500)}
CALLS = {
    "one": {},
    "batch": {"count": 3},
    "fixed memory": {"cache_implementation": "static"},
    "padding": {"is_padding": True},
}
CASES = [
    (target, policy, shape, call) for target in TARGETS for policy in POLICIES for shape in SHAPES for call in CALLS
]
SOME = [case for case in CASES if case[0] == "twins" and case[1] in ("hybrid", "union")]


def texts_of(target, assistant, count=1, is_padding=False, move_to=lambda tensor: tensor, **arguments):
    """40 tokens after each of some prompts, or after padding alone."""
    texts = torch.full((count, 12), PAD) if is_padding else torch.cat([prompt(12, seed) for seed in range(count)])
    arguments |= {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "assistant_model": assistant}
    return target.generate(move_to(texts), attention_mask=move_to(torch.ones_like(texts)), **arguments)


@pytest.mark.parametrize(
    ("kind", "policy", "shape", "call"),
    representatives("families", [*SOME, *(one for one in CASES if one not in SOME)], keep=len(SOME)),
)
def test_the_lowest_id_is_chosen(kind, policy, shape, call, monkeypatch):
    monkeypatch.setattr(cpu_top_k, "_kernel", lambda: None)
    target = TARGETS[kind]()
    if call == "padding":
        # All logits of all tokens are equal.
        torch.nn.init.zeros_(target.get_output_embeddings().weight)
    assistant = DynSpecAssistant(perturbed(target, 0.02), POLICY_CASES[policy](), target=target, tree=SHAPES[shape])
    expected = texts_of(target, None, **CALLS[call])
    assert torch.equal(texts_of(target, assistant, **CALLS[call]), expected)


@pytest.mark.parametrize("call", ["one", "batch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_graph", [True, False])
def test_the_lowest_id_is_chosen_on_a_device(is_graph, shape, call, monkeypatch):
    if is_graph:
        monkeypatch.setattr(devices, "GRAPHS", frozenset({pretended.NAME}))
        monkeypatch.setattr(recorded, "_WARM_UPS", 10**6)
    target = twins(301)
    with pretended_device():
        there = move(copy.deepcopy(target))
        drafter = move(perturbed(target, 0.02))
        settings = {"target": there, "tree": SHAPES[shape], "num_assistant_tokens": 3}
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), **settings)
        output = texts_of(there, assistant, move_to=to_device, **CALLS[call]).memory
    assert torch.equal(output, texts_of(target, None, **CALLS[call]))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("columns", [5, 300, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_best_is_the_argmax(compiled, columns, dtype, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_top_k, "_kernel", lambda: None)
    scores = torch.randint(0, 4, (50, columns), generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0], scores[1, 2], scores[2, 1:3] = 0.0, torch.nan, -torch.inf
    for k in (1, 2, 5):
        best = best_ids(scores, k)
        assert torch.equal(best[:, 0], scores.argmax(-1)) and torch.equal(best[:, 0], argmax_rows(scores))
        # All are different, and none outside is larger.
        assert all(len(set(row)) == k for row in best.tolist())
        values = scores.gather(1, best).nan_to_num(torch.inf)
        assert torch.equal(values, scores.topk(k).values.nan_to_num(torch.inf))
