"""Drafters that know fewer positions than the target stop drafting there, and the text ends as plain generate's."""

import pytest
import torch
from calls import SHAPES, generate
from families import model_of
from models import VOCABULARY, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, OnlineAlignment
from hf_dynspec.drafters import as_drafter

POSITIONS = 32


def short_drafter(family: str) -> PreTrainedModel:
    return model_of(family, max_position_embeddings=POSITIONS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [12, POSITIONS - 1, POSITIONS, POSITIONS + 1, 40])
@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "ctrl", "biogpt"])
def test_drafting_stops_at_the_end_of_the_position_table(family, length, shape):
    target, drafter = tiny(), short_drafter(family)
    assert as_drafter(drafter).most_positions == POSITIONS
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    output = generate(target, assistant, prompt(length), max_new_tokens=48, eos_token_id=VOCABULARY - 1)
    assert torch.equal(output, generate(target, None, prompt(length), max_new_tokens=48, eos_token_id=VOCABULARY - 1))
    # The target reads the prompt before the first tree.
    assert (assistant.stats.drafted > 0) == (length + (shape == "tree") <= POSITIONS)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "bloom", "mpt"])
def test_positions_that_are_computed_have_no_end(family):
    assert as_drafter(model_of(family)).most_positions is None


@pytest.mark.parametrize("context", [4, 128])
@pytest.mark.parametrize("length", [POSITIONS - 10, POSITIONS, POSITIONS + 8])
def test_alignment_learns_from_texts_longer_than_the_position_table(length, context, recwarn):
    target, drafter = tiny(), short_drafter("gpt2")
    alignment = OnlineAlignment(synchronous=True, gate=False, context=context)
    assistant = DynSpecAssistant(drafter, "full", target=target, alignment=alignment)
    for seed in range(3):
        generate(target, assistant, prompt(length, seed), max_new_tokens=30, eos_token_id=VOCABULARY - 1)
    assert assistant.alignment.stats.error is None
    assert not [one for one in recwarn if "alignment failed" in str(one.message)]
    assert bool(assistant.alignment.stats.updates) == (length < POSITIONS)


def test_loaded_requests_are_cut_to_the_position_table():
    target = tiny()
    alignment = OnlineAlignment(synchronous=True, gate=False, fill="gate", align_threshold=0.0)
    long = model_of("gpt2", max_position_embeddings=4 * POSITIONS)
    assistant = DynSpecAssistant(long, "full", target=target, alignment=alignment)
    generate(target, assistant, prompt(POSITIONS - 4), max_new_tokens=40)
    requests = assistant.alignment.state_dict(include_buffer=True)["adapters"]["default"]["requests"]
    assert requests[0]["token_ids"].shape[0] > POSITIONS and "is_chosen" in requests[0]
    own = DynSpecAssistant(short_drafter("gpt2"), "full", target=target, alignment=alignment).alignment
    state = own.state_dict(include_buffer=True)
    state["adapters"]["default"]["requests"] = requests
    own.load_state_dict(state)
    (kept,) = own.adapter.buffer
    assert kept.token_ids.shape[0] == POSITIONS
    assert own.update_now() is not None
