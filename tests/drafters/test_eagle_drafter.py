"""EAGLE heads: the fast path against a reference that recomputes everything, round after round."""

import pytest
import torch
from calls import SHAPES, assert_same
from drafters import HEADS, LAYERS
from eagle_heads import LAYOUTS, Head, SlowHead, drafter_of, random_head, target_features
from models import VOCABULARY, prompt, tiny
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from hf_dynspec import DynSpecAssistant
from hf_dynspec.drafters.eagle.checkpoint import EagleCheckpoint
from hf_dynspec.drafters.eagle.drafter import EagleDrafter
from hf_dynspec.drafters.eagle.state import EagleState
from hf_dynspec.errors import ArtifactError, UnsupportedError
from hf_dynspec.modeling.head import DynamicLMHead, PackedRows
from hf_dynspec.modeling.parts import LARGEST_PADDING
from hf_dynspec.protocol import Shortlist

# Sums in another order, over hidden states of size 1 to 10 that are fed back up to four times: rounding of 2⁻⁵³ in
# fp64 and 2⁻²⁴ in fp32, with three digits to spare. A wrong position or feature is off by more than 10⁻².
TOLERANCES = {torch.float64: {"rtol": 1e-11, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}
READS = {"eagle2": (6,), "eagle3": (2, 3, 3), "speculators": (2, 3, 3)}

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0], "original_max_position_embeddings": 32}
ROPES = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    # Both grow past what the text's first half is rotated by.
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **LONGROPE}},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """In fp64, so that agreement to rounding says something; one test below runs in fp32."""
    return tiny("llama", num_hidden_layers=LAYERS).double()


def pair(head: Head, target: PreTrainedModel) -> tuple[EagleDrafter, SlowHead]:
    return drafter_of(head, target), SlowHead(head, target.get_input_embeddings().weight.detach())


class Rounds:
    """A text that grows as verdicts would make it grow, with random features for each of its tokens."""

    def __init__(self, drafter: EagleDrafter, slow: SlowHead, seed: int = 0, length: int = 8):
        self.drafter, self.slow, self.state = drafter, slow, drafter.start()
        self.random = torch.Generator().manual_seed(seed)
        self.width = drafter.settings.target_hidden_size * len(drafter.reads)
        self.start = 0
        self.tolerance = TOLERANCES[drafter.head.weight.dtype]
        self.text = self.tokens(length)
        self.features = self.some_features(length)

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=self.random)

    def some_features(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.width, generator=self.random, dtype=self.drafter.head.weight.dtype)

    def number(self, below: int) -> int:
        return int(torch.randint(0, below, (1,), generator=self.random))

    def extend(self, tokens: list[int]) -> None:
        self.text = torch.cat([self.text, torch.tensor(tokens, dtype=torch.int64)])
        self.features = torch.cat([self.features, self.some_features(len(tokens))])

    def compare(self, hidden: torch.Tensor, path: list[int]) -> None:
        expected = self.slow.after(self.text, self.features[self.start : -1], path)
        torch.testing.assert_close(hidden, expected, **self.tolerance)

    def advance(self) -> None:
        """With the features of the new tokens, or of some more."""
        missing = max(0, self.state.length - 1)
        first = max(self.start, missing - self.number(3))
        self.compare(self.state.advance(self.text, self.features[first:-1])[0], [])
        assert self.state.length == self.text.shape[0]

    def chain(self, depth: int) -> list[list[int]]:
        path: list[int] = []
        for _ in range(depth):
            token = self.tokens(1)
            path = [*path, int(token)]
            self.compare(self.state.draft(token)[0], path)
        return [path]

    def tree(self, depth: int, width: int) -> list[list[int]]:
        paths: list[list[int]] = [[]]
        for level in range(depth):
            # The parents' order is any; some have several children and some none.
            parents = torch.randint(0, len(paths), (width,), generator=self.random)
            tokens = self.tokens(width)
            hidden = self.state.draft(tokens, parents if level else torch.full_like(parents, 99))
            paths = [[*paths[parents[i]], int(tokens[i])] for i in range(width)]
            for row, path in zip(hidden, paths, strict=True):
                self.compare(row, path)
        return paths

    def verify(self, paths: list[list[int]]) -> None:
        """Accept the beginning of a path, and one more token that the target chose."""
        path = paths[self.number(len(paths))]
        accepted = path[: self.number(len(path) + 1)]
        if self.number(2):
            self.state.truncate(min(self.state.length, self.text.shape[0] + len(accepted)))
        self.extend([*accepted, self.number(VOCABULARY)])

    def run(self, depth: int = 3) -> "Rounds":
        """Ten rounds of trees and chains in turn."""
        before = len(self.text)
        for number in range(10):
            self.advance()
            self.verify(self.chain(depth) if number % 2 else self.tree(depth, depth))
        assert len(self.text) > before + 8
        return self


# The flow of features ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_chains_and_trees_agree_with_the_reference(name, target):
    Rounds(*pair(random_head(**HEADS[name]), target)).run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_agrees_to_its_own_rounding(layout):
    Rounds(*pair(random_head(layout), tiny("llama", num_hidden_layers=LAYERS))).run()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", ROPES)
def test_every_rotary_embedding_agrees(rope, layout, target):
    head = random_head(layout)
    head.layer.pop("rope_theta")
    head.layer.update(ROPES[rope])
    rounds = Rounds(*pair(head, target), length=28)
    if rope == "dynamic":  # transformers computes the base of its frequencies in fp32, from a tensor
        rounds.tolerance = {"rtol": 1e-6, "atol": 1e-6}
    assert rounds.run(depth=2).text.shape[0] > 36


@pytest.mark.parametrize("what", ["rotary embedding", "norm_before_residual", "norm_before_fc"])
def test_a_setting_matters(what, target):
    """The negative of the tests above: without it the outputs are others."""
    is_rope = what == "rotary embedding"
    given = {"layout": "eagle2"} if is_rope else {"layout": "speculators", what: True}
    head, other = random_head(**given), random_head(**given)
    if is_rope:
        other.layer.update(ROPES["linear"])
    else:
        other.config[what] = False
    rounds = Rounds(drafter_of(head, target), SlowHead(other, target.get_input_embeddings().weight))
    with pytest.raises(AssertionError, match="close"):
        rounds.advance()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_grows(layout, target, poisoned_memory):
    """Past its first capacity in the middle of a draft, and far past it at once."""
    rounds = Rounds(*pair(random_head(layout), target), length=252)
    rounds.advance()
    rounds.verify(rounds.tree(3, 4))
    rounds.advance()
    rounds.extend([1] * 700)
    rounds.advance()
    rounds.chain(2)


def test_a_dynamic_rotation_is_kept_as_the_cache_grows(target, poisoned_memory):
    head = random_head("eagle3")
    head.layer.update(ROPES["dynamic"])
    rounds = Rounds(*pair(head, target), length=254)
    rounds.advance()
    rounds.tree(2, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_pass_and_many_rounds_leave_the_same_cache(layout, target):
    rounds = Rounds(*pair(random_head(layout), target))
    for _ in range(5):
        rounds.advance()
        rounds.verify(rounds.chain(2))
    hidden = rounds.state.advance(rounds.text, rounds.features[max(0, rounds.state.length - 1) : -1])
    fresh = rounds.drafter.start().advance(rounds.text, rounds.features[:-1])
    torch.testing.assert_close(hidden, fresh, **TOLERANCES[hidden.dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_that_ends_otherwise_keeps_the_beginning(layout, target):
    rounds = Rounds(*pair(random_head(layout), target), length=20)
    rounds.advance()
    rounds.chain(2)
    rounds.state.truncate(12)
    assert rounds.state.length == 12
    rounds.text, rounds.features = rounds.text[:12], rounds.features[:12]
    # The feature of the token at which the texts part is new, and so is what follows.
    rounds.features[11] = rounds.some_features(1)[0]
    rounds.extend([5, 6, 7])
    rounds.advance()
    rounds.tree(2, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_start_afresh_where_features_begin(layout, target):
    """The target had the beginning in its cache, so its features are not to be had; positions stay true."""
    rounds = Rounds(*pair(random_head(layout), target), length=30)
    rounds.start = 17
    rounds.advance()
    rounds.verify(rounds.tree(2, 2))
    rounds.advance()
    # Again, with a gap after rows that are there.
    rounds.extend([3] * 9)
    rounds.start = rounds.text.shape[0] - 4
    rounds.advance()
    rounds.verify(rounds.chain(2))
    rounds.advance()
    rounds.state.truncate(rounds.start)
    assert rounds.state.length == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncating_to_nothing_starts_anew(layout, target):
    rounds = Rounds(*pair(random_head(layout), target))
    rounds.advance()
    rounds.state.truncate(1)
    assert rounds.state.length == 0
    rounds.advance()
    rounds.state.truncate(0)
    rounds.advance()
    rounds.chain(1)


def test_a_chain_may_name_its_parents(target):
    rounds = Rounds(*pair(random_head("eagle3"), target))
    rounds.advance()
    rounds.tree(4, 1)


def test_two_states_do_not_disturb_each_other(target):
    drafter, slow = pair(random_head("eagle2"), target)
    one, other = Rounds(drafter, slow, seed=1), Rounds(drafter, slow, seed=2, length=40)
    for _ in range(3):
        one.advance()
        other.advance()
        paths, others = one.chain(2), other.tree(2, 2)
        one.verify(paths)
        other.verify(others)


def test_what_cannot_be_done_is_refused(target):
    state = drafter_of(random_head("eagle2"), target).start()
    text, features = torch.arange(5), torch.zeros(4, 32)

    def refuse(problem, act, *arguments) -> None:
        with pytest.raises(ValueError, match=problem):
            act(*arguments)

    refuse("none were given", state.advance, text)
    refuse("none were given", state.advance, text[:1], features[:0])
    refuse("4 features", state.advance, text[:4], features)
    refuse("follows advance", state.draft, text[:1])
    state.advance(text, features)
    refuse("parents", state.draft, text[:2])
    refuse("covers 5 tokens", state.advance, text, features)


# Targets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_of_targets(family, layout):
    """With its true hidden states, and a head and an embedding that are the target's own."""
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 3} if family == "gemma3" else {}
    target = gemma() if family == "gemma" else tiny(family, num_hidden_layers=LAYERS, **changes)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    drafter, slow = pair(random_head(layout), target)
    assert drafter.reads == READS[layout]
    assert drafter.head.token_ids is None
    assert drafter.head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert drafter.weights.embedding.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    rounds = Rounds(drafter, slow, length=14)
    rounds.features = target_features(target, rounds.text, drafter.reads)
    rounds.advance()
    rounds.tree(2, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def gemma() -> PreTrainedModel:
    from transformers import GemmaConfig, GemmaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, head_dim=8, **shape)).eval()


def test_a_cap_on_the_targets_logits_is_honoured():
    target = tiny("gemma2", num_hidden_layers=LAYERS)
    assert drafter_of(random_head("eagle2"), target).head.soft_cap == 20.0


def test_the_last_feature_comes_after_the_final_norm(target):
    text = torch.arange(3, 12)
    features = target_features(target, text, drafter_of(random_head("eagle2"), target).reads)
    with torch.no_grad():
        expected = target.get_decoder()(text.unsqueeze(0)).last_hidden_state[0]
    torch.testing.assert_close(features, expected)


def test_a_target_that_does_not_fit_is_refused(target):
    config = T5Config(d_model=32, num_layers=1, num_heads=2, d_ff=8, d_kv=4, vocab_size=VOCABULARY)
    bogus, linear = {"type": "bogus", "factor": 2.0}, {"type": "linear"}
    for made, of, error, problem in (
        *((random_head(layout, hidden_size=16), target, ArtifactError, "hidden_size") for layout in LAYOUTS),
        *((random_head(layout, vocabulary=302), target, ArtifactError, "vocab_size") for layout in LAYOUTS),
        (random_head("eagle3", target_hidden_size=64), target, ArtifactError, r"hidden_size.*64"),
        (random_head("eagle3"), tiny("llama", num_hidden_layers=2), UnsupportedError, "hidden states"),
        (random_head("eagle3", eagle_aux_hidden_state_layer_ids=[1, 7, 3]), target, UnsupportedError, r"\(1, 7, 3\)"),
        (random_head("eagle2"), T5ForConditionalGeneration(config), UnsupportedError, "decoder-only"),
        (random_head("eagle3", rope_scaling=bogus), target, ArtifactError, "rope_parameters"),
        (random_head("eagle3", rope_scaling=linear), target, ArtifactError, "rope_parameters"),
    ):
        with pytest.raises(error, match=problem):
            drafter_of(made, of)


def test_a_head_of_another_width_needs_all_of_its_own(target):
    changes = {"hidden_size": 16, "target_hidden_size": 32, "draft_vocabulary": 50}
    with pytest.raises(ArtifactError, match="embed_tokens"):
        drafter_of(random_head("eagle3", **changes), target)
    rounds = Rounds(*pair(random_head("eagle3", own_embedding=True, **changes), target))
    rounds.advance()
    rounds.tree(2, 2)


# Vocabularies --------------------------------------------------------------------------------------------------------


def test_a_trimmed_head_names_its_tokens(target):
    head = random_head("eagle3", draft_vocabulary=100)
    drafter = drafter_of(head, target)
    assert drafter.head.weight.shape == (100, 32)
    assert torch.equal(drafter.head.token_ids, head.tensors["t2d"].nonzero()[:, 0])
    shortlist = Shortlist(torch.arange(100), version=0, is_prefix=True)
    state = drafter.start()
    hidden = state.advance(torch.arange(3, 9), torch.randn(5, 96))
    scores = drafter.head.scores(hidden, shortlist, PackedRows())
    torch.testing.assert_close(scores, (hidden @ head.tensors["lm_head.weight"].T.double()).float())


def test_a_head_with_the_targets_rows_drafts_any_token(target):
    head = random_head("speculators", draft_vocabulary=100)
    rows = target.get_output_embeddings().weight.detach()
    head.tensors["lm_head.weight"] = rows[head.tensors["t2d"]].float()
    drafter = drafter_of(head, target)
    assert drafter.head.token_ids is None
    assert drafter.head.weight.data_ptr() == rows.data_ptr()
    head.tensors["lm_head.weight"][-1] += 0.1
    assert drafter_of(head, target).head.token_ids.shape == (100,)


def test_an_untrimmed_head_of_its_own_names_no_tokens(target):
    head = random_head("eagle3")
    head.tensors["lm_head.weight"] = torch.randn(VOCABULARY, 32)
    drafter = drafter_of(head, target)
    assert drafter.head.token_ids is None
    assert isinstance(drafter.head, DynamicLMHead)
    assert torch.equal(drafter.head.weight.float(), head.tensors["lm_head.weight"])


# Loading and saving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_pretrained_and_save_pretrained(layout, target, tmp_path):
    head = random_head(layout, draft_vocabulary=None if layout == "eagle2" else 100)
    drafter = EagleDrafter.from_pretrained(head.write(tmp_path / "a"), target=target)
    drafter.save_pretrained(tmp_path / "b")
    again = EagleDrafter.from_pretrained(str(tmp_path / "b"), target=target)
    assert again.checkpoint.config == head.config
    text, features = torch.arange(3, 9), torch.randn(5, 32 * len(drafter.reads))
    one, other = drafter.start(), again.start()
    assert torch.equal(one.advance(text, features), other.advance(text, features))
    assert isinstance(one, EagleState)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_16_bit_it_rounds(layout, target):
    """bf16 has 8 bits: the outputs of two steps agree with fp32 to a few per cent of their size."""
    head = random_head(layout)
    checkpoint = EagleCheckpoint.from_parts(head.config, head.tensors)
    text, token = torch.arange(3, 12), torch.tensor([7])
    features = torch.randn(8, 32 * len(READS[layout]), generator=torch.Generator().manual_seed(0))
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        state = EagleDrafter(checkpoint, target, dtype=dtype).start()
        state.advance(text, features)
        outputs.append(state.draft(token))
        assert outputs[-1].dtype == target.dtype
    assert (outputs[0] - outputs[1]).norm() < 0.05 * outputs[0].norm()


def test_a_target_with_a_packed_embedding_is_refused_for_the_true_reason():
    """As GGUF files have it: bytes of blocks, and no rows of numbers."""
    target = tiny()
    packed = torch.zeros(301, 34, dtype=torch.uint8)
    target.get_input_embeddings().weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"keeps its embedding packed \(uint8\)"):
        drafter_of(random_head("eagle2"), target)


@pytest.mark.parametrize("own", [False, True], ids=["lent embedding", "own embedding"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_target_may_be_padded_before_its_head_is_loaded(layout, own):
    target = tiny(num_hidden_layers=6)
    target.resize_token_embeddings(pad_to_multiple_of=64)
    drafter = drafter_of(random_head(layout, own_embedding=own), target)
    for tree in SHAPES.values():
        assistant = DynSpecAssistant(drafter, target=target, tree=tree)
        assert_same(target, assistant)
        # An id that only the padded target knows.
        assert_same(target, assistant, torch.cat([prompt(), torch.full((1, 1), 315)], dim=1))
    target.resize_token_embeddings(VOCABULARY + LARGEST_PADDING)
    with pytest.raises(ArtifactError, match="is 301, and the target's is 1325"):
        drafter_of(random_head(layout), target)
