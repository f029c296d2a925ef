"""Unions of policies: whatever any of them selects."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigurationError, shown_value
from ..fields import FieldError
from ..protocol import (
    BackgroundWork,
    BlockShortlist,
    JoinedShortlist,
    Needs,
    Prompt,
    Shortlist,
    Verdict,
    VocabularyInfo,
)
from .base import ShortlistPolicy, ShortlistState, start_state
from .frequency import FrequencyShortlist
from .registry import UNKNOWN_POLICY_FIX, policy_class
from .storage import Storable, TensorRule

# Policies of a union and of the unions within it, all together, and how deep unions may lie within each other.
MOST_POLICIES = 32
DEEPEST_UNION = 4


class UnionShortlist(ShortlistPolicy):
    """Every token that any of the policies selects.

    Args:
        policies: at least one policy. Put those whose shortlists never change first: their rows are then never moved.

    Raises:
        ConfigurationError: no policies, too many of them, or something that is not a policy.
    """

    name = "union"
    card_summary = "Every token that any of several shortlist policies selects."

    def __init__(self, *policies: ShortlistPolicy):
        if not policies:
            raise ConfigurationError("a union needs at least one policy")
        for policy in policies:
            if not isinstance(policy, ShortlistPolicy):
                raise ConfigurationError(f"a union is made of policies, got {shown_value(policy)}")
        self.policies = policies
        if self.name == UnionShortlist.name:
            _count_policies(self.settings())

    @property
    def needs(self) -> Needs:
        needs = Needs()
        for policy in self.policies:
            needs = needs | policy.needs
        return needs

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        return tuple(one for policy in self.policies for one in policy.tokenizer_fingerprints)

    @property
    def static_core(self) -> FrequencyShortlist | None:
        """The largest of its policies' cores."""
        cores = [core for core in (policy.static_core for policy in self.policies) if core is not None]
        return max(cores, key=lambda core: core.size, default=None)

    def new_memory(self) -> tuple[Any, ...] | None:
        memories = tuple(policy.new_memory() for policy in self.policies)
        return None if all(memory is None for memory in memories) else memories

    def start(self, vocabulary: VocabularyInfo, memory: tuple[Any, ...] | None = None) -> "UnionState":
        with ExitStack() as stack:
            parts = []
            for policy, own in zip(self.policies, memory or (None,) * len(self.policies), strict=True):
                parts.append(start_state(policy, vocabulary, own))
                # Where a later one cannot be started, nobody else would know of this one.
                stack.callback(parts[-1].close)
            stack.pop_all()
        return UnionState(parts, vocabulary)

    def settings(self) -> dict[str, Any]:
        return {"policies": [{"name": policy.name, "settings": policy.settings()} for policy in self.policies]}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": tensor
            for index, policy in enumerate(self.policies)
            for name, tensor in policy.tensors().items()
        }

    @classmethod
    def require_settings(cls, settings: Mapping[str, Any]) -> None:
        """As for every policy; the policies inside are counted before the settings of any are looked at."""
        _count_policies(settings)
        for index, part in enumerate(settings["policies"]):
            field = f"policies[{index}]"
            try:
                policy = policy_class(part["name"])
            except ConfigurationError as error:
                raise FieldError(f"{field}.name", str(error), UNKNOWN_POLICY_FIX) from error
            try:
                policy.require_settings(part["settings"])
            except FieldError as error:
                raise FieldError(f"{field}.settings.{error.field}", error.problem, error.fix) from error

    @classmethod
    def tensor_rules_for(cls, settings: Mapping[str, Any]) -> Mapping[str, TensorRule]:
        rules = {}
        for index, part in enumerate(settings["policies"]):
            own = policy_class(part["name"]).tensor_rules_for(part["settings"])
            rules.update({f"{index}.{name}": rule for name, rule in own.items()})
        return rules

    @classmethod
    def classes_in(cls, settings: Mapping[str, Any]) -> tuple[type[Storable], ...]:
        classes = super().classes_in(settings)
        for part in settings["policies"]:
            classes += policy_class(part["name"]).classes_in(part["settings"])
        return classes

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "UnionShortlist":
        cls.require_settings(settings)
        policies = []
        for index, part in enumerate(settings["policies"]):
            prefix = f"{index}."
            own = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            policies.append(policy_class(part["name"]).from_settings(part["settings"], own))
        return cls(*policies)


def _count_policies(settings: Mapping[str, Any], depth: int = 1, path: str = "") -> int:
    """The number of policies inside a union of these settings, those of unions within it too.

    Raises:
        ConfigurationError: the settings are not those of a union, or the policies are too many or lie too deep.
    """
    parts = settings.get("policies") if isinstance(settings, Mapping) else None
    if not isinstance(parts, list) or not parts or set(settings) != {"policies"}:
        raise ConfigurationError("a union's settings are a list named 'policies' and nothing else")
    if depth > DEEPEST_UNION:
        raise ConfigurationError(f"unions lie within each other more than {DEEPEST_UNION} deep")
    count = len(parts)
    for index, part in enumerate(parts[: MOST_POLICIES + 1]):
        if not isinstance(part, Mapping) or set(part) != {"name", "settings"}:
            raise ConfigurationError(f"policy {index} of a union must have exactly a name and settings")
        if not isinstance(part["settings"], Mapping):
            problem = f"must be a JSON object, got {shown_value(part['settings'])}"
            raise FieldError(f"{path}policies[{index}].settings", problem, "Give the settings of that policy")
        if part["name"] == UnionShortlist.name:
            count += _count_policies(part["settings"], depth + 1, f"{path}policies[{index}].settings.")
        if count > MOST_POLICIES:
            raise ConfigurationError(f"a union holds {count} policies or more, and {MOST_POLICIES} are the most")
    return count


class UnionState(ShortlistState):
    """The parts' slots side by side. A slot whose id an earlier part holds too is not occupied.

    A part that chooses whole blocks anew for each draft step counts as the first, and stays a part of what is shown:
    its blocks are scored as blocks, and the slots of the others, which do not change within a round, as they are.
    """

    def __init__(self, parts: list[ShortlistState], vocabulary: VocabularyInfo):
        self._parts = parts
        # Of two such parts, and of a union within, everything is taken as slots.
        of_blocks = [part for part in parts if part.layout is not None and not isinstance(part, UnionState)]
        self._of_blocks = of_blocks[0] if len(of_blocks) == 1 else None
        self.layout = None if self._of_blocks is None else self._of_blocks.layout
        self._of_slots = [part for part in parts if part is not self._of_blocks]
        self._vocabulary = vocabulary
        self._shown: list[Shortlist | None] = [None] * len(self._of_slots)
        # taken[i]: bool [vocabulary], the ids that parts 0 … i hold. The last part's is never needed.
        self._taken: list[torch.Tensor | None] = [None] * len(self._of_slots)
        self._shortlist: Shortlist | None = None
        # What was shown last, and what its blocks and slots are.
        self._joined: tuple[BlockShortlist, Shortlist, JoinedShortlist] | None = None

    def restart(self) -> None:
        for part in self._parts:
            part.restart()

    def resume(self, token_ids: torch.Tensor) -> None:
        for part in self._parts:
            part.resume(token_ids)

    def end_call(self) -> None:
        for part in self._parts:
            part.end_call()

    def close(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        for part in self._parts:
            part.follow_weights(vocabulary)

    def finish_background_work(self) -> None:
        for part in self._parts:
            part.finish_background_work()

    def take_background_work(self) -> BackgroundWork:
        return sum((part.take_background_work() for part in self._parts), BackgroundWork())

    def begin_round(self) -> None:
        for part in self._parts:
            part.begin_round()

    def observe_prompt(self, prompt: Prompt) -> None:
        for part in self._parts:
            part.observe_prompt(prompt)

    def observe(self, verdict: Verdict) -> None:
        for part in self._parts:
            part.observe(verdict)

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:
        for part in self._parts:
            part.observe_draft_inputs(embeddings, features)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        blocks = None if self._of_blocks is None else self._of_blocks.select(depth, token_ids, features)
        if not self._of_slots:
            return blocks
        shown = [part.select(depth, token_ids, features) for part in self._of_slots]
        if self._shortlist is None or any(new is not old for new, old in zip(shown, self._shown, strict=True)):
            self._shortlist = self._unite(shown)
            self._shown = shown
        return self._shortlist if blocks is None else self._join(blocks, self._shortlist)

    def _join(self, blocks: BlockShortlist, slots: Shortlist) -> JoinedShortlist:
        if self._joined is None or self._joined[0] is not blocks or self._joined[1] is not slots:
            rest = replace(slots, occupied=_occupied(slots) & ~blocks.contains(slots.slots))
            self._joined = blocks, slots, JoinedShortlist(blocks, rest)
        return self._joined[2]

    def _unite(self, shown: list[Shortlist]) -> Shortlist:
        occupied = []
        earlier_changed = False
        for index, (new, old) in enumerate(zip(shown, self._shown, strict=True)):
            own = _occupied(new)
            if index > 0:
                own = own & ~self._taken[index - 1][new.slots]
            occupied.append(own)
            earlier_changed = earlier_changed or new is not old
            if earlier_changed and index + 1 < len(shown):
                self._taken[index] = self._mark(index, new.slots, own)
        replaced = self._replaced(shown)
        unchanged = self._shortlist is not None and replaced is not None and replaced.shape[0] == 0
        return Shortlist(
            self._shortlist.slots if unchanged else torch.cat([part.slots for part in shown]),
            version=0 if self._shortlist is None else self._shortlist.version + (not unchanged),
            occupied=torch.cat(occupied),
            replaced=self._shortlist.replaced if unchanged else replaced,
            is_transient=any(part.is_transient for part in shown),
        )

    def _mark(self, index: int, slots: torch.Tensor, occupied: torch.Tensor) -> torch.Tensor:
        """bool `[vocabulary]`: the ids of this part's occupied slots and of all earlier parts."""
        marks = torch.zeros(self._vocabulary.size, dtype=torch.int8, device=self._vocabulary.device)
        marks.scatter_reduce_(0, slots, occupied.to(torch.int8), "amax")
        return marks.bool() if index == 0 else marks.bool() | self._taken[index - 1]

    def _replaced(self, shown: list[Shortlist]) -> torch.Tensor | None:
        """int64 `[r]`: the slots of the union that may have changed since it was last shown, None where all may."""
        changed = []
        offset = 0
        for new, old in zip(shown, self._shown, strict=True):
            if old is None or new.slots.shape != old.slots.shape:
                return None
            if new.version == old.version + 1 and new.replaced is not None:
                changed.append(new.replaced + offset)
            elif new.version != old.version:
                changed.append(torch.arange(offset, offset + new.slots.shape[0], device=new.slots.device))
            offset += new.slots.shape[0]
        return torch.cat(changed) if changed else self._shown[0].slots[:0]


def _occupied(shortlist: Shortlist) -> torch.Tensor:
    """bool `[C]`: the slots of a part that count, the part's own size taken into account."""
    occupied = shortlist.occupied
    if occupied is None:
        occupied = torch.ones_like(shortlist.slots, dtype=torch.bool)
    if shortlist.width < shortlist.slots.shape[0]:
        occupied = occupied.clone()
        occupied[shortlist.width :] = False
    return occupied
