"""The rounds of one call under automatic drafting, and what is kept of them for the next call."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..stats import Clock
from .automatic import AutomaticDrafting
from .draft_shapes import ALONE, DraftShape, shapes_of
from .early_ends import DraftedToken, EarlyEnd
from .expected_rounds import FinishedRound
from .recurrences import Recurrences
from .token_choice import TokenChoice
from .tree_config import TreeConfig

# Settings of which it is remembered what was learnt.
_MOST_KEPT = 8


class AutomaticCall:
    """The rounds of one call under automatic drafting. Not shared between threads.

    Args:
        drafting: what was learnt, and is learnt on.
        now: what its clock goes by, see `Clock`.
    """

    def __init__(self, drafting: AutomaticDrafting, now: Callable[[], float] | None = None):
        self._drafting = drafting
        self._clock = Clock(now)
        drafting.begin_call(self._clock())
        # The round that was begun last: what it drafts, what ends it early, how many steps there is room for, whether
        # drafting rests in it, when it began, how long drafting took, whether it reads no more than rounds do, how
        # many tokens were accepted in it, None until that is known, and whether the target spoke on the whole draft.
        self._shape = ALONE
        self._end: EarlyEnd | None = None
        self._recurrences = Recurrences()
        self._most = 0
        self._is_at_rest = False
        self._began = self._drafting_seconds = 0.0
        self._is_usual = False
        self._accepted: int | None = None
        self._is_known = True
        # The policy that drafted last.
        self._policy: int | None = None
        # Rounds since the drafter has read the text, None where it never has.
        self._unread: int | None = None
        # Tokens that were generated, how many could be (0: not known yet), and after how many the drafter reads the
        # text (None: not asked yet); and of the round that was begun last, whether it waits for that, and how many
        # tokens it has not read.
        self._tokens = self._limit = 0
        self._reads_after: float | None = None
        self._is_waiting = False
        self._behind = 0
        # Rounds that were begun, and whether there was room for a draft in one of them.
        self._rounds = 0
        self._had_room = False

    @property
    def is_resting(self) -> bool:
        """See `AutomaticDrafting.is_resting`."""
        return self._drafting.is_resting

    @property
    def reads_features(self) -> bool:
        """See `AutomaticDrafting.reads_features`."""
        return self._drafting.reads_features

    def begin_round(self, most: int, fixed: DraftShape | None = None, behind: int = 0) -> DraftShape:
        """A round begins, and the one before it is over.

        Args:
            most: steps that there is room for; 0 where nothing can be drafted now.
            fixed: the shape of what is drafted, where only the policy is to be chosen.
            behind: tokens of the text that the drafter has not read, as far as it may wait with that.

        Returns:
            What to draft, and with which policy.
        """
        now = self._clock()
        if self._accepted is not None:
            self._record(now)
        self._began, self._drafting_seconds, self._accepted = now, 0.0, None
        self._rounds += 1
        shape = ALONE
        self._behind = behind
        self._limit = self._limit or (self._tokens + most + 1 if most > 0 else 0)
        self._is_waiting = most > 0 and fixed is None and self._waits(most)
        if most > 0 and not self._is_waiting:
            # A longer draft would tell no more in a round in which the drafter reads the prompt.
            shape = self._drafting.choose(fixed, most if self._had_room else 1)
            self._had_room = True
        is_drafting = shape.steps > 0
        self._shape, self._most = shape, most
        self._is_at_rest = not is_drafting and self._drafting.is_resting
        self._end = self._drafting.early_end(shape) if is_drafting else None
        # Another policy than before has to be shown the text first, and its rows have to be packed.
        has_read = not is_drafting or (self._unread is not None and self._unread <= 1 and shape.policy == self._policy)
        self._is_usual = has_read and self._rounds > 1
        if is_drafting:
            self._unread, self._policy = 0, shape.policy
        elif self._unread is not None:
            self._unread += 1
        return shape

    def _waits(self, most: int) -> bool:
        """Whether it is not worth it, or not yet, that the drafter reads the text."""
        if self._drafting.is_resting:
            return False
        if self._rounds == 1 and most == 1:
            # All that a draft could save a call of two tokens is one of its two rounds, and no call of them would tell
            # whether it does.
            return True
        if self._reads_after is None:
            self._reads_after = self._drafting.worth_after(self._behind, most + 1)
        return self._tokens < self._reads_after

    def _record(self, now: float) -> None:
        """The round that was begun last is over now."""
        seconds, is_timed = now - self._began, True
        if self._rounds == 1 and (alone := self._drafting.alone):
            # The target read the prompt in it, which it would without drafts too.
            seconds, is_timed = self._drafting_seconds + alone, False
        round = FinishedRound(
            self._shape,
            self._steps,
            self._accepted,
            self._is_known,
            self._end,
            seconds,
            self._is_usual,
            self._is_waiting,
            is_timed,
            self._drafting_seconds,
        )
        self._drafting.record(round, now)

    @property
    def _steps(self) -> int:
        """How many steps were drafted: fewer than were chosen where the draft ended early, or had no room."""
        return min(self._most, self._shape.steps) if self._end is None else self._end.steps

    @property
    def ends_early(self) -> bool:
        """Whether `goes_on` is to be asked in this round."""
        return self._end is not None

    def goes_on(self, token: DraftedToken) -> bool:
        """See `EarlyEnd.goes_on`."""
        return self._end.goes_on(token)

    def begin_draft(self, text: torch.Tensor) -> None:
        """A draft that may end early begins. See `Recurrences.begin_draft`."""
        self._recurrences.begin_draft(text)

    def goes_on_after(self, token_id: torch.Tensor, choice: TokenChoice) -> bool:
        """Whether another token is drafted after one, int64 `[1]`, that was chosen last. Waits for the device."""
        return self.goes_on(DraftedToken(choice.probability(), self._recurrences.go_on(token_id.item())))

    def has_drafted(self, steps: int | None = None) -> None:
        """The draft of the round is there, as far as the host knows.

        Args:
            steps: how many it has, where something else may have ended it (None: as many as were chosen).
        """
        if steps is not None:
            self._most = steps
        self._drafting_seconds = self._clock() - self._began
        if self._behind and self._steps:
            self._drafting.read(self._behind, self._steps, self._drafting_seconds)

    def end_round(self, accepted: int, is_last: bool = False) -> None:
        """The target has spoken.

        Args:
            accepted: how many drafted tokens were accepted, one below the other.
            is_last: the text ends with the token after them.
        """
        self._tokens += accepted + 1
        # Nothing is learnt of rounds without a choice, but how long the target alone takes where that is not known. A
        # rest goes on also there, where nothing could be drafted, as a head is not given what it reads.
        has_choice = self._is_at_rest or self._most > 0
        if not has_choice and (not self._is_usual or self._drafting.alone):
            return
        self._accepted = accepted
        # Whether the token that ends a text in the midst of a draft was drafted too is not known.
        self._is_known = accepted >= self._steps or not is_last

    def end_call(self) -> None:
        """The call has come to its end, and with it the round that was begun last."""
        if self._accepted is not None:
            self._record(self._clock())
            self._accepted = None
        if self._limit:
            self._drafting.end_call(self._tokens, self._limit)


class LearntDrafting:
    """What was learnt of drafting under the settings that were used last. Shareable between threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._learnt: OrderedDict[Hashable, tuple[AutomaticDrafting, int]] = OrderedDict()

    def under(
        self,
        setting: Hashable,
        tree: TreeConfig | None,
        weights_version: int,
        policies: int = 1,
        ends_early: bool = False,
    ) -> AutomaticDrafting:
        """What was learnt under a setting.

        Args:
            setting: what acceptance and times depend on, besides the next two.
            tree: the largest trees to draft, None for chains.
            weights_version: of the drafter. Where it is another one than before, drafting is tried again soon.
            policies: how many there are to choose from.
            ends_early: see `AutomaticDrafting`.
        """
        key = (setting, tree, ends_early)
        with self._lock:
            learnt, version = self._learnt.pop(key, None) or (
                AutomaticDrafting(shapes_of(tree, ends_early), policies, ends_early),
                weights_version,
            )
            self._learnt[key] = learnt, weights_version
            while len(self._learnt) > _MOST_KEPT:
                self._learnt.popitem(last=False)
        if version != weights_version:
            learnt.renew()
        return learnt

    def call_under(self, *setting: Any, **more: Any) -> AutomaticCall:
        """A call begins, under the setting that `under` takes."""
        return AutomaticCall(self.under(*setting, **more))

    def forget(self) -> None:
        """Another drafter, policy or target: nothing that was learnt is true any more."""
        with self._lock:
            self._learnt.clear()
