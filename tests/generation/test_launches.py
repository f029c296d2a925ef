"""How much a graph of a round launches: each operation of it takes a GPU about two microseconds, and there were 1,145
of them at Llama-3.1-8B's shapes when the first graph was tried."""

import pytest
import torch
from eagle_heads import drafter_of, random_head

pytest.importorskip("torch.utils.backend_registration", reason="torch knows no devices written in Python")

from hf_dynspec import DynSpecAssistant, FullShortlist, HybridShortlist, devices
from hf_dynspec.drafters.eagle import fixed
from hf_dynspec.evaluation.operations import pretended_device as pretended
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.evaluation.operations.rounds import random_model
from hf_dynspec.kernels import QueryRows, attention, reference
from hf_dynspec.memory import fixed_decoder
from hf_dynspec.rounds import RecordedRound, recorded

VOCABULARY = 2048
SAMPLED = {"do_sample": True, "top_k": 50}
QWENS = SAMPLED | {"repetition_penalty": 1.1}


# Kernels of a GPU that are one launch, or two.


@torch.library.custom_op("hf_dynspec_tests::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    within: torch.Tensor,
    levels: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return attention.round_attention(query, keys, values, QueryRows(lengths, within, levels), scale=scale).contiguous()


@torch.library.custom_op("hf_dynspec_tests::combination", mutates_args=())
def _combination(parts: torch.Tensor) -> torch.Tensor:
    return parts.clone()


@torch.library.custom_op("hf_dynspec_tests::rotation", mutates_args=())
def _rotation(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = reference.rotated(query, key, cos, sin)
    return query.contiguous().clone(), key.transpose(1, 2).contiguous().clone()


def attend(query, keys, values, rows, *, scale, window=None, soft_cap=None, sinks=None):
    within, levels = rows.within.contiguous(), rows.levels.contiguous()
    return _combination(_attention(query.contiguous(), keys, values, rows.lengths, within, levels, float(scale)))


def rotate(query, key, cos, sin):
    query, key = _rotation(query, key, cos, sin)
    return query, key.transpose(1, 2)


def launches(layers: int, policy, monkeypatch, *, tree: bool = False, **sampling) -> int:
    """What a round of chains of 5 launches, or of the default tree, with an EAGLE-2 head and a target of so many
    layers."""
    monkeypatch.setattr(devices, "GRAPHS", frozenset({pretended.NAME}))
    monkeypatch.setattr(recorded, "_WARM_UPS", 10**6)
    for module, name, kernel in (
        (fixed_decoder, "round_attention_for", attend),
        (fixed, "round_attention_for", attend),
        (fixed_decoder, "rotation_for", rotate),
    ):
        monkeypatch.setattr(module, name, lambda device, kernel=kernel: kernel)
    counts, run = [], RecordedRound._run_once
    with pretended_device() as device:

        def counted(self) -> bool:
            begin = len(device.events)
            is_same = run(self)
            counts.append(sum(event.is_operation for event in device.events[begin:]))
            return is_same

        monkeypatch.setattr(RecordedRound, "_run_once", counted)
        target = move(random_model(layers, VOCABULARY, seed=0, width=32))
        drafter = drafter_of(random_head("eagle2", vocabulary=VOCABULARY, num_key_value_heads=4), target)
        assistant = DynSpecAssistant(drafter, policy, target=target, tree=tree, num_assistant_tokens=5)
        text = to_device(torch.arange(3, 15).unsqueeze(0))
        settings = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **sampling}
        target.generate(
            text, attention_mask=to_device(torch.ones_like(text.memory)), assistant_model=assistant, **settings
        )
        assert assistant.stats.lane == "fixed memory, as a graph"
    return counts[3]


def hybrid() -> HybridShortlist:
    return HybridShortlist(core_size=256, window=1536)


def test_a_layer(monkeypatch):
    of_two, of_four = (launches(layers, FullShortlist(), monkeypatch) for layers in (2, 4))
    assert (of_four - of_two) / 2 <= 18


@pytest.mark.parametrize(
    ("policy", "settings", "most"),
    [
        (FullShortlist, {}, 200),
        (hybrid, {}, 239),
        (hybrid, SAMPLED, 399),
        (hybrid, QWENS, 745),
        (hybrid, {"tree": True}, 439),
        (hybrid, {"tree": True, **SAMPLED}, 1440),
    ],
    ids=["full", "hybrid", "sampled", "with a penalty", "trees", "sampled trees"],
)
def test_outside_of_layers(policy, settings, most, monkeypatch):
    assert launches(2, policy(), monkeypatch, **settings) - 2 * 18 <= most
