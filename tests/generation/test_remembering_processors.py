"""Processors with a memory: they see what comes out, once for each token and in order, and never a draft."""

import itertools

import pytest
import torch
from calls import SHAPES, generate, padded
from cases import pairwise, representatives
from models import EOS, POLICY_CASES, REMEMBERING, TERRIBLE, Counting, prompt
from sampled_texts import processors_of
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from hf_dynspec import DynSpecAssistant, devices
from hf_dynspec.drafting import draft_processors
from hf_dynspec.drafting.token_choice import TokenChoice
from hf_dynspec.shortlists import POLICIES

ALL_POLICIES = POLICY_CASES | TERRIBLE
LOOKS = (True, False)


@pytest.fixture
def looks(request, monkeypatch) -> bool:
    """Whether a value can be looked at without waiting for a device."""
    if not request.param:
        monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    return request.param


@pytest.mark.parametrize(
    ("kind", "shape", "looks"), pairwise("families", list(REMEMBERING), list(SHAPES), LOOKS), indirect=["looks"]
)
def test_greedy_output_is_the_targets_own(kind, shape, looks, target, drafter):
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=SHAPES[shape])
    expected = generate(target, logits_processor=[REMEMBERING[kind](target)])
    assert torch.equal(generate(target, assistant, logits_processor=[REMEMBERING[kind](target)]), expected)
    assert not torch.equal(expected, generate(target))
    assert 0 < assistant.stats.accepted < assistant.stats.drafted


# Each policy of the table with one processor by default, in turn; then all of each other one.
OF_THE_TABLE = list(zip(POLICIES, itertools.cycle(REMEMBERING), strict=False))


@pytest.mark.parametrize(
    ("policy", "kind"),
    representatives(
        "families", dict.fromkeys([*OF_THE_TABLE, *itertools.product(ALL_POLICIES, REMEMBERING)]), len(OF_THE_TABLE)
    ),
)
def test_every_policy(policy, kind, target, drafter):
    assistant = DynSpecAssistant(drafter, ALL_POLICIES[policy](), target=target)
    expected = generate(target, logits_processor=[REMEMBERING[kind](target)])
    assert torch.equal(generate(target, assistant, logits_processor=[REMEMBERING[kind](target)]), expected)


ARGUMENTS = {
    "guidance": {"guidance_scale": 1.5},
    "guidance against a prompt": {"guidance_scale": 1.7, "negative_prompt_ids": prompt(5, seed=9)},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "guidance and penalties": {"guidance_scale": 1.5, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize(
    ("name", "shape", "looks"), pairwise("families", list(ARGUMENTS), list(SHAPES), LOOKS), indirect=["looks"]
)
def test_what_arguments_of_generate_make(name, shape, looks, target, drafter):
    assistant = DynSpecAssistant(drafter, target=target, tree=SHAPES[shape])
    assert torch.equal(generate(target, assistant, **ARGUMENTS[name]), generate(target, **ARGUMENTS[name]))


@pytest.mark.parametrize(
    ("end", "shape", "looks"),
    pairwise("families", ("length", "token", "criterion"), list(SHAPES), LOOKS),
    indirect=["looks"],
)
def test_a_processor_is_asked_once_for_each_token_in_order(end, shape, looks, target, drafter):
    """Also if the text ends within an accepted draft. Stopping criteria are asked as often."""

    class Third(StoppingCriteria):
        def __init__(self):
            self.asked = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.asked += 1
            return torch.full((1,), self.asked == 15, dtype=torch.bool)

    class Silent(Counting):
        def __call__(self, input_ids, scores):
            super().__call__(input_ids, scores)
            return scores

    plain = generate(target)[0].tolist()
    for place in range(12, 18):
        criterion, processor = Third(), Silent()
        stop = {"length": {"max_new_tokens": place - 8}, "token": {"eos_token_id": plain[place]}, "criterion": {}}[end]
        assistant = DynSpecAssistant(target, "full", target=target, tree=SHAPES[shape])
        more = {"stopping_criteria": [criterion], "logits_processor": [processor]}
        output = generate(target, assistant, **stop, **more)[0].tolist()
        assert processor.texts == [output[:length] for length in range(12, len(output))]
        assert criterion.asked == len(output) - 12
        assert assistant.stats.accepted > 0 or len(output) <= 14


def test_processors_in_transformers_own_loop(target, drafter):
    """That loop shows them every candidate, so nothing is drafted."""
    for make in REMEMBERING.values():
        expected = generate(target, logits_processor=[make(target)])
        assistant = DynSpecAssistant(drafter, target=target)
        arguments = {"assistant_model": assistant, "logits_processor": LogitsProcessorList([make(target)])}
        output = type(target).generate(target, prompt(), max_new_tokens=24, do_sample=False, **arguments)
        assert torch.equal(output, expected)
        assert assistant.stats.drafted == 0 and assistant.stats.tokens == 24


# Drafts --------------------------------------------------------------------------------------------------------------

DRAFTED_UNDER = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 20},
    "min_length": {"min_length": 30},
    "suppress_tokens": {"suppress_tokens": [5, 9, 40, 77]},
    "sequence_bias": {"sequence_bias": {(9,): 5.0, (40,): -9.0}},
    "bad_words_ids": {"bad_words_ids": [[9], [11]]},
}


@pytest.mark.parametrize("name", DRAFTED_UNDER)
def test_a_processors_twin_computes_on_a_shortlist_what_it_computes_on_the_vocabulary(name, target):
    """Along a text with padding before it, at two nodes of each draft step of three rounds."""
    config = GenerationConfig(**DRAFTED_UNDER[name], max_new_tokens=3, eos_token_id=EOS, pad_token_id=0)
    text_of_call, mask = padded(3, prompt())
    made = processors_of(
        target, text_of_call, attention_mask=mask, generation_config=config, do_sample=False, max_new_tokens=3
    )
    twins = draft_processors.draft_processors(made)
    assert len(made) == len(twins) > 0
    context = draft_processors.DraftContext(target.config.vocab_size, 3, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    text = torch.cat([prompt()[0], prompt()[0, 3:7], torch.tensor([9, 40, 9])])
    changed = False
    for verified in (10, 14, text.shape[0]):
        context.start_round(text[:verified])
        paths = torch.empty(2, 0, dtype=torch.int64)
        for step in range(4):
            slots = torch.randperm(target.config.vocab_size, generator=generator)[:120]
            slots[0] = EOS if EOS not in slots[1:] else slots[0]
            logits = torch.randn(2, 120, generator=generator) * 3
            context.set_paths(paths)
            actual = logits
            for twin in twins:
                actual = twin(actual, slots, context)
            before = torch.cat([torch.zeros(3, dtype=torch.int64), text[:verified]])
            whole = torch.cat([before.expand(2, -1), paths], dim=1)
            wide = torch.zeros(2, target.config.vocab_size).scatter(1, slots.expand(2, -1), logits)
            expected = torch.cat([made(*rows)[:, slots] for rows in zip(whole.split(1), wide.split(1), strict=True)])
            torch.testing.assert_close(actual, expected)
            changed = changed or not torch.equal(actual, logits)
            fresh = slots[5:7] if step % 2 else text[4:6]
            paths = torch.cat([paths, fresh.unsqueeze(1)], dim=1)
    assert changed


def test_no_draft_step_looks_at_the_whole_vocabulary(target, drafter, monkeypatch):
    """Under any processor; what is as wide as the vocabulary is only ever looked up in."""
    sizes: list[int] = []
    operations = {"where": torch.where, "isin": torch.isin, "full": torch.full}
    in_draft = [False]
    for name, operation in operations.items():

        def watched(*args, operation=operation, **kwargs):
            result = operation(*args, **kwargs)
            if in_draft[0]:
                sizes.append(result.numel())
            return result

        monkeypatch.setattr(torch, name, watched)
    choose = TokenChoice.__call__

    def chosen(*args):
        in_draft[0] = True
        try:
            return choose(*args)
        finally:
            in_draft[0] = False

    monkeypatch.setattr(TokenChoice, "__call__", chosen)
    for arguments in DRAFTED_UNDER.values():
        assistant = DynSpecAssistant(drafter, POLICY_CASES["in_context"](), target=target)
        generate(target, assistant, **arguments)
    assert sizes and max(sizes) < target.config.vocab_size / 2
