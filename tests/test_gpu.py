"""On a GPU what comes out is the target's own too, and a round waits for the device once. Left out without one."""

import warnings

import pytest
import torch
from eagle_heads import agreeing_head, soft
from models import POLICY_CASES, perturbed, prompt, tiny
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, EagleDrafter, TreeConfig
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW_TOKENS = 32
TREE = TreeConfig(12, 2, 4)
DRAFTERS = ("independent", "eagle2", "eagle3")


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[PreTrainedModel, object]]:
    """By kind of drafter: a random target and what drafts for it, in fp32 on the GPU."""
    made = {"independent": (tiny().cuda(), perturbed(tiny()).cuda())}
    for layout in ("eagle2", "eagle3"):
        head, model = agreeing_head(layout), soft().cuda()
        made[layout] = model, EagleDrafter(EagleCheckpoint.from_parts(head.config, head.tensors), model)
    return made


def generate(target: PreTrainedModel, seed: int, **arguments) -> torch.Tensor:
    arguments = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **arguments}
    return target.generate(prompt(seed=seed).cuda(), **arguments)


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", POLICY_CASES)
def test_greedy_output_is_the_targets_own(policy, drafter, tree, pairs):
    target, drafts = pairs[drafter]
    assistant = DynSpecAssistant(drafts, POLICY_CASES[policy](), target=target, tree=tree)
    for seed in range(3):
        assert torch.equal(generate(target, seed, assistant_model=assistant), generate(target, seed))
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", ["full", "hybrid", "in_context", "router", "screen", "auto"])
def test_a_round_waits_once(policy, drafter, tree, do_sample, pairs):
    target, drafts = pairs[drafter]
    policy = "auto" if policy == "auto" else POLICY_CASES[policy]()
    assistant = DynSpecAssistant(drafts, policy, target=target, tree=tree)
    call = {"assistant_model": assistant, "do_sample": do_sample, "eos_token_id": None, "pad_token_id": 0}
    generate(target, 0, **call)
    waited = {}
    for count in (NEW_TOKENS, 4 * NEW_TOKENS):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.manual_seed(0)
                generate(target, 0, **call, max_new_tokens=count)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in seen if "synchronizing CUDA" in str(one.message)]
        waited[count] = len(places), assistant.stats.rounds
    (few, few_rounds), (many, many_rounds) = waited.values()
    assert many_rounds > few_rounds
    # A call waits a few times more, whatever its length, and as it happens once more or less.
    assert many - few <= many_rounds - few_rounds + 3, "\n".join(places)
