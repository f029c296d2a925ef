"""Targets and drafters with quantised activations, and with weights that are tensors of a class of their own."""

import copy
import warnings

import pytest
import torch
from calls import SHAPES, assert_same
from families import model_of
from models import perturbed, prompt, tiny
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, OnlineAlignment, UnsupportedError
from hf_dynspec.drafters.weights_watch import WeightsWatch
from hf_dynspec.modeling.parts import require_finite_weights


class SharedScale(nn.Linear):
    """Rounds all rows of an input to 8 bits by one scale, so that rows change each other's outputs."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().max().clamp_min(1e-9) / 127
        return super().forward((states / scale).round() * scale)


def with_shared_scales(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for one in model.modules():
        if isinstance(one, nn.Linear):
            one.__class__ = SharedScale
    return model


def quantised_by_torch(model: PreTrainedModel) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)


class Packed(torch.Tensor):
    """int8 numbers with a scale for each row, as quantising libraries have them. It is read by `linear` alone."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype)

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor):
        self.numbers, self.scales = numbers, scales

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            states, packed, *bias = args
            return functional.linear(states, packed.numbers * packed.scales, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales)
        raise NotImplementedError(f"{cls.__name__} cannot {func}")


def with_packed_weights(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model)
    for one in model.modules():
        if isinstance(one, nn.Linear):
            scales = one.weight.detach().abs().amax(1, keepdim=True) / 127
            packed = Packed((one.weight.detach() / scales).round().to(torch.int8), scales)
            one.weight = nn.Parameter(packed, requires_grad=False)
    return model


def with_weights_of_torchao(model: PreTrainedModel) -> PreTrainedModel:
    quantisation = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(model)
    quantisation.quantize_(model, quantisation.Int8WeightOnlyConfig())
    return model


ACTIVATIONS = {one.__name__: one for one in (with_shared_scales, quantised_by_torch)}
WEIGHTS = {one.__name__: one for one in (with_packed_weights, with_weights_of_torchao)}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_whose_rows_change_each_other_is_refused_for_that_reason(shape, kind):
    target = ACTIVATIONS[kind](tiny())
    with pytest.raises(UnsupportedError, match="other tokens with it, as models do that quantise activations"):
        DynSpecAssistant(perturbed(tiny()), target=target, tree=SHAPES[shape])


def test_a_target_whose_outputs_are_random_is_refused_for_that_reason():
    with pytest.raises(UnsupportedError, match="training mode"):
        DynSpecAssistant(perturbed(tiny()), target=tiny(attention_dropout=0.5).train())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gemma3_text", "phimoe", "qwen3_moe"])
def test_targets_of_16_bits_are_not_asked_to_round_alike(family, dtype):
    # Read at once and one by one, phimoe chooses other experts here, and its logits differ by half.
    target = model_of(family).to(dtype)
    DynSpecAssistant(tiny(), target=target)


@pytest.mark.parametrize("kind", ACTIVATIONS | WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_drafters_draft(shape, kind):
    target = tiny()
    assistant = DynSpecAssistant((ACTIVATIONS | WEIGHTS)[kind](perturbed(target)), target=target, tree=SHAPES[shape])
    assert_same(target, assistant)
    assert assistant.stats.acceptance_length > 1.5
    assert_same(target, assistant, torch.cat([prompt(), prompt(seed=1)]))


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_make_a_target_like_any_other(shape, kind):
    target = WEIGHTS[kind](tiny())
    assistant = DynSpecAssistant(perturbed(tiny()), target=target, tree=SHAPES[shape])
    assert_same(target, assistant)
    assert_same(target, assistant, cache_implementation="static")
    assert_same(target, assistant, torch.cat([prompt(), prompt(seed=1)]))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_alignment_beside_a_packed_target_and_of_a_packed_drafter(kind):
    target, drafter, settings = WEIGHTS[kind](tiny()), perturbed(tiny()), OnlineAlignment(synchronous=True)
    assistant = DynSpecAssistant(drafter, target=target, alignment=settings)
    for seed in range(3):
        assert_same(target, assistant, prompt(seed=seed))
    assert assistant.alignment.stats.updates and assistant.alignment.stats.error is None
    with pytest.raises(UnsupportedError, match="which is packed: load the drafter unpacked"):
        DynSpecAssistant(WEIGHTS[kind](drafter), target=target, alignment=settings)


def test_a_change_of_packed_weights_is_noticed():
    model = with_packed_weights(tiny())
    watch = WeightsWatch(model, samples=True)
    require_finite_weights(model)
    assert not watch.has_changed()
    model.lm_head.weight = with_packed_weights(tiny(seed=1)).lm_head.weight
    assert watch.has_changed() and not watch.has_changed()
