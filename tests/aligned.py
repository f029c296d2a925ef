"""What the tests of online alignment share: settings that learn fast, requests, and what became of weights."""

import hashlib

import torch
from models import prompt

from hf_dynspec import DynSpecAssistant, TreeConfig
from hf_dynspec.alignment import Trajectory

# Learns fast, always the same, and is served as soon as there is anything.
QUICK = {"synchronous": True, "learning_rate": 3e-3, "steps": 4, "rank": 8, "gate": False}
TREE = TreeConfig(20, 3, 4)


def generated(target, assistant=None, seed=0, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 24, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(seed=seed), **named | arguments)


def digest(model: torch.nn.Module) -> str:
    tensors = (one.detach().contiguous().view(torch.uint8).numpy() for one in model.state_dict().values())
    return hashlib.sha256(b"".join(one.tobytes() for one in tensors)).hexdigest()


def stream(target, assistant, requests: int, **arguments) -> list[float]:
    """The acceptance length of each of so many requests about three texts."""
    lengths = []
    for index in range(requests):
        output = generated(target, assistant, index % 3, **arguments)
        lengths.append(assistant.stats.acceptance_length)
        if not arguments.get("do_sample"):
            assert torch.equal(output, generated(target, None, index % 3, **arguments))
    return lengths


def recorded(assistant: DynSpecAssistant) -> list[Trajectory]:
    """The requests that are remembered."""
    return list(assistant.alignment._training.active_adapter.buffer)
