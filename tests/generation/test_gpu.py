"""On a GPU what comes out is the target's own too, and a round waits for the device once. Left out without one."""

import copy
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_sampling
import torch
from eagle_heads import agreeing_head, drafter_of, soft
from models import POLICY_CASES, perturbed, prompt, tiny
from sampled_texts import FALSE_ALARM, uniformity
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, OnlineAlignment, TreeConfig
from hf_dynspec.rounds import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NEW_TOKENS = 32
TREE = TreeConfig(12, 2, 4)
DRAFTERS = ("independent", "eagle2", "eagle3")


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[PreTrainedModel, object]]:
    """By kind of drafter: a random target and what drafts for it, in fp32 on the GPU."""
    made = {"independent": (tiny().cuda(), perturbed(tiny()).cuda())}
    for layout in ("eagle2", "eagle3"):
        model = soft().cuda()
        made[layout] = model, drafter_of(agreeing_head(layout), model)
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
    is_graph = not policy.startswith("auto")
    assert (
        assistant.stats.lane == "fixed memory, as a graph" if is_graph else assistant.stats.lane.startswith("general")
    )


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral", "phi", "gpt2", "cohere2", "granite"])
def test_other_families(family, tree):
    """Whose norms, rotations and attention have kernels with other settings, or none."""
    target = tiny(family).cuda()
    assistant = DynSpecAssistant(perturbed(tiny(family)).cuda(), "hybrid", target=target, tree=tree)
    for seed in range(3):
        assert torch.equal(generate(target, seed, assistant_model=assistant), generate(target, seed))
    assert assistant.stats_total.accepted > 0 and assistant.stats.lane == "fixed memory, as a graph"


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("policy", ["full", "hybrid", "in_context", "router", "screen", "union with a router"])
def test_a_batch_is_each_text_alone(policy, drafter, tree, pairs):
    target, drafts = pairs[drafter]
    assistant = DynSpecAssistant(drafts, POLICY_CASES[policy](), target=target, tree=tree)
    some = torch.cat([prompt(seed=seed) for seed in range(4)]).cuda()
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = torch.cat([target.generate(one[None], **call) for one in some])
    for _ in range(2):
        output = target.generate(some, attention_mask=torch.ones_like(some), assistant_model=assistant, **call)
        assert torch.equal(output, expected)
    assert assistant.stats.lane == "fixed memory, as a graph" and assistant.stats.accepted > 0


def test_texts_outgrow_a_graph(pairs):
    target, drafts = pairs["eagle3"]
    assistant = DynSpecAssistant(drafts, POLICY_CASES["hybrid"](), target=target)
    for count in (32, 3000):
        call = {"max_new_tokens": count, "eos_token_id": None}
        assert torch.equal(generate(target, 0, assistant_model=assistant, **call), generate(target, 0, **call))
    assert assistant.stats.lane == "fixed memory, as a graph"


def test_a_capture_that_fails_leaves_all_as_it_was(pairs):
    target, drafts = pairs["independent"]
    assistant = DynSpecAssistant(drafts, POLICY_CASES["hybrid"](), target=target)
    call = {"assistant_model": assistant, "do_sample": True, "temperature": 2.0, "eos_token_id": None}
    generate(target, 0, **call)
    stream, device = torch.cuda.current_stream(), torch.device("cuda", torch.cuda.current_device())
    numbers = torch.zeros(4, device=device)
    for run in (
        lambda: numbers.add_(torch.rand_like(numbers)).sum().item(),
        lambda: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
    ):
        with pytest.raises(RuntimeError):
            capture.record(run, device)
        assert torch.cuda.current_stream() == stream
        assert torch.rand(100, device=device).unique().numel() > 90
    texts = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        texts.append(generate(target, 0, **call).tolist())
    assert texts[0] == texts[2] != texts[1] and assistant.stats.lane == "fixed memory, as a graph"


def test_what_waits_is_not_recorded(pairs):
    """Eta's class checks a distribution, which looks at numbers."""
    target, drafts = pairs["independent"]
    assistant = DynSpecAssistant(drafts, POLICY_CASES["hybrid"](), target=target)
    call = {"do_sample": True, "top_k": 0, "temperature": 1e-3, "eta_cutoff": 0.01, "eos_token_id": None}
    assert torch.equal(generate(target, 0, assistant_model=assistant, **call), generate(target, 0, **call))
    assert assistant.stats.lane.startswith("fixed memory, no graph: the host waits for the device in ")


def test_a_seed_repeats_the_draws_of_a_graph(pairs):
    target, drafts = pairs["independent"]
    assistant = DynSpecAssistant(drafts, POLICY_CASES["hybrid"](), target=target)
    call = {"assistant_model": assistant, "do_sample": True, "temperature": 2.0, "eos_token_id": None}
    generate(target, 0, **call)
    texts = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        texts.append(generate(target, 0, **call).tolist())
    assert texts[0] == texts[2] != texts[1] and assistant.stats.lane == "fixed memory, as a graph"


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


@pytest.mark.parametrize("tree", [False, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", ["full", "union", "screen"])
def test_every_sampled_token_follows_the_target(policy, tree):
    """As in `test_sampling`: the target on the CPU says what the probabilities are."""
    target = test_sampling.sampling_target()
    drafter = perturbed(target, noise=0.8)
    assistant = DynSpecAssistant(
        copy.deepcopy(drafter).cuda(),
        test_sampling.POLICIES[policy](),
        target=copy.deepcopy(target).cuda(),
        tree=tree,
        num_assistant_tokens=2,
    )
    arguments = test_sampling.PROCESSORS["everything"]
    numbers = test_sampling.sampled_numbers(target, drafter, assistant, device=torch.device("cuda"), **arguments)
    assert uniformity(numbers) > FALSE_ALARM
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_threads_on_one_assistant(drafter, pairs):
    target, drafts = pairs[drafter]
    expected = [generate(target, seed) for seed in range(6)]
    assistant = DynSpecAssistant(drafts, POLICY_CASES["hybrid"](), target=target)

    def run(half: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [generate(target, seed, assistant_model=assistant) for seed in range(half, 6, 2)]
            torch.cuda.current_stream().synchronize()
            return found

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(run, range(2), timeout=600))
    for half, outputs in enumerate(halves):
        for output, own in zip(outputs, expected[half::2], strict=True):
            assert torch.equal(output, own)


@pytest.mark.parametrize("when", [{"synchronous": True}, {"background": True, "max_overhead": 1.0}], ids="+".join)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_that_learns_meanwhile(drafter, when, pairs):
    target, drafts = pairs[drafter]
    drafts = copy.deepcopy(drafts) if drafter == "independent" else drafts
    settings = OnlineAlignment(learning_rate=3e-3, rank=8, gate=False, **when)
    assistant = DynSpecAssistant(drafts, target=target, alignment=settings)
    deadline = time.monotonic() + 60
    while assistant.alignment.stats.updates < 3 and time.monotonic() < deadline:
        assert torch.equal(generate(target, 0, assistant_model=assistant), generate(target, 0))
    assert assistant.alignment.stats.updates >= 3 and assistant.alignment.stats.error is None
    assert assistant.alignment.stats.is_served
    assert torch.equal(generate(target, 1, assistant_model=assistant), generate(target, 1))
    assistant.unbind()
