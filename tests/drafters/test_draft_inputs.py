"""What draft steps start from, as policies are given it, and all draft steps of a text at once."""

import pytest
import torch
from draft_inputs import DraftInputs
from eagle_heads import LAYOUTS, random_head
from models import prompt, tiny

from hf_dynspec.drafters import CausalLMDrafter
from hf_dynspec.drafters.base import Drafter
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint
from hf_dynspec.drafters.eagle.drafter import EagleDrafter

LENGTH, DEPTH = 14, 4
# Sums in another order, in fp64.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
KINDS = ["causal", *LAYOUTS]


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=6).double()


def drafter_of(kind: str, target) -> Drafter:
    if kind == "causal":
        return CausalLMDrafter(tiny("qwen3", seed=3).double())
    head = random_head(kind)
    return EagleDrafter(EagleCheckpoint.from_parts(head.config, head.tensors), target)


def features_for(drafter: Drafter, target, length: int = LENGTH) -> torch.Tensor | None:
    """Random ones: what they are does not matter here, only that everybody reads the same."""
    width = len(drafter.reads) * target.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    return torch.randn(length, width, generator=generator, dtype=torch.float64) if width else None


@pytest.mark.parametrize("kind", KINDS)
def test_all_steps_of_a_text_at_once_are_those_of_rounds(kind, target):
    drafter, text = drafter_of(kind, target), prompt(LENGTH)[0]
    features = features_for(drafter, target)
    steps = list(drafter.unroll(text, features, DEPTH))
    assert len(steps) == DEPTH
    for start in range(LENGTH - DEPTH):
        state, taken_in = drafter.start(), DraftInputs()
        prefix = text[: start + 2]
        hidden = [state.advance(prefix, None if features is None else features[: start + 1], taken_in)[-1]]
        for token in text[start + 2 : start + 1 + DEPTH]:
            hidden.append(state.draft(token[None], observe_draft_inputs=taken_in)[0])
        for depth, step in enumerate(steps):
            assert step.hidden.shape[0] == LENGTH - 1 - depth
            torch.testing.assert_close(step.hidden[start], hidden[depth], **CLOSE)
            torch.testing.assert_close(step.embeddings[start : start + 1], taken_in.embeddings[depth], **CLOSE)
            torch.testing.assert_close(step.features[start : start + 1], taken_in.features[depth], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("is_tree", [False, True])
def test_inputs_are_right_after_every_verdict(kind, accepted, is_tree, target):
    """The feature before the newest token is the same whether it was computed now, in the last draft or before it."""
    drafter, text = drafter_of(kind, target), prompt(LENGTH)[0]
    features = features_for(drafter, target)
    state, length = drafter.start(), 6

    def advance(length: int, observe_draft_inputs: DraftInputs) -> None:
        read = None if features is None else features[max(0, state.length - 1) : length - 1]
        state.advance(text[:length], read, observe_draft_inputs)

    advance(length, DraftInputs())
    for level, token in enumerate(text[length : length + 3]):
        # In a tree, the right token is the second of two.
        tokens = torch.stack([token.new_tensor(7), token]) if is_tree else token[None]
        state.draft(tokens, torch.tensor([0, 1 if level else 0]) if is_tree else None, DraftInputs())
    state.truncate(min(state.length, length + accepted))
    again, fresh = DraftInputs(), DraftInputs()
    advance(length + accepted + 1, again)
    state = drafter.start()
    advance(length + accepted + 1, fresh)
    torch.testing.assert_close(again.embeddings[0], fresh.embeddings[0], **CLOSE)
    torch.testing.assert_close(again.features[0], fresh.features[0], **CLOSE)
    assert bool((fresh.features[0] != 0).any())


def test_before_the_first_token_there_is_nothing(target):
    taken_in = DraftInputs()
    drafter_of("causal", target).start().advance(prompt(1)[0], observe_draft_inputs=taken_in)
    assert taken_in.embeddings[0].shape == taken_in.features[0].shape == (1, 32)
    assert not taken_in.features[0].any()
