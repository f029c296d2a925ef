"""Rounds over fixed memory as a graph, on a device that is not there.

The graph that takes CUDA's place here holds what a real one holds: operations, with the memory that each reads and
writes. To launch it is to run them again on that memory, and nothing of the Python around them.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from calls import SHAPES
from cases import pairwise
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt, tiny
from torch.utils._pytree import tree_leaves, tree_map_only

pytest.importorskip("torch.utils.backend_registration", reason="torch knows no devices written in Python")

from hf_dynspec import DynSpecAssistant, devices
from hf_dynspec.evaluation.operations import pretended_device as pretended
from hf_dynspec.evaluation.operations.counting import is_operation
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.rounds import Round, recorded
from hf_dynspec.shortlists import POLICIES

AS_A_GRAPH = "fixed memory, as a graph"
IN_ROUNDS = tuple(name for name in POLICIES if name not in ("retrieval", "evospec", "auto"))


class Graph:
    """The operations of a function, with their memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self.operations: list[tuple] = []

    def record(self, run: Callable[[], None]) -> None:
        run_on_the_cpu = pretended._on_the_cpu

        def noted(func, args, kwargs):
            results = run_on_the_cpu(func, args, kwargs)
            self.operations.append((func, args, kwargs, results))
            return results

        with self._monkeypatch.context() as patched:
            patched.setattr(pretended, "_on_the_cpu", noted)
            run()

    def replay(self) -> None:
        for func, args, kwargs, results in self.operations:
            if not is_operation(func, results):
                continue
            again = pretended._on_the_cpu(func, args, kwargs)
            for kept, one in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != one.data_ptr():
                    kept.copy_(one)

    @property
    def outside(self) -> list[tuple]:
        """The operations by name, with the addresses that they read and write in memory that none of them made."""
        made, found = set(), []
        for func, args, kwargs, results in self.operations:
            inputs, outputs = (
                [one for one in tree_leaves(some) if isinstance(one, torch.Tensor)]
                for some in (tree_map_only(pretended.PretendedTensor, lambda one: one.memory, (args, kwargs)), results)
            )
            memory = {memory_of(one) for one in inputs}
            found.append((func.name(), [one.data_ptr() for one in inputs if memory_of(one) not in made]))
            made |= {memory_of(one) for one in outputs} - memory
        return found


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """The graphs that were recorded, on a device that has them."""
    made: list[Graph] = []

    def record(run, device):
        graph = Graph(monkeypatch)
        # The device has to run what it records: so the first launch is done already.
        graph.record(run)
        launches = iter([None])
        made.append(graph)
        return lambda: next(launches, graph) and graph.replay()

    monkeypatch.setattr(devices, "GRAPHS", frozenset({pretended.NAME}))
    monkeypatch.setattr(recorded, "record", record)
    return made


def pair_there(kind: str, family: str = "llama"):
    """A target and its drafter on the device, and the target where it was."""
    target = tiny(family) if kind == "independent" else soft(family)
    there = move(copy.deepcopy(target))
    if kind == "independent":
        return there, move(copy.deepcopy(perturbed(target))), target
    return there, drafter_of(agreeing_head(kind), there), target


def generate(target, assistant, length=12, seed=0, **arguments) -> torch.Tensor:
    text = to_device(prompt(length, seed))
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **arguments}
    mask = to_device(torch.ones(1, length, dtype=torch.int64))
    return target.generate(text, attention_mask=mask, assistant_model=assistant, **arguments).memory


def plain(target, length=12, seed=0, **arguments) -> torch.Tensor:
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **arguments}
    return target.generate(prompt(length, seed), **arguments)


CASES = pairwise("families", IN_ROUNDS, ("independent", "eagle2", "eagle3"), tuple(SHAPES), ("llama", "gemma3"))


@pytest.mark.parametrize(("policy", "kind", "shape", "family"), CASES)
def test_a_graph_writes_and_drafts_what_its_round_does(policy, kind, shape, family, graphs):
    """Two texts, one after another, with the graph of the first: the same tokens, and as many accepted drafts."""
    with pretended_device() as device:
        there, drafter, target = pair_there(kind, family)
        settings = {"target": there, "tree": SHAPES[shape], "num_assistant_tokens": 3}
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        waits, rounds = [], []
        for seed, length, new in ((0, 12, 40), (1, 20, 24), (1, 20, 40)):
            device.events.clear()
            text = generate(there, assistant, length, seed, max_new_tokens=new)
            assert torch.equal(text, plain(target, length, seed, max_new_tokens=new))
            stats = assistant.stats
            assert stats.lane == AS_A_GRAPH and len(graphs) == 1
            waits.append(sum(event.waits for event in device.events))
            rounds.append(stats.rounds)
        # The host waits once a round, besides what it waits for at the beginning.
        assert waits[2] - waits[1] == rounds[2] - rounds[1] > 0
        assistant.unbind()
        devices.GRAPHS = frozenset()
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        generate(there, assistant, 20, 1, cache_implementation="static")
        assert assistant.stats.lane == "fixed memory"
    assert (stats.rounds, stats.accepted, stats.oov_rate) == (
        assistant.stats.rounds,
        assistant.stats.accepted,
        assistant.stats.oov_rate,
    )
    assert stats.active_vocabulary == assistant.stats.active_vocabulary and stats.accepted > 0


@pytest.mark.parametrize(
    ("policy", "kind", "shape"), pairwise("families", IN_ROUNDS, ("independent", "eagle3"), tuple(SHAPES))
)
def test_every_round_is_the_same_operations_on_the_same_memory(policy, kind, shape, graphs, monkeypatch):
    """Each round anew, and not as a graph."""
    seen = []
    run = Round.run

    monkeypatch.setattr(recorded, "_WARM_UPS", 10**6)

    def noted(self):
        seen.append(Graph(monkeypatch))
        seen[-1].record(lambda: run(self))

    monkeypatch.setattr(Round, "run", noted)
    with pretended_device():
        there, drafter, _ = pair_there(kind)
        settings = {"target": there, "tree": SHAPES[shape], "num_assistant_tokens": 3}
        generate(there, DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings), max_new_tokens=16)
    assert len(seen) > 4
    # A first round may make what later ones share.
    for one in seen[2:]:
        assert one.outside == seen[1].outside
