"""The choice between policies by what they turn out to be worth on this computer, round by round."""

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigurationError, shown_value
from ..protocol import VocabularyInfo
from .base import ShortlistPolicy, ShortlistState, start_state
from .composite import CompositePolicy
from .forwarding import ForwardingState
from .hybrid import HybridShortlist
from .screen import ScreenShortlist


class AutomaticShortlist(CompositePolicy):
    """One of several policies in each round: the one that brings the most tokens per second, by the time that rounds
    have taken and by how much of their drafts the target has accepted (DynaSpec, equation 2).

    The others are tried now and then, for a few rounds. One that does not draft costs nothing: it is shown the text
    when its turn comes. Greedy tokens are the same whatever is chosen, and sampled ones have the same distribution,
    but which are drawn then depends on the clock too, and not on the seed alone.

    The choice is the assistant's. Wherever a policy is led along a text without a clock, as by `hf-dynspec coverage`,
    this is the first of them.

    Args:
        policies: to choose from (None: `HybridShortlist()` and `ScreenShortlist()`, which need nothing built or
            trained). Put first the one that is most likely to be the best. To try one costs a few rounds, so leave out
            what cannot be.

    Raises:
        ConfigurationError: no policies, too many of them, or something that is not a policy.
    """

    name = "auto"
    card_summary = "The one of several shortlist policies that turns out to be the fastest."
    called = "an automatic policy"
    can_be_part = False

    def __init__(self, policies: Sequence[ShortlistPolicy] | None = None):
        if policies is None:
            policies = (HybridShortlist(), ScreenShortlist())
        if isinstance(policies, str | ShortlistPolicy) or not isinstance(policies, Sequence):
            raise ConfigurationError(f"{self.called} is made of a list of policies, got {shown_value(policies)}")
        super().__init__(*policies)

    @classmethod
    def of(cls, policies: list[ShortlistPolicy]) -> "AutomaticShortlist":
        return cls(policies)

    def start(self, vocabulary: VocabularyInfo, memory: tuple[Any, ...] | None = None) -> ShortlistState:
        policy, own = self.with_memories(memory)[0]
        # It is told of rows that only others asked for, and need not know what to do then.
        return ForwardingState(start_state(policy, vocabulary, own))

    def alternatives(self, memory: tuple[Any, ...] | None) -> tuple[tuple[ShortlistPolicy, Any], ...]:
        return self.with_memories(memory)
