"""How long drafting that loses rests until it is tried again, so that trying costs next to nothing."""

# Tokens until drafting is tried again. Each time that it loses still they are so many times as many. Where next to
# nothing is accepted one missed draft ends a trial, so that it costs little and the next one may come soon: what
# decided for the rest may have been bad luck with a few drafts.
_SHORTEST_REST, _LONGEST_REST, _LONGER_EACH_TIME = 12, 256, 1.25
# They are also as many as it takes for the trials to cost no more than this share of the time, unless drafting has
# gained more than they cost: a larger one for the first trial, and for a few where one costs less than such a part of
# what a token takes without drafts. A few drafts at the beginning of a text tell little, and much is lost where they
# were bad luck.
_SHARE_OF_TRIALS, _SHARE_OF_FIRST_TRIALS = 0.01, 0.025
_FIRST_CHEAP_TRIALS, _CHEAP = 3, 0.75
# Where the latest trial cost more than those before, so much of that is paid for by the next rest, and what is left by
# later ones: a stall tells little of trials to come.
_LATEST_TRIAL = 0.125
# The most that a trial is taken to cost: so many tokens without drafts, or so many times what those before it did.
_MOST_OF_TRIAL, _MOST_SURPRISE = 256, 4
# Tokens whose features a head is given to begin with, when drafting is tried again in the midst of a text.
FEATURES_BEFORE_RETRIAL = 64


class Rests:
    """The rests of drafting under one setting, and the trials between them. Shared between threads only in what it
    tells of the rest that goes on."""

    def __init__(self):
        # Tokens to generate alone before drafting is tried again, None while it is not resting; and how many were.
        self._tokens: int | None = None
        self._rested = 0
        # Trials that lost, one after the other.
        self._trials = 0
        # How long a rest is that nothing has to be paid for by, and that the latest trial is paid for by.
        self._usual = self._pays = 0
        # The seconds that are lost by the trial that goes on, and those that one is taken to lose.
        self._lost = self._lost_by_trial = 0.0
        # Seconds that drafting has gained so far, and that it had when the latest rest was over, and when rests were
        # halved last.
        self._gained = self._gained_at_end = self._gained_at_halving = 0.0

    @property
    def is_resting(self) -> bool:
        """Whether nothing is drafted now."""
        # Looked up once, as another call may end the rest meanwhile.
        tokens = self._tokens
        return tokens is not None and self._rested < tokens

    @property
    def reads_features(self) -> bool:
        """Whether a head that reads the target's features has to be given those of the tokens that come now."""
        tokens = self._tokens
        return tokens is None or tokens - self._rested <= FEATURES_BEFORE_RETRIAL

    @property
    def have_ended(self) -> bool:
        """Whether drafting goes on: it was not found to lose, or not when it was tried last."""
        return self._tokens is None

    def begin_call(self) -> None:
        """Another call begins: how often drafting has lost in other texts tells half as much of this one, where it has
        gained since rests were halved last."""
        if self._gained > self._gained_at_halving:
            self._usual //= 2
            self._gained_at_halving = self._gained

    def add(self) -> None:
        """A token was generated while drafting rests."""
        self._rested += 1

    def gain(self, seconds: float) -> None:
        """A round has gained so many seconds by drafting, or lost them."""
        self._gained += seconds

    def begin(self, lost: float, alone: float) -> None:
        """Drafting was found to lose, and rests.

        Where it has gained nothing since the last rest, that one has ended by mistake: this one is longer.

        Args:
            lost: seconds that a round with a draft takes longer than the target alone.
            alone: seconds that this one takes.
        """
        if self._gained > self._gained_at_end:
            self._usual = self._trials = 0
        self._lost_by_trial = max(self._lost_by_trial, lost)
        self._rest(alone)

    def try_again(self) -> None:
        """A trial begins."""
        self._lost = 0.0

    def lose(self, seconds: float) -> None:
        """A round of a trial has lost so many seconds."""
        self._lost += max(0.0, seconds)

    def go_on(self, alone: float) -> None:
        """The trial is over, and drafting rests once more.

        Args:
            alone: seconds that a token takes without drafts.
        """
        lost = min(self._lost, max(_MOST_OF_TRIAL * alone, _MOST_SURPRISE * self._lost_by_trial))
        self._lost_by_trial += _LATEST_TRIAL * (lost - self._lost_by_trial)
        self._trials += 1
        self._rest(alone)

    def _rest(self, alone: float) -> None:
        """Rest for as long as usual, and at least as long as pays for a trial; at most as long where drafting has
        gained more than one loses."""
        first = _FIRST_CHEAP_TRIALS if self._lost_by_trial < _CHEAP * alone else 1
        share = _SHARE_OF_FIRST_TRIALS if self._trials < first else _SHARE_OF_TRIALS
        pays = self._pays = max(_SHORTEST_REST, int(self._lost_by_trial / (alone * share)))
        longer = max(_SHORTEST_REST, int(_LONGER_EACH_TIME * self._usual))
        self._usual = min(longer, max(_LONGEST_REST, pays))
        has_gained = self._gained > self._lost_by_trial
        self._tokens, self._rested = min(self._usual, pays) if has_gained else max(self._usual, pays), 0

    def forget(self) -> None:
        """What drafting has lost was the fault of stalls: it tells nothing of trials to come."""
        self._usual, self._lost_by_trial = 0, 0.0

    def hasten(self) -> None:
        """How often drafting has lost tells nothing any more: it is tried again as soon as that is paid for."""
        self._usual = 0
        if self._tokens is not None:
            self._tokens = min(self._tokens, self._pays)

    def end(self, is_new: bool = False) -> None:
        """Drafting is worth its time again.

        Args:
            is_new: for another reason than that it was tried, so that how often it has lost tells nothing any more.
        """
        if self._tokens is not None:
            self._gained_at_end = self._gained
        if is_new:
            self._usual = self._trials = 0
        self._tokens, self._rested = None, 0
