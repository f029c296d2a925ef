"""Ask about images: a target that reads them, beside a drafter that reads text alone.

The text is the target's own, and the same as without the drafter. Both are timed after a first call.

    python examples/images.py --target Qwen/Qwen2.5-VL-7B-Instruct --drafter Qwen/Qwen2.5-0.5B-Instruct \
        --image photo.jpg --prompt "What is written on the sign?" --device cuda --dtype bfloat16
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.console import Console
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_dynspec import DynSpecAssistant
from hf_dynspec.evaluation.policy_text import parse_policy
from hf_dynspec.loading import load_model


def main(
    target: Annotated[str, typer.Option(help="Folder or Hub id of a model that reads images.")],
    drafter: Annotated[str, typer.Option(help="Folder or Hub id of a model that reads text.")],
    image: Annotated[list[Path], typer.Option(help="May be repeated.")],
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "Describe the image.",
    policy: Annotated[str, typer.Option(help="As for hf-dynspec bench.")] = "hybrid",
    max_new_tokens: int = 128,
    device: str = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Print the answer, how it was drafted, and how much faster it came."""
    console = Console(highlight=False)
    model = AutoModelForImageTextToText.from_pretrained(target, dtype=getattr(torch, dtype)).to(device).eval()
    processor = AutoProcessor.from_pretrained(target)
    parts = [{"type": "image", "image": Image.open(path).convert("RGB")} for path in image]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(device, getattr(torch, dtype))
    assistant = DynSpecAssistant(
        load_model(drafter, device=torch.device(device), dtype=dtype, role="drafter"),
        parse_policy(policy),
        target=model,
        tokenizer=processor.tokenizer,
    )
    outputs: dict[bool, torch.Tensor] = {}
    seconds: dict[bool, float] = {}
    for _ in range(2):
        for drafts in (False, True):
            start = time.perf_counter()
            outputs[drafts] = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                assistant_model=assistant if drafts else None,
            ).cpu()
            seconds[drafts] = time.perf_counter() - start
    read = inputs["input_ids"].shape[1]
    console.print(processor.decode(outputs[True][0, read:], skip_special_tokens=True), markup=False)
    stats = assistant.stats
    console.print(
        f"\n{outputs[True].shape[1] - read} tokens after {read}, {stats.acceptance_length:.2f} in a round; "
        f"{seconds[False] / seconds[True]:.2f} times as fast as without drafts; "
        f"{'the same text' if torch.equal(outputs[False], outputs[True]) else 'ANOTHER TEXT'}."
    )


if __name__ == "__main__":
    typer.run(main)
