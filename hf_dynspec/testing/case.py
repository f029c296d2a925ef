"""A policy, and the made-up vocabulary and tiny random models that its contract is tried with."""

import copy
from typing import NoReturn

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..errors import PolicyError
from ..protocol import HeadRows, VocabularyInfo
from ..shortlists import ShortlistPolicy, ShortlistState
from ..shortlists.validation import validated
from ..stats import DraftingStatistics

# Rows of the made-up target's head past the vocabulary, whose ids it may name and no shortlist may hold.
PADDING = 20
# The ids that are made up are below this, and heads of attention have an even width.
SMALLEST_VOCABULARY, WIDTH_UNIT = 100, 8
NEW_TOKENS = 14
_PROMPT_LENGTH = 12


class PolicyCase:
    """A policy, and the vocabulary and models that it is tried with."""

    def __init__(self, policy: ShortlistPolicy, vocabulary_size: int, hidden_size: int):
        self.label = type(policy).__qualname__
        if not isinstance(policy, ShortlistPolicy):
            self.fail(
                "it is no ShortlistPolicy", "Pass an object whose class derives from hf_dynspec.ShortlistPolicy."
            )
        self.policy, self.vocabulary_size, self.hidden_size = policy, vocabulary_size, hidden_size
        # Everything is checked here as it is with `validate=True`.
        self.checked = validated(policy)
        self.needs = self.checked.needs
        self.target = _tiny_model(vocabulary_size, hidden_size)
        self.drafter = _perturbed(self.target)
        # Of the calls with the policy alone.
        self.stats = DraftingStatistics()
        self._plain: dict[tuple[int, ...], torch.Tensor] = {}

    def fail(self, problem: str, fix: str) -> NoReturn:
        raise PolicyError(self.label, None, problem, fix)

    def vocabulary(self, eos: tuple[int, ...] = (2, 77), draftable: torch.Tensor | None = None) -> VocabularyInfo:
        """A made-up vocabulary, with made-up rows of heads if the policy asks for them."""
        size, generator = self.vocabulary_size, torch.Generator().manual_seed(1)
        rows = {}
        if self.needs.drafter_rows:
            count = size if draftable is None else draftable.shape[0]
            weight = torch.randn(count, self.hidden_size, generator=generator)
            rows["drafter_rows"] = HeadRows(weight, token_ids=draftable)
        if self.needs.target_rows:
            rows["target_rows"] = HeadRows(torch.randn(size + PADDING, self.hidden_size, generator=generator))
        return VocabularyInfo(size, eos, torch.device("cpu"), draftable, self.hidden_size, **rows)

    def state(self, policy: ShortlistPolicy | None = None) -> ShortlistState:
        return (self.checked if policy is None else policy).start(self.vocabulary())

    def prompt(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.vocabulary_size, (1, _PROMPT_LENGTH), generator=generator)

    def plain(self, text: torch.Tensor) -> torch.Tensor:
        """What the target says greedily, without an assistant."""
        key = tuple(text[0].tolist())
        if key not in self._plain:
            self._plain[key] = self.target.generate(text, do_sample=False, max_new_tokens=NEW_TOKENS)
        return self._plain[key]


def _tiny_model(vocabulary_size: int, hidden_size: int) -> PreTrainedModel:
    """A random model, whose weights are large enough for clear preferences among tokens."""
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
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                spread = 1.0 if parameter is model.get_input_embeddings().weight else 0.2
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def _perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """A model that agrees with another one often."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(100)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())
    return other
