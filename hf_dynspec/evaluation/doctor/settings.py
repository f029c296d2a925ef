"""The settings of a diagnosis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...errors import shown_value
from ...fields import SettingError
from ...shortlists import ShortlistPolicy
from ...tree_config import TreeConfig
from ..policy_text import named_policies, require_no_choice
from ..settings import OneDrafterSettings, PairSettings, is_temperature
from ..tree_text import format_tree, parse_trees

# The baseline of all policies. It is always measured.
FULL = "full"
# The policies that need nothing built, nothing trained and no prompt before the call. The last ones are left out first
# if there is no time for all.
POLICIES = (FULL, "hybrid", "frequency", "in_context", "screen")


def fastest_but_for_ties(ratios: Mapping[str, float]) -> str:
    """The label of the fastest policy, given the speeds by label; that of the default policy if it is not clearly
    slower: smaller differences are chance, and other texts turn them."""
    fastest = max(ratios, key=lambda label: ratios[label])
    return "hybrid" if ratios.get("hybrid", 0.0) >= 0.97 * ratios[fastest] else fastest


@dataclass(frozen=True)
class DoctorSettings(OneDrafterSettings):
    """What to measure. `OneDrafterSettings` has the models and prompts.

    Args:
        prompts: as for `PairSettings`; by default a few texts of several kinds.
        policies: the policies to measure, besides `full`.
        num_assistant_tokens: the longest chain to measure, at least 3; two shorter ones are measured too.
        max_new_tokens: tokens of the texts to compare speeds for.
        tree: the shape of the trees to measure: a `TreeConfig`, or a text for `parse_tree` (None: no trees).
        top_k: for sampling: draw from the most probable `top_k` tokens (0: from all).
        seconds: about how long to measure.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy or no tree.
    """

    prompts: Sequence[str | Path] = ()
    policies: Sequence[str] | Mapping[str, ShortlistPolicy] = POLICIES
    num_assistant_tokens: int = 8
    tree: str | TreeConfig | None = "default"
    top_k: int = 50
    seconds: float = 90.0

    _LEAST: ClassVar[Mapping[str, int]] = {**PairSettings._LEAST, "num_assistant_tokens": 3, "top_k": 0}

    def __post_init__(self):
        super().__post_init__()
        if not is_temperature(self.seconds) or self.seconds == 0:
            raise SettingError("seconds", f"must be a number above 0, got {shown_value(self.seconds)}")
        self.resolved_tree()
        self.resolved_policies()

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The lengths of chains to measure. All policies are measured with the one in the middle."""
        longest = self.num_assistant_tokens
        shortest = max(1, longest // 4)
        return shortest, (shortest + longest) // 2, longest

    def resolved_tree(self) -> TreeConfig | None:
        """The shape of the trees, or None."""
        return None if self.tree is None else parse_trees([self.tree])[0]

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """See `named_policies`. `full` is always there."""
        named = named_policies(self.policies)
        require_no_choice(named.values())
        return named if FULL in named else {**named_policies([FULL]), **named}

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        shape = self.resolved_tree()
        return {**super().to_dict(), "tree": None if shape is None else format_tree(shape)}
