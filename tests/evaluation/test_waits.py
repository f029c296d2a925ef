"""How often a round waits for the device, and how much it gives it to do: counted on a device that is not there.

Everything that this package and transformers do in a `generate` call runs on the pretended device, on which no
shortcut of a CPU is taken, and comes out as it does on the CPU.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from beside_targets import TOKENS, dflash, gemma4, gemma4_assistant
from cases import pairwise, representatives
from eagle_heads import agreeing_head, soft
from models import EOS, POLICY_CASES, character_tokenizer, prompt, tiny
from transformers import StoppingCriteria

from hf_dynspec import DynSpecAssistant, EagleDrafter, OnlineAlignment, TreeConfig
from hf_dynspec.alignment import aligner
from hf_dynspec.alignment.aligner import Aligner
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint

sys.path.append(str(Path(__file__).parents[2] / "examples"))
pytest.importorskip("torch.utils.backend_registration", reason="torch knows no devices written in Python")
import count_operations

from hf_dynspec.evaluation.operations.pretended_device import NAME, move, pretended_device, to_device
from hf_dynspec.evaluation.operations.rounds import Round, operations, recording, waits
from hf_dynspec.shortlists import POLICIES

CHAIN, TREE = False, TreeConfig(12, 2, 4)


# The counter itself --------------------------------------------------------------------------------------------------

WAITING = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy to the host": lambda x: torch.empty(4, dtype=torch.int64).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 1),
    "index by a mask": lambda x: x[x > 1],
    "assign by a mask": lambda x: x.clone().__setitem__(x > 1, x[:1]),
    "index by one number": lambda x: x[x[0]],
    "slice by one number": lambda x: x[: x[1]],
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "multinomial": lambda x: x.float().softmax(0).multinomial(2),
    "isin of many": lambda x: torch.isin(x, x.repeat(16)),
    "tensor of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "tensor of a number": lambda x: torch.tensor(1, device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "to the device": lambda x: torch.arange(3).to(x.device),
    "copy to the device": lambda x: x.clone().copy_(torch.arange(4)),
    "index by a list": lambda x: x[[0, 1]],
    "assign a number by an index": lambda x: x.clone().__setitem__(x, 1),
}
FREE = {
    "arithmetic": (lambda x: x + 1, 1),
    "product": (lambda x: x.float() @ x.float(), 3),
    "view": (lambda x: x.view(2, 2)[1:].unsqueeze(0), 0),
    "memory": (lambda x: x.new_empty(5), 0),
    "nothing to copy": (lambda x: torch.tensor([], device=x.device), 0),
    "range": (lambda x: torch.arange(3, device=x.device), 1),
    "index": (lambda x: x[x], 1),
    "assign by an index": (lambda x: x.clone().__setitem__(x, x), 2),
    "fill by an index": (lambda x: x.clone().index_fill_(0, x, 1), 2),
    "take": (lambda x: x.take(x[0]), 1),
    "top": (lambda x: x.topk(2), 1),
    "isin of few": (lambda x: torch.isin(x, x[:2]), 1),
    "no wait for a number in where": (lambda x: torch.where(x > 1, x, 0), 3),
}


@pytest.mark.parametrize("kind", WAITING)
def test_the_counter_sees_what_waits(kind):
    with pretended_device() as device:
        numbers = to_device(torch.arange(4))
        assert not device.events
        WAITING[kind](numbers)
    assert sum(event.waits for event in device.events) >= 1


@pytest.mark.parametrize("kind", FREE)
def test_the_counter_counts_what_does_not_wait(kind):
    run, expected = FREE[kind]
    with pretended_device() as device:
        run(to_device(torch.arange(4)))
    assert not [event.where for event in device.events if event.waits]
    assert operations(device.events) == expected


def test_the_device_refuses_what_lies_elsewhere():
    with pretended_device():
        numbers = to_device(torch.arange(4))
        assert numbers.device.type == (numbers + 1).device.type == NAME
        with pytest.raises(RuntimeError, match="lies on the CPU"):
            numbers + torch.arange(4)
        with pytest.raises((RuntimeError, TypeError)):
            numbers.numpy()


# Rounds --------------------------------------------------------------------------------------------------------------


def rounds(
    target, drafter, policy="full", tree=CHAIN, alignment=None, drafted: int | str = 3, **arguments
) -> list[Round]:
    """The rounds of a call on the device. A greedy text must be what plain `generate` writes on the CPU."""
    input_ids = prompt()
    assistant_settings = {"tree": tree, "num_assistant_tokens": drafted, "alignment": alignment}
    arguments = {"max_new_tokens": 14, "do_sample": False} | arguments
    there = move(copy.deepcopy(target))
    with pretended_device() as device:
        if isinstance(drafter, EagleCheckpoint):
            drafts = EagleDrafter(drafter, there)
        else:
            drafts = move(copy.deepcopy(drafter))
        assistant = DynSpecAssistant(drafts, policy, target=there, **assistant_settings)
        with recording(device) as recorded:
            torch.manual_seed(0)
            mask = {"attention_mask": to_device(torch.ones_like(input_ids))}
            outputs = there.generate(to_device(input_ids), assistant_model=assistant, **mask, **arguments)
    assert assistant.stats.rounds > 3
    if not arguments["do_sample"]:
        plain = {name: value for name, value in arguments.items() if name != "streamer"}
        expected = target.generate(input_ids, **plain)
        assert torch.equal(getattr(outputs, "sequences", outputs).memory, getattr(expected, "sequences", expected))
    return recorded.rounds(device.events)


def assert_waits(rounds: list[Round], most: int = 1) -> None:
    for one in rounds:
        waited = [event for event in one.events if event.waits]
        assert len(waited) <= most, "".join(f"{event.name}\n{event.where}\n" for event in waited)
    # Nothing comes out that nobody looks at.
    assert all(waits(one.events) for one in rounds)


# Retrieval waits in a thread of its own, where this device is not seen; or, if it is asked to, in the round.
WATCHED = [one for one in POLICY_CASES if "retrieval" not in one]
# By default each class of policies once, in chains or in trees.
CASES_OF_POLICIES = [
    case
    for place, policy in enumerate(sorted(WATCHED, key=lambda one: one not in POLICIES))
    for case in representatives(
        "simulation",
        [(policy, CHAIN, False), (policy, TREE, True)][:: 1 if place % 2 else -1],
        keep=int(policy in POLICIES),
    )
]


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
class TestWaits:
    @pytest.mark.parametrize(("policy", "tree", "do_sample"), CASES_OF_POLICIES)
    def test_of_every_policy(self, policy, tree, do_sample, target, drafter):
        assert_waits(rounds(target, drafter, POLICY_CASES[policy](), tree, do_sample=do_sample))

    @pytest.mark.parametrize(("tree", "do_sample"), [(CHAIN, True), (TREE, False)], ids=["sampled chain", "tree"])
    @pytest.mark.parametrize("policy", ["full", "hybrid", "router", "union with a router"])
    def test_of_both_other_shapes(self, policy, tree, do_sample, target, drafter):
        assert_waits(rounds(target, drafter, POLICY_CASES[policy](), tree, do_sample=do_sample))

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("tree", [TreeConfig(2, 0, 1), TreeConfig(3, 1, 1), TreeConfig(5, 1, 3)], ids=str)
    def test_of_small_trees(self, tree, do_sample, target, drafter):
        """Down to one node: the number of a single place must not be read either."""
        assert_waits(rounds(target, drafter, "hybrid", tree, do_sample=do_sample))

    @pytest.mark.parametrize(
        ("head", "tree", "do_sample"),
        pairwise("simulation", ("eagle2 hybrid", "eagle3 router", "eagle3 full"), (CHAIN, TREE), (False, True)),
    )
    def test_of_eagle_heads(self, head, tree, do_sample):
        layout, policy = head.split()
        head = agreeing_head(layout)
        checkpoint = EagleCheckpoint.from_parts(head.config, head.tensors)
        model = soft(eos_token_id=None)
        model.generation_config.eos_token_id = None
        assert_waits(rounds(model, checkpoint, POLICY_CASES[policy](), tree, do_sample=do_sample))

    @pytest.mark.parametrize(("policy", "do_sample"), [("native", False), ("native", True), ("full", True)])
    def test_of_gemma_4s_assistants(self, policy, do_sample):
        model = gemma4(eos_token_id=None)
        model.generation_config.eos_token_id = None
        # transformers' layers with a window wait once, when the prompt is read.
        assert_waits(rounds(model, gemma4_assistant(model), policy, do_sample=do_sample)[1:])

    @pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
    def test_of_drafters_of_blocks(self, do_sample):
        model = tiny(vocabulary=TOKENS, num_hidden_layers=4, eos_token_id=None)
        model.generation_config.eos_token_id = None
        # Likewise, when the first block is drafted.
        assert_waits(rounds(model, dflash(model), "hybrid", do_sample=do_sample)[1:])

    @pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
    @pytest.mark.parametrize("kind", ["independent", "eagle3"])
    def test_of_automatic_drafting(self, kind, tree, target, drafter):
        """Rounds are timed, and none is waited for; those that draft nothing wait once too."""
        if kind != "independent":
            head = agreeing_head(kind)
            target, drafter = soft(eos_token_id=None), EagleCheckpoint.from_parts(head.config, head.tensors)
            target.generation_config.eos_token_id = None
        assert_waits(rounds(target, drafter, "auto", tree, drafted="auto", max_new_tokens=40))

    @pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
    @pytest.mark.parametrize(
        "arguments",
        [
            {"eos_token_id": [EOS, 5, 7]},
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
            {"stop_strings": ["zzz"], "tokenizer": character_tokenizer()},
            {"max_time": 600.0},
            {"return_dict_in_generate": True, "output_scores": True},
            {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
        ],
        ids="+".join,
    )
    def test_under_arguments_of_generate(self, arguments, tree, target, drafter):
        # What criteria and processors hold is moved to the device when they first see something there.
        assert_waits(rounds(target, drafter, "full", tree, **arguments)[1:])

    @pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
    @pytest.mark.parametrize("policy", ["full", "router"])
    def test_of_a_call_that_is_recorded(self, policy, tree, target, drafter, monkeypatch):
        """The device cannot train; what is recorded is counted. Only the end, when the request is over, waits more."""
        monkeypatch.setattr(aligner, "Learner", LearnsNothing)
        monkeypatch.setattr(Aligner, "learn", lambda aligner: taken.append(aligner._take_out()))
        taken = []
        recorded = rounds(target, drafter, POLICY_CASES[policy](), tree, OnlineAlignment(top_k=8))
        assert_waits(recorded[:-1])
        assert taken[0][0].log_normalisers.shape == (14,)

    def test_of_a_streamer(self, target, drafter):
        streamer = Streamer()
        assert_waits(rounds(target, drafter, streamer=streamer), most=2)
        assert streamer.token_ids == target.generate(prompt(), max_new_tokens=14, do_sample=False)[0].tolist()

    def test_of_a_criterion_of_ones_own(self, target, drafter):
        """It is asked after every token, before anybody sees the next: that waits as often as it must."""
        waited = [
            waits(one.events) for one in rounds(target, drafter, stopping_criteria=[NeverDone()], max_new_tokens=20)
        ]
        assert max(waited) > 2


class LearnsNothing:
    def __init__(self, drafter, settings):
        pass

    def base_weights(self) -> dict[str, torch.Tensor]:
        return {}


class Streamer:
    def __init__(self):
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.token_ids += value.flatten().tolist()

    def end(self) -> None:
        pass


class NeverDone(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


# Operations ----------------------------------------------------------------------------------------------------------

# A little above what docs/on-a-gpu.md says: of a draft step and of a round.
MOST_OPERATIONS = {
    ("independent", "full", "chain", False): (110, 790),
    ("independent", "hybrid", "tree", False): (132, 1120),
    ("EAGLE-3", "full", "chain", False): (26, 365),
    ("EAGLE-3", "hybrid", "chain", True): (39, 520),
    ("EAGLE-3", "router", "tree", False): (74, 770),
    ("EAGLE-3", "in_context", "tree", True): (93, 1720),
}


@pytest.mark.filterwarnings("ignore:the tokenizers of target and drafter")
@pytest.mark.parametrize("case", MOST_OPERATIONS, ids=str)
def test_operations_of_a_draft_step_and_of_a_round(case):
    drafter, policy, shape, do_sample = case
    counts = count_operations.count(
        drafter, count_operations.POLICIES[policy](), count_operations.SHAPES[shape], do_sample
    )
    most_in_a_step, most_in_a_round = MOST_OPERATIONS[case]
    assert 0 < counts.step <= most_in_a_step and counts.target < counts.round <= most_in_a_round
    assert counts.waits == 1
