"""Targets that read images: their own output, in chains and trees, with drafters that read text alone."""

import re
from pathlib import Path

import pytest
import torch
from aligned import quick_assistant, recorded
from cases import representatives
from eagle_heads import agreeing_head, drafter_of, soft
from image_models import FAMILIES, IMAGE, VIDEO, model_of, prompt_of
from models import VOCABULARY, tiny
from test_all_families import TREE, WellInformed, assert_names
from transformers import DynamicCache

from hf_dynspec import DynSpecAssistant, InContextShortlist, UnsupportedError
from hf_dynspec.cache_names import CACHE
from hf_dynspec.protocol import Needs
from hf_dynspec.shortlists.full import FullShortlist

NEW_TOKENS = 30
# Patterns of the refusals' messages: of families that cannot be a target at all, and that take no trees.
NO_TARGET = {"mllama": "keys and values of images"}
NO_TREE = {"lfm2_vl": "conv", "qwen3_5": "recurrent"}
FIRST = ("qwen2_vl", "paligemma", "llava", "glm4v")
ALL = [*FIRST, *(family for family in FAMILIES if family not in FIRST)]


@torch.no_grad()
def head_of(target, layout="eagle3"):
    """A head that agrees with a target now and then, whose layers then hardly change their input."""
    for name, parameter in target.get_decoder().named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.mul_(0.25)
    return drafter_of(agreeing_head(layout), target)


def generate(target, assistant=None, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "assistant_model": assistant}
    return target.generate(**named | arguments)


@pytest.mark.parametrize("family", representatives("families", ALL, keep=len(FIRST)))
def test_the_output_is_the_targets_own(family):
    target = model_of(family)
    prompts = [prompt_of(family), prompt_of(family, images=2, seed=1)]
    # Without images, and after other ones.
    ids = prompts[0]["input_ids"]
    prompts += [{"input_ids": ids.where(ids < IMAGE, 7)}, prompts[0]]
    for tree in (False, TREE):
        cause = NO_TARGET.get(family) or (tree and NO_TREE.get(family))
        if cause:
            with pytest.raises(UnsupportedError) as refusal:
                DynSpecAssistant(tiny(), target=target, tree=tree)
            assert_names(refusal, cause)
            continue
        for one in prompts:
            expected = generate(target, **one)
            assistant = DynSpecAssistant(WellInformed(expected[0], VOCABULARY), target=target, tree=tree)
            assert torch.equal(generate(target, assistant, **one), expected)
            assert 0 < assistant.stats.accepted < assistant.stats.drafted
            assistant.unbind()


def test_the_page_says_what_these_tests_expect():
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| `")
    ]
    pages = {family: [cell == "yes" for cell in row] for family, *row in rows}
    for family in FAMILIES:
        is_target = family not in NO_TARGET
        assert pages[family] == [is_target, is_target and family not in NO_TREE], family


def test_the_image_matters():
    """In the families whose models see it as the tests' prompts have it."""
    blind = set()
    for family in FIRST:
        target, one = model_of(family), prompt_of(family)
        other = one | {"pixel_values": -one["pixel_values"]}
        if torch.equal(generate(target, **one), generate(target, **other)):
            blind.add(family)
    assert not blind


def test_drafts_may_hold_the_tokens_that_stand_for_images():
    """Beside an image the target counts them in all that it reads."""
    target, one = model_of("llava"), prompt_of("llava")
    expected = generate(target, **one)
    for drafted in (IMAGE, VIDEO):
        text = expected[0].clone()
        text[one["input_ids"].shape[1] + 1 :: 3] = drafted
        assistant = DynSpecAssistant(WellInformed(text, VOCABULARY), target=target)
        assert torch.equal(generate(target, assistant, **one), expected)
        assistant.unbind()


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", ["eagle2", "eagle3"])
def test_heads_read_the_states_at_images(layout, tree):
    """The target reads text as the one that the head agrees with."""
    target, like = model_of("llava"), soft()
    target.model.language_model.load_state_dict(like.model.state_dict())
    target.lm_head.load_state_dict(like.lm_head.state_dict())
    drafter = drafter_of(agreeing_head(layout), target)
    assistant = quick_assistant(drafter, target, tree, steps=1)
    for seed in range(3):
        one = prompt_of("llava", images=2, seed=seed)
        output = generate(target, assistant, **one)
        assert torch.equal(output, generate(target, **one))
        with torch.no_grad():
            whole = one | {"input_ids": output, "attention_mask": torch.ones_like(output)}
            states = target(**whole, output_hidden_states=True).hidden_states
        request = recorded(assistant)[seed]
        assert torch.equal(request.token_ids, output[0])
        # The last token was not read.
        expected = torch.cat([states[layer][0, :-1] for layer in drafter.reads], dim=-1)
        torch.testing.assert_close(request.features[:-1], expected, rtol=1e-3, atol=1e-3)
    assert assistant.stats_total.accepted > 0


def test_videos():
    for family in ("qwen2_vl", "qwen3_vl"):
        target, one = model_of(family), prompt_of(family, images=2, video=True)
        expected = generate(target, **one)
        assistant = DynSpecAssistant(WellInformed(expected[0], VOCABULARY), target=target)
        assert torch.equal(generate(target, assistant, **one), expected)
        assert assistant.stats.accepted > 0


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_a_prompt_with_images_is_read_at_once(family):
    target, one = model_of(family), prompt_of(family, images=2)
    expected = generate(target, **one)
    assistant = DynSpecAssistant(WellInformed(expected[0], VOCABULARY), target=target)
    assert torch.equal(generate(target, assistant, **one, prefill_chunk_size=5), expected)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_a_text_goes_on_in_a_cache_with_images(family):
    target, one = model_of(family), prompt_of(family)
    outputs = []
    for is_assisted in (False, True):
        cache = DynamicCache(config=target.config.get_text_config())
        assistant = DynSpecAssistant(tiny(), target=target) if is_assisted else None
        text = generate(target, assistant, **one, **{CACHE: cache})
        text = torch.cat([text, torch.tensor([[5, 6, 7]])], dim=1)
        mask = torch.ones_like(text)
        outputs.append(generate(target, assistant, input_ids=text, attention_mask=mask, **{CACHE: cache}))
    assert torch.equal(*outputs)


class Listener(FullShortlist):
    """Scores everything, and keeps the prompts that it is shown."""

    needs = Needs(prompt_top_k=3)

    def __init__(self, positions: int | None):
        self.needs = Needs(prompt_top_k=3, prompt_positions=positions)
        self.token_ids, self.top_ids = [], []

    def start(self, vocabulary):
        state = super().start(vocabulary)

        def observe_prompt(prompt):
            self.token_ids.append(prompt.token_ids)
            if prompt.top_ids is not None:
                self.top_ids.append(prompt.top_ids)

        state.observe_prompt = observe_prompt
        return state


@pytest.mark.parametrize("positions", [None, 5, 8])
def test_policies_are_shown_text_alone(positions):
    """Not the placeholders, nor what the target says where one follows."""
    target, one = model_of("qwen2_vl"), prompt_of("qwen2_vl", images=2)
    listener = Listener(positions)
    assistant = DynSpecAssistant(tiny(), listener, target=target)
    generate(target, assistant, **one, max_new_tokens=4)
    (text,) = one["input_ids"]
    assert torch.equal(listener.token_ids[0], text[text != IMAGE])
    with torch.no_grad():
        likeliest = target(**one).logits[0].topk(3).indices
    is_shown = torch.cat([text[1:] != IMAGE, torch.tensor([True])])
    expected = likeliest[is_shown][-(positions or len(text)) :]
    (shown,) = listener.top_ids
    # A few rows of logits come out of the forward, and some of them precede placeholders.
    assert torch.equal(shown, expected[-len(shown) :]) and (positions is not None or len(shown) == len(expected))


def test_images_do_not_fill_a_window():
    """A window of as many tokens as there is text keeps all of it beside any number of placeholders."""
    target, one = model_of("llava_next"), prompt_of("llava_next", images=3)
    text = one["input_ids"][one["input_ids"] != IMAGE]
    policy = InContextShortlist(window=len(text), prompt_top_k=0, verify_top_k=0)
    assistant = DynSpecAssistant(tiny(), policy, target=target)
    candidates = assistant.draft_round(one["input_ids"])
    assert set(text.tolist()) <= set(candidates.shortlists[0].ids().tolist())


IN_BATCHES = ("qwen2_vl", "llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "glm4v", "idefics3", "smolvlm", "mistral3")


def together(prompts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Several prompts as a processor returns them with padding_side="left"."""
    longest = max(one["input_ids"].shape[1] for one in prompts)
    joined = {}
    for name, first in prompts[0].items():
        parts = [one[name] for one in prompts]
        if name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            parts = [torch.nn.functional.pad(part, (longest - part.shape[1], 0)) for part in parts]
        # The images of Idefics 3 have one more dimension, of the batch.
        joined[name] = torch.cat(parts, dim=1 if first.dim() == 5 and first.shape[0] == 1 else 0)
    return joined


@pytest.mark.parametrize("way", ["in rounds", "text by text"])
@pytest.mark.parametrize("family", representatives("families", IN_BATCHES, keep=3))
def test_a_batch_is_each_text_alone(family, way):
    target = model_of(family)
    head = head_of(target)
    prompts = [prompt_of(family, images=count, seed=seed) for seed, count in enumerate((2, 1, 3))]
    arguments = {"no_repeat_ngram_size": 4} if way == "text by text" else {}
    alone = [generate(target, **one, **arguments)[0, one["input_ids"].shape[1] :] for one in prompts]
    assistant = DynSpecAssistant(head, target=target)
    for _ in range(2):
        some = together(prompts)
        output = generate(target, assistant, **some, **arguments)
        assert torch.equal(output[:, some["input_ids"].shape[1] :], torch.stack(alone))
        assert assistant.stats.lane.startswith("fixed memory, drafts" if arguments else "fixed memory")
        assert assistant.stats.accepted > 0
    (one, *_) = prompts
    copies = generate(target, assistant, **one, **arguments, num_return_sequences=2, do_sample=True, top_k=1)
    assert torch.equal(copies, torch.cat([one["input_ids"], alone[0][None]], dim=1).expand(2, -1))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_a_text_without_images_in_a_batch_with_images(family):
    target, one = model_of(family), prompt_of(family, images=2)
    ids = one["input_ids"].where(one["input_ids"] < IMAGE, 7)
    types = {name: torch.zeros_like(tensor) for name, tensor in one.items() if name.endswith("token_type_ids")}
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}
    some = {name: torch.cat([tensor, text[name]]) if name in text else tensor for name, tensor in one.items()}
    assistant = DynSpecAssistant(head_of(target), target=target)
    output = generate(target, assistant, **some)
    assert torch.equal(output, torch.cat([generate(target, **one), generate(target, **text)]))


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
def test_heads_draft_in_a_batch(tree):
    target = model_of("qwen2_vl")
    assistant = DynSpecAssistant(head_of(target, "eagle2"), target=target, tree=tree)
    prompts = [prompt_of("qwen2_vl", images=count, seed=seed) for seed, count in enumerate((1, 2))]
    output = generate(target, assistant, **together(prompts))
    for row, one in zip(output, prompts, strict=True):
        assert torch.equal(row[-NEW_TOKENS:], generate(target, **one)[0, -NEW_TOKENS:])


def test_images_that_are_not_encoded_before_a_prompt_are_refused_in_a_batch(monkeypatch):
    target, one = model_of("llava"), prompt_of("llava")
    assistant = DynSpecAssistant(tiny(), target=target)
    monkeypatch.setattr(type(target), "_supports_mm_encoder_outputs", lambda self: False)
    with pytest.raises(UnsupportedError, match=re.escape("pixel_values cannot be used in a batch")):
        generate(target, assistant, **together([one, one]))
