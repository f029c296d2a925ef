"""How often drafted tokens were accepted of late, and how many tokens rounds can be expected to bring by that."""

from .draft_shapes import ALONE, LONGEST, DraftShape

# Rounds with a draft in which an acceptance is forgotten by half.
_HALF_LIFE = 48
# How many rounds a guess at an acceptance counts for: that of the step before it, and this for the first step.
_ROUNDS_OF_GUESS = 1
_FIRST_GUESS = 0.7


class RunningAcceptance:
    """How often a token of a draft step was accepted where one of the step before it was, the latest rounds first.

    Args:
        tree_sizes: nodes of the trees that there are, whose acceptances differ; empty for chains, which share theirs.
    """

    def __init__(self, tree_sizes: set[int]):
        # By the nodes of a tree, 0 for chains: accepted and asked, for each draft step.
        self._counts = {size: ([0.0] * LONGEST, [0.0] * LONGEST) for size in tree_sizes or {0}}
        self._decay = 0.5 ** (1 / _HALF_LIFE)

    def add(self, shape: DraftShape, accepted: int) -> None:
        """A round is over. A draft that ended early and was accepted as a whole was not accepted any further."""
        self._scale(self._decay)
        hits, asked = self._counts.get(shape.nodes) or self._counts[0]
        for step in range(min(shape.steps, accepted + 1)):
            asked[step] += 1.0
            hits[step] += step < accepted

    def fade_to(self, rounds: float) -> None:
        """Let all that was counted count for no more than so many rounds."""
        most = max(asked[0] for _, asked in self._counts.values())
        if most > rounds:
            self._scale(rounds / most)

    def _scale(self, factor: float) -> None:
        for counts in self._counts.values():
            for numbers in counts:
                numbers[:] = [factor * number for number in numbers]

    def expected_tokens(self) -> dict[DraftShape, float]:
        """`Ω` of every shape: the tokens that a round of it can be expected to bring, with the target's own."""
        expected = {ALONE: 1.0}
        for size, (hits, asked) in self._counts.items():
            tokens = reached = 1.0
            guess = _FIRST_GUESS
            for step in range(LONGEST):
                if size and not asked[step]:
                    guess = self._of_other_sizes(step, guess)
                guess = (hits[step] + _ROUNDS_OF_GUESS * guess) / (asked[step] + _ROUNDS_OF_GUESS)
                reached *= guess
                tokens += reached
                expected[DraftShape(step + 1, size or step + 1)] = tokens
        return expected

    def _of_other_sizes(self, step: int, guess: float) -> float:
        hits = sum(counts[0][step] for counts in self._counts.values())
        asked = sum(counts[1][step] for counts in self._counts.values())
        return (hits + _ROUNDS_OF_GUESS * guess) / (asked + _ROUNDS_OF_GUESS)
