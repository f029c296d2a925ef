"""A folder for the Hub with which transformers alone drafts from an artifact's shortlist.

`generate(custom_generate="me/repository", trust_remote_code=True)` runs `custom_generate/generate.py` of a repository,
which transformers copies without any other file. So that file holds this package's own `shortlist_generate.py` and the
shortlist as text. Only token ids come out of the artifact.
"""

import base64
import runpy
import textwrap
import zlib
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData

from ...errors import ArtifactError
from ...files import replacing
from . import CARD_FILE, CODE_FILE, REQUIREMENTS_FILE
from .static import StaticShortlist

_CODE = Path(__file__).with_name("shortlist_generate.py")
_CARD = Path(__file__).with_name("custom_generate_card.md")
_REQUIREMENTS = "torch\ntransformers>=5.20\n"  # as setup.cfg


def write_custom_generate(folder: Path, shortlist: StaticShortlist, repo_id: str | None = None) -> int:
    """Write the folder, which is made if needed, for a repository's name or None. Each file appears in one step, and
    the code last. Returns the number of tokens in the shortlist.

    Raises:
        ConfigurationError: as `StaticShortlist.token_ids`.
        ArtifactError: the code was read back with another shortlist.
    """
    ids = shortlist.token_ids().sort().values
    card = _card(shortlist, ids.numel(), repo_id)
    texts = {CARD_FILE: card, REQUIREMENTS_FILE: _REQUIREMENTS, CODE_FILE: _code(ids, shortlist.tokenizer.size)}
    for name, text in texts.items():
        with replacing(folder / name) as scratch:
            scratch.write_text(text, encoding="utf-8")
            if name == CODE_FILE and runpy.run_path(str(scratch))["_token_ids"]().tolist() != ids.tolist():
                raise ArtifactError(name, "was not read back as it was written", "Write it to another disk.")
    return ids.numel()


def _code(ids: torch.Tensor, vocabulary_size: int) -> str:
    places = torch.zeros(-(-vocabulary_size // 8) * 8, dtype=torch.uint8)
    places[ids] = 1
    places = (places.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8)
    encoded = base64.b64encode(zlib.compress(bytes(places.tolist()), 9)).decode("ascii")
    lines = "\n".join(f'    "{line}"' for line in textwrap.wrap(encoded, 100))
    code = _CODE.read_text(encoding="utf-8")
    for empty, filled in {
        "VOCABULARY_SIZE = 0\n": f"VOCABULARY_SIZE = {vocabulary_size}\n",
        'SHORTLIST = ""\n': f"SHORTLIST = (\n{lines}\n)\n",
    }.items():
        before, after = code.split(empty)
        code = before + filled + after
    return code


def _card(shortlist: StaticShortlist, size: int, repo_id: str | None) -> str:
    config = shortlist.config
    target, drafter = (one.hub_id if one else None for one in (config.target, config.drafter))
    license_id, models = config.provenance.get("license"), [one for one in (target, drafter) if one]
    optional = {"base_model": models} if models else {}
    if isinstance(license_id, str) and license_id.isprintable():
        optional["license"] = license_id
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["custom_generate", "speculative-decoding", "assisted-generation"],
            **optional,
        ),
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
