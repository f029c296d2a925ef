"""What measurements are told: models and prompts, one drafter or many. What one kind has besides is in its folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import ConfigurationError, shown_value
from ..fields import LARGEST_SEED, SettingError
from ..shortlists import ShortlistPolicy
from ..tree_config import AUTO, LONGEST_DRAFT, TreeConfig
from .policy_text import DEFAULT_POLICIES, shorten_paths
from .tree_text import parse_trees

# Where the system refuses to make so many, torch ends the process without a word.
MOST_THREADS = 1024

# The label of the independent small model among the drafters; EAGLE heads go by the names of their folders.
INDEPENDENT = "drafter"
# The target's own MTP layers, by name and by label.
MTP = "mtp"


@dataclass(frozen=True)
class PairSettings:
    """Which models and prompts to measure, and with which policies.

    Args:
        target: folder or Hub id of the model to speed up. May be left out where loaded models are passed.
        drafter: folder or Hub id of the small model, or `"mtp"` for the target's own MTP layers.
        prompts: JSON lines files, see `read_workload`.
        policies: what `parse_policy` understands, or policies by the name to show.
        max_new_tokens: tokens to generate for each prompt.
        num_assistant_tokens: tokens drafted per round; what takes `"auto"` says so.
        limit: take the first so many prompts of each category of each file (None: all).
        chat_template: make each prompt the user's turn of a chat.
        max_prompt_tokens: keep the last so many tokens of longer prompts (None: refuse prompts that do not fit).
        dtype: of both models: a torch dtype's name or "auto" for that of the weights, as is None.
        device: where both models run; "auto" is the first CUDA device if there is one, else the CPU.
        threads: CPU threads (None: torch's choice).
        seed: for sampling.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    target: str | None = None
    drafter: str | None = None
    prompts: Sequence[str | Path] = ()
    policies: Sequence[str] | Mapping[str, ShortlistPolicy] = DEFAULT_POLICIES
    max_new_tokens: int = 128
    num_assistant_tokens: int | str = 5
    limit: int | None = None
    chat_template: bool = False
    max_prompt_tokens: int | None = None
    dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    # Whether `num_assistant_tokens` may be chosen round by round.
    _TAKES_AUTO: ClassVar[bool] = False
    # The least that each whole number may be. None is one where it is the default.
    _LEAST: ClassVar[Mapping[str, int]] = {
        "max_new_tokens": 1,
        "num_assistant_tokens": 1,
        "limit": 1,
        "max_prompt_tokens": 1,
        "threads": 1,
        "seed": 0,
    }
    # The most that some of them may be.
    _MOST: ClassVar[Mapping[str, int]] = {
        "num_assistant_tokens": LONGEST_DRAFT,
        "threads": MOST_THREADS,
        "seed": LARGEST_SEED,
    }

    def __post_init__(self):
        for name, least in self._LEAST.items():
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if name == "num_assistant_tokens" and value == AUTO and self._TAKES_AUTO:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(name, f"must be a whole number of at least {least}, got {value!r}")
            if value > self._MOST.get(name, value):
                raise SettingError(name, f"must be at most {self._MOST[name]:,}, got {shown_value(value)}")
        self._require_device_and_dtype()

    def _require_device_and_dtype(self) -> None:
        if self.device != "auto":
            try:
                torch.empty(0, device=self.device)
            except (RuntimeError, AssertionError) as error:
                problem = str(error).splitlines()[0]
                raise SettingError("device", f"{self.device!r} cannot be used: {problem}") from error
        if self.dtype not in (None, "auto") and not isinstance(getattr(torch, str(self.dtype), None), torch.dtype):
            raise SettingError("dtype", f"must be auto or a torch dtype such as float32, got {self.dtype!r}")

    def resolved_device(self) -> torch.device:
        """The device that `device` means on this computer."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(name)

    def on(self, device: torch.device) -> "PairSettings":
        """The same settings for another device."""
        return replace(self, device=str(device))

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values, without the policies and with paths shortened."""
        settings = {name: value for name, value in vars(self).items() if name != "policies"}
        for name in ("target", "drafter"):
            settings[name] = None if settings[name] is None else shorten_paths(str(settings[name]))
        settings["prompts"] = [shorten_paths(str(path)) for path in settings["prompts"]]
        return settings


@dataclass(frozen=True)
class OneDrafterSettings(PairSettings):
    """Settings of a measurement of one drafter, a small model or an EAGLE head.

    Args:
        eagle: folder or Hub id of an EAGLE head for the target, in place of the drafter.
        allow_pickle: read a head that is not in safetensors, as `EagleDrafter.from_pretrained`.
        temperature: of both models; 0 decodes greedily.

    Raises:
        ConfigurationError: a setting is out of range, or there are two drafters.
    """

    eagle: str | None = None
    allow_pickle: bool = False
    temperature: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not is_temperature(self.temperature):
            raise SettingError("temperature", f"must be a number of at least 0, got {shown_value(self.temperature)}")
        if self.drafter is not None and self.eagle is not None:
            raise ConfigurationError("name a drafter or an EAGLE head, not both: one of them drafts")

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        return {**super().to_dict(), "eagle": None if self.eagle is None else shorten_paths(str(self.eagle))}


@dataclass(frozen=True)
class SystemsSettings(PairSettings):
    """Settings of a measurement of systems that run side by side: every drafter, in every shape of drafts.

    Every system draws a prompt with the same seed, and each repeat has seeds of its own.

    Args:
        eagle: folders or Hub ids of EAGLE heads for the target, beside the drafter or in its place.
        allow_pickle: read heads that are not in safetensors, as `EagleDrafter.from_pretrained`.
        chains: draft chains of `num_assistant_tokens`.
        trees: draft trees of each of these shapes: a `TreeConfig`, or what `parse_tree` understands.
        temperatures: each is measured for itself; 0 decodes greedily.
        top_k: for sampling: draw from the so many most probable tokens (0: from all).
        repeats: how often each prompt is run by each system.
        profile_prompts: prompts of each domain on which it is measured, apart from the timed runs, where a round's
            time goes and what the shortlists cover (0: on none).
        transformers_assisted: run transformers' assisted generation too, with drafts of the same length.
        rivals: run what users have without this package too: transformers' assisted generation as the drafter's own
            settings have it (by default 20 tokens, and none after one of which the drafter is less sure than 0.4), and
            prompt lookup.

    Raises:
        ConfigurationError: a setting is out of range, or there is nothing to draft.
    """

    eagle: Sequence[str] = ()
    allow_pickle: bool = False
    chains: bool = True
    trees: Sequence[str | TreeConfig] = ()
    temperatures: Sequence[float] = (0.0,)
    top_k: int = 50
    repeats: int = 3
    profile_prompts: int = 2
    transformers_assisted: bool = True
    rivals: bool = True

    _LEAST: ClassVar[Mapping[str, int]] = {**PairSettings._LEAST, "top_k": 0, "repeats": 1, "profile_prompts": 0}

    def __post_init__(self):
        super().__post_init__()
        wrong = [value for value in self.temperatures or [None] if not is_temperature(value)]
        if wrong:
            raise SettingError("temperatures", f"must be numbers of at least 0, got {shown_value(wrong[0])}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigurationError(f"a temperature is given twice: {self.temperatures!r}")
        head_labels(self.eagle)
        if not self.resolved_shapes():
            raise ConfigurationError("there is nothing to draft: name a tree, or leave chains on")

    def resolved_shapes(self) -> list[TreeConfig | None]:
        """The shapes of the drafts; None for chains."""
        return [None] * bool(self.chains) + parse_trees(self.trees)

    def to_dict(self) -> dict[str, Any]:
        """See `PairSettings.to_dict`."""
        eagle = [shorten_paths(str(source)) for source in self.eagle]
        return {**super().to_dict(), "eagle": eagle, "trees": [asdict(tree) for tree in parse_trees(self.trees)]}


def is_temperature(value: Any) -> bool:
    """Whether a value is a number of at least 0 and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < float("inf")


def head_labels(sources: Sequence[str]) -> list[str]:
    """What EAGLE heads from these folders or Hub ids are shown as: the last component of each name, and the one before
    it where that is not enough. Raises `ConfigurationError` if that does not tell two apart."""
    parts = [Path(source).absolute().parts if Path(source).is_dir() else Path(source).parts for source in sources]
    last = [Counter([INDEPENDENT, MTP, *("/".join(one[-count:]) for one in parts)]) for count in (1, 2)]
    labels = []
    for one in parts:
        label = next((text for count in (1, 2) if last[count - 1][text := "/".join(one[-count:])] == 1), None)
        if label is None:
            raise ConfigurationError(f"two EAGLE heads would be shown as {'/'.join(one[-2:])!r}; rename a folder")
        labels.append(label)
    return labels
