"""Draft steps over keys and values at fixed addresses, as they are captured on a GPU. Without one the same steps run
operation by operation, in the same memory and under the same masks."""

import gc
import weakref

import pytest
import torch
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig, devices
from hf_dynspec.drafters import CausalLMDrafter, captured_step
from hf_dynspec.drafters.captured_step import CapturedSteps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def captured(monkeypatch) -> None:
    """Steps are captured here too, and texts outgrow their memory soon."""
    monkeypatch.setattr(devices, "GRAPHS", frozenset({DEVICE.type}))
    monkeypatch.setattr(captured_step, "_FEWEST_POSITIONS", 16)


def greedy(target: PreTrainedModel, input_ids: torch.Tensor, **arguments) -> torch.Tensor:
    return target.generate(input_ids, **{"do_sample": False, "max_new_tokens": 40, **arguments})


@pytest.mark.parametrize("tree", [False, TreeConfig(12, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi", "gpt2"])
def test_greedy_output_is_the_targets_own(family, tree):
    target = tiny(family).to(DEVICE)
    assistant = DynSpecAssistant(perturbed(target), POLICY_CASES["hybrid"](), target=target, tree=tree)
    assert isinstance(assistant.drafter.step, CapturedSteps)
    for seed in range(2):
        input_ids = prompt(seed=seed).to(DEVICE)
        assert torch.equal(greedy(target, input_ids, assistant_model=assistant), greedy(target, input_ids))
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_steps_say_what_the_decoder_says(family):
    """Past windows, after a cut, after levels of a tree, and where the memory is outgrown."""
    model = tiny(family).to(DEVICE)
    drafter = CausalLMDrafter(model)
    text = prompt(60).to(DEVICE)[0]
    with torch.no_grad():
        expected = model.get_decoder()(input_ids=text.unsqueeze(0), use_cache=False)[0][0]
        state = drafter.start()
        actual = [*state.advance(text[:7])]
        for token_id in text[7:30].split(1):
            actual += state.draft(token_id)
        state.truncate(20)
        state.draft(text[:2], torch.zeros(2, dtype=torch.int64, device=DEVICE))
        state.truncate(20)
        actual = [*actual[:20], *state.advance(text[:23])]
        for token_id in text[23:].split(1):
            actual += state.draft(token_id)
    torch.testing.assert_close(torch.stack(actual), expected, rtol=1e-4, atol=1e-4)


def test_memory_is_used_again_and_never_by_two(monkeypatch):
    made = []
    memory_of_the_package = captured_step._StepMemory
    monkeypatch.setattr(
        captured_step, "_StepMemory", lambda *args: made.append(args[2]) or memory_of_the_package(*args)
    )
    drafter = CausalLMDrafter(tiny().to(DEVICE))
    made.clear()
    text = prompt(20).to(DEVICE)[0]
    with torch.no_grad():
        first, second = drafter.start(), drafter.start()
        expected = first.advance(text)
        second.advance(text.flip(0))
        # There is one already: what was compared when the drafter was made.
        assert made == [32]
        torch.testing.assert_close(first.draft(text[:1]), drafter.start().advance(torch.cat([text, text[:1]]))[-1:])
        del first, second
        gc.collect()
        made.clear()
        torch.testing.assert_close(drafter.start().advance(text), expected)
    assert made == []


def test_weights_that_are_put_elsewhere_are_followed():
    target = tiny().to(DEVICE)
    drafter = CausalLMDrafter(perturbed(target))
    text = prompt(20).to(DEVICE)[0]
    state = drafter.start()
    with torch.no_grad():
        state.advance(text[:19])
        own = dict(target.named_parameters())
        replace = drafter.prepare_weights({name: own[name] for name, _ in drafter.module.named_parameters()})
        before = drafter.step
        replace()
        assert drafter.step is not before
        state = drafter.start()
        state.advance(text[:19])
        expected = target.get_decoder()(input_ids=text.unsqueeze(0), use_cache=False)[0][0, -1:]
        torch.testing.assert_close(state.draft(text[19:]), expected, rtol=1e-4, atol=1e-4)


def test_memory_that_is_kept_is_given_up_where_there_is_too_little(monkeypatch):
    drafter = CausalLMDrafter(tiny().to(DEVICE))
    kept = weakref.ref(drafter.step._free[32])
    memory_of_the_package, asked = captured_step._StepMemory, []

    def memory(*args):
        asked.append(args[2])
        if kept() is not None:
            raise torch.OutOfMemoryError
        return memory_of_the_package(*args)

    monkeypatch.setattr(captured_step, "_StepMemory", memory)
    with torch.no_grad():
        drafter.start().advance(prompt(60).to(DEVICE)[0])
    assert asked == [64, 64]


def test_what_failed_for_lack_of_memory_holds_none_when_it_is_tried_again(monkeypatch):
    drafter, made = CausalLMDrafter(tiny().to(DEVICE)), []

    class Memory(captured_step._StepMemory):
        def __init__(self, *args):
            assert all(one() is None for one in made)
            super().__init__(*args)
            made.append(weakref.ref(self))
            if len(made) == 1:
                raise torch.OutOfMemoryError

    monkeypatch.setattr(captured_step, "_StepMemory", Memory)
    with torch.no_grad():
        drafter.start().advance(prompt(60).to(DEVICE)[0])
    assert len(made) == 2


@pytest.mark.parametrize("when", ["made", "changed"])
def test_inference_mode_leaves_nothing_that_cannot_be_written_to(when):
    target = tiny().to(DEVICE)
    drafter, input_ids = perturbed(target), prompt().to(DEVICE)
    with torch.inference_mode(when == "made"):
        assistant = DynSpecAssistant(drafter, "full", target=target)
    if when == "changed":
        with torch.no_grad():
            drafter.get_input_embeddings().weight.mul_(1.0)
            next(drafter.model.layers.parameters()).mul_(1.0)
    expected = greedy(target, input_ids)
    with torch.inference_mode():
        assert torch.equal(greedy(target, input_ids, assistant_model=assistant), expected)
    assert torch.equal(greedy(target, input_ids, assistant_model=assistant), expected)
    assert isinstance(assistant.drafter.step, CapturedSteps)


def test_what_is_trained_is_not_kept():
    drafter = CausalLMDrafter(tiny().to(DEVICE))
    text = prompt(20).to(DEVICE)[0]
    with torch.enable_grad():
        assert all(step.hidden.requires_grad for step in drafter.unroll(text, None, 2))
    assert not any(one.requires_grad for memory in drafter.step._free.values() for one in memory._tensors)


def test_what_was_no_number_is_forgotten_with_its_text():
    drafter = CausalLMDrafter(tiny().to(DEVICE))
    text = prompt(20).to(DEVICE)[0]
    with torch.no_grad():
        expected = drafter.start().advance(text)
        state = drafter.start()
        state.advance(text[:10])
        for tensor in state._layers._memory._tensors:
            tensor[..., 10:12, :] = torch.nan
        state._layers._count = 12
        state._length = 12
        state.truncate(10)
        torch.testing.assert_close(state.advance(text[:11]), expected[10:11], rtol=1e-4, atol=1e-4)
        for tensor in state._layers._memory._tensors:
            tensor.fill_(torch.nan)
        del state
        state = drafter.start()
        state.advance(text[:19])
        torch.testing.assert_close(state.draft(text[19:]), expected[-1:], rtol=1e-4, atol=1e-4)


def test_texts_may_outgrow_their_memory_under_autocast():
    target = tiny().to(DEVICE)
    assistant = DynSpecAssistant(perturbed(target), "full", target=target)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        output = greedy(
            target, prompt(10).to(DEVICE), assistant_model=assistant, max_new_tokens=100, eos_token_id=None
        )
    assert output.shape[1] == 110 and assistant.stats.accepted > 0


def test_what_does_not_agree_is_not_used(monkeypatch):
    monkeypatch.setattr(captured_step._StepMemory, "_mask", lambda self, window: self._places[None, None, None] * 0.0)
    assert CausalLMDrafter(tiny().to(DEVICE)).step is None
