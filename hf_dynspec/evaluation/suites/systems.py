"""The ways to generate that an evaluation compares: the baselines of `bench`, and an assistant for each drafter,
method and shape of its drafts."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...assistant import DynSpecAssistant
from ...drafters import Drafter, EagleDrafter
from ...shortlists import ShortlistPolicy
from ...tree_config import TreeConfig
from ..bench.systems import CONSTANT_DRAFT_LENGTH, Combination, System, combine, open_systems
from ..pair import Pair
from ..tree_text import format_tree
from .methods import Method
from .settings import SuiteSettings


@dataclass
class SuiteSystem:
    """One way to generate.

    Args:
        label: what it is shown as.
        baseline: of the benchmark; None for an assistant of this package.
        assistant: the assistant; None for a baseline.
        policies: by domain, the assistant's.
        drafter: the drafter's label; None for a baseline.
        method: the label of its method; None for a baseline.
        shape: of its trees; None for chains, and for a baseline.
        learns: whether it knows, on a prompt, something of those before.
    """

    label: str
    baseline: System | None = None
    assistant: DynSpecAssistant | None = None
    policies: Mapping[str, ShortlistPolicy] | None = None
    drafter: str | None = None
    method: str | None = None
    shape: TreeConfig | None = None
    learns: bool = False

    def described(self) -> dict[str, Any]:
        """What it is, as JSON values."""
        shape = None if self.shape is None else format_tree(self.shape)
        return {"label": self.label, "drafter": self.drafter, "method": self.method, "tree": shape}

    @property
    def generation(self) -> Mapping[str, Any]:
        """What is set in the generation configuration of its calls."""
        return {} if self.baseline is None else self.baseline.generation

    def surroundings(self) -> AbstractContextManager:
        """What its calls are made in."""
        return nullcontext() if self.baseline is None else self.baseline.surroundings()

    def take_domain(self, domain: str) -> None:
        """Draft by the policy of this domain from here on."""
        if self.assistant is not None and self.assistant.policy is not self.policies[domain]:
            self.assistant.policy = self.policies[domain]

    def start_anew(self) -> None:
        """Forget what was learnt."""
        if self.assistant is not None:
            self.assistant.forget()
            if self.assistant.alignment is not None:
                self.assistant.alignment.reset()

    def speaker(self, turns: int) -> Any:
        """What is passed as `assistant_model` in a conversation of so many turns."""
        if self.assistant is None:
            return self.baseline.assistant
        return self.assistant.conversation() if turns > 1 else self.assistant


@contextmanager
def open_suite_systems(
    pair: Pair, settings: SuiteSettings, policies: Mapping[str, Mapping[str, ShortlistPolicy]], notes: list[str]
) -> Iterator[list[SuiteSystem]]:
    """Set up all systems; put the models back as they were.

    Args:
        pair: the models.
        settings: what is run.
        policies: by method and domain.
        notes: is told which baselines could not be set up, and why.

    Raises:
        ConfigurationError: a drafter cannot be aligned, or two systems would have one label.
        UnsupportedError: the models cannot be used together.
    """
    methods = {method.label: method for method in settings.resolved_methods()}
    combinations = combine(list(pair.drafters), methods, settings.resolved_shapes())
    baselines = settings.num_assistant_tokens, settings.transformers_assisted, settings.rivals
    with open_systems(pair, {}, {}, *baselines, notes) as theirs, ExitStack() as stack:
        systems = [SuiteSystem(one.label, baseline=one) for one in theirs]
        for label, combination in combinations.items():
            of_method = policies[combination.policy]
            method = methods[combination.policy]
            assistant = _assistant(pair, combination, method, next(iter(of_method.values())), settings)
            stack.callback(assistant.unbind)
            learns = method.alignment is not None or any(
                policy.new_memory() is not None for policy in of_method.values()
            )
            kind = {"drafter": combination.drafter, "method": method.label, "shape": combination.tree}
            systems.append(SuiteSystem(label, assistant=assistant, policies=of_method, learns=learns, **kind))
        yield systems


def _assistant(
    pair: Pair, combination: Combination, method: Method, policy: ShortlistPolicy, settings: SuiteSettings
) -> DynSpecAssistant:
    drafter = pair.drafters[combination.drafter]
    assistant = DynSpecAssistant(
        drafter if method.alignment is None else _twin(drafter, pair),
        policy,
        target=pair.target,
        tokenizer=pair.tokenizer,
        num_assistant_tokens=settings.num_assistant_tokens,
        tree=combination.tree or False,
        alignment=method.online_alignment(),
    )
    for name, value in CONSTANT_DRAFT_LENGTH.items():
        setattr(assistant.generation_config, name, value)
    return assistant


def _twin(drafter: Drafter, pair: Pair) -> Any:
    """A drafter with weights of its own, which may be trained while the other stays as it is."""
    if isinstance(drafter, EagleDrafter):
        return EagleDrafter(drafter.checkpoint, pair.target)
    return copy.deepcopy(pair.drafter_model)
