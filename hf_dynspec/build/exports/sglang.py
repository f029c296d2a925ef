"""SGLang's `--speculative-token-map`, which FR-Spec's code reads too."""

from pathlib import Path

import torch

from ...errors import ArtifactError
from ...files import replacing
from ..frequency_list import import_frequency_list
from .static import StaticShortlist


def write_token_map(path: str | Path, shortlist: StaticShortlist) -> int:
    """Write token ids as SGLang loads them, by `torch.load(path, weights_only=True)`: the rows of the target's LM head
    for an EAGLE-2 head. The file is read back by those rules before it takes its place. Equal lists give equal bytes.
    Returns the number of ids.

    Raises:
        ConfigurationError: as `StaticShortlist.token_ids`.
        OSError: the file cannot be written.
    """
    path, ids = Path(path), shortlist.token_ids().tolist()
    with replacing(path) as scratch:
        try:
            with scratch.open("wb") as stream:  # a stream, as torch writes the name of a file into it
                torch.save(ids, stream)
        except RuntimeError as error:  # how torch reports a failed write
            problem = next(iter(str(error).splitlines()), type(error).__name__)
            raise OSError(f"{path} could not be written, most often for want of space: {problem}") from error
        if import_frequency_list(scratch, shortlist.tokenizer.size, field=path.name) != ids:
            raise ArtifactError(path.name, "was not read back as it was written", "Write it to another disk.")
    return len(ids)
