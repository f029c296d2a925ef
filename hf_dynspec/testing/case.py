"""A policy under test, with an artificial vocabulary, tiny random models and artificial rounds."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..errors import PolicyError
from ..protocol import HeadRows, Needs, OwnClusters, Prompt, Shortlist, Verdict, VocabularyInfo
from ..shortlists import ShortlistPolicy, ShortlistState
from ..shortlists.base import start_state
from ..shortlists.validation import validated
from ..stats import DraftingStatistics

# Rows of the target's head past the vocabulary, which top ids may name and shortlists may not hold.
PADDING = 20
# Token ids in the checks are below this, and attention heads have an even width.
SMALLEST_VOCABULARY, WIDTH_UNIT = 100, 8
NEW_TOKENS = 14
_PROMPT_LENGTH, _LONG_PROMPT, _ROUNDS = 12, 30, 12
# Of the artificial drafter's own.
_CLUSTERS = 12


class PolicyCase:
    """A policy, and the vocabulary and models that it is checked with."""

    def __init__(self, policy: ShortlistPolicy, vocabulary_size: int, hidden_size: int):
        self.label = type(policy).__qualname__
        if not isinstance(policy, ShortlistPolicy):
            self.fail(
                "it is no ShortlistPolicy", "Pass an object whose class derives from hf_dynspec.ShortlistPolicy."
            )
        self.policy, self.vocabulary_size, self.hidden_size = policy, vocabulary_size, hidden_size
        # Everything is checked as with `validate=True`.
        self.checked = validated(policy)
        self.needs = self.checked.needs
        self.target = _tiny_model(vocabulary_size, hidden_size)
        self.drafter = _perturbed(self.target)
        # Of the calls with the policy alone.
        self.stats = DraftingStatistics()
        self._states: list[ShortlistState] = []
        self._plain: dict[tuple[int, ...], torch.Tensor] = {}

    def fail(self, problem: str, fix: str) -> NoReturn:
        raise PolicyError(self.label, None, problem, fix)

    def vocabulary(self, eos: tuple[int, ...] = (2, 77), draftable: torch.Tensor | None = None) -> VocabularyInfo:
        """A vocabulary, with random rows of heads if the policy needs them."""
        size, generator = self.vocabulary_size, torch.Generator().manual_seed(1)
        rows = {}
        if self.needs.drafter_rows:
            count = size if draftable is None else draftable.shape[0]
            weight = torch.randn(count, self.hidden_size, generator=generator)
            centroids = torch.randn(_CLUSTERS, self.hidden_size, generator=torch.Generator().manual_seed(2))
            clusters = OwnClusters(torch.arange(size) % _CLUSTERS, centroids, 3)
            rows["drafter_rows"] = HeadRows(weight, token_ids=draftable, clusters=clusters)
        if self.needs.target_rows:
            rows["target_rows"] = HeadRows(torch.randn(size + PADDING, self.hidden_size, generator=generator))
        return VocabularyInfo(size, eos, torch.device("cpu"), draftable, self.hidden_size, **rows)

    def state(
        self,
        policy: ShortlistPolicy | None = None,
        vocabulary: VocabularyInfo | None = None,
        memory: object = None,
    ) -> ShortlistState:
        """A new state, which `close_states` closes."""
        self._states.append(start_state(policy or self.checked, vocabulary or self.vocabulary(), memory))
        return self._states[-1]

    def close_states(self) -> None:
        while self._states:
            self._states.pop().close()

    def prompt(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.vocabulary_size, (1, _PROMPT_LENGTH), generator=generator)

    def plain(self, text: torch.Tensor) -> torch.Tensor:
        """The target's greedy continuation without an assistant."""
        key = tuple(text[0].tolist())
        if key not in self._plain:
            self._plain[key] = self.target.generate(text, do_sample=False, max_new_tokens=NEW_TOKENS)
        return self._plain[key]

    def shortlists(
        self, state: ShortlistState, seed: int, in_fixed_memory: bool = False
    ) -> Iterator[tuple[str, Shortlist]]:
        """A description of each draft step of a random call, and its shortlist. Chains and trees take turns. Rounds
        over fixed memory have verdicts of one shape."""
        generator = torch.Generator().manual_seed(seed)
        for index, event in enumerate(_events(self, self.needs, seed)):
            if isinstance(event, Prompt):
                state.observe_prompt(event)
            else:
                state.observe(_of_fixed_shape(event, self.vocabulary_size) if in_fixed_memory else event)
            if in_fixed_memory:
                state.settle()
            else:
                state.begin_round()
            for depth in range(3):
                nodes = 1 if depth == 0 or index % 2 else 3
                token_ids = torch.randint(0, self.vocabulary_size, (nodes,), generator=generator)
                embeddings, before, features = torch.randn(3, nodes, self.hidden_size, generator=generator)
                if self.needs.draft_inputs:
                    state.observe_draft_inputs(embeddings, before)
                shortlist = state.select(depth, token_ids, features)
                yield f"after {index + 1} events, at draft step {depth}", shortlist
                again = state.select(depth, token_ids, features)
                if again.version != shortlist.version or not torch.equal(again.slots, shortlist.slots):
                    self.fail(
                        f"asked twice for one draft step it selects other slots ({depth=})",
                        "Let `select` depend on the state's observations alone.",
                    )

    def selected(self, state: ShortlistState, seed: int, in_fixed_memory: bool = False) -> list[tuple[str, set[int]]]:
        """The ids of every shortlist of a random call."""
        shown = self.shortlists(state, seed, in_fixed_memory)
        return [(place, set(shortlist.ids().tolist())) for place, shortlist in shown]

    def require_equal(self, actual: list, expected: list, problem: str, fix: str) -> None:
        for (place, own), (_, other) in zip(actual, expected, strict=True):
            if own != other:
                self.fail(f"{problem}: {place} it selects {len(own)} ids, others than the {len(other)} expected", fix)


def _events(case: PolicyCase, needs: Needs, seed: int) -> Iterator[Prompt | Verdict]:
    """The observations of a random call, with everything that the policy needs."""
    generator = torch.Generator().manual_seed(seed)
    size, padded = case.vocabulary_size, case.vocabulary_size + PADDING

    def ids(*shape: int, limit: int = padded) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    def shown(rows: int, top_k: int, states: bool) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        if top_k:
            order = torch.rand(rows, padded, generator=generator).topk(min(top_k, padded))
            values["top_ids"] = order.indices
            if needs.top_logits:
                values["top_logits"] = order.values
        if states:
            values["hidden_states"] = torch.randn(rows, case.hidden_size, generator=generator)
        return values

    start = _LONG_PROMPT
    yield Prompt(ids(start, limit=size), 0)
    if needs.of_prompt:
        positions = min(start, needs.prompt_positions or start)
        yield Prompt(ids(0), start, **shown(positions, needs.prompt_top_k, needs.prompt_hidden_states))
    for index in range(_ROUNDS):
        # Every fifth round drafts nothing.
        drafted = ids(index % 5, limit=size)
        accepted = int(ids(1, limit=drafted.shape[0] + 1))
        verified = torch.cat([drafted[:accepted], ids(1)])
        values = shown(accepted + 1, needs.verify_top_k, needs.hidden_states)
        if needs.out_of_vocabulary:
            values["out_of_vocabulary"] = torch.tensor([False] * accepted + [index % 3 == 0])
        yield Verdict(drafted, verified, start, **values)
        start += accepted + 1


def _of_fixed_shape(verdict: Verdict, no_token: int) -> Verdict:
    """The verdict as if all drafts had been accepted, with no token in the place of those that were not."""
    missing = verdict.drafted.shape[0] + 1 - verdict.verified.shape[0]
    fields = {name: getattr(verdict, name) for name in ("out_of_vocabulary", "top_ids", "top_logits")}
    padded = {
        name: torch.cat([one, one.new_full((missing, *one.shape[1:]), no_token if name == "top_ids" else 0)])
        for name, one in (fields | {"verified": verdict.verified}).items()
        if one is not None
    }
    padded["verified"][verdict.verified.shape[0] :] = no_token
    return replace(verdict, **padded)


def _tiny_model(vocabulary_size: int, hidden_size: int) -> PreTrainedModel:
    """A random model, with weights large enough for clear preferences among tokens."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model, generator = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                spread = 1.0 if parameter is model.get_input_embeddings().weight else 0.2
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def _perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """A model that often agrees with another one."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(100)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())
    return other
