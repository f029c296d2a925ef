"""The systems that a run compares: baselines, and an assistant for each drafter, policy and shape of drafts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from ...alignment.settings import OnlineAlignment
from ...assistant import DynSpecAssistant
from ...devices import has_graphs
from ...drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ...errors import ConfigurationError
from ...kernels import prepare_kernels
from ...loading import shared_vocabulary_size
from ...shortlists import ShortlistPolicy
from ...tree_config import AUTO, TreeConfig
from ..head_product import head_product, why_not_head_product
from ..pair import Pair
from ..settings import SystemsSettings
from ..tree_text import format_tree

PLAIN = "plain"
# Plain generation with this package's product for the target's logits, if verifications use it: the gain over this is
# that of drafting itself.
HEAD_PRODUCT = "plain generate, this package's head product"
# On GPUs: what users have without any drafter. transformers compiles a forward over a static cache there.
COMPILED = "plain generate, static cache, compiled"
# They accept nothing.
WITHOUT_DRAFTS = (PLAIN, HEAD_PRODUCT, COMPILED)
TRANSFORMERS = "transformers"
# What users have without this package: the same drafter with transformers' default settings, and no drafter (Saxena,
# 2023, "Prompt Lookup Decoding").
TRANSFORMERS_DEFAULTS = "transformers' defaults"
PROMPT_LOOKUP = "prompt lookup"
RIVALS = (TRANSFORMERS_DEFAULTS, PROMPT_LOOKUP)
# Their names for readers, in the order of the tables. Their rounds are counted by the target's forwards.
BASELINES = {
    PLAIN: "plain generate",
    HEAD_PRODUCT: HEAD_PRODUCT,
    COMPILED: COMPILED,
    TRANSFORMERS: "transformers' assisted",
    **{rival: rival for rival in RIVALS},
}

# All systems except the rivals draft the same number of tokens in every round, so that rounds compare. transformers'
# default is 20, and a draft ends after the first token with a drafter probability below 0.4.
CONSTANT_DRAFT_LENGTH = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
# As its author has it.
PROMPT_LOOKUP_SETTINGS = {"prompt_lookup_num_tokens": 10}


@dataclass(frozen=True)
class Combination:
    """The parts of one assistant."""

    drafter: str
    policy: str  # the label of the policy, or of the method in an evaluation
    tree: TreeConfig | None  # the shape of its trees; None for chains

    @property
    def group(self) -> tuple[str, TreeConfig | None]:
        """The drafter and the shape, which policies have in common if they are compared with one another."""
        return self.drafter, self.tree


def combine(
    drafters: Sequence[str], policies: Iterable[str], shapes: Sequence[TreeConfig | None]
) -> dict[str, Combination]:
    """Every drafter with every policy in every shape (None: chains), by label, policies of one group side by side.

    A label is the policy's, with the drafter's before it where there are several, and with the tree after it. Raises
    `ConfigurationError` if two combinations would have one label.
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


@dataclass
class System:
    """One way to generate."""

    label: str
    baseline: Any = None  # the `assistant_model` of a baseline; None for plain generation
    assistant: DynSpecAssistant | None = None
    policies: Mapping[str, ShortlistPolicy] = field(default_factory=dict)  # the assistant's policy by domain
    parts: Combination | None = None
    learns: bool = False  # earlier prompts have an influence on it
    surroundings: Callable[[], AbstractContextManager] = nullcontext  # makes the context of its calls
    # Settings in the generation configuration of its calls.
    generation: Mapping[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Its label and parts, as JSON values."""
        drafter, method, tree = (None,) * 3 if self.parts is None else vars(self.parts).values()
        shape = None if tree is None else format_tree(tree)
        return {"label": self.label, "drafter": drafter, "method": method, "tree": shape}

    def take_domain(self, domain: str) -> None:
        """Draft with the policy of this domain from here on."""
        if self.assistant is not None and self.assistant.policy is not self.policies[domain]:
            self.assistant.policy = self.policies[domain]

    def start_anew(self) -> None:
        """Forget what was learned."""
        if self.assistant is not None:
            self.assistant.forget()
            if self.assistant.alignment is not None:
                self.assistant.alignment.reset()

    def speaker(self, turns: int) -> Any:
        """The `assistant_model` of a conversation of so many turns."""
        if self.assistant is None:
            return self.baseline
        return self.assistant.conversation() if turns > 1 else self.assistant


@contextmanager
def open_systems(
    pair: Pair,
    settings: SystemsSettings,
    policies: Mapping[str, Mapping[str, ShortlistPolicy]],
    notes: list[str],
    alignments: Mapping[str, OnlineAlignment | None] | None = None,
) -> Iterator[list[System]]:
    """Set up the baselines and an assistant for each drafter, policy and shape; put the models back as they were.

    Args:
        pair, settings: the models, and the shapes and lengths of drafts and the baselines.
        policies: by label and domain.
        notes: takes a note for each baseline that could not be set up.
        alignments: by label how the drafter is aligned (None: it is not).

    Raises:
        ConfigurationError: a drafter cannot be aligned, or two systems would have one label.
        UnsupportedError: the models cannot be used together.
    """
    combinations = combine(list(pair.drafters), policies, settings.resolved_shapes())
    for drafter in pair.drafters.values():
        # Refuses a drafter with another tokenizer. The assistants get the tokenizer, to look it up only once.
        shared_vocabulary_size(pair.target, drafter, None)
    systems = [System(PLAIN)]
    if "cpu" in {pair.target.device.type, *(drafter.head.device.type for drafter in pair.drafters.values())}:
        # Not in a call that is timed.
        prepare_kernels()
    problem = why_not_head_product(pair.target)
    if problem is None:
        systems.append(System(HEAD_PRODUCT, surroundings=lambda: head_product(pair.target)))
    else:
        notes.append(f"plain generate with this package's head product was left out: {problem}")
    if has_graphs(pair.target.device):
        # One size for all prompts, as each size is compiled.
        longest = max(map(len, pair.encoded)) + settings.max_new_tokens
        systems.append(System(COMPILED, generation={"cache_implementation": "static", "max_cache_len": longest}))
    with ExitStack() as stack:
        systems += _drafting_baselines(pair, settings, stack, notes)
        for label, parts in combinations.items():
            by_domain = policies[parts.policy]
            alignment = (alignments or {}).get(parts.policy)
            assistant = _assistant(pair, parts, next(iter(by_domain.values())), settings, alignment)
            stack.callback(assistant.unbind)
            learns = alignment is not None or any(one.new_memory() is not None for one in by_domain.values())
            systems.append(System(label, assistant=assistant, policies=by_domain, parts=parts, learns=learns))
        yield systems


def _drafting_baselines(pair: Pair, settings: SystemsSettings, stack: ExitStack, notes: list[str]) -> Iterator[System]:
    """The baselines that draft. The drafter's settings are put back when the stack is closed."""
    drafter, problem = pair.drafter_model, _why_not_transformers(pair)
    if problem is None:
        stack.enter_context(_draft_settings(drafter, {}))
        length = settings.num_assistant_tokens
        length = DEFAULT_NUM_ASSISTANT_TOKENS if length == AUTO else length
        wanted = {"num_assistant_tokens": length, **CONSTANT_DRAFT_LENGTH}
        if settings.transformers_assisted:
            yield System(TRANSFORMERS, drafter, surroundings=lambda: _draft_settings(drafter, wanted))
        if settings.rivals:
            yield System(TRANSFORMERS_DEFAULTS, drafter)
    elif settings.transformers_assisted or settings.rivals:
        notes.append(f"transformers' assisted generation was left out: {problem}")
    if settings.rivals:
        yield System(PROMPT_LOOKUP, generation=PROMPT_LOOKUP_SETTINGS)


def _assistant(
    pair: Pair,
    parts: Combination,
    policy: ShortlistPolicy,
    settings: SystemsSettings,
    alignment: OnlineAlignment | None,
) -> DynSpecAssistant:
    drafter = pair.drafters[parts.drafter]
    if alignment is not None:
        # A twin with weights of its own is trained, so that other systems' drafter stays as it is.
        drafter = drafter.copy()
    assistant = DynSpecAssistant(
        drafter,
        policy,
        target=pair.target,
        tokenizer=pair.tokenizer,
        num_assistant_tokens=settings.num_assistant_tokens,
        tree=parts.tree or False,
        alignment=alignment,
    )
    for name, value in CONSTANT_DRAFT_LENGTH.items():
        setattr(assistant.generation_config, name, value)
    return assistant


def _why_not_transformers(pair: Pair) -> str | None:
    """Why transformers' assisted generation cannot draft with this pair's small model; None if it can."""
    if pair.drafter_model is None:
        return "it drafts with an independent model, and there is none"
    rows, drafter_rows = (one.config.get_text_config().vocab_size for one in (pair.target, pair.drafter_model))
    if rows == drafter_rows:
        return None
    return (
        "it takes two models for users of one tokenizer only if their vocabularies have equally many rows, and these "
        f"have {rows:,} and {drafter_rows:,}"
    )


@contextmanager
def _draft_settings(drafter: PreTrainedModel, wanted: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers draft with these settings, which it reads from the drafter's own and may change; put those
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
