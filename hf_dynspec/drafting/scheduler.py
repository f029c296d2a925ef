"""How many tokens the rounds of one call draft: a fixed number, transformers' schedules, or automatically."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from transformers import GenerationConfig

from ..tree_config import AUTO, LONGEST_DRAFT, TreeConfig
from .automatic import AutomaticCall
from .settings import DEFAULT_NUM_ASSISTANT_TOKENS
from .token_choice import TokenChoice


class RoundPlan(NamedTuple):
    """What one round drafts.

    Attributes:
        steps: draft steps at most; 0 if nothing is drafted.
        tree: the shape of the tree (None: a chain).
        policy: the index of the policy that drafts.
    """

    steps: int
    tree: TreeConfig | None
    policy: int = 0


class DraftScheduler:
    """Plans the drafts of one call, round by round.

    Args:
        config: `num_assistant_tokens`, its schedule and `assistant_confidence_threshold`.
        tree: the shape of trees, the largest one if shapes are chosen (None: chains).
        automatic: chooses what `config` leaves open (None: nothing is open).

    Attributes:
        num_assistant_tokens: tokens of a chain, as far as they are not chosen automatically.
    """

    def __init__(self, config: GenerationConfig, tree: TreeConfig | None, automatic: AutomaticCall | None):
        tokens = config.num_assistant_tokens
        is_open = tokens == AUTO
        self.num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS if is_open or tokens is None else int(tokens)
        self.tree = tree
        self._automatic = automatic
        self._chooses_shape = is_open and automatic is not None
        schedule = config.num_assistant_tokens_schedule or "constant"
        # Whether drafts become longer and shorter as transformers' schedules say.
        self.adapts_length = schedule != "constant" and tree is None and not self._chooses_shape
        self._threshold = float(config.assistant_confidence_threshold or 0.0)

    def begin_round(self, most: int) -> RoundPlan:
        """Plan a round that has room for a path of `most` tokens."""
        fixed = RoundPlan(max(0, min(self.num_assistant_tokens if self.tree is None else most, most)), self.tree)
        if self._automatic is None:
            return fixed
        plan = self._automatic.begin_round(most)
        if not plan.steps:
            return RoundPlan(0, None)
        if not self._chooses_shape:
            return fixed._replace(policy=plan.policy)
        if self.tree is None:
            return RoundPlan(min(plan.steps, most), None, plan.policy)
        tree = replace(self.tree, total_tokens=plan.nodes + 1, depth=plan.steps - 1)
        return RoundPlan(most, tree, plan.policy)

    @property
    def is_backing_off(self) -> bool:
        """Whether nothing is drafted for now since drafting has lost."""
        return self._automatic is not None and self._automatic.chooser.is_backing_off

    @property
    def keeps_features(self) -> bool:
        """Whether a head needs the target's hidden states at the tokens that come now, also if nothing is drafted."""
        return self._automatic is None or self._automatic.chooser.keeps_features

    def stop_rule(self, choice: TokenChoice) -> Callable[[], bool] | None:
        """Whether a chain goes on after the token that was chosen last; None if it always does."""
        threshold, automatic = self._threshold, self._automatic
        if automatic is None or not automatic.stops_early:
            return (lambda: choice.probability() >= threshold) if threshold > 0 else None

        def goes_on() -> bool:
            probability = choice.probability()
            return automatic.goes_on(probability) and probability >= threshold

        return goes_on

    def has_drafted(self, steps: int, is_usual: bool = True) -> None:
        """The round's draft has so many steps. Unless the round is a usual one, its time says nothing of others."""
        if self._automatic is not None:
            self._automatic.has_drafted(steps, is_usual)

    def end_round(self, accepted: int, drafted: int | None, is_last: bool) -> None:
        """The target has judged the round.

        Args:
            accepted: accepted tokens, one below the other.
            drafted: tokens of the draft (None: there was none).
            is_last: the text ends with the token after them.
        """
        if self._automatic is not None:
            self._automatic.end_round(accepted, is_last)
        if self.adapts_length and drafted is not None:
            change = 2 if accepted == drafted else -1
            self.num_assistant_tokens = min(LONGEST_DRAFT, max(1, self.num_assistant_tokens + change))

    def end_call(self) -> None:
        """The call is over, and its last round too."""
        if self._automatic is not None:
            self._automatic.end_call()
