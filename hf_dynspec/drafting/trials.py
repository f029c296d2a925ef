"""When something else is drafted than what promises the most by what is known, and what that may cost.

Other lengths, and other sizes of trees, are not tried: those that are drafted tell of them, by the acceptance of each
step and by the line that times lie on, and one round of another says too little to change that.
"""

from collections.abc import Callable, Mapping

from .draft_shapes import ALONE, DraftShape, are_chains

# Trials begin where those before, and the time of so many rounds, are no more than this share of all time.
_SHARE_OF_TRIALS, _LOST_BY_TRIAL = 0.02, 0.5
# The target alone is timed once more where it took longer than such a part of a round with a short draft, as that may
# have been a stall.
_SURPRISINGLY_LONG = 0.9
# Where a draft of one token takes so many times as long as the target alone, and was missed, no longer one is tried.
_DEAR = 1.5
# Tokens of a round with a short draft below which it is not timed once more.
_MISSED = 1.5
# Draft steps with which a policy is tried first: fewer tell too little of what one costs, and more cost too much where
# it is dear.
_STEPS_OF_POLICY_TRIAL = 3
# Rounds for which a policy is tried, the first of which is not timed. One that promises nearly as much costs next to
# nothing, and is tried for longer, as only many rounds tell how much its drafts are worth.
_ROUNDS_OF_POLICY_TRIAL, _ROUNDS_OF_RIVAL = 3, 6
_NEAR_RIVAL = 0.95
# Rounds until a policy is tried again, or the target alone: each time twice as many, up to the second number. The
# target alone is a rival where drafts bring fewer tokens per round than this.
_FEW_TOKENS = 2.0
_RIVALS_AGAIN_AFTER = (32, 128)
_OTHERS_AGAIN_AFTER = (1024, 8192)


class Trials:
    """What is tried beside the best, of one setting. Not shared between threads.

    Args:
        shapes: those of the first policy, `ALONE` not among them.
        policies: how many there are, each of which drafts all of these shapes.
    """

    def __init__(self, shapes: tuple[DraftShape, ...], policies: int):
        self._first = _first_trials(shapes)
        self._short = min(shape for shape, _ in self._first if shape.steps)
        self._has_tried_all = self._has_tried_again = False
        self._never = list(range(1, policies))
        self._policies = policies
        self._tried_at = [0] * policies
        self._alone_at = self._alone_again_after = 0
        self._again_after = [0] * policies
        # The one that goes on, and for how many rounds yet.
        self._going_on: DraftShape | None = None
        self._left = 0
        self._rounds, self._seconds, self._lost = 0, 0.0, 0.0

    def first(
        self,
        count: Callable[[DraftShape], int],
        seconds: Callable[[DraftShape], float],
        tokens: Callable[[DraftShape], float],
        room: int,
    ) -> DraftShape | None:
        """What has to be known before anything is chosen; None where all of it is, or no more can be told now.

        Args:
            count: tells how often a shape was timed.
            seconds: tells how long a round of one takes.
            tokens: tells how many are to be expected of a round of one.
            room: the most steps of a draft that can be timed.
        """
        if self._has_tried_all:
            return None
        is_dear = self._short.nodes == 1 and count(ALONE) > 0 and seconds(self._short) > _DEAR * seconds(ALONE)
        for shape, enough in self._first:
            if shape.steps > room:
                continue
            # Whether it would pay if it took no longer than a short draft.
            may_pay = count(ALONE) > 0 and tokens(shape) * seconds(ALONE) > seconds(self._short)
            is_left_out = is_dear and not may_pay and shape.steps > 1
            if count(shape) < (enough if may_pay else 1) and not is_left_out:
                return shape
            if shape == ALONE:
                alone, short = seconds(ALONE), seconds(self._short)
                if alone > _SURPRISINGLY_LONG * short and count(ALONE) < 2:
                    return ALONE
                if short > (1 + self._short.steps) * alone:
                    # Drafting a token takes longer than the target alone: hardly anything longer can be worth it.
                    # Unless it was a stall, which one more may tell.
                    if self._has_tried_again or count(self._short) > 1 or tokens(self._short) <= _MISSED:
                        return None
                    self._has_tried_again = True
                    return self._short
        self._has_tried_all = all(count(shape) >= enough for shape, enough in self._first)
        return None

    def go_on(self) -> DraftShape | None:
        """What is drafted in the next round of a trial that goes on, if any does."""
        if not self._left:
            return None
        self._left -= 1
        return self._going_on

    def begin(
        self,
        speeds: Mapping[DraftShape, float],
        best: DraftShape,
        tokens: float,
    ) -> DraftShape | None:
        """A shape to draft in place of the best one, if there is one to try now.

        Args:
            speeds: tokens per second to expect of each.
            best: the one that is chosen.
            tokens: to expect of a round of it.
        """
        least, most = _RIVALS_AGAIN_AFTER if tokens < _FEW_TOKENS else _OTHERS_AGAIN_AFTER
        after = min(max(self._alone_again_after, least), most)
        if ALONE in speeds and self._rounds - self._alone_at > after:
            self._alone_again_after = 2 * after
            return ALONE
        if self._lost > self._seconds * (_SHARE_OF_TRIALS - _LOST_BY_TRIAL / max(1, self._rounds)):
            return None
        return self._of_policy(speeds, best)

    def _of_policy(self, speeds: Mapping[DraftShape, float], best: DraftShape) -> DraftShape | None:
        """One of a policy that was never tried, or not for long."""
        if self._never:
            policy = self._never.pop(0)
            own = [one for one in speeds if one.steps and one.policy == policy]
            trial = min(own, key=lambda one: (abs(one.steps - _STEPS_OF_POLICY_TRIAL), one.nodes))
            self._try(trial, _ROUNDS_OF_POLICY_TRIAL)
            return trial
        for policy in range(self._policies):
            if policy == best.policy:
                continue
            own = max((one for one in speeds if one.steps and one.policy == policy), key=speeds.get)
            is_rival = speeds[own] > _NEAR_RIVAL * speeds[best]
            least, most = _RIVALS_AGAIN_AFTER if is_rival else _OTHERS_AGAIN_AFTER
            after = min(max(self._again_after[policy], least), most)
            if self._rounds - self._tried_at[policy] > after:
                self._again_after[policy] = 2 * after
                self._try(own, _ROUNDS_OF_RIVAL if is_rival else _ROUNDS_OF_POLICY_TRIAL)
                return own
        return None

    def _try(self, shape: DraftShape, rounds: int) -> None:
        self._going_on, self._left = shape, rounds - 1

    def record(self, shape: DraftShape, seconds: float, lost: float) -> None:
        """A round is over.

        Args:
            shape: what it drafted.
            seconds: how long it took.
            lost: how many of them it took longer than the best one would have for as many tokens.
        """
        self._rounds += 1
        self._seconds += seconds
        self._lost = max(0.0, self._lost + lost)
        if shape == ALONE:
            self._alone_at = self._rounds
        else:
            self._tried_at[shape.policy] = self._rounds


def _first_trials(shapes: tuple[DraftShape, ...]) -> tuple[tuple[DraftShape, int], ...]:
    """What is tried before anything else, in this order, and how often: enough to tell what a draft step costs, and a
    node of a tree. The first is short, so that there always is room for it, and little is lost where a target is as
    small as its drafter."""
    if are_chains(shapes):
        steps = min(4, max(shape.steps for shape in shapes))
        return ((DraftShape(1, 1), 1), (ALONE, 1), (DraftShape(steps, steps), 2))
    sizes = sorted({shape.nodes for shape in shapes})
    small = sizes[len(sizes) // 2 - 1] if len(sizes) > 1 else sizes[0]
    deep = max(shape for shape in shapes if shape.nodes == small)
    shallow = DraftShape(1, small)
    large = max(shape for shape in shapes if shape.nodes == sizes[-1])
    return ((shallow, 1), (ALONE, 1), (deep, 2), (large, 2))
