"""Complete a Python function with the embedded pocket pair, and compare ways of speculative decoding on it.

Run with `make quickstart`, or `python examples/quickstart.py` where hf_dynspec is installed. Takes about a minute.
"""

import logging
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_dynspec import DynSpecAssistant

POCKET = Path(__file__).parent / "pocket"
POLICIES = ("full", "frequency", "in_context", "hybrid")
NUM_ASSISTANT_TOKENS = 5
MAX_NEW_TOKENS = 128
REPEATS = 5
# A prompt ends where a token ends: the line break and the indentation after it are one.
PROMPT = """class Node:
    def __init__(self, name, value, parent=None):
        self.name = name
        self.value = value
        self.parent = parent

    def get_name(self):
        return self.name

    def get_value(self):
        return self.value

    def get_parent(self):"""


def is_for_us(record: logging.LogRecord) -> bool:
    """Whether a message concerns what is called here: transformers' assisted generation calls `generate` in a way that
    transformers itself advises against, and nobody outside can change that."""
    return not record.getMessage().startswith("Passing `generation_config` together with generation-related arguments")


def load(name: str) -> PreTrainedModel:
    """Load one model of the pocket pair in fp32, where greedy tokens must be identical to the last one."""
    return AutoModelForCausalLM.from_pretrained(POCKET / name, dtype=torch.float32).eval()


def generate(target: PreTrainedModel, inputs: dict, assistant) -> tuple[torch.Tensor, float]:
    """Generate greedily. Returns the new tokens and the seconds that it took."""
    start = time.perf_counter()
    output = target.generate(**inputs, assistant_model=assistant, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :], time.perf_counter() - start


def acceptance_length(target: PreTrainedModel, inputs: dict, assistant) -> float:
    """Tokens per forward of the target, counted, for assistants that keep no statistics."""
    forwards = []
    hook = target.register_forward_hook(lambda *_: forwards.append(1))
    try:
        tokens, _ = generate(target, inputs, assistant)
    finally:
        hook.remove()
    return len(tokens) / len(forwards)


def main() -> None:
    logging.getLogger("transformers.generation.utils").addFilter(is_for_us)
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(POCKET / "target")
    target, drafter = load("target"), load("drafter")
    # What transformers' own assisted generation reads, so that all draft the same number of tokens.
    drafter.generation_config.num_assistant_tokens = NUM_ASSISTANT_TOKENS
    drafter.generation_config.assistant_confidence_threshold = 0.0
    inputs = dict(tokenizer(PROMPT, return_tensors="pt"))

    assistants = {"plain generate": None, "transformers' assisted": drafter}
    for policy in POLICIES:
        assistants[f"hf_dynspec, {policy}"] = DynSpecAssistant(
            drafter, policy, target=target, num_assistant_tokens=NUM_ASSISTANT_TOKENS
        )

    lengths = {name: acceptance_length(target, inputs, assistant) for name, assistant in assistants.items()}
    speeds: dict[str, list[float]] = {name: [] for name in assistants}
    outputs = {}
    for _ in track(range(REPEATS), "Generating", transient=True):
        for name, assistant in assistants.items():
            outputs[name], seconds = generate(target, inputs, assistant)
            speeds[name].append(len(outputs[name]) / seconds)

    console.print(PROMPT, style="dim", end="", markup=False, highlight=False)
    console.print(tokenizer.decode(outputs["plain generate"], skip_special_tokens=True), markup=False, highlight=False)
    headings = ("tokens/s", "acceptance\nlength", "active\nvocabulary", "same tokens\nas plain")
    table = Table("", *headings)
    for name, assistant in assistants.items():
        is_ours = isinstance(assistant, DynSpecAssistant)
        active = assistant.stats.active_vocabulary if is_ours else (len(tokenizer) if assistant else None)
        same = outputs[name].tolist() == outputs["plain generate"].tolist()
        table.add_row(
            name,
            f"{statistics.median(speeds[name]):.0f}",
            f"{lengths[name]:.2f}",
            "" if active is None else f"{active:,.0f}",
            "yes" if same else "NO",
        )
    console.print(table)


if __name__ == "__main__":
    main()
