"""How often drafted tokens were accepted of late, and how many tokens rounds can be expected to bring by that."""

from .draft_shapes import LONGEST, DraftShape

# Rounds with a draft in which an acceptance is forgotten by half.
_HALF_LIFE = 96
# How likely the first token is accepted before anything is known, and how many rounds this guess counts for.
_FIRST_GUESS, _ROUNDS_OF_FIRST_GUESS = 0.7, 1
# How many rounds the guess counts for that a token is accepted as likely as one of the step before it. Drafts are long
# where they are good, so that later steps alone would promise more than they bring.
_ROUNDS_OF_GUESS = 10
# Larger trees miss less often: by the size to minus this power, as long as those of a size were hardly seen. Rather
# too much than too little: a size that promises more than it brings is drafted and found out, one that promises less
# never is.
_MISSES_BY_SIZE = 0.2
# How many tokens the guess counts for that a policy's drafts are accepted like all others, and after how many rounds
# what is known of that is forgotten by half. Most policies differ by a few hundredths, which is the luck of a few
# hundred rounds; but one that brings a quarter less has to be found out by its trials.
_TOKENS_OF_LIKENESS = 500.0
_HALF_LIFE_OF_GAIN = 1024


class RunningAcceptance:
    """How often a token of a draft step was accepted where one of the step before it was, the latest rounds first.

    Args:
        tree_sizes: nodes of the trees that there are, whose acceptances differ; empty for chains, which share theirs.
        policies: how many the drafts are made with. They share all, but for what one is told to bring more or less.
    """

    def __init__(self, tree_sizes: set[int], policies: int = 1):
        # By the nodes of a tree, 0 for chains: accepted and asked, for each draft step.
        self._counts = {size: ([0.0] * LONGEST, [0.0] * LONGEST) for size in tree_sizes or {0}}
        # By the nodes of a tree: the tokens to expect, as long as nothing is added.
        self._tokens: dict[int, list[float]] = {}
        self._decay = 0.5 ** (1 / _HALF_LIFE)
        # Of each policy the tokens that it brought, and those that were to be expected.
        self._brought, self._expected = [0.0] * policies, [0.0] * policies

    def add(self, shape: DraftShape, accepted: int) -> None:
        """A round is over. A draft that ended early and was accepted as a whole was not accepted any further."""
        if len(self._brought) > 1:
            self._compare(shape, accepted)
        self._scale(self._decay)
        hits, asked = self._counts.get(shape.nodes) or self._counts[0]
        for step in range(min(shape.steps, accepted + 1)):
            asked[step] += 1.0
            hits[step] += step < accepted

    def _compare(self, shape: DraftShape, accepted: int) -> None:
        """Remember what a round brought beside what was to be expected of it, whatever its policy."""
        expected = self._tokens_of_shape(shape)
        decay = 0.5 ** (1 / _HALF_LIFE_OF_GAIN)
        self._brought = [decay * tokens for tokens in self._brought]
        self._expected = [decay * tokens for tokens in self._expected]
        self._brought[shape.policy] += accepted + 1
        self._expected[shape.policy] += expected

    def _gain(self, policy: int) -> float:
        """How many times as many tokens a policy brings as all of them do."""
        brought, expected = self._brought[policy], self._expected[policy]
        return (brought + _TOKENS_OF_LIKENESS) / (expected + _TOKENS_OF_LIKENESS)

    def expected_tokens(self, shape: DraftShape) -> float:
        """`Ω`: the tokens that a round of a shape can be expected to bring, with the target's own."""
        if not shape.steps:
            return 1.0
        return self._tokens_of_shape(shape) * self._gain(shape.policy)

    def _tokens_of_shape(self, shape: DraftShape) -> float:
        """The same, whatever the policy."""
        size = shape.nodes if shape.nodes in self._counts else 0
        tokens = self._tokens.get(size)
        if tokens is None:
            tokens = self._tokens[size] = self._tokens_by_steps(size)
        return tokens[shape.steps]

    def _tokens_by_steps(self, size: int) -> list[float]:
        hits, asked = self._counts[size]
        reached, guess, rounds, tokens = 1.0, _FIRST_GUESS, _ROUNDS_OF_FIRST_GUESS, [1.0]
        for step in range(LONGEST):
            if size:
                guess, rounds = self._of_all_sizes(step, size, guess, rounds), _ROUNDS_OF_GUESS
            guess = (hits[step] + rounds * guess) / (asked[step] + rounds)
            rounds = _ROUNDS_OF_GUESS
            reached *= guess
            tokens.append(tokens[-1] + reached)
        return tokens

    def _of_all_sizes(self, step: int, size: int, guess: float, rounds: float) -> float:
        """The acceptance of trees of a size as all of them tell it, those of other sizes by what sizes differ in."""
        misses, all_asked = rounds * (1.0 - guess), rounds
        for other, (hits, asked) in self._counts.items():
            misses += (asked[step] - hits[step]) * (other / size) ** _MISSES_BY_SIZE
            all_asked += asked[step]
        return max(0.0, 1.0 - misses / all_asked)

    def fade_to(self, rounds: float) -> None:
        """Let all that was counted count for no more than so many rounds."""
        most = max(asked[0] for _, asked in self._counts.values())
        if most > rounds:
            self._scale(rounds / most)

    def _scale(self, factor: float) -> None:
        self._tokens.clear()
        for counts in self._counts.values():
            for numbers in counts:
                numbers[:] = [factor * number for number in numbers]
