"""Count what a GPU would be given to do in a round, without one: `python examples/count_operations.py`.

Prints the table of docs/on-a-gpu.md: the operations of a draft step and of a round, by drafter, policy and shape of
drafts, and how often the host waits for the device. A GPU launches each operation, which takes the host some
microseconds however little there is to compute. Models are random and tiny, as their sizes change no count; their
numbers of layers do, and are named. Counted is the round that repeats: neither the prompt nor the end of a text.
"""

import statistics
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hf_dynspec import DynSpecAssistant, EagleDrafter, TreeConfig
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.evaluation.operations.rounds import operations, random_model, recording, waits
from hf_dynspec.shortlists import ShortlistPolicy
from hf_dynspec.shortlists.frequency import FrequencyShortlist
from hf_dynspec.shortlists.full import FullShortlist
from hf_dynspec.shortlists.hybrid import HybridShortlist
from hf_dynspec.shortlists.in_context import InContextShortlist
from hf_dynspec.shortlists.router.policy import Router, RouterShortlist
from hf_dynspec.shortlists.screen.policy import ScreenShortlist
from hf_dynspec.shortlists.union import UnionShortlist

VOCABULARY, WIDTH, CLUSTERS = 2048, 32, 16
TARGET_LAYERS, DRAFTER_LAYERS = 4, 2
CHAIN, TREE = 5, TreeConfig()
SHAPES = {"chain": False, "tree": TREE}
DRAFTERS = ("independent", "EAGLE-3")
POLICIES = {
    "full": FullShortlist,
    "frequency": lambda: FrequencyShortlist(size=256),
    "in_context": lambda: InContextShortlist(window=256),
    "hybrid": lambda: HybridShortlist(core_size=256, window=1536),
    "router": lambda: RouterShortlist(_random_router(), max_clusters=8),
    "router + in_context": lambda: UnionShortlist(
        RouterShortlist(_random_router(), max_clusters=8), InContextShortlist(window=128, eviction="lru")
    ),
    "screen": lambda: ScreenShortlist(candidates=256),
}


class Counts(NamedTuple):
    """What a round that repeats is made of.

    Args:
        step: operations from one draft step's head to the next one's; None where a round has one step or none.
        target: operations of the target's forward.
        round: operations of the whole round.
        waits: of the host for the device, in the round that has the most.
    """

    step: int | None
    target: int
    round: int
    waits: int


def count(drafter: str, policy: ShortlistPolicy, tree: TreeConfig | bool, do_sample: bool) -> Counts:
    """Count the rounds of a call with random models."""
    target = move(random_model(TARGET_LAYERS, VOCABULARY, seed=0, width=WIDTH))
    with pretended_device() as device:
        if drafter == "independent":
            drafts = move(random_model(DRAFTER_LAYERS, VOCABULARY, seed=1, width=WIDTH))
        else:
            drafts = EagleDrafter(random_head(), target)
        assistant = DynSpecAssistant(drafts, policy, target=target, tree=tree, num_assistant_tokens=CHAIN)
        prompt = to_device(torch.arange(3, 15).unsqueeze(0))
        with recording(device) as recorded:
            torch.manual_seed(0)
            new = {"max_new_tokens": 11, "eos_token_id": None, "pad_token_id": 0}
            target.generate(prompt, assistant_model=assistant, do_sample=do_sample, **new)
    rounds = recorded.rounds(device.events)
    # The first round reads the prompt, and the last ones draft less, as the text ends.
    steady = rounds[2:4]
    steps = [operations(one.events[begin:end]) for one in steady for begin, end in pairwise(one.heads)]
    return Counts(
        statistics.median_high(steps) if steps else None,
        statistics.median_high(operations(one.events[: one.target]) for one in steady),
        statistics.median_high(operations(one.events) for one in steady),
        max(waits(one.events) for one in rounds),
    )


# Random models -------------------------------------------------------------------------------------------------------


def random_head() -> EagleCheckpoint:
    """An EAGLE-3 head for `random_model` that nobody trained, without a projection of its own."""
    shapes = {"fc": (WIDTH, 3 * WIDTH)}
    shapes |= {f"midlayer.self_attn.{letter}_proj": (WIDTH, 2 * WIDTH) for letter in "qkv"}
    shapes |= {"midlayer.self_attn.o_proj": (WIDTH, WIDTH), "midlayer.mlp.down_proj": (WIDTH, 2 * WIDTH)}
    shapes |= {f"midlayer.mlp.{name}_proj": (2 * WIDTH, WIDTH) for name in ("gate", "up")}
    norms = ["norm", *(f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    generator = torch.Generator().manual_seed(2)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 6 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(WIDTH) for name in norms}
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "target_layer_ids": [1, 2, 3],
    }
    return EagleCheckpoint.from_parts(config, tensors)


def _random_router() -> Router:
    generator = torch.Generator().manual_seed(3)
    return Router(
        clusters=(torch.arange(VOCABULARY) % CLUSTERS).to(torch.int32),
        input_weight=torch.randn(24, 2 * WIDTH, generator=generator),
        input_bias=torch.randn(24, generator=generator),
        output_weight=torch.randn(CLUSTERS, 24, generator=generator),
        output_bias=torch.randn(CLUSTERS, generator=generator),
    )


def main() -> None:
    """Print the table: operations of a draft step / of a round."""
    kinds = [(shape, do_sample) for shape in SHAPES for do_sample in (False, True)]
    named = [f"{shape}, {'sampled' if do_sample else 'greedy'}" for shape, do_sample in kinds]
    print(f"| drafter | policy | {' | '.join(named)} | waits |")
    print("|---|---|" + "---:|" * (len(kinds) + 1))
    for drafter in DRAFTERS:
        for policy, make in POLICIES.items():
            counts = [count(drafter, make(), SHAPES[shape], do_sample) for shape, do_sample in kinds]
            cells = [f"{one.step} / {one.round}" for one in counts]
            most = max(one.waits for one in counts)
            print(f"| {drafter} | {policy} | {' | '.join(cells)} | {most} |", flush=True)
    print(f"\nOf each round, the target's forward of {TARGET_LAYERS} layers: {counts[0].target} (chain).")


if __name__ == "__main__":
    main()
