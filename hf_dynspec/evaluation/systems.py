"""The ways to generate that a benchmark compares: two baselines, and an assistant for each policy."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..assistant import DynSpecAssistant
from ..drafters import as_drafter
from ..shortlists import ShortlistPolicy
from ..vocabulary import shared_vocabulary_size
from .pair import Pair

PLAIN = "plain"
TRANSFORMERS = "transformers"

# All systems that draft do so by the same number of tokens in every round, or their rounds would not be comparable: by
# default transformers also ends a draft at the first token of which the drafter is less sure than 0.4.
CONSTANT_DRAFT_LENGTH = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


@dataclass(frozen=True)
class System:
    """One way to generate.

    Args:
        label: what it is shown as.
        policy: its shortlist policy; None for the two baselines.
        assistant: what is passed as `assistant_model`; None for plain generation.
    """

    label: str
    policy: ShortlistPolicy | None
    assistant: Any


@contextmanager
def open_systems(
    pair: Pair, num_assistant_tokens: int, transformers_assisted: bool, notes: list[str]
) -> Iterator[list[System]]:
    """Set up the baselines and an assistant for each policy; put the models back as they were.

    Args:
        pair: models and policies.
        num_assistant_tokens: tokens drafted per round by all systems that draft.
        transformers_assisted: set up transformers' assisted generation too.
        notes: is told why it could not be.

    Raises:
        UnsupportedError: the models cannot be used together.
    """
    target = pair.target
    own_drafter = as_drafter(pair.drafter)
    # Refuses a drafter with another tokenizer. The assistants are then told the tokenizer, to look it up only once.
    shared_vocabulary_size(target, own_drafter, None)
    systems = [System(PLAIN, None, None)]
    with ExitStack() as stack:
        if transformers_assisted:
            model = pair.drafter_model
            rows, drafter_rows = (one.config.get_text_config().vocab_size for one in (target, model))
            if rows == drafter_rows:
                stack.enter_context(_draft_length(model, num_assistant_tokens))
                systems.append(System(TRANSFORMERS, None, model))
            else:
                notes.append(
                    "transformers' assisted generation was left out: it takes two models for users of one tokenizer "
                    f"only if their vocabularies have equally many rows, and these have {rows:,} and {drafter_rows:,}"
                )
        for label, policy in pair.policies.items():
            assistant = DynSpecAssistant(
                own_drafter,
                policy,
                target=target,
                tokenizer=pair.tokenizer,
                num_assistant_tokens=num_assistant_tokens,
            )
            stack.callback(assistant.unbind)
            for name, value in CONSTANT_DRAFT_LENGTH.items():
                setattr(assistant.generation_config, name, value)
            systems.append(System(label, policy, assistant))
        yield systems


@contextmanager
def _draft_length(drafter: PreTrainedModel, num_assistant_tokens: int) -> Iterator[None]:
    """Let transformers draft as many tokens as the assistants do, which it reads from the drafter's own settings."""
    config = drafter.generation_config
    wanted = {"num_assistant_tokens": num_assistant_tokens, **CONSTANT_DRAFT_LENGTH}
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


# Models and surroundings -------------------------------------------------------------------------------------------
