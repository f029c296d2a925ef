"""SGLang's `--speculative-token-map`, which FR-Spec's own code reads too."""

from pathlib import Path

import torch

from ...errors import ArtifactError
from ...files import replacing
from ..frequency_list import import_frequency_list
from .static import StaticShortlist


def write_token_map(path: str | Path, shortlist: StaticShortlist) -> int:
    """Write a list of token ids as SGLang loads it: `torch.load(path, weights_only=True)` gives ids, which it takes as
    the rows of the target's LM head that an EAGLE-2 head may draft, row by row.

    The file is read back, by those rules, before it takes its place: an export that fails or is interrupted leaves no
    file, or the one that was there. The same list gives the same bytes.

    Args:
        path: the file to write; missing folders are made.
        shortlist: which tokens.

    Returns:
        How many ids were written.

    Raises:
        ConfigurationError: as `StaticShortlist.token_ids`.
        OSError: the file cannot be written.
    """
    path = Path(path)
    ids = shortlist.token_ids().tolist()
    with replacing(path) as scratch:
        try:
            # Into a stream, as torch writes the name of a file into it.
            with scratch.open("wb") as stream:
                torch.save(ids, stream)
        except RuntimeError as error:  # what torch makes of a write that the system refuses, without its number
            problem = next(iter(str(error).splitlines()), type(error).__name__)
            raise OSError(f"{path} could not be written, most often for want of space: {problem}") from error
        if import_frequency_list(scratch, shortlist.tokenizer.size, field=path.name) != ids:
            raise ArtifactError(path.name, "was not read back as it was written", "Write it to another disk.")
    return len(ids)
