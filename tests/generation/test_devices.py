"""cuDNN's attention is switched off while a GPU takes part in a call, and afterwards torch is as it was."""

import threading

import pytest
import torch
from calls import SHAPES, generate
from models import perturbed, tiny
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LogitsProcessorList

from hf_dynspec import DynSpecAssistant, devices
from hf_dynspec.devices import without_attention_plans

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def plans():
    assert cuda.cudnn_sdp_enabled()
    yield
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("at", "has_plans"), [((GPU,), False), ((CPU, GPU), False), ((CPU,), True)], ids=str)
def test_attention_makes_no_plans_where_a_gpu_takes_part(at, has_plans):
    with without_attention_plans(*at):
        assert cuda.cudnn_sdp_enabled() == has_plans
        with without_attention_plans(*at):
            assert cuda.cudnn_sdp_enabled() == has_plans
        assert cuda.cudnn_sdp_enabled() == has_plans


def test_what_a_user_settled_stays():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_attention_plans(GPU):
        assert cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        with without_attention_plans(GPU):
            assert not cuda.cudnn_sdp_enabled()
        assert not cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(True)


def test_threads_that_come_and_go_leave_it_as_it_was():
    seen, start = [], threading.Barrier(4)

    def come_and_go() -> None:
        start.wait()
        for _ in range(500):
            with without_attention_plans(GPU):
                seen.append(cuda.cudnn_sdp_enabled())

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2000 and not any(seen)


@pytest.mark.parametrize("shape", SHAPES)
def test_rounds_read_without_plans(shape, monkeypatch):
    """The target and the drafter, also if an error ends the call."""
    monkeypatch.setattr(devices, "HOST_MEMORY", frozenset())
    target = tiny()
    drafter, seen = perturbed(target), {"target": [], "drafter": []}
    assistant = DynSpecAssistant(drafter, target=target, tree=SHAPES[shape])
    hooks = [
        model.model.register_forward_pre_hook(lambda *_, name=name: seen[name].append(cuda.cudnn_sdp_enabled()))
        for name, model in (("target", target), ("drafter", drafter))
    ]
    generate(target, assistant)
    assert all(len(forwards) > 3 and not any(forwards) for forwards in seen.values())
    assert cuda.cudnn_sdp_enabled()

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generate(target, assistant, logits_processor=LogitsProcessorList([fail]))
    for hook in hooks:
        hook.remove()
