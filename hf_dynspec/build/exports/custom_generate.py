"""A folder for the Hub with which transformers alone drafts from an artifact's shortlist.

`generate(custom_generate="me/repository", trust_remote_code=True)` runs `custom_generate/generate.py` of a repository,
which transformers copies out of it without any other file. So that file holds all: code, which is this package's own
`shortlist_generate.py`, and the shortlist, as text. Nothing of it comes out of the artifact but token ids.
"""

import base64
import runpy
import textwrap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from ...artifacts.config import DynSpecConfig
from ...errors import ArtifactError
from ...files import replacing
from .static import StaticShortlist

CODE_FILE = "custom_generate/generate.py"
REQUIREMENTS_FILE = "custom_generate/requirements.txt"
CARD_FILE = "README.md"
FILES = (CODE_FILE, REQUIREMENTS_FILE, CARD_FILE)

_CODE = Path(__file__).with_name("shortlist_generate.py")
_CARD = Path(__file__).with_name("custom_generate_card.md")
# Of transformers, as this package itself asks for it.
_REQUIREMENTS = "torch\ntransformers>=5.20\n"
_LINE = 100


def write_custom_generate(folder: Path, shortlist: StaticShortlist, repo_id: str | None = None) -> int:
    """Write the folder. Each file appears in one step, and the code, which is what others look for, last.

    Args:
        folder: made if needed.
        shortlist: which tokens the drafter may propose.
        repo_id: where it is going to be published, for the usage on its card (None: not known yet).

    Returns:
        How many tokens there are in the shortlist.

    Raises:
        ConfigurationError: as `StaticShortlist.token_ids`.
        ArtifactError: the code was not read back with the shortlist that it was written with.
        OSError: a file cannot be written.
    """
    ids = shortlist.token_ids().sort().values
    card = _card(shortlist, ids.numel(), repo_id)
    texts = {CARD_FILE: card, REQUIREMENTS_FILE: _REQUIREMENTS, CODE_FILE: _code(ids, shortlist.tokenizer.size)}
    for name, text in texts.items():
        with replacing(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
            if name == CODE_FILE and _ids_of(scratch) != ids.tolist():
                raise ArtifactError(name, "was not read back as it was written", "Write it to another disk.")
    return ids.numel()


def _code(ids: torch.Tensor, vocabulary_size: int) -> str:
    places = torch.zeros(-(-vocabulary_size // 8) * 8, dtype=torch.uint8)
    places[ids] = 1
    places = (places.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)
    encoded = base64.b64encode(zlib.compress(bytes(places.tolist()), 9)).decode("ascii")
    lines = "\n".join(f'    "{line}"' for line in textwrap.wrap(encoded, _LINE))
    code = _CODE.read_text(encoding="utf-8")
    for empty, filled in {
        "VOCABULARY_SIZE = 0\n": f"VOCABULARY_SIZE = {vocabulary_size}\n",
        'SHORTLIST = ""\n': f"SHORTLIST = (\n{lines}\n)\n",
    }.items():
        before, after = code.split(empty)
        code = before + filled + after
    return code


def _ids_of(path: Path) -> list[int]:
    """What the code that was just written, which is this package's own, makes of its shortlist."""
    return runpy.run_path(str(path))["_token_ids"]().tolist()


def _card(shortlist: StaticShortlist, size: int, repo_id: str | None) -> str:
    config = shortlist.config
    target, drafter = (one.hub_id if one else None for one in (config.target, config.drafter))
    card = ModelCard.from_template(
        _card_data(config, target, drafter),
        template_path=str(_CARD),
        location=repo_id or "path/to/this/folder",
        name=repo_id or "Assisted generation with a shortlist",
        target=target or "path/to/target",
        drafter=drafter or "path/to/drafter",
        size=f"{size:,}",
        vocabulary=f"{shortlist.tokenizer.size:,}",
        digest=shortlist.tokenizer.sha256,
    )
    return str(card).rstrip("\n") + "\n"


def _card_data(config: DynSpecConfig, target: str | None, drafter: str | None) -> ModelCardData:
    license_id = config.provenance.get("license")
    optional: Mapping[str, Any] = {
        "base_model": [one for one in (target, drafter) if one],
        "license": license_id if isinstance(license_id, str) and license_id.isprintable() else None,
    }
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["custom_generate", "speculative-decoding", "assisted-generation"],
        **{key: value for key, value in optional.items() if value},
    )
