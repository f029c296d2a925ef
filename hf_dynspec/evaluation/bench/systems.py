"""The ways to generate that a benchmark compares: baselines, and assistants of drafters, policies and shapes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from ...assistant import DynSpecAssistant
from ...drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ...errors import ConfigurationError
from ...kernels import prepare_kernels
from ...loading import shared_vocabulary_size
from ...shortlists import ShortlistPolicy
from ...tree_config import AUTO, TreeConfig
from ..head_product import head_product, why_not_head_product
from ..pair import Pair
from ..tree_text import format_tree

PLAIN = "plain"
# Plain generation with the product that verifications compute the target's logits by, where that is this package's:
# what drafting itself gains is what is faster than this.
HEAD_PRODUCT = "plain generate, this package's head product"
TRANSFORMERS = "transformers"
# What users have without this package: the same drafter, as transformers drafts with it unless told otherwise, and
# no drafter at all (Saxena, 2023, "Prompt Lookup Decoding").
TRANSFORMERS_DEFAULTS = "transformers' defaults"
PROMPT_LOOKUP = "prompt lookup"
RIVALS = (TRANSFORMERS_DEFAULTS, PROMPT_LOOKUP)
# What drafts and says nothing of its rounds, which are counted by the target's forwards.
DRAFTING_BASELINES = (TRANSFORMERS, *RIVALS)
# What the assistants are compared with, in the order of the tables.
BASELINES = (PLAIN, HEAD_PRODUCT, *DRAFTING_BASELINES)

# All systems that draft, but the rivals, do so by the same number of tokens in every round, or their rounds would not
# be comparable: by default transformers drafts 20, and ends a draft at the first token of which the drafter is less
# sure than 0.4.
CONSTANT_DRAFT_LENGTH = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
# As many tokens as its author takes: they cost a verification's rows, and no drafter.
PROMPT_LOOKUP_SETTINGS = {"prompt_lookup_num_tokens": 10}


@dataclass(frozen=True)
class Combination:
    """What one assistant is made of.

    Args:
        drafter: the drafter's label.
        policy: the policy's label.
        tree: the shape of its trees; None drafts chains.
    """

    drafter: str
    policy: str
    tree: TreeConfig | None

    @property
    def group(self) -> tuple[str, TreeConfig | None]:
        """What policies have to have in common to be compared with one another: the drafter and the shape."""
        return self.drafter, self.tree


def combine(
    drafters: Sequence[str], policies: Iterable[str], shapes: Sequence[TreeConfig | None]
) -> dict[str, Combination]:
    """Every drafter with every policy in every shape, by label, the policies of one group side by side.

    A label is the policy's, with the drafter's before it where there are several, and with the tree after it.

    Args:
        drafters: their labels.
        policies: their labels.
        shapes: of trees; None for chains.

    Raises:
        ConfigurationError: two combinations would have one label.
    """
    combined: dict[str, Combination] = {}
    for drafter, shape, policy in product(drafters, shapes, policies):
        parts = [drafter] if len(drafters) > 1 else []
        parts += [policy] if shape is None else [policy, f"tree {format_tree(shape)}"]
        label = " · ".join(parts)
        if label in combined:
            raise ConfigurationError(f"two systems would be shown as {label!r}; show the policies by other names")
        combined[label] = Combination(drafter, policy, shape)
    return combined


@dataclass(frozen=True)
class System:
    """One way to generate.

    Args:
        label: what it is shown as.
        assistant: what is passed as `assistant_model`; None for plain generation.
        is_ours: whether it is an assistant of this package, and not one of the baselines.
        surroundings: makes what its calls are made in.
        generation: what is set in the generation configuration of its calls.
    """

    label: str
    assistant: Any
    is_ours: bool = False
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    generation: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def open_systems(
    pair: Pair,
    policies: Mapping[str, ShortlistPolicy],
    combinations: dict[str, Combination],
    num_assistant_tokens: int | str,
    transformers_assisted: bool,
    rivals: bool,
    notes: list[str],
) -> Iterator[list[System]]:
    """Set up the baselines and an assistant for each combination; put the models back as they were.

    Args:
        pair: the models.
        policies: the policies by label.
        combinations: what the assistants are made of, by label.
        num_assistant_tokens: tokens of each chain, of all systems that draft chains; `"auto"` is for assistants.
        transformers_assisted: set up transformers' assisted generation with drafts of that length too.
        rivals: set up what transformers does unless told otherwise, and prompt lookup.
        notes: is told which baselines could not be set up, and why.

    Raises:
        UnsupportedError: the models cannot be used together.
    """
    for drafter in pair.drafters.values():
        # Refuses a drafter with another tokenizer. The assistants are told the tokenizer, to look it up only once.
        shared_vocabulary_size(pair.target, drafter, None)
    systems = [System(PLAIN, None)]
    if "cpu" in {pair.target.device.type, *(drafter.head.device.type for drafter in pair.drafters.values())}:
        # Not in a call that is timed.
        prepare_kernels()
    problem = why_not_head_product(pair.target)
    if problem is None:
        systems.append(System(HEAD_PRODUCT, None, surroundings=lambda: head_product(pair.target)))
    else:
        notes.append(f"plain generate with this package's head product was left out: {problem}")
    with ExitStack() as stack:
        systems += _drafting_baselines(pair, num_assistant_tokens, transformers_assisted, rivals, stack, notes)
        for label, combination in combinations.items():
            policy = policies[combination.policy]
            assistant = _assistant(pair, combination, policy, num_assistant_tokens)
            stack.callback(assistant.unbind)
            systems.append(System(label, assistant, is_ours=True))
        yield systems


def _drafting_baselines(
    pair: Pair,
    num_assistant_tokens: int | str,
    transformers_assisted: bool,
    rivals: bool,
    stack: ExitStack,
    notes: list[str],
) -> Iterator[System]:
    """What drafts without this package. The drafter's settings are put back when the stack is closed."""
    drafter, problem = pair.drafter_model, _why_not_transformers(pair)
    if problem is None:
        stack.enter_context(_draft_settings(drafter, {}))
        length = DEFAULT_NUM_ASSISTANT_TOKENS if num_assistant_tokens == AUTO else num_assistant_tokens
        wanted = {"num_assistant_tokens": length, **CONSTANT_DRAFT_LENGTH}
        if transformers_assisted:
            yield System(TRANSFORMERS, drafter, surroundings=lambda: _draft_settings(drafter, wanted))
        if rivals:
            yield System(TRANSFORMERS_DEFAULTS, drafter)
    elif transformers_assisted or rivals:
        notes.append(f"transformers' assisted generation was left out: {problem}")
    if rivals:
        yield System(PROMPT_LOOKUP, None, generation=PROMPT_LOOKUP_SETTINGS)


def _assistant(
    pair: Pair, combination: Combination, policy: ShortlistPolicy, num_assistant_tokens: int | str
) -> DynSpecAssistant:
    assistant = DynSpecAssistant(
        pair.drafters[combination.drafter],
        policy,
        target=pair.target,
        tokenizer=pair.tokenizer,
        num_assistant_tokens=num_assistant_tokens,
        tree=combination.tree or False,
    )
    for name, value in CONSTANT_DRAFT_LENGTH.items():
        setattr(assistant.generation_config, name, value)
    return assistant


def _why_not_transformers(pair: Pair) -> str | None:
    """Why transformers' assisted generation cannot draft with this pair's small model; None where it can."""
    if pair.drafter_model is None:
        return "it drafts with an independent model, and there are EAGLE heads only"
    rows, drafter_rows = (one.config.get_text_config().vocab_size for one in (pair.target, pair.drafter_model))
    if rows == drafter_rows:
        return None
    return (
        "it takes two models for users of one tokenizer only if their vocabularies have equally many rows, and these "
        f"have {rows:,} and {drafter_rows:,}"
    )


@contextmanager
def _draft_settings(drafter: PreTrainedModel, wanted: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers draft by these settings, which it reads from the drafter's own and may change, and put those
    back."""
    config = drafter.generation_config
    before = {name: getattr(config, name) for name in ("num_assistant_tokens", *CONSTANT_DRAFT_LENGTH)}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
