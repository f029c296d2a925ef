"""The shapes of draft trees as the texts of a command line: `60/5/10`, or `default`."""

import re
from collections.abc import Sequence

from ..errors import ConfigurationError
from ..tree_config import TreeConfig

_SHAPE = re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})", re.ASCII)


def parse_tree(text: str) -> TreeConfig:
    """Make the shape that a text describes: `total_tokens/depth/top_k`, or `default` for `TreeConfig()`.

    Raises:
        ConfigurationError: the text is neither, or a number is out of range.
    """
    if text == "default":
        return TreeConfig()
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"tree {text!r}: write total_tokens/depth/top_k, such as 60/5/10, or default")
    return TreeConfig(*map(int, match.groups()))


def format_tree(tree: TreeConfig) -> str:
    """The text of a shape, as `parse_tree` reads it."""
    return f"{tree.total_tokens}/{tree.depth}/{tree.top_k}"


def parse_trees(trees: Sequence[str | TreeConfig]) -> list[TreeConfig]:
    """The shapes, each of which may be given as a text. Raises `ConfigurationError` if a text is no shape, a value is
    neither, or a shape is given twice."""
    shapes: list[TreeConfig] = []
    for given in trees:
        if not isinstance(given, str | TreeConfig):
            raise ConfigurationError(f"a tree must be a text such as 60/5/10 or a TreeConfig, got {given!r}")
        shape = parse_tree(given) if isinstance(given, str) else given
        if shape in shapes:
            raise ConfigurationError(f"the tree {format_tree(shape)} is given twice")
        shapes.append(shape)
    return shapes
