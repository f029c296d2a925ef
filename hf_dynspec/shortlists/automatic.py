"""The choice between policies by their measured speed on this computer, round by round."""

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
    """One of several policies in each round: the one with the most tokens per second, judged by the time of past
    rounds and by how much of their drafts the target accepted (DynaSpec, equation 2).

    The others are tried now and then, for a few rounds. A policy that is not drafting costs nothing: it sees the text
    when its turn comes. The choice changes neither greedy tokens nor the distribution of sampled ones, but sampled
    tokens then depend on the clock as well as on the seed.

    The assistant makes the choice. Without a clock, as in `hf-dynspec coverage`, this is the first of the policies.

    Args:
        policies: the candidates (None: `HybridShortlist()` and `ScreenShortlist()`, which need nothing built or
            trained). Put the likely best one first. Trying one costs a few rounds, so leave out hopeless ones.

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
        # `follow_weights` is called for rows that only the other policies asked for too, and does nothing then.
        return ForwardingState(start_state(policy, vocabulary, own))

    def alternatives(self, memory: tuple[Any, ...] | None) -> tuple[tuple[ShortlistPolicy, Any], ...]:
        return self.with_memories(memory)
