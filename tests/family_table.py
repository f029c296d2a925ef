"""What each family of transformers can do here, as docs/families.md shows it. Every cell was tried on a tiny model.

python tests/family_table.py docs/families.md
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import families
import image_models
import transformers
from models import prompt, tiny
from test_all_families import WellInformed
from transformers import PreTrainedModel

from hf_dynspec import DynSpecAssistant, TreeConfig, UnsupportedError
from hf_dynspec.drafters import CausalLMDrafter

INTRODUCTION = """# Which models work?

Every family of transformers {version} with a decoder of text was tried as a target and as an independent drafter, on
tiny random models: in chains and trees, and as the target of a batch in one memory. A cell without "yes" gives the
reason of the error in a few words. `tests/generation/test_all_families.py` and `tests/generation/test_images.py`
compare the outputs with plain `generate`'s, token by token. `tests/family_table.py` writes this page.

Older releases of transformers, from 5.20 on, can be used too (`make test-oldest`). With them the package refuses
several families with recurrent states, and batches of GPT-J.
"""
YES = "yes"
HEADER = ["family", "target: chains", "trees", "batches", "drafter: chains", "trees"]
# Parts of messages, and what a cell says for them.
REASONS = {
    "caches more than keys and values": "states beside keys",
    "after several tokens read at once": "misreads several tokens",
    "keeps a recurrent state in": "state elsewhere",
    "recurrent state": "recurrent",
    "convolutions": "convolutions",
    "of the kind conv": "convolutions",
    "keys and values of images": "images in the cache",
    "between its decoder and its logits": "its head does more",
    "keeps no cache": "no cache",
    "cache of its own": "its own cache",
    "ignores its cache": "no cache",
    "cannot be rolled back": "cannot roll back",
    "no tree mask": "no tree mask",
    "changes with the others beside it": "branches mix",
    "branches change each other": "branches mix",
    "cannot read the texts of a batch": "no fixed memory",
    "when its texts lie in memory of fixed size": "no fixed memory",
    "rotary embedding that changes": "changing rope",
}


def outcome(attempt: Callable[[], object]) -> str:
    """What a cell says of an attempt."""
    try:
        attempt()
    except UnsupportedError as error:
        return next(says for part, says in REASONS.items() if part in str(error))
    return YES


def row_of(model: PreTrainedModel) -> list[str]:
    """The cells of a family."""
    tree, made = TreeConfig(total_tokens=16, depth=3, top_k=4), {}

    def target(shape: TreeConfig | bool) -> None:
        DynSpecAssistant(WellInformed(prompt()[0]), target=model, tree=shape).unbind()

    def batch() -> None:
        assistant = DynSpecAssistant(WellInformed(prompt()[0]), target=model)
        try:
            assistant.forward.require_batches()
        finally:
            assistant.unbind()

    def drafter(shape: TreeConfig | bool) -> None:
        if "drafter" not in made:
            made["drafter"] = CausalLMDrafter(model)
        if shape:
            made["drafter"].require_trees()

    attempts = (lambda: target(False), lambda: target(tree), batch, lambda: drafter(False), lambda: drafter(tree))
    return [outcome(one) for one in attempts]


def table(rows: dict[str, list[str]]) -> str:
    """A table in Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *([f"`{name}`", *cells] for name, cells in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def page() -> str:
    """The page."""
    of_text = {name: row_of(families.model_of(name)) for name in sorted(families.SETTINGS)}
    of_images = {name: row_of(image_models.model_of(name)) for name in sorted(image_models.FAMILIES)}
    version = ".".join(transformers.__version__.split(".")[:2])
    parts = [
        INTRODUCTION.format(version=version),
        "## Text\n",
        table(of_text),
        "## Images and text\n\nAs a drafter such a model reads text.\n",
        table(of_images),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    tiny()
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
