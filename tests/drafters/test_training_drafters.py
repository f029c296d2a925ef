"""Drafters can be trained: gradients through an unrolled draft, and drafting that follows what was learnt."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from drafters import HEADS, LAYERS, drafter_named, features_for
from eagle_heads import LAYOUTS, drafter_of, random_head
from models import prompt, tiny
from torch import nn
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, EagleDrafter, TreeConfig
from hf_dynspec.drafters import Drafter
from hf_dynspec.errors import ArtifactError, UnsupportedError
from hf_dynspec.modeling.head import PackedRows
from hf_dynspec.protocol import Shortlist

LENGTH, DEPTH, TREE = 10, 3, TreeConfig(20, 2, 5)
# Central differences of a loss near 1 in fp64: rounding of 1e-16 / STEP, and a third derivative times STEP².
STEP = 1e-5
CLOSE = {"rtol": 1e-6, "atol": 1e-9}
# Sums in another order, in fp64.
EQUAL = {"rtol": 1e-10, "atol": 1e-10}

# Biases (qwen2), norms of queries and keys and tied embeddings (qwen3), a scale of the logits (granite), layer norms.
FAMILIES = ("llama", "qwen2", "qwen3", "granite", "gpt2")
KINDS = [*FAMILIES, *HEADS]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=LAYERS).double()


def loss_of(drafter: Drafter, text: torch.Tensor | None = None, features: torch.Tensor | None = None) -> torch.Tensor:
    """Cross-entropy against random distributions over a few tokens, half of them the same for all rows and half chosen
    for each, summed over the steps."""
    text = prompt(LENGTH)[0] if text is None else text
    features = (
        features_for(drafter, LENGTH, dtype=next(drafter.module.parameters()).dtype) if features is None else features
    )
    draftable = drafter.head.token_ids
    if draftable is None:
        draftable = torch.arange(drafter.head.weight.shape[0])
    random = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for step in drafter.unroll(text, features, DEPTH):
        rows = step.hidden.shape[0]
        for shape in ((6,), (rows, 6)):
            token_ids = draftable[torch.randint(0, draftable.shape[0], shape, generator=random)]
            wanted = torch.rand(rows, 6, generator=random, dtype=torch.float64)
            log_probabilities = drafter.token_logits(step.hidden, token_ids).log_softmax(-1)
            loss = loss - (wanted * log_probabilities).sum() / 100
    return loss


def require_true_gradients(drafter: Drafter, parameters: dict[str, nn.Parameter]) -> None:
    """Some entries of each against differences of the loss; those with the largest gradients, and some at random."""
    loss_of(drafter).backward()
    random = torch.Generator().manual_seed(1)
    for name, parameter in parameters.items():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name
        flat, gradients = parameter.data.view(-1), parameter.grad.flatten()
        some = torch.randint(0, flat.shape[0], (2,), generator=random)
        for entry in [*gradients.abs().topk(2).indices.tolist(), *some.tolist()]:
            before, losses = flat[entry].item(), []
            for value in (before + STEP, before - STEP):
                flat[entry] = value
                losses.append(loss_of(drafter).item())
            flat[entry] = before
            numeric = torch.tensor((losses[0] - losses[1]) / (2 * STEP), dtype=torch.float64)
            assert torch.allclose(gradients[entry], numeric, **CLOSE), f"{name}[{entry}]"


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_an_unrolled_draft(kind, target):
    drafter = drafter_named(kind, target)
    target.zero_grad(set_to_none=True)
    parameters = dict(drafter.module.named_parameters())
    if kind in HEADS:
        names = {name for name, one in random_head(**HEADS[kind]).tensors.items() if one.is_floating_point()}
        assert len(names) == len(parameters)
    require_true_gradients(drafter, parameters)
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_with_and_without_gradients_the_steps_are_those_of_drafts(kind, target):
    """The module, an operation at a time, what a text is unrolled with for study, and a session's rounds."""
    drafter, text = drafter_named(kind, target), prompt(LENGTH)[0]
    features = features_for(drafter, LENGTH)
    trained = list(drafter.unroll(text, features, DEPTH))
    with torch.no_grad():
        studied = list(drafter.unroll(text, features, DEPTH))
    assert all(step.hidden.requires_grad for step in trained)
    assert not any(one.requires_grad for step in studied for one in step)
    for one, other in zip(trained, studied, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, **EQUAL)
    for start in (0, 3, LENGTH - DEPTH - 1):
        state = drafter.start()
        read = None if features is None else features[: start + 1]
        hidden = [state.advance(text[: start + 2], read)[-1]]
        hidden += [state.draft(token[None])[0] for token in text[start + 2 : start + 1 + DEPTH]]
        for depth, expected in enumerate(hidden):
            torch.testing.assert_close(trained[depth].hidden[start], expected, **EQUAL)


@pytest.mark.parametrize("kind", ["llama", "eagle2-attention-bias", "eagle3", "speculators-qwen3"])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_prompt_is_read_without_drafting_from_it(kind, with_gradients, target):
    drafter, text = drafter_named(kind, target), prompt(LENGTH)[0]
    features = features_for(drafter, LENGTH)
    with torch.set_grad_enabled(with_gradients):
        for first in (0, 4, LENGTH - 1 - DEPTH):
            everywhere = drafter.unroll(text, features, DEPTH)
            for step, here in zip(everywhere, drafter.unroll(text, features, DEPTH, first), strict=True):
                for expected, actual in zip(step, here, strict=True):
                    torch.testing.assert_close(actual, expected[first:], **EQUAL)


def test_a_head_feeds_its_own_outputs_back_while_it_is_trained(target):
    """EAGLE-3 its output before the norm, EAGLE-2 what the projection reads, with the gradients that they carry."""
    drafter = drafter_named("eagle3", target)
    text, features = prompt(3)[0], features_for(drafter, 3)
    first, second = drafter.unroll(text, features, 2)
    torch.testing.assert_close(drafter.module.norm(second.features), first.hidden[:1], **EQUAL)
    (gradient,) = torch.autograd.grad(second.hidden.sum(), second.features, retain_graph=True)
    (through,) = torch.autograd.grad(second.features, drafter.module.layer.mlp.down_proj.weight, gradient)
    assert bool(through.any())
    drafter = drafter_named("eagle2", target)
    first, second = drafter.unroll(text, features[:, :32], 2)
    torch.testing.assert_close(second.features, first.hidden[:1], **EQUAL)
    (gradient,) = torch.autograd.grad(second.hidden.sum(), first.hidden)
    assert bool(gradient[0].any())


def test_a_projection_of_the_targets_own_rows_is_not_trained(target):
    head = random_head("speculators", draft_vocabulary=100)
    head.tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach()[head.tensors["t2d"]].float()
    drafter = drafter_of(head, target)
    frozen = [name for name, one in drafter.module.named_parameters() if not one.requires_grad]
    assert frozen == ["lm_head.weight"] and drafter.head.token_ids is None
    loss_of(drafter).backward()
    assert all(one.grad is not None for one in drafter.module.parameters() if one.requires_grad)


# Logits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "eagle2", "eagle3-trimmed"])
def test_logits_are_those_of_a_shortlist(kind, target):
    drafter = drafter_named(kind, target)
    hidden = torch.randn(4, 32, dtype=torch.float64)
    draftable = drafter.head.token_ids if drafter.head.token_ids is not None else torch.arange(301)
    shortlist = Shortlist(draftable[torch.tensor([3, 70, 5, 99, 0])], version=0)
    logits = drafter.token_logits(hidden, shortlist.slots)
    torch.testing.assert_close(logits.float(), drafter.head.scores(hidden, shortlist, PackedRows()))
    chosen = shortlist.slots[torch.tensor([[0, 1], [4, 4], [2, 0], [3, 1]])]
    columns = torch.tensor([[0, 1], [4, 4], [2, 0], [3, 1]])
    torch.testing.assert_close(drafter.token_logits(hidden, chosen), logits.gather(1, columns))


def test_a_token_that_cannot_be_drafted_has_no_chance(target):
    drafter = drafter_named("eagle3-trimmed", target)
    known = random_head(**HEADS["eagle3-trimmed"]).tensors["t2d"]
    hidden = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
    logits = drafter.token_logits(hidden, torch.arange(known.shape[0]))
    assert torch.equal(logits.isfinite(), known.expand(2, -1))
    logits[:, known].sum().backward()
    assert bool(hidden.grad.isfinite().all())
    rows = drafter_named("llama", target).token_logits(hidden.detach(), torch.tensor([300, 301, 10_000]))
    assert rows.isfinite()[0].tolist() == [True, False, False]


# Drafting follows ----------------------------------------------------------------------------------------------------


def pair(kind: str) -> tuple[PreTrainedModel, Drafter]:
    target = tiny("llama", num_hidden_layers=LAYERS)
    return target, drafter_named(kind, target)


def scores_of(drafter: Drafter | DynSpecAssistant, target: PreTrainedModel | None = None) -> torch.Tensor:
    if isinstance(drafter, Drafter):
        drafter = DynSpecAssistant(drafter, "full", target=target, tree=TREE)
    return drafter.draft_round(prompt(20, seed=3)).scores


def train(drafter: Drafter, steps: int = 3) -> list[float]:
    optimizer = torch.optim.Adam([one for one in drafter.module.parameters() if one.requires_grad], lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(drafter)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def greedy(target: PreTrainedModel, assistant: DynSpecAssistant | None = None) -> torch.Tensor:
    return target.generate(prompt(), max_new_tokens=16, do_sample=False, assistant_model=assistant)


TRAINED = ["qwen3", "eagle2-attention-bias", "eagle3", "eagle3-trimmed", "speculators-qwen3"]


@pytest.mark.parametrize("kind", TRAINED)
def test_a_step_of_training_changes_the_next_rounds_drafts(kind):
    target, drafter = pair(kind)
    expected = greedy(target)
    before = {name: one.clone() for name, one in target.state_dict().items()}
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=TREE)
    greedy(target, assistant)
    version, scores = drafter.weights_version, scores_of(assistant)
    losses = train(drafter)
    assert losses[-1] < losses[0] and drafter.weights_version > version
    assert not torch.equal(scores_of(assistant), scores)
    if isinstance(drafter, EagleDrafter):
        fresh = EagleDrafter(drafter.checkpoint, target)
        torch.testing.assert_close(scores_of(assistant), scores_of(fresh, target))
    assert torch.equal(greedy(target, assistant), expected)
    assert all(torch.equal(one, before[name]) for name, one in target.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafting_needs_no_copies_of_the_weights(layout):
    target = tiny("llama", num_hidden_layers=LAYERS)
    drafter = drafter_of(random_head(layout), target)
    for _ in range(2):
        module, weights = drafter.module, drafter.weights
        assert weights.qkv.data_ptr() == module.layer.self_attn.q_proj.weight.data_ptr()
        assert weights.gate_up.data_ptr() == module.layer.mlp.gate_proj.weight.data_ptr()
        assert weights.fc.data_ptr() == module.fc.weight.data_ptr()
        assert weights.qkv.shape == (64, 32 if layout == "eagle2" else 64)
        train(drafter, 1)
        assert drafter.weights_version


@pytest.mark.parametrize("kind", TRAINED)
def test_a_copy_is_trained_while_the_drafter_drafts(kind):
    target, drafter = pair(kind)
    assistant = DynSpecAssistant(drafter, "full", target=target, tree=TREE)
    scores, version = scores_of(assistant), drafter.weights_version
    other = drafter.copy()
    assert type(other) is type(drafter) and torch.equal(scores_of(other, target), scores)
    train(other)
    assert torch.equal(scores_of(assistant), scores) and drafter.weights_version == version
    drafter.module.load_state_dict(other.module.state_dict())
    torch.testing.assert_close(scores_of(assistant), scores_of(other, target))
    assert drafter.weights_version > version


def test_a_copy_outlives_no_target():
    target, drafter = pair("eagle2")
    del target
    with pytest.raises(ReferenceError, match="gone"):
        drafter.copy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_that_is_cast_alone_is_trained_so_and_drafts_in_the_targets_dtype(layout):
    """fp32 weights for an optimizer, beside a target of 16 bits."""
    target = tiny("llama", num_hidden_layers=LAYERS).to(torch.bfloat16)
    drafter = drafter_of(random_head(layout), target)
    assert drafter.module.fc.weight.dtype == torch.bfloat16
    drafter.module.float()
    assistant = DynSpecAssistant(drafter, "full", target=target)
    before = assistant.draft_round(prompt(20, seed=3)).logits[0]
    (step,) = drafter.unroll(prompt(LENGTH)[0], features_for(drafter, LENGTH, dtype=torch.float32), 1)
    assert step.features.dtype == torch.float32 and step.hidden.dtype == torch.bfloat16
    train(drafter)
    assert not torch.equal(assistant.draft_round(prompt(20, seed=3)).logits[0], before)
    assert drafter.weights.qkv.dtype == torch.bfloat16
    assert {one.dtype for one in drafter.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_that_was_loaded_in_inference_mode_drafts(layout):
    target = tiny("llama", num_hidden_layers=LAYERS)
    expected = greedy(target)
    with torch.inference_mode():
        drafter = drafter_of(random_head(layout), target)
        assistant = DynSpecAssistant(drafter, "full", target=target)
        assert torch.equal(greedy(target, assistant), expected)
    assert torch.equal(greedy(target, assistant), expected)
    with torch.inference_mode(), torch.no_grad():
        drafter.module.fc.weight.mul_(1.5)
    assert torch.equal(greedy(target, assistant), expected)


# Adapters ------------------------------------------------------------------------------------------------------------


def lora(*modules: str, **settings) -> peft.LoraConfig:
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 16, "init_lora_weights": False, "target_modules": list(modules)}
    return peft.LoraConfig(**given | settings)


ADAPTED = {
    "queries and values": ("q_proj", "v_proj"),
    "every linear layer": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"),
    "the own projection": ("v_proj", "lm_head"),
}


def head_of(layout: str, target: PreTrainedModel) -> EagleDrafter:
    return drafter_of(random_head(layout, draft_vocabulary=None if layout == "eagle2" else 100), target)


def require_gradients_of_adapters_alone(drafter: Drafter) -> dict[str, nn.Parameter]:
    trained = {name: one for name, one in drafter.module.named_parameters() if one.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    require_true_gradients(drafter, trained)
    assert all(one.grad is None for name, one in drafter.module.named_parameters() if name not in trained)
    return trained


# An EAGLE-2 head has no projection of its own.
@pytest.mark.parametrize(
    ("what", "layout"),
    [(what, layout) for what in ADAPTED for layout in LAYOUTS if (what, layout) != ("the own projection", "eagle2")],
)
def test_drafting_follows_adapters_and_gradients_reach_them_alone(what, layout, target):
    drafter = head_of(layout, target)
    text, features = prompt(LENGTH)[0], features_for(drafter, LENGTH)

    def drafted() -> torch.Tensor:
        state = drafter.start()
        assert drafter.weights_version >= 0
        hidden = [state.advance(text[:5], features[:4])[-1], state.draft(text[5:6])[0]]
        return drafter.head.scores(torch.stack(hidden), Shortlist(torch.arange(60), 0, is_prefix=True), PackedRows())

    def unrolled() -> torch.Tensor:
        steps = list(drafter.unroll(text, features, 2))
        ids = torch.arange(301) if drafter.head.token_ids is None else drafter.head.token_ids
        return drafter.token_logits(torch.stack([step.hidden[3] for step in steps]), ids)[:, :60].detach().float()

    plain, version = drafted(), drafter.weights_version
    peft.inject_adapter_in_model(lora(*ADAPTED[what]), drafter.module)
    with_adapter = drafted()
    assert drafter.weights_version > version and not torch.allclose(with_adapter, plain, atol=1e-3)
    torch.testing.assert_close(with_adapter, unrolled())
    assert len(require_gradients_of_adapters_alone(drafter)) == 2 * len(ADAPTED[what])
    # What peft can do to adapters is followed too.
    layers = [one for one in drafter.module.modules() if hasattr(one, "lora_A")]
    for change, expected in (
        (lambda one: one.enable_adapters(False), plain),
        (lambda one: one.enable_adapters(True), with_adapter),
        (lambda one: one.merge(), with_adapter),
        (lambda one: one.enable_adapters(False), plain),
        (lambda one: one.enable_adapters(True), with_adapter),
        (lambda one: one.unmerge() if one.merged else None, with_adapter),
    ):
        for layer in layers:
            change(layer)
        torch.testing.assert_close(drafted(), expected)


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("v_proj", "lm_head")])
def test_gradients_reach_the_adapters_of_an_independent_drafter(modules, target):
    drafter = drafter_named("llama", target)
    peft.inject_adapter_in_model(lora(*modules), drafter.module)
    assert drafter.weights_version
    require_gradients_of_adapters_alone(drafter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_trained_and_generation_goes_on(layout):
    target = tiny("llama", num_hidden_layers=LAYERS)
    drafter = head_of(layout, target)
    peft.inject_adapter_in_model(lora(*ADAPTED["queries and values"]), drafter.module)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    expected = greedy(target)
    assert torch.equal(greedy(target, assistant), expected)
    before = {name: one.clone() for name, one in drafter.module.state_dict().items() if "lora_" not in name}
    scores = assistant.draft_round(prompt(20, seed=3)).logits[0]
    train(drafter)
    assert not torch.equal(assistant.draft_round(prompt(20, seed=3)).logits[0], scores)
    assert all(torch.equal(drafter.module.state_dict()[name], one) for name, one in before.items())
    assert torch.equal(greedy(target, assistant), expected)


def test_a_small_update_of_16_bit_weights_is_not_rounded_away_when_it_is_merged():
    target = tiny("llama", num_hidden_layers=LAYERS).to(torch.bfloat16)
    drafter = drafter_of(random_head("eagle3"), target)
    peft.inject_adapter_in_model(lora("q_proj"), drafter.module)
    with torch.no_grad():
        for name, one in drafter.module.named_parameters():
            if "lora_B" in name:
                one.mul_(1e-4)
    merged = drafter.checkpoint.tensors["layer.self_attn.q_proj.weight"]
    base = drafter.module.layer.self_attn.q_proj.base_layer.weight
    assert merged.dtype == torch.float32 and base.dtype == torch.bfloat16
    assert float((merged != base.float()).float().mean()) > 0.9


def test_what_cannot_be_merged_is_refused_by_name(target, tmp_path):
    drafter = drafter_of(random_head("eagle2"), target)
    plain, drafter.module.fc = drafter.module.fc, nn.Sequential(nn.Linear(64, 32).double())
    for attempt in (lambda: drafter.weights_version, lambda: drafter.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedError, match="fc of the EAGLE head is a Sequential"):
            attempt()
    with pytest.raises(UnsupportedError, match="fc of the EAGLE head"):
        assert drafter.weights_version  # the failure is not forgotten
    drafter.module.fc = plain
    assert drafter.weights_version > 0


# Writing -------------------------------------------------------------------------------------------------------------


def inject(drafter: EagleDrafter) -> None:
    peft.inject_adapter_in_model(lora(*ADAPTED["every linear layer"]), drafter.module)


@pytest.mark.parametrize("change", [train, inject])
@pytest.mark.parametrize("kind", ["eagle2", "eagle2-attention-bias", "eagle3", "eagle3-trimmed", "speculators-qwen3"])
def test_weights_are_written_as_they_are(kind, change: Callable[[EagleDrafter], Any], tmp_path):
    target, drafter = pair(kind)
    assert isinstance(drafter, EagleDrafter)
    drafter.save_pretrained(tmp_path / "before")
    change(drafter)
    drafter.save_pretrained(tmp_path / "after")
    before, after = (EagleDrafter.from_pretrained(tmp_path / name, target=target) for name in ("before", "after"))
    expected = scores_of(drafter, target)
    assert torch.equal(scores_of(after, target), expected) and not torch.allclose(scores_of(before, target), expected)
    assert after.checkpoint.config == drafter.checkpoint.config
    assert after.checkpoint.tensors.keys() == drafter.checkpoint.tensors.keys()


def test_weights_that_training_ruined_are_not_written(target, tmp_path):
    drafter = drafter_of(random_head("eagle3"), target)
    drafter.save_pretrained(tmp_path)
    with torch.no_grad():
        drafter.module.layer.mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ArtifactError, match=r"layer\.mlp\.up_proj\.weight.*NaN"):
        drafter.save_pretrained(tmp_path)
    assert EagleDrafter.from_pretrained(tmp_path, target=target).weights.gate_up.isfinite().all()


def test_a_checkpoint_is_not_trained_with_its_drafter():
    """Two drafters of one checkpoint are two."""
    target, drafter = pair("eagle3")
    head = random_head(**HEADS["eagle3"])
    one, other = drafter_of(head, target), drafter_of(head, target)
    train(one)
    fresh = random_head(**HEADS["eagle3"])
    assert all(torch.equal(head.tensors[name], fresh.tensors[name]) for name in head.tensors)
    assert torch.equal(other.module.fc.weight, drafter.module.fc.weight)
