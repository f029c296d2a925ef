"""What tests of whole calls share: a call with an assistant and without one, and what happens within it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from models import prompt
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig
from hf_dynspec.protocol import Candidates

SMALL_TREE = TreeConfig(total_tokens=12, depth=2, top_k=4)
SHAPES = {"chain": False, "tree": SMALL_TREE}
# fp32 logits of a batched forward and of one-token forwards, where logits reach about 100.
CLOSE = {"rtol": 1e-4, "atol": 3e-3}


def generate(target: PreTrainedModel, assistant: Any = None, input_ids: Any = None, **arguments: Any) -> Any:
    """24 tokens, greedily, after a prompt of 12, unless the arguments say otherwise."""
    defaults = {"max_new_tokens": 24, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt() if input_ids is None else input_ids, **{**defaults, **arguments})


def assert_same(target: PreTrainedModel, assistant: Any, input_ids: Any = None, **arguments: Any) -> torch.Tensor:
    """The output with the assistant, which is the one without."""
    output = generate(target, assistant, input_ids, **arguments)
    assert torch.equal(output, generate(target, None, input_ids, **arguments))
    return output


def assert_two_threads_agree(target: PreTrainedModel, make: Callable[[], DynSpecAssistant]) -> None:
    """Two threads that share an assistant get the target's own outputs, and draft as one call after the other does."""
    prompts, (assistant, alone) = [prompt(10 + seed, seed) for seed in range(4)], (make(), make())
    expected = [generate(target, None, input_ids) for input_ids in prompts]
    together = threading.Barrier(2)

    def run(half: int) -> list[torch.Tensor]:
        together.wait(timeout=600)
        return [generate(target, assistant, input_ids) for input_ids in prompts[half::2]]

    with ThreadPoolExecutor(2) as pool:
        for half, outputs in enumerate(pool.map(run, range(2), timeout=600)):
            assert all(torch.equal(*both) for both in zip(outputs, expected[half::2], strict=True))
    for input_ids in prompts:
        generate(target, alone, input_ids)
    assert assistant.stats_total.to_dict() == alone.stats_total.to_dict()
    assert assistant.stats_total.calls == len(prompts)


def padded(pads: int, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt with tokens of padding before it, and its attention mask."""
    text = torch.cat([torch.zeros(1, pads, dtype=torch.int64), input_ids], dim=1)
    return text, (torch.arange(text.shape[1]) >= pads).long()[None]


class Pieces:
    """A streamer that keeps what it is given: the prompt, then the tokens of each round."""

    def __init__(self):
        self.pieces: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0 and value.device.type == "cpu"
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


class Round(NamedTuple):
    """One draft: the verified tokens before it, the longest useful path, and what was drafted."""

    prefix: torch.Tensor
    most: int
    candidates: Candidates
