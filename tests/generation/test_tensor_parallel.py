"""Targets whose weights are spread over two processes (`tp_plan`), which run each forward in step."""

from pathlib import Path

import pytest
import torch
from eagle_heads import drafter_of, random_head
from launched_processes import launch
from models import perturbed, prompt, tiny
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hf_dynspec import (
    DynSpecAssistant,
    InContextShortlist,
    RetrievalShortlist,
    UnionShortlist,
    UnsupportedError,
)
from hf_dynspec.alignment import OnlineAlignment

CLOCKS = {
    "num_assistant_tokens='auto'": lambda: {"num_assistant_tokens": "auto"},
    "the policy 'auto'": lambda: {"policy": "auto"},
    "alignment": lambda: {"alignment": OnlineAlignment()},
    "synchronous=True": lambda: {"policy": UnionShortlist(InContextShortlist(), RetrievalShortlist(size=64))},
}


def greedy(target, assistant=None) -> torch.Tensor:
    return target.generate(prompt(), max_new_tokens=24, do_sample=False, assistant_model=assistant)


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})

import torch
from models import prompt
from torch import distributed
from transformers import AutoModelForCausalLM

from hf_dynspec import DynSpecAssistant, RetrievalShortlist, TreeConfig, UnsupportedError


def load(name, **options):
    return AutoModelForCausalLM.from_pretrained(sys.argv[1] + name, **options).eval()


def refused(reason, **settings):
    try:
        DynSpecAssistant(**dict(drafter=drafter, target=target) | settings)
    except UnsupportedError as error:
        assert reason in str(error), str(error)
    else:
        raise AssertionError(reason)


target, drafter = load("/target", tp_plan="auto"), load("/drafter")
assert distributed.get_world_size() == 2 and hasattr(target.lm_head.weight, "device_mesh")
text, batch = prompt(), torch.cat([prompt(), prompt(seed=1)])


def generate(ids, assistant=None, **arguments):
    return target.generate(ids, max_new_tokens=24, assistant_model=assistant, **dict(do_sample=False) | arguments)


expected = generate(text)
retrieval = RetrievalShortlist(size=64, synchronous=True)
for policy, tree in (("hybrid", False), ("screen", False), (retrieval, False), ("hybrid", TreeConfig(20, 2, 5))):
    assistant = DynSpecAssistant(drafter, policy, target=target, tree=tree)
    for memory in (None, "static"):
        assert torch.equal(generate(text, assistant, cache_implementation=memory), expected), (policy, tree, memory)
    assert torch.equal(generate(batch, assistant), generate(batch)), (policy, tree)
assert assistant.stats.acceptance_length > 1.5

# Each process draws, so with equal seeds they draw the same.
torch.manual_seed(3)
drawn = generate(text, assistant, do_sample=True)
gathered = [torch.empty_like(drawn) for _ in range(2)]
distributed.all_gather(gathered, drawn)
assert torch.equal(*gathered)

# What goes by a clock would draft something else in each process, which would then wait for the other for ever.
refused("num_assistant_tokens='auto'", num_assistant_tokens="auto")
refused("without tp_plan", drafter=load("/drafter", tp_plan="auto"))
refused("without tp_plan", drafter=target)

distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.process
def test_two_processes_of_one_target_verify_the_same_drafts_and_clocks_are_refused(tmp_path):
    target = tiny()
    target.save_pretrained(tmp_path / "target")
    perturbed(target).save_pretrained(tmp_path / "drafter")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch(script, tmp_path)


@pytest.fixture
def spread():
    """A target whose output projection is spread over the processes of a group, which is this one alone."""
    if not distributed.is_available():
        pytest.skip("torch without processes")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    target = tiny()
    style = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    yield parallelize_module(target, init_device_mesh("cpu", (1,)), {"lm_head": style})
    distributed.destroy_process_group()


def test_a_spread_target_takes_whole_drafters_and_no_clocks(spread):
    expected = greedy(spread)
    drafter = perturbed(tiny())
    assistant = DynSpecAssistant(drafter, target=spread)
    assert torch.equal(greedy(spread, assistant), expected)
    assert assistant.stats.acceptance_length > 1.5
    for asked, settings in CLOCKS.items():
        with pytest.raises(UnsupportedError, match=asked):
            DynSpecAssistant(drafter, target=spread, **settings())
    assistant.generation_config.num_assistant_tokens = "auto"
    with pytest.raises(UnsupportedError, match="set a number"):
        greedy(spread, assistant)
    with pytest.raises(UnsupportedError, match="without tp_plan"):
        DynSpecAssistant(spread, target=tiny())
    with pytest.raises(UnsupportedError, match="need a target without one"):
        drafter_of(random_head("eagle2"), spread)
