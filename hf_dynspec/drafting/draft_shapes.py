"""The shapes of draft that automatic drafting chooses from. Plain data: importing this module does not load torch."""

from collections.abc import Sequence
from typing import NamedTuple

from .tree_config import TreeConfig

# The longest chains, and paths of trees, that are thought of: at an acceptance of 0.9 the twelfth token is reached in
# one round of three.
LONGEST = 12
# Sizes of trees that are thought of: the given one, and halves of it.
_TREE_SIZES = 4


class DraftShape(NamedTuple):
    """What one round drafts.

    Attributes:
        steps: draft steps; 0 where the target generates alone.
        nodes: tokens drafted: as many as steps in a chain, more in a tree.
        policy: what they are drafted with: the number of a policy among those that there are to choose from.
    """

    steps: int
    nodes: int
    policy: int = 0


ALONE = DraftShape(0, 0)


def shapes_of(tree: TreeConfig | None, ends_early: bool = False) -> tuple[DraftShape, ...]:
    """The shapes to choose from, `ALONE` not among them: chains, or trees of at most the given size and depth; one
    chain where it ends early by itself."""
    if ends_early:
        return (DraftShape(LONGEST, LONGEST),)
    if tree is None:
        return tuple(DraftShape(steps, steps) for steps in range(1, LONGEST + 1))
    deepest, largest = min(tree.depth + 1, LONGEST), tree.total_tokens - 1
    sizes = {largest >> halving for halving in range(_TREE_SIZES)}
    return tuple(DraftShape(steps, size) for size in sorted(sizes) for steps in range(1, min(deepest, size) + 1))


def shape_of(num_assistant_tokens: int, tree: TreeConfig | None) -> DraftShape:
    """The shape of what is drafted where that is settled, as far as it is told apart from others."""
    if tree is not None:
        return shapes_of(tree)[-1]
    steps = min(num_assistant_tokens, LONGEST)
    return DraftShape(steps, steps)


def are_chains(shapes: Sequence[DraftShape]) -> bool:
    """Whether all of these are chains."""
    return all(shape.nodes == shape.steps for shape in shapes)
