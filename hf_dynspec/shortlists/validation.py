"""Checks of every shortlist against the policy's contract. They take time, and are for authors of policies."""

import copy
from typing import Any, NoReturn

import torch

from ..errors import PolicyError
from ..protocol import BlockShortlist, JoinedShortlist, Needs, Shortlist, VocabularyInfo
from .base import ShortlistPolicy, ShortlistState
from .forwarding import ForwardingPolicy, ForwardingState
from .union import UnionShortlist


def validated(policy: ShortlistPolicy) -> ShortlistPolicy:
    """A policy whose states check every shortlist before they return it, in a union also those of the parts.

    Its states raise `PolicyError` at the draft step that breaks the contract. The policy's own errors pass through.
    """
    return _ValidatedPolicy(_with_validated_parts(policy), type(policy).__qualname__)


def _with_validated_parts(policy: ShortlistPolicy) -> ShortlistPolicy:
    if not isinstance(policy, UnionShortlist):
        return policy
    twin = copy.copy(policy)
    # An inner union must keep its class, which the outer one looks for.
    twin.policies = tuple(
        _with_validated_parts(part) if isinstance(part, UnionShortlist) else validated(part)
        for part in policy.policies
    )
    return twin


class _ValidatedPolicy(ForwardingPolicy):
    """Starts validated states. `label` names the policy in errors."""

    name = "validated"

    def __init__(self, policy: ShortlistPolicy, label: str):
        super().__init__(policy)
        self._label = label
        self.name = policy.name

    @property
    def needs(self) -> Needs:
        needs = super().needs
        if not isinstance(needs, Needs):
            raise PolicyError(
                self._label, None, f"`needs` is {type(needs).__name__}", "Return hf_dynspec.Needs, as a property."
            )
        return needs

    def alternatives(self, memory: Any) -> tuple[tuple[ShortlistPolicy, Any], ...]:
        alternatives = self.policy.alternatives(memory)
        if len(alternatives) == 1:
            return ((self, memory),)
        return tuple((validated(policy), own) for policy, own in alternatives)

    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> "_ValidatedState":
        state = super().start(vocabulary, memory)
        if not isinstance(state, ShortlistState):
            raise PolicyError(
                self._label, None, f"`start` returned {type(state).__name__}", "Return a ShortlistState."
            )
        needs_rows = self.needs.drafter_rows or self.needs.target_rows
        if needs_rows and type(state).follow_weights is ShortlistState.follow_weights:
            state.close()
            raise PolicyError(
                self._label,
                None,
                "it asks for the rows of a head, and does not follow changes of their weights",
                f"Override {type(state).__qualname__}.follow_weights.",
            )
        return _ValidatedState(state, vocabulary, self._label)


class _ValidatedState(ForwardingState):
    """Checks the shortlists of a state, which waits for the device. `label` names its policy in errors."""

    def __init__(self, state: ShortlistState, vocabulary: VocabularyInfo, label: str):
        super().__init__(state)
        self._vocabulary, self._label, self._depth = vocabulary, label, 0
        self._eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=vocabulary.device)
        # The last shortlist's version and a copy of its slots, which may be changed in place.
        self._last: tuple[int, torch.Tensor] | None = None

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        self._vocabulary = vocabulary
        super().follow_weights(vocabulary)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        shortlist, self._depth = super().select(depth, token_ids, features), depth
        self._check_kinds(shortlist)
        self._check_slots(shortlist)
        self._check_ids(shortlist)
        if self._last is not None:
            self._check_version(shortlist, *self._last)
        self._last = shortlist.version, shortlist.slots.clone()
        return shortlist

    def _fail(self, problem: str, fix: str) -> NoReturn:
        raise PolicyError(self._label, self._depth, problem, fix)

    def _check_kinds(self, shortlist: Shortlist) -> None:
        if not isinstance(shortlist, Shortlist):
            self._fail(f"`select` returned {type(shortlist).__name__}", "Return a Shortlist.")
        if isinstance(shortlist.version, bool) or not isinstance(shortlist.version, int):
            self._fail(f"the version is {type(shortlist.version).__name__}", "Count versions with a plain int.")
        blocks = shortlist.chosen if isinstance(shortlist, JoinedShortlist) else shortlist
        if isinstance(blocks, BlockShortlist) and blocks.layout is not self.layout:
            self._fail(
                "the blocks are of another layout than the state's",
                "Make one BlockLayout when the state starts, and keep it as its `layout`.",
            )
        self._require_tensor("slots", shortlist.slots, torch.int64)
        if shortlist.occupied is not None:
            self._require_tensor("occupied", shortlist.occupied, torch.bool)
        if shortlist.replaced is not None:
            self._require_tensor("replaced", shortlist.replaced, torch.int64)

    def _require_tensor(self, name: str, value: object, dtype: torch.dtype) -> None:
        device = self._vocabulary.device
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.dim() != 1 or value.device != device:
            described = type(value).__name__
            if isinstance(value, torch.Tensor):
                described = f"{value.dtype}{list(value.shape)} on {value.device}"
            self._fail(f"`{name}` is {described}", f"It must be {dtype}[n] on {device}.")

    def _check_slots(self, shortlist: Shortlist) -> None:
        slots, count = shortlist.slots, shortlist.slots.shape[0]
        if not 0 < shortlist.width <= count:
            self._fail(f"{shortlist.width} of {count} slots are to be scored", "Score at least one and at most all.")
        if shortlist.occupied is not None and shortlist.occupied.shape[0] != count:
            self._fail(
                f"`occupied` has {shortlist.occupied.shape[0]} entries, and there are {count} slots",
                "Say of every slot whether it is occupied.",
            )
        outside = slots[(slots < 0) | (slots >= self._vocabulary.size)]
        if outside.numel():
            self._fail(
                f"a slot holds the id {int(outside[0])}, and ids lie from 0 to {self._vocabulary.size - 1}",
                "Leave out ids past VocabularyInfo.size, which are padding; unoccupied slots need a valid id too.",
            )
        barred = slots[~self._vocabulary.can_draft(slots)]
        if barred.numel():
            self._fail(
                f"a slot holds the id {int(barred[0])}, which the drafter's head has no row for",
                "Keep to VocabularyInfo.draftable (see VocabularyInfo.can_draft), in unoccupied slots too.",
            )
        replaced = shortlist.replaced
        if replaced is not None and bool(((replaced < 0) | (replaced >= count)).any()):
            self._fail(f"`replaced` names slots outside of 0 to {count - 1}", "Name slots, not ids.")
        rows = self._vocabulary.draftable
        if rows is None:
            rows = torch.arange(shortlist.width, device=self._vocabulary.device)
        if shortlist.is_prefix and not torch.equal(shortlist.scored_slots, rows[: shortlist.width]):
            self._fail(
                "`is_prefix` says that slot i is row i of the head, and it is not",
                "Leave is_prefix out, or take VocabularyInfo.draftable (else 0, 1, 2, …) as slots.",
            )

    def _check_ids(self, shortlist: Shortlist) -> None:
        ids, counts = shortlist.ids().unique(return_counts=True)
        repeated = ids[counts > 1]
        if repeated.numel():
            self._fail(
                f"the id {int(repeated[0])} is in {int(counts.max())} of the scored, occupied slots, and ids must be "
                "unique: the drafter would draw it with a probability that verification does not know",
                "Leave repeats unoccupied.",
            )
        missing = self._eos[~torch.isin(self._eos, ids)]
        if missing.numel():
            self._fail(
                f"the end-of-sequence id {int(missing[0])} is not on the shortlist",
                "Every shortlist, nested ones too, holds VocabularyInfo.eos_token_ids.",
            )

    def _check_version(self, shortlist: Shortlist, version: int, slots: torch.Tensor) -> None:
        new = shortlist.version
        if new < version:
            self._fail(
                f"the version went back from {version} to {new}",
                "Count on for as long as the state lives, also after restart().",
            )
        is_of_same_size = shortlist.slots.shape == slots.shape
        if new == version and not (is_of_same_size and torch.equal(shortlist.slots, slots)):
            self._fail(
                f"the slots changed and the version did not, it is still {version}: tokens would be scored by the "
                "rows of others",
                "Increase the version whenever a slot gets another id, also in place.",
            )
        if shortlist.replaced is None or new != version + 1:
            return
        count = shortlist.slots.shape[0]
        if not is_of_same_size:
            self._fail(
                f"`replaced` is given, and there are {count} slots where there were {slots.shape[0]}",
                "Give None, for all slots, if their number changes.",
            )
        changed = shortlist.slots != slots
        changed[shortlist.replaced] = False
        if bool(changed.any()):
            self._fail(
                f"slot {int(changed.nonzero()[0])} changed, and `replaced` does not name it",
                f"Name every slot that may differ from version {version}, or give None for all.",
            )
