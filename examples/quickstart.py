"""Completes code with the embedded pocket pair, or with a pair of yours, and compares ways of speculative decoding.

    make quickstart
    make quickstart TARGET=path/to/target DRAFTER=path/to/drafter EAGLE=path/to/eagle-head

Or `python examples/quickstart.py --help` if hf_dynspec is installed. The embedded pair takes about a minute on two
cores and downloads nothing. All of it runs on the CPU in fp32; `hf-dynspec bench` measures on other devices too.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from real_head import show_real_head
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_dynspec import DynSpecAssistant, EagleDrafter
from hf_dynspec.errors import DynSpecError, DynSpecWarning
from hf_dynspec.evaluation.head_product import head_product, why_not_head_product
from hf_dynspec.loading import load_model, load_tokenizer

POCKET = Path(__file__).parent / "pocket"
PLAIN, TRANSFORMERS = "plain generate", "transformers' assisted"
# Drafts are verified by a product of the target's head that is faster than torch's. Plain generation could use it too,
# so what it gains by it is not due to drafts.
HEAD_PRODUCT = "plain, our LM head"
POLICIES = ("full", "frequency", "in_context", "hybrid")
EAGLE_POLICIES = ("full", "hybrid")
# The same for all systems, so that their rounds compare. Eight pay for the embedded pair with a shortlist.
NUM_ASSISTANT_TOKENS, POCKET_NUM_ASSISTANT_TOKENS = 5, 8
# Greedy text of a model as small as the embedded one repeats itself, which would make drafts too easy.
POCKET_NO_REPEAT_NGRAM_SIZE = 8
POCKET_NOTE = f"""(So small a model repeats itself, which is easy to draft: all systems generate
with no_repeat_ngram_size={POCKET_NO_REPEAT_NGRAM_SIZE}.)"""
# It ends with the colon, as the line break and the indentation after it are one token.
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
READ_ON = """Read on:
  README.md                  how to use it, and "Will it help me?"
  docs/choosing-a-policy.md  which shortlist, and how large
  docs/eagle-and-trees.md    EAGLE heads and draft trees
  model_cards/pocket.md      the embedded pair
Try a pair of yours:
  make quickstart TARGET=path/to/target DRAFTER=path/to/drafter"""


@dataclass
class System:
    """One way to generate, and its figures.

    Attributes:
        assistant: `generate`'s assistant model: nothing, a drafter, or an assistant of hf_dynspec.
        context: makes the context manager in which it generates.
        acceptance_length: tokens per forward of the target.
        speeds: tokens per second of each repeat.
        tokens: the new tokens, which are the same in every repeat.
    """

    assistant: Any
    context: Callable[[], AbstractContextManager] = nullcontext
    acceptance_length: float = 0.0
    speeds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second of the fastest repeat, as other work on the computer can only slow it down."""
        return max(self.speeds)

    def active_vocabulary(self, vocabulary_size: int) -> str:
        """The mean number of tokens that a draft step scores."""
        if self.assistant is None:
            return ""
        is_ours = isinstance(self.assistant, DynSpecAssistant)
        return f"{self.assistant.stats.active_vocabulary if is_ours else vocabulary_size:,.0f}"


def silence_libraries() -> None:
    """Hide the messages of all libraries but hf_dynspec."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module="hf_dynspec")
    warnings.filterwarnings("default", category=DynSpecWarning)


def make_systems(
    target: PreTrainedModel, drafter: PreTrainedModel | None, eagle: EagleDrafter | None, num_assistant_tokens: int
) -> dict[str, System]:
    """All systems by their names in the table."""

    def assistant(drafts: Any, policy: str) -> System:
        return System(DynSpecAssistant(drafts, policy, target=target, num_assistant_tokens=num_assistant_tokens))

    systems = {PLAIN: System(None)}
    if why_not_head_product(target) is None:
        systems[HEAD_PRODUCT] = System(None, lambda: head_product(target))
    if drafter is not None:
        # transformers' own assisted generation reads its settings here.
        drafter.generation_config.num_assistant_tokens = num_assistant_tokens
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0.0
        systems[TRANSFORMERS] = System(drafter)
        systems |= {policy: assistant(drafter, policy) for policy in POLICIES}
    if eagle is not None:
        systems |= {f"EAGLE, {policy}": assistant(eagle, policy) for policy in EAGLE_POLICIES}
    return systems


def load(
    target: str, drafter: str | None, eagle: str | None, num_assistant_tokens: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, System]]:
    """The target, its tokenizer and all systems, on the CPU in fp32, so that greedy tokens must be identical."""
    model = load_model(target, device="cpu", dtype="float32", role="target")
    tokenizer = load_tokenizer(target)
    small = load_model(drafter, device="cpu", dtype="float32", role="drafter") if drafter else None
    head = EagleDrafter.from_pretrained(eagle, target=model) if eagle else None
    return model, tokenizer, make_systems(model, small, head, num_assistant_tokens)


def generate(target: PreTrainedModel, inputs: dict, system: System, max_new_tokens: int) -> tuple[list[int], float]:
    """The new tokens of a greedy call, and its seconds."""
    settings = {"assistant_model": system.assistant, "max_new_tokens": max_new_tokens, "do_sample": False}
    with system.context():
        start = time.perf_counter()
        output = target.generate(**inputs, **settings)
        tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, time.perf_counter() - start


def warm_up(target: PreTrainedModel, inputs: dict, systems: dict[str, System], max_new_tokens: int) -> None:
    """Generate once with each system, and count the target's forwards."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    hook = target.register_forward_hook(count)
    try:
        for system in systems.values():
            forwards = 0
            system.tokens, _ = generate(target, inputs, system, max_new_tokens)
            system.acceptance_length = len(system.tokens) / forwards
    finally:
        hook.remove()


def show_table(console: Console, systems: dict[str, System], vocabulary_size: int) -> None:
    """Print a row for each system."""
    plain = systems[PLAIN]
    caption = f"tokens/s: of the fastest of {len(plain.speeds)} calls"
    if HEAD_PRODUCT in systems:
        caption += "; our LM head: the product that drafts are verified by, which plain generation can have too"
    table = Table(box=box.SIMPLE, caption=caption)
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "times\nplain", "acceptance\nlength", "active\nvocabulary", "same\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, system in systems.items():
        table.add_row(
            name,
            f"{system.speed:.0f}",
            f"{system.speed / plain.speed:.2f}",
            f"{system.acceptance_length:.2f}",
            system.active_vocabulary(vocabulary_size),
            "yes" if system.tokens == plain.tokens else "NO",
        )
    console.print(table)


def closing_sentence(systems: dict[str, System]) -> str:
    """The table in one sentence, in which plain is the faster way of plain generation."""
    prefix = "" if "hybrid" in systems else "EAGLE, "
    hybrid = systems[f"{prefix}hybrid"]
    plain = max((systems[name] for name in (PLAIN, HEAD_PRODUCT) if name in systems), key=lambda system: system.speed)
    others = {"full": systems[f"{prefix}full"], TRANSFORMERS: systems.get(TRANSFORMERS), "plain": plain}
    times = [f"{hybrid.speed / other.speed:.1f}× {name}" for name, other in others.items() if other is not None]
    same = "same tokens" if hybrid.tokens == plain.tokens else "NOT the same tokens"
    return f"{prefix}hybrid: {', '.join(times)}, {same}."


def main(
    target: Annotated[
        str | None, typer.Option("--target", help="Folder or Hub id of a target, in place of the pocket's.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Folder or Hub id of an independent drafter for it.")
    ] = None,
    eagle: Annotated[str | None, typer.Option("--eagle", help="Folder or Hub id of an EAGLE head for it.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="The text to complete.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Tokens to generate.")] = 64,
    num_assistant_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-assistant-tokens",
            min=1,
            help=f"Tokens of a draft; unless given {POCKET_NUM_ASSISTANT_TOKENS} with the embedded pair, and "
            f"{NUM_ASSISTANT_TOKENS} with others.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed calls of each system; the fastest counts.")
    ] = 4,
) -> None:
    """Complete a text with a target and its drafters, and compare ways of speculative decoding on it."""
    if target is None and (drafter or eagle):
        raise typer.BadParameter("a drafter or an EAGLE head belongs to a target: name its target too (TARGET=…)")
    if target and not (drafter or eagle):
        raise typer.BadParameter("a target drafts nothing alone: name a drafter (DRAFTER=…) or EAGLE head (EAGLE=…)")
    is_embedded = target is None
    if is_embedded:
        target, drafter, eagle = (str(POCKET / name) for name in ("target", "drafter", "eagle"))
    if num_assistant_tokens is None:
        num_assistant_tokens = POCKET_NUM_ASSISTANT_TOKENS if is_embedded else NUM_ASSISTANT_TOKENS
    silence_libraries()
    console = Console()
    try:
        with console.status("Loading the models"):
            model, tokenizer, systems = load(target, drafter, eagle, num_assistant_tokens)
    except DynSpecError as error:
        raise typer.BadParameter(str(error)) from error
    if is_embedded:
        model.generation_config.no_repeat_ngram_size = POCKET_NO_REPEAT_NGRAM_SIZE
    inputs = dict(tokenizer(prompt, return_tensors="pt"))
    with console.status("Warming up"):
        warm_up(model, inputs, systems, max_new_tokens)
    for _ in track(range(repeats), "Generating", console=console, transient=True, disable=not console.is_terminal):
        for system in systems.values():
            _, seconds = generate(model, inputs, system, max_new_tokens)
            system.speeds.append(len(system.tokens) / seconds)
    console.print(prompt, style="dim", end="", markup=False, highlight=False)
    console.print(tokenizer.decode(systems[PLAIN].tokens, skip_special_tokens=True), markup=False, highlight=False)
    if is_embedded:
        console.print(POCKET_NOTE, style="dim", highlight=False)
    show_table(console, systems, len(tokenizer))
    show_real_head(console)
    console.print(closing_sentence(systems), style="bold", highlight=False)
    console.print(READ_ON, highlight=False)


if __name__ == "__main__":
    typer.run(main)
