"""The files of a trained drafter: its weights in 16 bits, and a card that says where they come from."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from ..artifacts.config import CARD_FILE, LIBRARY_NAME, ModelReference
from ..build.corpus import Corpus
from ..build.drafter_job import TrainedDrafter
from ..build.drafter_losses import TEMPERATURE
from ..drafters import CausalLMDrafter, EagleDrafter
from ..drafters.eagle.checkpoint import write_checkpoint
from ..errors import shown_text
from ..evaluation.provenance import versions
from ..files import replacing

_CARD = """---
{metadata}
---

# {title}

{about}, for speculative decoding with `hf_dynspec`. The target verifies every token, so the output is the target's
own.

Install `hf_dynspec` by `pip install git+<its repository>`.

```python
{usage}
```

## At held-out texts

{figures}

A round of chains of {depth} is expected to give **{length:.2f} tokens** at temperature {temperature}, the target's own
one included. That holds for texts like the ones that it was trained on; `hf-dynspec bench` measures it on prompts.

## How it was made

```bash
{command}
```

{provenance}
"""
_LOADING = {
    "eagle": 'drafter = EagleDrafter.from_pretrained("path/to/this/folder", target=target)',
    "drafter": 'drafter = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype=target.dtype)',
}


def digest_of(corpus: Corpus) -> str:
    """The SHA-256 of the contents of all files."""
    digest = hashlib.sha256()
    for file in corpus.files:
        with open(file.path, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def write_drafter(
    out: Path, trained: TrainedDrafter, target: Any, tokenizer: Any, command: str, provenance: dict[str, Any]
) -> None:
    """Write a drafter and its card into a folder. `config.json` comes last, so that a folder that has it is whole."""
    drafter, is_local = trained.drafter, os.path.isdir(target.name_or_path)
    reference = ModelReference(os.path.abspath(target.name_or_path) if is_local else target.name_or_path)
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / CARD_FILE) as scratch:
        scratch.write_text(_card(trained, reference, command, provenance), encoding="utf-8")
    if isinstance(drafter, EagleDrafter):
        checkpoint = drafter.checkpoint
        halves = {name: tensor.cpu().to(torch.bfloat16) for name, tensor in checkpoint.tensors.items()}
        write_checkpoint(out, replace(checkpoint, tensors=halves))
    elif isinstance(drafter, CausalLMDrafter):
        tokenizer.save_pretrained(out)
        drafter.model.to(torch.bfloat16).save_pretrained(out)


def _card(trained: TrainedDrafter, target: ModelReference, command: str, provenance: dict[str, Any]) -> str:
    figures, state = trained.figures, trained.state
    kind = "eagle" if isinstance(trained.drafter, EagleDrafter) else "drafter"
    name = target.hub_id or "path/to/target"
    imports = "DynSpecAssistant, EagleDrafter" if kind == "eagle" else "DynSpecAssistant"
    usage = [
        f"from hf_dynspec import {imports}",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'target = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", device_map="auto")',
        'inputs = tokenizer("Speculative decoding is", return_tensors="pt").to(target.device)',
        _LOADING[kind],
        "assistant = DynSpecAssistant(drafter, target=target)",
        "output = target.generate(**inputs, assistant_model=assistant, max_new_tokens=128)",
    ]
    rows = enumerate(zip(figures.agreement, figures.acceptance, strict=True), 1)
    by_step = [(step, f"{same:.1%}", f"{accepted:.1%}") for step, (same, accepted) in rows]
    made = {
        "target": target.name_or_path,
        "commit of the target": target.commit,
        **provenance,
        "tokens of texts": f"{trained.tokens[0]:,}",
        "tokens that the target wrote": f"{trained.tokens[1]:,}",
        "batches": f"{state.step:,}",
        "minutes": f"{state.seconds / 60:.1f}",
        "held-out divergence": f"{figures.loss:.3f}",
        **versions(),
    }
    metadata = ModelCardData(
        library_name=LIBRARY_NAME,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "assisted-generation", *["eagle"] * (kind == "eagle")],
        **({"base_model": target.hub_id, "base_model_relation": "adapter"} if target.hub_id else {}),
    )
    about = "An EAGLE head" if kind == "eagle" else "A small drafter"
    return _CARD.format(
        metadata=metadata.to_yaml(),
        title=f"{about} for {shown_text(target.name_or_path)}",
        about=about,
        usage="\n".join(usage),
        figures=_table(("draft step", "same most probable token", "accepted"), by_step),
        depth=len(figures.agreement),
        length=figures.acceptance_length,
        temperature=TEMPERATURE,
        command=shown_text(command.replace("```", "")),
        provenance=_table(("record", "value"), [pair for pair in made.items() if pair[1] is not None]),
    )


def _table(head: tuple[str, ...], rows: list[tuple]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = [[shown_text(str(cell), 1000).replace("|", "&#124;") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
