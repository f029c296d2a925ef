"""Rounds over fixed memory as a graph, on a device that is not there: see `emulated_graphs`."""

import copy
import gc
import itertools
from contextlib import nullcontext

import families
import image_models
import pytest
import torch
from calls import SHAPES
from cases import representatives
from eagle_heads import agreeing_head, drafter_of, soft
from emulated_graphs import Graph
from models import POLICY_CASES, RandomShortlist, perturbed, prompt, tiny
from peft import LoraConfig, get_peft_model
from test_all_families import NO_TARGET, VARIANTS

pytest.importorskip("torch.utils.backend_registration", reason="torch knows no devices written in Python")

from hf_dynspec import DynSpecAssistant, FullShortlist, devices
from hf_dynspec.alignment.live_weights import LiveWeights
from hf_dynspec.drafters import as_drafter
from hf_dynspec.drafting import trees
from hf_dynspec.evaluation.operations import pretended_device as pretended
from hf_dynspec.evaluation.operations.pretended_device import move, pretended_device, to_device
from hf_dynspec.generation import fixed_lane, verification
from hf_dynspec.generation.arguments import CallArguments
from hf_dynspec.generation.batch import why_general
from hf_dynspec.modeling import head
from hf_dynspec.rounds import Report, Round, recorded
from hf_dynspec.shortlists.router.state import RouterState

AS_A_GRAPH = "fixed memory, as a graph"
IN_ROUNDS = tuple(name for name in POLICY_CASES if not name.startswith("auto"))


def pair_there(kind: str, family: str = "llama"):
    """A target and its drafter on the device, and the target where it was."""
    target = tiny(family) if kind == "independent" else soft(family)
    there = move(copy.deepcopy(target))
    if kind == "independent":
        return there, move(copy.deepcopy(perturbed(target))), target
    return there, drafter_of(agreeing_head(kind), there), target


def generate(target, assistant, length=12, seed=0, **arguments) -> torch.Tensor:
    text = to_device(prompt(length, seed))
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **arguments}
    mask = to_device(torch.ones(1, length, dtype=torch.int64))
    return target.generate(text, attention_mask=mask, assistant_model=assistant, **arguments).memory


def plain(target, length=12, seed=0, **arguments) -> torch.Tensor:
    arguments = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **arguments}
    return target.generate(prompt(length, seed), **arguments)


KINDS = ("independent", "eagle2", "eagle3")
# The package's own policies once by default, and one variant.
SOME = [(policy, KINDS[n % 3], list(SHAPES)[n % 2]) for n, policy in enumerate(IN_ROUNDS)]
CASES = [*SOME, *(case for case in itertools.product(IN_ROUNDS, KINDS, SHAPES) if case not in SOME)]
FIRST = [("hybrid", "independent", "chain"), ("union with a router", "eagle3", "tree")]


@pytest.mark.parametrize(("policy", "kind", "shape"), representatives("families", CASES, keep=8))
def test_a_graph_writes_and_drafts_what_its_round_does(policy, kind, shape, graphs, monkeypatch):
    """Texts one after another, with the graph of the first: the same tokens, and as many accepted drafts."""
    with pretended_device() as device:
        there, drafter, target = pair_there(kind)
        settings = {"target": there, "tree": SHAPES[shape], "num_assistant_tokens": 3}
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        waits, rounds = [], []
        for seed, length, new in ((0, 12, 16), (1, 20, 8), (1, 20, 16)):
            device.events.clear()
            text = generate(there, assistant, length, seed, max_new_tokens=new)
            assert torch.equal(text, plain(target, length, seed, max_new_tokens=new))
            stats = assistant.stats
            assert stats.lane == AS_A_GRAPH and len(graphs) == 1
            waits.append(sum(event.waits for event in device.events))
            rounds.append(stats.rounds)
        # The host waits once a round, besides what it waits for at the beginning. Retrieval then copies a verdict.
        assert rounds[2] - rounds[1] > 0
        if "retrieval" not in policy:
            assert waits[2] - waits[1] == rounds[2] - rounds[1]
        assistant.unbind()
        # The same rounds, launched one operation after another.
        monkeypatch.setattr(devices, "GRAPHS", frozenset())
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        generate(there, assistant, 20, 1, max_new_tokens=16, cache_implementation="static")
        assert assistant.stats.lane == "fixed memory"
    assert (stats.rounds, stats.accepted, stats.oov_rate) == (
        assistant.stats.rounds,
        assistant.stats.accepted,
        assistant.stats.oov_rate,
    )
    assert stats.active_vocabulary == assistant.stats.active_vocabulary and stats.drafted > 0


@pytest.mark.parametrize(
    ("policy", "kind", "shape"),
    representatives("families", [*FIRST, *(case for case in CASES if case not in FIRST)], keep=2),
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


BATCHED = ("hybrid", "frequency", "in_context", "router", "union", "union with a router")


@pytest.mark.parametrize("policy", representatives("families", BATCHED, keep=1))
def test_texts_of_a_batch_end_on_a_device_without_graphs(policy, graphs, monkeypatch):
    monkeypatch.setattr(devices, "GRAPHS", frozenset())
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=there, num_assistant_tokens=3)
        write_a_batch(there, assistant, target)
        assert assistant.stats.lane == "fixed memory"
        # The sessions draft alone again, each with rows of its own.
        assert {session.selector.rows._reserve for session in assistant._sessions._idle} == {head._memory_of_its_own}
        assert torch.equal(generate(there, assistant), plain(target))


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 9, "top_p": 0.9}], ids=["all", "few"])
@pytest.mark.parametrize("policy", representatives("families", ("hybrid", "full", "router"), keep=2))
def test_a_sampled_batch_as_a_graph(policy, settings, graphs, monkeypatch):
    """At such a temperature the most probable tokens are drawn. See `test_sampling` for others."""
    if policy == "full":
        # Two texts at once, and the third.
        monkeypatch.setattr(verification, "_MOST_ROWS", 8)
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=there, num_assistant_tokens=3)
        write_a_batch(there, assistant, target, do_sample=True, temperature=1e-3, **settings)
        assert assistant.stats.lane == AS_A_GRAPH and assistant.stats.accepted > 0


def test_a_batch_of_chains_is_verified_in_as_many_operations_as_one_text(graphs):
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, FullShortlist(), target=there, num_assistant_tokens=3)
        for do_sample in (False, True):
            for count in (1, 2, 5):
                inputs = to_device(torch.cat([prompt(12, seed) for seed in range(count)]))
                mask = to_device(torch.ones(count, 12, dtype=torch.int64))
                settings = {"max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": None}
                there.generate(inputs, attention_mask=mask, assistant_model=assistant, **settings)
    one, two, five, *sampled = (len(graph.launched) for graph in graphs)
    # What is left for each text is a report, and the concatenation of its draft and of its memory's parts.
    assert two - one < 20 and five - two < 45
    assert [more - fewer for fewer, more in itertools.pairwise(sampled)] == [two - one, five - two]


def write_a_batch(there, assistant, target, **sampling) -> None:
    """Texts end at tokens of their own, or all at the length of the call."""
    alone = [plain(target, 12, seed)[0, 12:].tolist() for seed in range(3)]
    for eos in (None, [alone[0][7], alone[1][20]]):
        inputs = to_device(torch.cat([prompt(12, seed) for seed in range(3)]))
        mask = to_device(torch.ones(3, 12, dtype=torch.int64))
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0, **sampling}
        output = there.generate(inputs, attention_mask=mask, assistant_model=assistant, **settings).memory
        for row, tokens in zip(output[:, 12:].tolist(), alone, strict=True):
            count = next((n + 1 for n, one in enumerate(tokens) if one in (eos or ())), len(tokens))
            assert row[:count] == tokens[:count] and not any(row[count:])


@pytest.mark.parametrize("policy", representatives("families", BATCHED, keep=2))
def test_a_batch_as_a_graph(policy, graphs):
    """Texts that end stand still, and the others go on in the same graph. One product scores the packed shortlists of
    all texts."""
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), target=there, num_assistant_tokens=3)
        write_a_batch(there, assistant, target)
        assert assistant.stats.lane == AS_A_GRAPH and assistant.stats.accepted > 0
    # Sessions, and so graphs, belong to EOS ids.
    assert len(graphs) == 2
    products = [arguments[1].shape for func, arguments, *_ in graphs[0].launched if func.name() == "aten::bmm"]
    of_heads = [shape for shape in products if shape[:2] == (3, target.config.hidden_size)]
    assert len(of_heads) == (3 if policy in ("in_context", "hybrid", "union") else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_penalty_on_repetitions_in_a_graph(shape, graphs):
    """The set of a text's tokens is another one in each call and in each round."""
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3, tree=SHAPES[shape])
        for seed in range(3):
            settings = {"repetition_penalty": 1.4, "max_new_tokens": 24}
            assert torch.equal(generate(there, assistant, 12, seed, **settings), plain(target, 12, seed, **settings))
            assert assistant.stats.lane == AS_A_GRAPH
        # Plain generate penalises padding too.
        text = torch.cat([torch.zeros(1, 4, dtype=torch.int64), prompt()], dim=1)
        mask = (torch.arange(text.shape[1]) >= 4).long()[None]
        settings |= {"do_sample": False, "eos_token_id": None}
        output = there.generate(to_device(text), attention_mask=to_device(mask), assistant_model=assistant, **settings)
        assert torch.equal(output.memory, target.generate(text, attention_mask=mask, **settings))
    assert len(graphs) == 1 and assistant.stats.lane == "general: a logits processor looks at padding"
    assert assistant.stats_total.accepted > 0


def test_texts_outgrow_a_graph(graphs, monkeypatch):
    monkeypatch.setattr(fixed_lane, "_FEWEST_POSITIONS_OF_GRAPHS", 16)
    monkeypatch.setattr(fixed_lane, "FIRST_POSITIONS", 2)
    with pretended_device():
        there, drafter, target = pair_there("eagle3")
        assistant = DynSpecAssistant(drafter, POLICY_CASES["in_context"](), target=there)
        text = generate(there, assistant, max_new_tokens=60)
    assert torch.equal(text, plain(target, max_new_tokens=60))
    assert len(graphs) == 3 and assistant.stats.lane == AS_A_GRAPH


def test_a_graph_draws_anew_in_each_round(graphs):
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=there, num_assistant_tokens=3)
        texts = []
        for seed in (0, 1, 0):
            # The graph of the first text is not there at first, and then draws in another order.
            generate(there, assistant, do_sample=True, temperature=2.0)
            torch.manual_seed(seed)
            texts.append(generate(there, assistant, do_sample=True, temperature=2.0).tolist())
        assert assistant.stats.lane == AS_A_GRAPH and assistant.stats_total.accepted > 0
    assert texts[0] == texts[2] != texts[1]


def test_automatic_drafting_chooses_among_graphs(graphs):
    """Each length is a graph of its own, and text and shortlists are the same whatever was launched before."""
    with pretended_device():
        there, drafter, target = pair_there("eagle3")
        settings = {"target": there, "num_assistant_tokens": "auto"}
        assistant = DynSpecAssistant(drafter, POLICY_CASES["in_context"](), **settings)
        for _ in range(2):
            text = generate(there, assistant, max_new_tokens=70)
            assert torch.equal(text, plain(target, max_new_tokens=70))
            assert assistant.stats.lane == AS_A_GRAPH
        drafted = {steps for steps, count in enumerate(assistant.stats_total.drafted_at, 1) if count}
    assert len(graphs) >= 2 and max(drafted) >= 5
    # Without a draft, too.
    assert assistant.stats_total.rounds > sum(assistant.stats_total.rounds_of.values())


def changed(what: str, there, drafter) -> None:
    if what == "the target":
        with torch.no_grad():
            there.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    elif what == "the target's head":
        weight = to_device(-there.lm_head.weight.memory)
        there.lm_head = torch.nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        there.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    elif what == "a hook of the target":
        there.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 1.0)
    else:
        with torch.no_grad():
            drafter.model.layers[0].mlp.down_proj.weight.mul_(1.5)


@pytest.mark.parametrize("what", ["the target", "the target's head", "a hook of the target", "the drafter"])
def test_no_graph_outlives_the_models(what, graphs):
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=there, num_assistant_tokens=3)
        generate(there, assistant)
        changed(what, there, drafter)
        text = generate(there, assistant)
        assert torch.equal(text, generate(there, None))
    is_hooked = what == "a hook of the target"
    assert len(graphs) == (1 if is_hooked else 2)
    assert assistant.stats.lane.startswith("general: ") == is_hooked


class Layer(torch.nn.Module):
    """A layer of another package around one of the target's."""

    def __init__(self, layer: torch.nn.Module, looks: bool):
        super().__init__()
        self.layer, self._looks = layer, looks

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(hidden)
        # What is looked at once is a constant of a graph.
        return hidden * float(hidden.abs().max().item() > 0) if self._looks else hidden * 1.0


@pytest.mark.parametrize("looks", [False, True])
def test_parts_of_other_packages_are_tried(looks, graphs):
    with pretended_device():
        there, drafter, target = pair_there("independent")
        mlp = there.model.layers[0].mlp
        mlp.down_proj = Layer(mlp.down_proj, looks).eval()
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        for seed in range(2):
            assert torch.equal(generate(there, assistant, seed=seed), plain(target, seed=seed))
    reason = "general: LlamaForCausalLM has parts of other packages that cannot be recorded"
    assert assistant.stats.lane == (reason if looks else AS_A_GRAPH)
    # The trial, and the round.
    assert len(graphs) == (0 if looks else 2)


def test_adapters_come_and_go(graphs):
    """A graph holds the adapters that were active when it was recorded."""
    target = get_peft_model(copy.deepcopy(tiny()), LoraConfig(r=2, init_lora_weights=False)).eval()
    there = move(copy.deepcopy(target))
    with pretended_device():
        drafter = move(copy.deepcopy(perturbed(tiny())))
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        for is_active in (True, False, True):
            with nullcontext() if is_active else there.disable_adapter():
                text = generate(there, assistant)
            with nullcontext() if is_active else target.disable_adapter():
                assert torch.equal(text, plain(target))
            assert assistant.stats.lane == AS_A_GRAPH
    assert len(graphs) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_drafts_with_the_weights_that_alignment_serves(kind, graphs):
    """They are written to where the drafter's own ones lie, and these come back, bit for bit."""
    with pretended_device():
        there, drafter, target = pair_there(kind)
        drafter = as_drafter(drafter)
        own = {name: one.memory.clone() for name, one in drafter.module.named_parameters()}
        names = [name for name in own if name.endswith(("q_proj.weight", "down_proj.weight"))]
        assert names and drafter.replaces_numbers(names)
        learned = {name: to_device(torch.randn_like(own[name])) for name in names}
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        live, accepted = LiveWeights(drafter), []

        def draft(assistant: DynSpecAssistant) -> None:
            assert torch.equal(generate(there, assistant), plain(target))
            assert assistant.stats.lane == AS_A_GRAPH
            accepted.append(assistant.stats.accepted)

        draft(assistant)
        live.serve(learned)
        draft(assistant)
        assert len(graphs) == 1 and not live.were_changed()
        assistant.unbind()
        # Recorded anew.
        draft(DynSpecAssistant(drafter, target=there, num_assistant_tokens=3))
        live.restore()
        assert all(torch.equal(one.memory, own[name]) for name, one in drafter.module.named_parameters())
    assert len(graphs) == 2 and accepted[0] != accepted[1] == accepted[2]


def test_a_round_that_cannot_be_recorded_is_launched(graphs, monkeypatch):
    def failing(run, device):
        raise RuntimeError("operation not permitted")

    with pretended_device():
        there, drafter, target = pair_there("independent")
        settings = {"target": there, "num_assistant_tokens": 3}
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), **settings)
        generate(there, assistant)
        expected = assistant.stats.accepted
        monkeypatch.setattr(recorded, "record", failing)
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), **settings)
        text = generate(there, assistant)
    assert torch.equal(text, plain(target))
    assert assistant.stats.lane == "fixed memory, no graph: RuntimeError: operation not permitted"
    assert abs(assistant.stats.accepted - expected) <= 3


@pytest.mark.parametrize("policy", representatives("families", ("in_context", "hybrid", "router")))
@pytest.mark.parametrize("fails_at", [0, 150, 10**6])
def test_one_length_that_cannot_be_recorded_leaves_the_texts_alone(fails_at, policy, graphs, monkeypatch):
    """Whatever other lengths had recorded: rows of shortlists are packed anew, and all rounds are launched."""
    record, captures = recorded.record, []

    def failing(run, device):
        captures.append(run)
        if len(captures) == 2:
            Graph(monkeypatch).record(run, fails_at)
        return record(run, device)

    monkeypatch.setattr(recorded, "record", failing)
    with pretended_device():
        there, drafter, target = pair_there("eagle3")
        settings = {"target": there, "num_assistant_tokens": "auto"}
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        lanes = []
        for _ in range(2):
            assert torch.equal(generate(there, assistant, max_new_tokens=70), plain(target, max_new_tokens=70))
            lanes.append(assistant.stats.lane)
    # The next call tries again.
    assert lanes == ["fixed memory, no graph: RuntimeError: operation not permitted", AS_A_GRAPH]


PROCESSORS = {
    "temperature": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.9},
    "epsilon": {"epsilon_cutoff": 0.01},
    "eta": {"eta_cutoff": 0.01},
    "penalty": {"repetition_penalty": 1.2},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", representatives("families", ("eta", *(one for one in PROCESSORS if one != "eta"))))
def test_what_waits_is_not_recorded(kind, shape, graphs):
    """Eta's class checks a distribution, which looks at numbers."""
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3, tree=SHAPES[shape])
        settings = {"do_sample": True, "temperature": 1e-3, "top_k": 0, **PROCESSORS[kind]}
        text = generate(there, assistant, **settings)
        assert torch.equal(text, plain(target, **settings))
    waits = "fixed memory, no graph: the host waits for the device in "
    assert assistant.stats.lane.startswith(waits) if kind == "eta" else assistant.stats.lane == AS_A_GRAPH
    assert len(graphs) == (kind != "eta")


@pytest.mark.parametrize("waits", [True, False])
def test_mixtures_of_experts_are_recorded_if_they_do_not_wait(waits, graphs, monkeypatch):
    """torch's grouped product copies the sizes of groups to the host on most GPUs."""
    if waits:
        monkeypatch.setattr(pretended, "_WAITING", {*pretended._WAITING, "aten::bmm"})
    target = without_grouped_products(families.model_of("mixtral"))
    with pretended_device():
        there, drafter = move(copy.deepcopy(target)), move(perturbed(target))
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        assert torch.equal(generate(there, assistant), plain(target))
    assert (len(graphs) == 0) == waits == ("no graph: the host waits" in assistant.stats.lane)


def without_grouped_products(model):
    """The model with experts by batched products: the CPU counts groups in no dtype that transformers asks for."""
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.parametrize("family", representatives("families", dict.fromkeys(("gemma3_text", *families.SETTINGS))))
def test_families(family, graphs):
    """Each is recorded and writes its own text, or is launched and says why."""
    target = without_grouped_products(families.model_of(family))
    if family in NO_TARGET:
        pytest.skip("is refused as a target")
    with pretended_device():
        there, drafter = move(copy.deepcopy(target)), move(copy.deepcopy(perturbed(tiny())))
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        assert torch.equal(generate(there, assistant), plain(target))
    lane = assistant.stats.lane
    assert (lane == AS_A_GRAPH and len(graphs) == 1) or lane.startswith(
        ("general: ", "fixed memory, no graph: the host")
    )


def test_yarn_is_recorded(graphs):
    """Its rotation of a position is the same at every length."""
    family, changes = VARIANTS["yarn"]
    target = families.model_of(family, **changes)
    with pretended_device():
        there, drafter = move(copy.deepcopy(target)), move(copy.deepcopy(perturbed(target)))
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        assert torch.equal(generate(there, assistant, max_new_tokens=60), plain(target, max_new_tokens=60))
    assert assistant.stats.lane == AS_A_GRAPH and assistant.stats.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_owns_what_it_reads(shape, graphs):
    """Processors of a later call take the place of those of the first, and caches forget."""
    with pretended_device():
        there, drafter, target = pair_there("eagle3")
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3, tree=SHAPES[shape])
        for seed in range(3):
            settings = {"do_sample": True, "temperature": 1e-3, "top_k": 5, "repetition_penalty": 1.2}
            assert torch.equal(generate(there, assistant, 12, seed, **settings), plain(target, 12, seed, **settings))
            trees._depths.cache_clear()
            gc.collect()
    assert len(graphs) == 1 and assistant.stats.lane == AS_A_GRAPH


@pytest.mark.parametrize("policy", ["router", "union with a router"])
def test_no_stream_of_a_router_is_left_alone(policy, graphs, monkeypatch):
    """What a round lets go on beside it, it waits for: also if nothing is drafted."""
    begun, rounds, (observe, select, run) = (
        set(),
        [],
        (RouterState.observe_draft_inputs, RouterState.select, Round.run),
    )

    def noted_observe(self, *inputs):
        begun.add(id(self))
        return observe(self, *inputs)

    def noted_select(self, *inputs):
        begun.discard(id(self))
        return select(self, *inputs)

    def noted_run(self):
        run(self)
        rounds.append((self.steps, len(begun)))

    monkeypatch.setattr(RouterState, "observe_draft_inputs", noted_observe)
    monkeypatch.setattr(RouterState, "select", noted_select)
    monkeypatch.setattr(Round, "run", noted_run)
    with pretended_device():
        there, drafter, _ = pair_there("eagle3")
        settings = {"target": there, "num_assistant_tokens": "auto"}
        assistant = DynSpecAssistant(drafter, POLICY_CASES[policy](), **settings)
        generate(there, assistant, max_new_tokens=70)
    assert {steps for steps, _ in rounds} >= {0, 5} and not any(left for _, left in rounds)


ASKED = {
    "the cache is returned": {"return_dict_in_generate": True},
    "a logits processor looks at the order of tokens": {"no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("reason", ASKED)
def test_arguments_that_take_the_general_lane(reason, graphs):
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, target=there)
        inputs = {"attention_mask": to_device(torch.ones(1, 12, dtype=torch.int64)), "max_new_tokens": 8}
        settings = inputs | {"do_sample": False} | ASKED[reason]
        there.generate(to_device(prompt()), assistant_model=assistant, **settings)
    assert assistant.stats.lane == f"general: {reason}" and not graphs


def test_another_kind_of_cache_takes_the_general_lane(graphs):
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, target=there)
        for kind, reason in ((None, None), ("dynamic", None), ("offloaded", "another kind of cache is asked for")):
            given = {"inputs": to_device(prompt()), "cache_implementation": kind, "max_new_tokens": 4}
            call = CallArguments(type(there).generate.__get__(there), (), given)
            assert why_general(assistant, call, call.resolved(there)) == reason


def test_images_in_a_graph(graphs):
    target = image_models.model_of("llava")
    there = move(copy.deepcopy(target))
    with pretended_device():
        assistant = DynSpecAssistant(move(copy.deepcopy(perturbed(tiny()))), target=there, num_assistant_tokens=3)
        for images in (1, 3, 2):
            inputs = image_models.prompt_of("llava", images=images, seed=images)
            moved = {name: to_device(one) for name, one in inputs.items()}
            settings = {"max_new_tokens": 16, "do_sample": False}
            output = there.generate(**moved, **settings, assistant_model=assistant).memory
            assert torch.equal(output, target.generate(**inputs, **settings)) and assistant.stats.lane == AS_A_GRAPH
    assert len(graphs) == 1


def test_a_lane_with_an_error_is_not_used_again(graphs, monkeypatch):
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, POLICY_CASES["hybrid"](), target=there)
        generate(there, assistant)
        with monkeypatch.context() as patched:
            patched.setattr(Report, "read", interrupt)
            with pytest.raises(KeyboardInterrupt):
                generate(there, assistant, seed=1)
        assert torch.equal(generate(there, assistant), plain(target))
    assert len(graphs) == 2


def interrupt(*arguments) -> None:
    raise KeyboardInterrupt


REASONS = {
    "the length of drafts is chosen in each round": lambda: {"num_assistant_tokens": "auto", "tree": True},
    "drafts end at a low confidence": lambda: {"assistant_confidence_threshold": 0.3},
    "the time of sections is measured": lambda: {"profile": True},
    "the policy random decides on the host": lambda: {"policy": RandomShortlist(60)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_calls_that_take_the_general_lane(reason, graphs):
    settings = REASONS[reason]()
    policy = settings.pop("policy", "full")
    with pretended_device():
        there, drafter, target = pair_there("independent")
        assistant = DynSpecAssistant(drafter, policy, target=there, **settings)
        assert torch.equal(generate(there, assistant, max_new_tokens=8), plain(target, max_new_tokens=8))
    assert assistant.stats.lane == f"general: {reason}" and not graphs


def test_a_graph_is_not_used_under_autocast(graphs, monkeypatch):
    """It computes in the dtypes of the call that recorded it."""
    with pretended_device():
        there, drafter, _ = pair_there("independent")
        assistant = DynSpecAssistant(drafter, target=there, num_assistant_tokens=3)
        generate(there, assistant)
        assert assistant.stats.lane == AS_A_GRAPH
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: device == (pretended.NAME,))
        assert fixed_lane.why_no_graph(assistant) == "autocast is on"
        generate(there, assistant, cache_implementation="static")
        assert assistant.stats.lane == "fixed memory"
