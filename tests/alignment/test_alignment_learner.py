"""What trains a copy of a drafter: what it changes, what it leaves alone, and what can be done with what it learnt."""

import threading
from dataclasses import replace

import pytest
import torch
from aligned import LORA, WHOLE, digest, made_up_request
from drafters import LAYERS, drafter_named
from models import tiny
from peft import PeftModel
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_dynspec.alignment import Learner, OnlineAlignment, Trajectory, acceptance_of
from hf_dynspec.drafters import CausalLMDrafter, Drafter
from hf_dynspec.errors import ConfigurationError

KINDS = ("llama", "gpt2", "eagle2", "eagle3", "eagle3-trimmed")


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=LAYERS)


def trained(drafter: Drafter, settings: OnlineAlignment, steps: int = 8) -> tuple[Learner, Trajectory, list[float]]:
    learner, trajectory = Learner(drafter, settings), made_up_request(drafter)
    return learner, trajectory, [learner.step([trajectory]) for _ in range(steps)]


def hidden_of(drafter: Drafter, trajectory: Trajectory) -> torch.Tensor:
    (step,) = drafter.unroll(trajectory.token_ids, trajectory.features, 1)
    return step.hidden.detach()


# What is learnt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_touches_nothing_but_what_it_trains(kind, settings, target):
    drafter = drafter_named(kind, target)
    before = digest(drafter.module), digest(target)
    learner = Learner(drafter, settings)
    base, trajectory = learner.base_digest(), made_up_request(drafter)
    (at_first, same), own = learner.acceptance(trajectory), acceptance_of(drafter, trajectory, settings)
    assert at_first == same == pytest.approx(own, abs=1e-6)
    losses = [learner.step([trajectory]) for _ in range(12)]
    assert losses[-1] < losses[0] and learner.dropped == 0
    unlearnt, learnt = learner.acceptance(trajectory)
    assert unlearnt == pytest.approx(own, abs=1e-6) and learnt > own
    assert learnt == pytest.approx(acceptance_of(learner.drafter, trajectory, settings))
    assert (digest(drafter.module), digest(target)) == before and learner.base_digest() == base
    assert all(one.grad is None for model in (drafter.module, target) for one in model.parameters())


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learnt_fits_into_the_drafter(kind, settings, target):
    drafter = drafter_named(kind, target)
    learner, trajectory, _ = trained(drafter, settings)
    weights, base, own = learner.weights(), learner.base_weights(), dict(drafter.module.named_parameters())
    assert weights.keys() == base.keys() <= own.keys()
    assert all(torch.equal(one, own[name]) for name, one in base.items())
    assert any(not torch.equal(one, own[name]) for name, one in weights.items())
    unlearnt = hidden_of(drafter, trajectory)
    with torch.no_grad():
        for name, one in weights.items():
            own[name].copy_(one)
    torch.testing.assert_close(hidden_of(drafter, trajectory), hidden_of(learner.drafter, trajectory))
    assert not torch.allclose(hidden_of(drafter, trajectory), unlearnt)
    # It keeps none of what it gave.
    learner.step([trajectory])
    assert all(torch.equal(own[name], one) for name, one in weights.items())


def test_a_projection_that_is_the_embedding_too_is_refused_before_anything_is_adapted():
    drafter = CausalLMDrafter(tiny("llama", seed=3, tie_word_embeddings=True))
    settings = replace(LORA, modules=("q_proj", "lm_head"))
    with pytest.raises(ConfigurationError, match=r"the weight of lm_head is model\.embed_tokens\.weight too"):
        Learner(drafter, settings)
    assert "lm_head.weight" not in Learner(drafter, replace(LORA, modules="all-linear")).weights()
    assert "model.embed_tokens.weight" in Learner(drafter, WHOLE).weights()


def test_whoever_draws_while_a_learner_is_made_draws_nothing_twice(target):
    """A learner is made anew beside requests that sample where somebody changes the drafter's weights."""
    drafter, drawn, is_over = drafter_named("llama", target), [], threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            drawn.append(torch.rand((), dtype=torch.float64).item())

    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(5):
        Learner(drafter, LORA)
    is_over.set()
    thread.join()
    assert len(set(drawn)) == len(drawn) > 100


def test_the_modules_are_those_that_are_named(target):
    def adapted(kind: str, modules) -> set[str]:
        weights = Learner(drafter_named(kind, target), replace(LORA, modules=modules)).weights()
        return {name.removesuffix(".weight").rpartition(".")[2] for name in weights}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert adapted("llama", "all-linear") == attention | mlp
    assert adapted("gpt2", "all-linear") == {"c_attn", "c_proj", "c_fc"}
    assert adapted("eagle3-trimmed", "all-linear") == attention | mlp | {"fc"}
    assert adapted("llama", ("q_proj", "v_proj")) == {"q_proj", "v_proj"}
    assert adapted("eagle3-trimmed", ["fc", "lm_head"]) == {"fc", "lm_head"}
    with pytest.raises(ConfigurationError, match=r"no linear layer 'query'. There are .*q_proj"):
        adapted("llama", ("v_proj", "query"))


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
def test_it_starts_anew_and_learns_the_same_to_the_bit(settings, target):
    drafter = drafter_named("eagle3", target)
    state = torch.get_rng_state()
    learner, trajectory, losses = trained(drafter, settings)
    assert torch.equal(torch.get_rng_state(), state), "users seed the generator of the process"
    first = learner.weights()
    learner.reset()
    assert learner.nbytes == 0
    for name, one in learner.base_weights().items():
        assert torch.equal(learner.weights()[name], one)
    assert [learner.step([trajectory]) for _ in range(len(losses))] == losses
    assert all(torch.equal(one, first[name]) for name, one in learner.weights().items())


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_scoring_changes_nothing_of_what_is_learnt(kind, settings, target):
    drafter = drafter_named(kind, target)
    one, other = made_up_request(drafter), made_up_request(drafter, length=11)
    plain, scoring = Learner(drafter, settings), Learner(drafter, settings)
    for batch in ([one], [one, other], [other], [one]):
        for trajectory in (other, one):
            scoring.acceptance(trajectory)
        assert scoring.step(batch) == plain.step(batch)
    assert all(torch.equal(one, plain.weights()[name]) for name, one in scoring.weights().items())
    # What was unrolled with other weights is not learnt from.
    scoring.acceptance(one)
    for learner in (plain, scoring):
        learner.reset()
    assert scoring.step([one]) == plain.step([one])


def test_steps_over_several_requests_take_their_mean(target):
    drafter = drafter_named("llama", target)
    one = made_up_request(drafter)
    short = made_up_request(drafter, length=9)
    empty = made_up_request(drafter, length=2, first=1)
    alone = [Learner(drafter, LORA).step([each]) for each in (one, short)]
    assert Learner(drafter, LORA).step([one, short]) == pytest.approx(sum(alone) / 2)
    learner = Learner(drafter, LORA)
    assert learner.step([empty]) is None and learner.step([]) is None and learner.dropped == 0
    assert learner.acceptance(empty) is None


def test_a_loss_that_is_no_number_changes_nothing(target):
    drafter = drafter_named("eagle2", target)
    learner, trajectory, _ = trained(drafter, LORA, 2)
    before = learner.adapter_state()
    broken = made_up_request(drafter)
    broken.top_logits[3, 1] = torch.nan
    assert learner.step([broken]) is None and learner.step([trajectory, broken]) is None
    assert learner.dropped == 2
    assert all(torch.equal(one, before[name]) for name, one in learner.adapter_state().items())
    assert learner.step([trajectory]) is not None


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
@pytest.mark.parametrize("kind", ["qwen3", "eagle3", "eagle3-trimmed"])
def test_a_drafter_of_16_bits_is_trained_in_32(kind, settings):
    target = tiny("llama", num_hidden_layers=LAYERS).to(torch.bfloat16)
    drafter = drafter_named(kind, target)
    drafter.module.to(torch.bfloat16)
    assert drafter.weights_version >= 0
    learner = Learner(drafter, settings)
    assert {one.dtype for one in learner.drafter.module.parameters()} == {torch.float32}
    assert {one.dtype for one in drafter.module.parameters()} == {torch.bfloat16}
    trajectory = made_up_request(drafter)
    losses = [learner.step([trajectory]) for _ in range(10)]
    assert losses[-1] < losses[0]
    own = dict(drafter.module.named_parameters())
    for name, one in learner.base_weights().items():
        assert one.dtype == torch.bfloat16 and torch.equal(one, own[name])
    assert {one.dtype for one in learner.weights().values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["llama", "eagle3"])
def test_what_comes_from_inference_mode_is_learnt_from(kind):
    with torch.inference_mode():
        target = tiny("llama", num_hidden_layers=LAYERS)
        drafter = drafter_named(kind, target)
        learner = Learner(drafter, LORA)
        trajectory = made_up_request(drafter)
        losses = [learner.step([trajectory]) for _ in range(5)]
        assert learner.acceptance(trajectory) is not None
    assert losses[-1] < losses[0]


# What it takes -------------------------------------------------------------------------------------------------------


def test_training_takes_as_much_memory_as_was_reckoned_and_no_more(target):
    drafter = drafter_named("llama", target)
    taken = {}
    for settings in (LORA, WHOLE):
        learner, trajectory, _ = trained(drafter, settings, 1)
        parameters = [one for one in learner.drafter.module.parameters() if one.requires_grad]
        states = sum(one.numel() * one.element_size() * 2 for one in parameters)
        gradients = sum(one.nbytes for one in parameters)
        # Besides, AdamW counts the steps of each tensor.
        assert states + gradients <= learner.nbytes <= states + gradients + 8 * len(parameters)
        taken[settings] = learner.nbytes
        for _ in range(20):
            learner.step([trajectory])
        assert learner.nbytes == taken[settings]
    assert taken[LORA] < taken[WHOLE]


# Adapters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_peft_alone_loads_an_adapter(kind, target, tmp_path, recwarn):
    drafter = drafter_named(kind, target)
    learner, trajectory, _ = trained(drafter, LORA)
    learner.adapter_config().save_pretrained(tmp_path)
    save_file(learner.adapter_state(), tmp_path / "adapter_model.safetensors")
    recwarn.clear()
    model = PeftModel.from_pretrained(drafter_named(kind, target).model, tmp_path)
    assert not [one for one in recwarn if "missing" in str(one.message) or "unexpected" in str(one.message)]
    logits = model(input_ids=trajectory.token_ids[None]).logits
    expected = learner.drafter.model(input_ids=trajectory.token_ids[None]).logits
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(logits, drafter.model(input_ids=trajectory.token_ids[None]).logits)


@pytest.mark.parametrize("settings", [LORA, WHOLE], ids=["LoRA", "all"])
def test_what_was_learnt_is_taken_up_by_another_learner(settings, target):
    drafter = drafter_named("eagle2", target)
    learner, trajectory, _ = trained(drafter, settings)
    other = Learner(drafter, settings)
    other.step([trajectory])
    other.load_adapter_state(learner.adapter_state())
    assert all(torch.equal(one, learner.weights()[name]) for name, one in other.weights().items())
    assert other.base_digest() == learner.base_digest()
    assert other.step([trajectory]) is not None


def test_an_adapter_of_something_else_is_refused_whole(target):
    drafter = drafter_named("llama", target)
    learner, _, _ = trained(drafter, LORA)
    before = learner.adapter_state()
    first = next(iter(before))
    missing = {name: one for name, one in before.items() if name != first}
    wider = trained(drafter, replace(LORA, rank=5))[0].adapter_state()
    broken = {name: one.clone() for name, one in before.items()}
    broken[first][0, 0] = torch.inf
    for state in (missing, wider, before | {"base_model.model.more": torch.zeros(1)}):
        with pytest.raises(ConfigurationError, match=r"another drafter, or of other modules or another rank: .*\w"):
            learner.load_adapter_state(state)
    with pytest.raises(ConfigurationError, match="NaN or infinity: base_model"):
        learner.load_adapter_state(broken)
    assert all(torch.equal(one, before[name]) for name, one in learner.adapter_state().items())
