"""What a benchmark is to measure, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...drafting.tree_config import TreeConfig
from ...errors import ConfigurationError
from ...shortlists import ShortlistPolicy
from ..pair import PairSettings, head_labels, is_temperature
from ..policy_text import named_policies, shorten_paths
from ..tree_text import parse_trees
from .systems import BASELINES


@dataclass(frozen=True)
class BenchmarkSettings(PairSettings):
    """What to measure, and on what. `PairSettings` has the models, policies and prompts.

    Every drafter runs with every policy, in chains and in trees of every shape. Every system draws a prompt with the
    same seed, and each repeat has seeds of its own. Transformers' assisted generation drafts chains of
    `num_assistant_tokens` too (of five where that is `"auto"`), with the independent drafter. Where verifications
    compute the target's logits by this package's own product, plain generation runs with that product too.

    Args:
        eagle: folders or Hub ids of EAGLE heads for the target, beside the drafter or in its place.
        allow_pickle: read heads that are not in safetensors, as `EagleDrafter.from_pretrained`.
        chains: draft chains of `num_assistant_tokens`, which may be `"auto"`.
        trees: draft trees of each of these shapes: a `TreeConfig`, or what `parse_tree` understands.
        temperatures: each is measured for itself; 0 decodes greedily.
        top_k: for sampling: draw from the so many most probable tokens (0: from all).
        repeats: how often each prompt is run by each system.
        profile_prompts: prompts of each domain that time per section and coverage are measured on, apart from the
            timed runs (0: do not measure either).
        measure_coverage: measure the target's probability mass on the shortlists.
        transformers_assisted: run transformers' assisted generation too.
        rivals: run what users have without this package too: transformers' assisted generation as the drafter's own
            settings have it (by default 20 tokens, and none after one of which the drafter is less sure than 0.4), and
            prompt lookup.

    Raises:
        ConfigurationError: a setting is out of range, or a text is no policy or no tree.
    """

    eagle: Sequence[str] = ()
    allow_pickle: bool = False
    chains: bool = True
    trees: Sequence[str | TreeConfig] = ()
    temperatures: Sequence[float] = (0.0,)
    top_k: int = 50
    repeats: int = 3
    profile_prompts: int = 2
    measure_coverage: bool = True
    transformers_assisted: bool = True
    rivals: bool = True

    _TAKES_AUTO: ClassVar[bool] = True
    _LEAST: ClassVar[Mapping[str, int]] = {**PairSettings._LEAST, "top_k": 0, "repeats": 1, "profile_prompts": 0}

    def __post_init__(self):
        super().__post_init__()
        if not self.temperatures or not all(is_temperature(value) for value in self.temperatures):
            raise ConfigurationError(f"temperatures must be numbers of at least 0, got {self.temperatures!r}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigurationError(f"a temperature is given twice: {self.temperatures!r}")
        head_labels(self.eagle)
        if not self.resolved_shapes():
            raise ConfigurationError("there is nothing to draft: name a tree, or leave chains on")
        self.resolved_policies()

    def resolved_shapes(self) -> list[TreeConfig | None]:
        """The shapes of the drafts; None for chains."""
        return [None] * bool(self.chains) + parse_trees(self.trees)

    def resolved_policies(self) -> dict[str, ShortlistPolicy]:
        """See `named_policies`. The labels of the baselines are taken."""
        named = named_policies(self.policies)
        for label in BASELINES:
            if label in named:
                raise ConfigurationError(f"a policy cannot be shown as {label!r}, which is one of the baselines")
        return named

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        eagle = [shorten_paths(str(source)) for source in self.eagle]
        return {**super().to_dict(), "eagle": eagle, "trees": [asdict(tree) for tree in parse_trees(self.trees)]}
