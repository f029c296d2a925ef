"""Shared by the tests of online alignment: settings, real and invented requests, and digests of weights."""

import hashlib

import torch
from drafters import features_for
from models import VOCABULARY, prompt

from hf_dynspec import DynSpecAssistant, OnlineAlignment, TreeConfig
from hf_dynspec.alignment import Trajectory
from hf_dynspec.drafters import Drafter

# Learns fast and reproducibly, and is served at once.
QUICK = {"synchronous": True, "learning_rate": 3e-3, "steps": 4, "rank": 8, "gate": False}
# For tests of the learner alone.
LORA = OnlineAlignment(learning_rate=1e-2, rank=4, horizon=3)
WHOLE = OnlineAlignment.osd(learning_rate=1e-3)
TREE = TreeConfig(20, 3, 4)
# An invented request: its tokens, those before the first verified one, and the target's ids at each place.
LENGTH, FIRST, KEPT = 14, 6, 7


def digest(model: torch.nn.Module) -> str:
    """A digest of all weights, to the bit."""
    total = hashlib.sha256()
    for name, one in sorted(model.state_dict().items()):
        total.update(name.encode() + one.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def quick_assistant(drafter, target, tree: TreeConfig | bool = False, **changes) -> DynSpecAssistant:
    """An assistant that drafts from the whole vocabulary, and is aligned by `QUICK` with these changes."""
    return DynSpecAssistant(drafter, "full", target=target, tree=tree, alignment=OnlineAlignment(**QUICK | changes))


def taught(requests: int, drafter, target, **changes) -> DynSpecAssistant:
    """A quick assistant that has learnt from so many requests."""
    assistant = quick_assistant(drafter, target, **changes)
    stream(target, assistant, requests)
    return assistant


# Requests ------------------------------------------------------------------------------------------------------------


def generated(target, assistant=None, seed=0, **arguments) -> torch.Tensor:
    named = {"max_new_tokens": 24, "do_sample": False, "assistant_model": assistant}
    return target.generate(prompt(seed=seed), **named | arguments)


def stream(target, assistant, requests: int, **arguments) -> list[float]:
    """The acceptance length of each request, about three texts in turn."""
    lengths = []
    for index in range(requests):
        output = generated(target, assistant, index % 3, **arguments)
        lengths.append(assistant.stats.acceptance_length)
        if not arguments.get("do_sample"):
            assert torch.equal(output, generated(target, None, index % 3, **arguments))
    return lengths


def recorded(assistant: DynSpecAssistant) -> list[Trajectory]:
    """The requests in the replay buffer."""
    return list(assistant.alignment.adapter.buffer)


def made_up_request(drafter: Drafter, kept: int = KEPT, length: int = LENGTH, first: int = FIRST) -> Trajectory:
    """A request of which the drafter can propose most. Its verdicts are in fp64 where the drafter is, in fp32
    otherwise, and its features in the drafter's dtype."""
    random = torch.Generator().manual_seed(11)
    text, verified = prompt(length)[0], length - first
    logits = torch.randn(verified, VOCABULARY, generator=random, dtype=torch.float64).mul(3)
    draftable = torch.arange(VOCABULARY) if drafter.head.token_ids is None else drafter.head.token_ids
    logits[:, draftable] += 2
    top_logits, top_ids = logits.topk(kept)
    log_normalisers = logits.logsumexp(-1)
    is_wrong = torch.rand(verified, generator=random) < 0.5
    shortlist = draftable[torch.randperm(draftable.shape[0], generator=random)[:20]]
    dtype, features = drafter.head.weight.dtype, features_for(drafter, length)
    wide = torch.promote_types(dtype, torch.float32)
    said = (one.to(wide) for one in (top_logits, log_normalisers))
    features = None if features is None else features.to(dtype)
    return Trajectory(text, first, top_ids, *said, is_wrong, shortlist, features)
