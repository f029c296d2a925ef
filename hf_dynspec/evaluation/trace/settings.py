"""What to trace."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...errors import ConfigurationError
from ...shortlists import FullShortlist, ShortlistPolicy
from ...tree_config import TreeConfig
from ..policy_text import named_policies, require_no_choice
from ..prompts import WorkloadPrompt
from ..settings import OneDrafterSettings, PairSettings
from ..tree_text import parse_trees

DEFAULT_POLICY = "retrieval"


@dataclass(frozen=True)
class TraceSettings(OneDrafterSettings):
    """What to trace. `OneDrafterSettings` has the models and prompts.

    Args:
        policies: one text for `parse_policy`, or one policy by label.
        prompt_id: the identifier of the prompt among those of the files (None: the first).
        tree: draft trees of this shape: a `TreeConfig`, or a text for `parse_tree` (None: chains).
        top_k: for sampling: draw from the so many most probable tokens (0: from all).

    Raises:
        ConfigurationError: a setting is out of range, there is not one policy, or it has nothing to trace.
    """

    policies: tuple[str, ...] | Mapping[str, ShortlistPolicy] = (DEFAULT_POLICY,)
    prompt_id: str | None = None
    tree: str | TreeConfig | None = None
    top_k: int = 50

    # The last token of a text is never drafted, nor the first by a head that reads the target's states.
    _LEAST: ClassVar[Mapping[str, int]] = {**PairSettings._LEAST, "max_new_tokens": 3, "top_k": 0}

    def __post_init__(self):
        super().__post_init__()
        if len(self.policies) != 1:
            raise ConfigurationError(f"name one policy to trace, got {len(self.policies)}")
        self.resolved_tree()
        self.resolved_policy()

    def resolved_tree(self) -> TreeConfig | None:
        """The shape of the trees, None for chains."""
        return None if self.tree is None else parse_trees([self.tree])[0]

    def resolved_policy(self) -> tuple[str, ShortlistPolicy]:
        """The policy's label and the policy."""
        ((label, policy),) = named_policies(self.policies).items()
        require_no_choice([policy])
        if isinstance(policy, FullShortlist):
            raise ConfigurationError(
                "the policy 'full' holds every token, so there is nothing to trace: name another one, such as "
                f"{DEFAULT_POLICY} or hybrid"
            )
        return label, policy

    def chosen(self, prompts: list[WorkloadPrompt]) -> WorkloadPrompt:
        """The prompt to trace. Raises `ConfigurationError` if there is none of that identifier."""
        if not prompts:
            raise ConfigurationError("there is no prompt to trace")
        chosen = [one for one in prompts if self.prompt_id in (None, one.identifier)]
        if not chosen:
            known = ", ".join(prompt.identifier for prompt in prompts[:8])
            more = ", …" if len(prompts) > 8 else ""
            raise ConfigurationError(f"there is no prompt {self.prompt_id!r}; there are {known}{more}")
        return chosen[0]

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        tree = self.resolved_tree()
        return {**super().to_dict(), "tree": None if tree is None else asdict(tree)}
