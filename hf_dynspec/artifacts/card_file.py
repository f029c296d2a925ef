"""The model card in a folder, which somebody may have edited: such a card is kept."""

import os
import re
from pathlib import Path

from ..errors import ArtifactError
from ..files import is_there, read_file, require_own_file
from .card import is_unedited_card, render_card
from .config import CARD_FILE, DynSpecConfig

LARGEST_CARD = 2**22

# All but the white space that text files have.
_CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")


def card_to_publish(directory: str | os.PathLike, config: DynSpecConfig, repo_id: str) -> str:
    """The model card that `push_artifact` uploads, unless somebody edited the one on the Hub: the folder's own if that
    was edited, or a generated one.

    Raises:
        ArtifactError: the folder's own is a link, not a file, too large, not UTF-8, or holds what steers terminals.
    """
    path = Path(directory, CARD_FILE)
    text = _read_card(path) if is_there(path) else None
    return render_card(config, repo_id) if text is None or is_unedited_card(text) else text


def may_replace_card(path: Path) -> bool:
    """Whether there is no card, or one that `render_card` made. What cannot be read as a card is somebody's own."""
    if not is_there(path):
        return True
    try:
        return is_unedited_card(_read_card(path))
    except ArtifactError:
        return False


def _read_card(path: Path) -> str:
    """The text of a card that somebody may have edited.

    Raises:
        ArtifactError: it is a link, not a file, too large, not UTF-8, or holds what steers terminals.
    """
    require_own_file(path, CARD_FILE)
    return _decoded_card(read_file(path, CARD_FILE, LARGEST_CARD))


def _decoded_card(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(CARD_FILE, f"is not UTF-8 text: {error.reason}", "Save it as UTF-8.") from error
    steering = _CONTROL_CHARACTER.search(text)
    if steering:
        problem = f"holds the control character {steering[0]!r}, which steers the terminals it is shown on"
        raise ArtifactError(CARD_FILE, problem, "Remove it.")
    return text
