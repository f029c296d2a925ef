"""Complete many prompts, sharded over processes: one per GPU, or several on CPUs.

    python examples/batch_generation.py --out completions.jsonl                                # one process
    accelerate launch --num_processes 4 examples/batch_generation.py --target T --drafter D \\
        --prompts prompts.jsonl --out completions.jsonl                                        # a GPU for each

On CPUs, `accelerate launch` starts several with `--multi_gpu`. Each process completes every n-th prompt and writes its
own file, and the first process merges these in the order of the prompts. A prompt's seed is its number, so that the
output does not depend on the number of processes, even when sampling.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from rich.progress import track

from hf_dynspec import DynSpecAssistant
from hf_dynspec.errors import DynSpecError
from hf_dynspec.evaluation import parse_policy, read_workload
from hf_dynspec.files import append_json_line, read_whole_lines, replacing
from hf_dynspec.loading import load_model, load_tokenizer

POCKET = Path(__file__).parent / "pocket"


def complete(
    assistant: DynSpecAssistant, tokenizer: Any, text: str, max_new_tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Complete one prompt. Returns the new text, its number of tokens and the acceptance length."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    inputs = tokenizer(text, return_tensors="pt").to(assistant.target.device)
    torch.manual_seed(seed)
    output = assistant.target.generate(**inputs, assistant_model=assistant, max_new_tokens=max_new_tokens, **sampling)
    new = output[0, inputs["input_ids"].shape[1] :]
    completion = tokenizer.decode(new, skip_special_tokens=True)
    return {"completion": completion, "tokens": len(new), "acceptance_length": assistant.stats.acceptance_length}


def part_of(out: Path, process: int) -> Path:
    """The file of one process."""
    return out.with_name(f".{out.name}.{process}.part")


def merge(out: Path, processes: int) -> None:
    """Merge the processes' files in the order of the prompts."""
    parts = [path for path in (part_of(out, process) for process in range(processes)) if path.exists()]
    lines = {line.pop("number"): line for path in parts for line in read_whole_lines(path)}
    with replacing(out) as scratch:
        scratch.touch()
        for number in sorted(lines):
            append_json_line(scratch, lines[number])
    for path in parts:
        path.unlink()


def main(
    out: Annotated[Path, typer.Option(help="The JSON lines to write.")],
    target: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(POCKET / "target"),
    drafter: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(POCKET / "drafter"),
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines.")] = None,
    policy: Annotated[str, typer.Option(help="As for hf-dynspec bench.")] = "hybrid",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> None:
    """Complete all prompts and write a line for each, in their order."""
    rows = read_workload(prompts or [POCKET / "prompts.jsonl"])
    shortlists = parse_policy(policy)
    state = PartialState(cpu=not torch.cuda.is_available())
    dtype = "auto" if state.device.type == "cuda" else "float32"
    models = {
        role: load_model(name, device=state.device, dtype=dtype, role=role)
        for role, name in (("target", target), ("drafter", drafter))
    }
    tokenizer = load_tokenizer(target)
    # A fixed number of tokens, so that the output does not depend on the clock.
    assistant = DynSpecAssistant(
        models["drafter"], shortlists, target=models["target"], tokenizer=tokenizer, num_assistant_tokens=5
    )
    part = part_of(out, state.process_index)
    part.unlink(missing_ok=True)
    own = range(state.process_index, len(rows), state.num_processes)
    for number in track(own, "completing", disable=not state.is_main_process):
        done = complete(assistant, tokenizer, rows[number].text, max_new_tokens, temperature, seed=number)
        append_json_line(part, {"number": number, "prompt": rows[number].identifier, **done})
    state.wait_for_everyone()
    if state.is_main_process:
        merge(out, state.num_processes)
        typer.echo(f"{out}: {len(rows)} prompts, {state.num_processes} processes")
    # An interpreter that ends while the processes are connected sometimes aborts.
    state.destroy_process_group()


if __name__ == "__main__":
    try:
        typer.run(main)
    except DynSpecError as error:
        sys.exit(f"error: {error}")
