"""Multi-token-prediction layers as drafters: transformers' own drafts, exact output, and checkpoints of every kind."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from calls import SHAPES, assert_same, generate
from command_line import invoke, write_rows
from local_hub import running_hub
from models import POLICY_CASES, prompt, tiny, word_tokenizer
from mtp_models import FAMILIES, LAYERS, save_with_mtp
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_dynspec import (
    ArtifactError,
    ConfigurationError,
    DynSpecAssistant,
    MtpDrafter,
    NotBoundError,
    OnlineAlignment,
    UnsupportedError,
)
from hf_dynspec.drafters.mtp.state import MtpState
from hf_dynspec.loading import without_warnings_of_transformers

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LATE = f"model.layers.{LAYERS}."
# Families with layers that transformers' `use_mtp` builds too.
OF_TRANSFORMERS = ("deepseek_v3", "glm4_moe")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TREE = [([5, 6, 7], [0, 0, 0]), ([8, 9, 10, 11], [0, 2, 2, 1]), ([12, 13, 14], [1, 3, 1]), ([15, 16], [2, 0])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str, int], PreTrainedModel]:
    """Returns a target of a family with some MTP layers in its folder."""
    made = {}

    def target_of(family: str, count: int = 1) -> PreTrainedModel:
        if (family, count) not in made:
            made[family, count] = save_with_mtp(tmp_path_factory.mktemp(family), family, count)
        return made[family, count]

    return target_of


@pytest.fixture
def target(saved) -> PreTrainedModel:
    return saved("deepseek_v3")


def changed(target: PreTrainedModel, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a target's checkpoint with other tensors."""
    shutil.copytree(target.name_or_path, folder)
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def features_of(target: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    return target(token_ids.unsqueeze(0), output_hidden_states=True).hidden_states[-1][0].detach()


def draft_along(state: MtpState, tokens: list[int]) -> torch.Tensor:
    return torch.cat([torch.empty(0, 32), *(state.draft(torch.tensor([token])) for token in tokens)])


# Drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "count"), [("mellum", 1), *product(OF_TRANSFORMERS, (1, 2, 3))])
def test_greedy_drafts_are_those_of_transformers(family, count, saved, rounds, monkeypatch):
    """Step by step, both within a call and after each of its texts alone."""
    target = saved(family, count)
    patterns = [r"^mtp\.", *(rf"model\.layers\.{LAYERS + at}\." for at in range(count))]
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", patterns)
    forward, theirs = MtpModel.forward, []

    def recording(self, *arguments, full_input_ids, **options):
        output = forward(self, *arguments, full_input_ids=full_input_ids, **options)
        theirs.append((full_input_ids.clone(), output[0][0]))
        return output

    monkeypatch.setattr(MtpModel, "forward", recording)
    options = {"max_new_tokens": 24, "eos_token_id": None}
    expected = generate(target, None, prompt(8, seed=3), use_mtp=True, **options)
    assistant = DynSpecAssistant(MtpDrafter.from_pretrained(target), "full", target=target, num_assistant_tokens=count)
    assert torch.equal(assert_same(target, assistant, prompt(8, seed=3), **options), expected)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    within = {one.prefix.shape[0]: one.candidates.token_ids for one in list(rounds)}
    for text, drafted in theirs:
        assert torch.equal(assistant.draft_round(text).token_ids, drafted)
        mine = within.get(text.shape[1], drafted[:0])
        assert torch.equal(mine, drafted[: mine.shape[0]])
    assert len(theirs) >= 10 and sum(text.shape[1] in within for text, _ in theirs) >= len(theirs) - 1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen2"])
def test_layers_without_a_counterpart_follow_their_public_definition(family, saved):
    """In plain torch: vLLM's for `mtp.*`, and MiMo's own code for `model.mtp_layers.*`, whose projection reads the
    hidden state first."""
    target = saved(family)
    token_ids = prompt(12, seed=2)[0]
    features = features_of(target, token_ids)
    expected = PlainLayer(target, family).run(token_ids[1:], features[:-1])
    drafter = MtpDrafter.from_pretrained(target)
    for n in (2, 5, 12):
        state = drafter.start()
        torch.testing.assert_close(state.advance(token_ids[:n], features[: n - 1])[0], expected[n - 2], **CLOSE)
    # Its own hidden states take the features' place.
    drafted = draft_along(state, [7, 8])
    longer, own = torch.cat([token_ids, torch.tensor([7, 8])]), expected[-1:]
    for step in range(2):
        inputs = torch.cat([features[:-1], own])
        output = PlainLayer(target, family).run(longer[1 : 13 + step], inputs)[-1:]
        torch.testing.assert_close(drafted[step], output[0], **CLOSE)
        own = torch.cat([own, output])


class PlainLayer:
    """One MTP layer in plain torch, over a whole text at once."""

    def __init__(self, target: PreTrainedModel, family: str):
        tensors = load_file(Path(target.name_or_path, WEIGHTS))
        self.is_qwen3 = family != "qwen2"
        stem = "mtp.layers.0." if self.is_qwen3 else "model.mtp_layers.0."
        self.layer = {name.removeprefix(stem): one for name, one in tensors.items() if name.startswith(stem)}
        self.beside = {name.removeprefix("mtp."): one for name, one in tensors.items() if name.startswith("mtp.")}
        self.embedding = tensors["model.embed_tokens.weight"]
        self.config = target.config
        self.head_dim = 8

    def norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled = states * (states.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return scaled * (1 + weight if self.is_qwen3 else weight)

    def linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(states, self.layer[f"{name}.weight"], self.layer.get(f"{name}.bias"))

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope = self.config.rope_parameters
        size = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        angles = positions[:, None] * rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        turned, rest = states[..., :size], states[..., size:]
        left, right = turned.chunk(2, -1)
        turned = turned * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
        return torch.cat([turned, rest], -1)

    def attend(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n, heads = states.shape[0], 4
        queries, keys, values = (self.linear(states, f"self_attn.{one}_proj").view(n, -1, 8) for one in "qkv")
        gate = None
        if self.is_qwen3:
            queries, gate = queries.reshape(n, heads, 16).chunk(2, -1)
            queries = self.norm(queries, self.layer["self_attn.q_norm.weight"])
            keys = self.norm(keys, self.layer["self_attn.k_norm.weight"])
        queries, keys = self.rotate(queries, positions), self.rotate(keys, positions)
        keys, values = (one.repeat_interleave(heads // one.shape[1], 1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        attended = attended if gate is None else attended * gate.sigmoid()
        return self.linear(attended.reshape(n, -1), "self_attn.o_proj")

    def mlp(self, states: torch.Tensor, stem: str = "mlp.") -> torch.Tensor:
        if f"{stem}gate.weight" not in self.layer:
            inner = functional.silu(self.linear(states, f"{stem}gate_proj")) * self.linear(states, f"{stem}up_proj")
            return self.linear(inner, f"{stem}down_proj")
        weights, chosen = self.linear(states, f"{stem}gate").softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        shared = self.linear(states, f"{stem}shared_expert_gate").sigmoid()
        output = shared * self.mlp(states, f"{stem}shared_expert.")
        for row in range(states.shape[0]):
            for weight, expert in zip(weights[row], chosen[row].tolist(), strict=True):
                output[row] += weight * self.mlp(states[row], f"{stem}experts.{expert}.")
        return output

    def run(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, d]`: the hidden states at tokens from position 1 on, each with the hidden state before it."""
        embedded, layer, beside = self.embedding[token_ids], self.layer, self.beside
        if self.is_qwen3:
            embedded = self.norm(embedded, beside["pre_fc_norm_embedding.weight"])
            hidden = self.norm(hidden, beside["pre_fc_norm_hidden.weight"])
            states, last = (
                functional.linear(torch.cat([embedded, hidden], -1), beside["fc.weight"]),
                beside["norm.weight"],
            )
        else:
            hidden = self.norm(hidden, layer["hidden_layernorm.weight"])
            embedded = self.norm(embedded, layer["token_layernorm.weight"])
            states, last = (
                self.linear(torch.cat([hidden, embedded], -1), "input_proj"),
                layer["final_layernorm.weight"],
            )
        positions = torch.arange(1, states.shape[0] + 1)
        states = states + self.attend(self.norm(states, layer["input_layernorm.weight"]), positions)
        states = states + self.mlp(self.norm(states, layer["post_attention_layernorm.weight"]))
        return self.norm(states, last)


@pytest.mark.parametrize("n", [2, 3, 12])
@pytest.mark.parametrize(
    ("family", "count"), sorted(set(product(FAMILIES, (1, 2, 3))) - {("mellum", 2), ("mellum", 3)})
)
def test_each_path_of_a_tree_is_a_chain(family, count, n, saved):
    target = saved(family, count)
    drafter, token_ids = MtpDrafter.from_pretrained(target), prompt(n, seed=5)[0]
    drafter.require_trees()
    features = features_of(target, token_ids)[:-1]
    tree = drafter.start()
    tree.advance(token_ids, features)
    paths = [[]]
    for tokens, parents in TREE:
        drafted = tree.draft(torch.tensor(tokens), torch.tensor(parents))
        paths = [[*paths[parent], token] for token, parent in zip(tokens, parents, strict=True)]
        for path, actual in zip(paths, drafted, strict=True):
            chain = drafter.start()
            chain.advance(token_ids, features)
            torch.testing.assert_close(actual, draft_along(chain, path)[-1], **CLOSE)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_round_by_round_is_the_same_as_at_once(count, saved):
    """Whatever was drafted between, chains or trees, and however few tokens were accepted."""
    target = saved("glm4_moe", count)
    drafter, token_ids = MtpDrafter.from_pretrained(target), prompt(30, seed=5)[0]
    features = features_of(target, token_ids)
    state = drafter.start()
    for n in (2, 3, 5, 9, 10, 13, 20):
        since = max(0, state.length - 1)
        actual = [state.advance(token_ids[:n], features[since : n - 1])]
        assert state.length == n
        alone = drafter.start()
        expected = [alone.advance(token_ids[:n], features[: n - 1])]
        for one, into in ((state, actual), (alone, expected)):
            into.append(draft_along(one, [7, 8, 9, 4][: n % 5]))
        torch.testing.assert_close(torch.cat(actual), torch.cat(expected), **CLOSE)
        if n == 10:
            state.truncate(n)
            state.advance(token_ids[:11], features[n - 1 : 10])
            state.draft(torch.tensor([3, 4]), torch.tensor([0, 0]))
        state.truncate(state.length)
    with pytest.raises(ValueError, match="covers 20 tokens"):
        state.advance(token_ids[:20], features[18:19])


@pytest.mark.parametrize("count", [1, 3])
def test_rows_go_on_after_a_shorter_text_and_start_afresh_after_a_gap(count, saved):
    target = saved("glm4_moe", count)
    drafter, token_ids = MtpDrafter.from_pretrained(target), prompt(30, seed=5)[0]
    features = features_of(target, token_ids)
    state, alone = drafter.start(), drafter.start()
    state.advance(token_ids[:20], features[:19])
    draft_along(state, [5, 6, 7])
    state.truncate(11)
    assert state.length == 11
    actual = state.advance(token_ids[:14], features[10:13])
    torch.testing.assert_close(actual, alone.advance(token_ids[:14], features[:13]), **CLOSE)
    # Of several layers only the first has all rows again.
    drafted = draft_along(state, [5, 6, 7, 8])
    if count == 1:
        torch.testing.assert_close(drafted, draft_along(alone, [5, 6, 7, 8]), **CLOSE)
    # The features between are missing: the rows are those of a text whose beginning is not known.
    actual = state.advance(token_ids[:25], features[20:24])
    alone = drafter.start()
    torch.testing.assert_close(actual, alone.advance(token_ids[:25], features[20:24]), **CLOSE)
    torch.testing.assert_close(draft_along(state, [5, 6, 7]), draft_along(alone, [5, 6, 7]), **CLOSE)
    state.truncate(0)
    assert state.length == 0
    with pytest.raises(ValueError, match="hidden states at up to 4 tokens, got None"):
        state.advance(token_ids[:5])
    with pytest.raises(ValueError, match="follows advance"):
        drafter.start().draft(token_ids[:1])


@pytest.mark.parametrize(("family", "count"), [("mellum", 1), ("glm4_moe", 1), ("glm4_moe", 2), ("deepseek_v3", 3)])
def test_unrolled_steps_are_those_of_drafts(family, count, saved):
    target, n, depth = saved(family, count), 14, 5
    drafter, token_ids = MtpDrafter.from_pretrained(target), prompt(n, seed=5)[0]
    features = features_of(target, token_ids)
    unrolled = list(drafter.unroll(token_ids, features, depth))
    assert len(unrolled) == depth
    for start in range(n - depth):
        state, inputs = drafter.start(), []
        observe = partial(lambda inputs, *some: inputs.append(some), inputs)
        hidden = [state.advance(token_ids[: start + 2], features[: start + 1], observe)]
        for token in token_ids[start + 2 : start + 1 + depth]:
            hidden.append(state.draft(token[None], None, observe))
        for step, read, output in zip(unrolled, inputs, hidden, strict=True):
            for actual, expected in zip(step, (*read, output), strict=True):
                torch.testing.assert_close(actual[start], expected[-1], **CLOSE)
    for first in (3, n - 1 - depth):
        for step, here in zip(unrolled, drafter.unroll(token_ids, features, depth, first), strict=True):
            for one, actual in zip(step, here, strict=True):
                torch.testing.assert_close(actual, one[first:], **CLOSE)
    (short,) = drafter.unroll(token_ids[:2], features, 1)
    torch.testing.assert_close(short.hidden, unrolled[0].hidden[:1], **CLOSE)
    sum(step.hidden.square().sum() for step in unrolled).backward()
    assert all(one.grad is not None for one in drafter.module.parameters())
    assert all(one.grad is None for one in target.parameters())


# Whole calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", ["full", "hybrid"])
@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_greedy_output_is_the_targets_own(family, policy, shape, count, saved):
    target = saved(family, count)
    assistant = DynSpecAssistant("mtp", POLICY_CASES[policy](), target=target, tree=SHAPES[shape])
    for length in (1, 3, 12):
        output = assert_same(target, assistant, prompt(length, seed=1), max_new_tokens=14, eos_token_id=None)
        assert assistant.stats.tokens == output.shape[1] - length
    assert 0 < assistant.stats_total.accepted < assistant.stats_total.drafted
    assert assistant.stats_total.calls == 3


@pytest.mark.parametrize("policy", [name for name in POLICY_CASES if "," not in name])
def test_every_policy_drafts_with_mtp_layers(policy, target):
    assistant = DynSpecAssistant("mtp", POLICY_CASES[policy](), target=target, validate=True)
    assert_same(target, assistant, max_new_tokens=12)


@pytest.mark.parametrize("count", [1, 2])
def test_conversations_go_on(count, saved):
    target = saved("deepseek_v3", count)
    assistant = DynSpecAssistant("mtp", "hybrid", target=target)
    conversation, text = assistant.conversation(), prompt(12, seed=1)
    for turn in range(3):
        output = assert_same(target, conversation, text, max_new_tokens=10, eos_token_id=None)
        # The second turn takes back a part of the answer.
        text = torch.cat([output[:, : output.shape[1] - 4 * (turn == 1)], prompt(5, seed=turn)], 1)
    assert assistant.stats_total.accepted > 0


def test_samples_and_batches(saved):
    target = saved("glm4_moe")
    assistant = DynSpecAssistant("mtp", "hybrid", target=target)
    torch.manual_seed(0)
    sampled = generate(target, assistant, do_sample=True, temperature=0.8)
    assert sampled.shape[1] <= 36 and assistant.stats.drafted > 0
    assert_same(target, assistant, prompt(12).repeat(2, 1))


def test_drafting_follows_the_targets_weights(target):
    target = AutoModelForCausalLM.from_pretrained(target.name_or_path, dtype=torch.float32).eval()
    drafter = MtpDrafter.from_pretrained(target)
    assistant = DynSpecAssistant(drafter, "full", target=target)
    generate(target, assistant)
    version = drafter.weights_version
    with torch.no_grad():
        target.lm_head.weight.mul_(-1.0)
    assert drafter.weights_version == version + 1 == drafter.weights_version
    assert_same(target, assistant, eos_token_id=None)
    assert assistant.stats.accepted > 0
    target.to(torch.bfloat16)
    generate(target, assistant)
    assert drafter.head.weight.dtype == torch.bfloat16 == next(drafter.module.parameters()).dtype
    assert {id(one) for one in drafter.module.parameters()}.isdisjoint(id(one) for one in target.parameters())


@pytest.mark.parametrize("modules", ["all-linear", "all-parameters"])
def test_layers_can_be_aligned(modules, target, tmp_path):
    settings = OnlineAlignment(modules=modules, synchronous=True, gate=False, steps=4)
    assistant = DynSpecAssistant("mtp", "full", target=target, alignment=settings)
    before = {name: one.clone() for name, one in target.named_parameters()}
    for seed in range(4):
        assert_same(target, assistant, prompt(12, seed), eos_token_id=None)
    assert assistant.alignment.stats.is_served and assistant.alignment.stats.error is None
    assert all(torch.equal(one, before[name]) for name, one in target.named_parameters())
    assistant.alignment.save_pretrained(tmp_path)
    again = DynSpecAssistant("mtp", "full", target=target, alignment=settings)
    again.alignment.load(tmp_path)
    learnt = assistant.alignment.learner.adapter_state()
    assert learnt and all(
        torch.equal(one, learnt[name]) for name, one in again.alignment.learner.adapter_state().items()
    )


# The door ------------------------------------------------------------------------------------------------------------


def test_the_name_is_resolved_for_each_target(saved):
    first, second = saved("deepseek_v3"), saved("glm4_moe")
    assistant = DynSpecAssistant("mtp")
    with pytest.raises(NotBoundError, match="'mtp' is loaded for a target: pass target"):
        _ = assistant.drafter.head
    assistant.bind(first)
    drafter = assistant.drafter
    assert isinstance(drafter, MtpDrafter) and assistant.bind(first).drafter is drafter
    with pytest.raises(ArtifactError, match="was not loaded from a checkpoint"):
        assistant.bind(tiny())
    assert assistant.drafter is drafter and assistant.target is first
    assert_same(first, assistant)
    assert assistant.bind(second).drafter is not drafter
    assert_same(second, assistant)
    assistant.drafter = MtpDrafter.from_pretrained(second)
    assistant.drafter = "mtp"
    assert_same(second, assistant)
    with pytest.raises(ConfigurationError, match="no drafter named 'mpt': name a folder"):
        DynSpecAssistant("mpt")
    with pytest.raises(NotBoundError, match="is loaded for a target"):
        DynSpecAssistant("mtp", alignment=OnlineAlignment())
    with pytest.raises(ArtifactError, match="it has 64 and 301"):
        DynSpecAssistant(MtpDrafter.from_pretrained(first), target=tiny(hidden_size=64))


def test_artifacts_name_mtp_layers(target, tmp_path):
    DynSpecAssistant("mtp", "hybrid", target=target).save_pretrained(tmp_path / "artifact")
    loaded = DynSpecAssistant.from_pretrained(tmp_path / "artifact", target=target)
    assert isinstance(loaded.drafter, MtpDrafter)
    assert "drafter=drafter" not in (tmp_path / "artifact" / "README.md").read_text()
    assert_same(target, loaded)


def test_commands_take_the_name(target, tmp_path):
    folder = changed(target, tmp_path / "target", lambda tensors: None)
    word_tokenizer().save_pretrained(folder)
    write_rows(tmp_path / "prompts.jsonl", [{"text": "t5 t6 t7 t8"}])
    words = ["--target", folder, "--drafter", "mtp", "--prompts", tmp_path / "prompts.jsonl", "--policy", "full"]
    words += ["--max-new-tokens", 6, "--device", "cpu", "--json", tmp_path / "out.json"]
    assert invoke("bench", *words, "--repeats", 1).exit_code == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["models"]["drafter"]["class"] == "MtpDrafter"
    assert invoke("coverage", *words).exit_code == 0
    short = invoke("coverage", *words, "--max-new-tokens", 2)
    assert short.exit_code == 1 and "MTP layers" in str(short.exception)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def replaced(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"{LATE}{name}.weight": tensor})


def without(part: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{LATE}{part}")]


BAD = {
    "none": (
        without(""),
        "no multi-token-prediction layers; looked for layers.N.eh_proj .*, mtp.layers.N .*mtp_layers",
    ),
    "a norm is missing": (without("hnorm"), "missing layers.0.hnorm.weight"),
    "an expert is missing": (without("mlp.experts.1.up_proj"), "parts of .*experts.gate_up_proj are missing"),
    "shape": (replaced("hnorm", torch.ones(31)), rf"{LATE}hnorm.weight has shape \[31\], expected \[32\]"),
    "shape of an expert": (replaced("mlp.experts.1.up_proj", torch.ones(17, 32)), "or of other shapes"),
    "shape of a copy": (replaced("shared_head.head", torch.ones(302, 32)), r"has shape \[302, 32\], and the target's"),
    "unknown": (replaced("gates", torch.ones(31)), f"unexpected {LATE}gates.weight"),
    "fp8": (replaced("eh_proj", torch.ones(32, 64).to(torch.float8_e4m3fn)), "dtype F8_E4M3, as in quantised"),
    "int8": (replaced("eh_proj", torch.ones(32, 64, dtype=torch.int8)), "dtype I8, as in quantised"),
    "infinite": (replaced("eh_proj", torch.full((32, 64), torch.inf)), "holds NaN or infinity"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_by_name(name, target, tmp_path):
    change, problem = BAD[name]
    with pytest.raises(ArtifactError, match=problem) as caught:
        MtpDrafter.from_pretrained(target, changed(target, tmp_path / "bad", change))
    assert "path_or_repo" in str(caught.value) or str(tmp_path / "bad") in str(caught.value)


def test_shapes_are_checked_before_memory_is_taken(target, tmp_path, monkeypatch):
    folder = changed(target, tmp_path / "bad", replaced("hnorm", torch.ones(31)))

    def on_meta(tensor, device, dtype):
        assert torch.device(device).type == "meta"
        return tensor.to(dtype)

    monkeypatch.setattr("transformers.core_model_loading._materialize_copy", on_meta)
    with pytest.raises(ArtifactError, match="expected"):
        MtpDrafter.from_pretrained(target, folder)


def test_targets_that_cannot_lend_their_parts(target, tmp_path):
    with pytest.raises(ArtifactError, match=r"target: was not loaded from a checkpoint.*path_or_repo"):
        MtpDrafter.from_pretrained(tiny())
    with pytest.raises(UnsupportedError, match="scales, normalises, packs or offloads its embeddings"):
        MtpDrafter.from_pretrained(tiny("gemma3"))
    with pytest.raises(ArtifactError, match="no folder '/no/such/folder'"):
        MtpDrafter.from_pretrained(target, "/no/such/folder")
    folder = changed(target, tmp_path / "pickled", lambda tensors: None)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin: is a pickle, and .* has no model.safetensors"):
        MtpDrafter.from_pretrained(target, folder)
    # Windows of attention layers are known, but not layers that keep other states.
    qwen = save_with_mtp(tmp_path / "qwen", "qwen3_next")
    qwen.config.mtp_layer_types = ["linear_attention"]
    with pytest.raises(UnsupportedError, match="layers of the kind linear_attention"):
        MtpDrafter.from_pretrained(qwen)


def test_an_output_projection_and_an_embedding_of_their_own(target, saved, tmp_path):
    names = {"head": f"{LATE}shared_head.head.weight", "embedding": f"{LATE}embed_tokens.weight"}
    own = {name: torch.randn(301, 32) for name in names.values()}
    drafter = MtpDrafter.from_pretrained(
        target, changed(target, tmp_path / "own", lambda tensors: tensors.update(own))
    )
    assert torch.equal(drafter.head.weight, own[names["head"]])
    assert torch.equal(drafter.embed(torch.tensor([3, 7])), own[names["embedding"]][[3, 7]])
    assert_same(target, DynSpecAssistant(drafter, "hybrid", target=target))
    shared = MtpDrafter.from_pretrained(target)
    assert shared.head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert shared.num_embeddings == 301
    rotation = {f"{LATE}self_attn.rotary_emb.inv_freq": torch.ones(2)}
    MtpDrafter.from_pretrained(target, changed(target, tmp_path / "old", lambda tensors: tensors.update(rotation)))
    # One projection drafts for all layers.
    several = saved("deepseek_v3", 2)
    folder = changed(several, tmp_path / "several", lambda tensors: tensors.update(own))
    with pytest.raises(ArtifactError, match="is not the target's, and there are several layers"):
        MtpDrafter.from_pretrained(several, folder)


def sharded(target: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint in two files, of which one holds the MTP layers."""
    shutil.copytree(target.name_or_path, folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    place = {name: f"model-0000{1 + name.startswith(LATE)}-of-00002.safetensors" for name in tensors}
    for file in set(place.values()):
        held = {name: one for name, one in tensors.items() if place[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(one.nbytes for one in tensors.values())}, "weight_map": place}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_only_the_files_with_mtp_layers_are_read(target, tmp_path, monkeypatch):
    folder, expected = sharded(target, tmp_path / "sharded"), MtpDrafter.from_pretrained(target).module.state_dict()
    with running_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.publish("someone/model", folder)
        module = MtpDrafter.from_pretrained(target, "someone/model").module
        fetched = {path.rsplit("/", 1)[1] for _, path in hub.requests if "/resolve/" in path}
        assert {INDEX, "config.json", "model-00002-of-00002.safetensors"} == fetched
        assert all(torch.equal(one, expected[name]) for name, one in module.state_dict().items())
        with without_warnings_of_transformers():
            loaded = AutoModelForCausalLM.from_pretrained("someone/model", dtype=torch.float32)
        module = MtpDrafter.from_pretrained(loaded).module
        assert all(torch.equal(one, expected[name]) for name, one in module.state_dict().items())
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"nothing")
    MtpDrafter.from_pretrained(target, folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"names 'model-00002-of-00002\.safetensors', which is not there"):
        MtpDrafter.from_pretrained(target, folder)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_target_may_be_padded_before_and_after_its_layers_are_loaded(family, tmp_path):
    target = save_with_mtp(tmp_path, family)
    target.resize_token_embeddings(pad_to_multiple_of=64)
    assistant = DynSpecAssistant("mtp", target=target)
    assert_same(target, assistant)
    # An id that only the padded target knows.
    assert_same(target, assistant, torch.cat([prompt(), torch.full((1, 1), 315)], dim=1))
    target.resize_token_embeddings(384)
    assistant.policy = "full"
    assert_same(target, assistant)
