"""What the rounds of a `generate` call give a device to do: recorded on one that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ...modeling.head import DynamicLMHead, PackedRows
from ...protocol import Shortlist
from ...stats import Stopwatch
from .pretended_device import Event, PretendedDevice

# Of the texts that are generated for a recording.
PROMPT_TOKENS = 12


@dataclass(frozen=True)
class Round:
    """One round, from the beginning of one verification to the beginning of the next."""

    events: list[Event]
    # For each event the section of a profile (`stats.SECTIONS`) that it belongs to, `"other"` for none.
    sections: list[str]
    target: int  # how many of the events belong to the target's forward
    heads: list[int]  # before which of them the draft steps' heads began
    shortlists: list[Shortlist]  # what these heads scored


@dataclass(frozen=True)
class Recording:
    """What happened within one call."""

    # Name, first event and end of each section of a profile, in the order in which they ended.
    sections: list[tuple[str, int, int]] = field(default_factory=list)
    # What a head scored, by the event before which it began.
    shortlists: dict[int, Shortlist] = field(default_factory=dict)

    def rounds(self, events: list[Event]) -> list[Round]:
        """Divide the events of the call into its rounds, the last one aside."""
        labels = ["other"] * len(events)
        # Of two sections the outer one ends later, and what is within the inner one is not its own.
        for name, begin, end in reversed(self.sections):
            labels[begin:end] = [name] * (end - begin)
        verifications = [(begin, end) for name, begin, end in self.sections if name == "verification"]
        heads = [begin for name, begin, _ in self.sections if name == "head"]
        rounds = []
        for (begin, end), (after, _) in pairwise(verifications):
            own = [head for head in heads if begin <= head < after]
            places, shortlists = [head - begin for head in own], [self.shortlists[head] for head in own]
            rounds.append(Round(events[begin:after], labels[begin:after], end - begin, places, shortlists))
        return rounds


@contextmanager
def recording(device: PretendedDevice) -> Iterator[Recording]:
    """Note which of the device's events belong to which section of a round, and what the heads score."""
    found = Recording()
    section_of_the_package, scores_of_the_package = Stopwatch.section, DynamicLMHead.scores

    @contextmanager
    def section(self: Stopwatch, name: str) -> Iterator[None]:
        begin = len(device.events)
        yield
        found.sections.append((name, begin, len(device.events)))

    def scores(self: DynamicLMHead, hidden: torch.Tensor, shortlist: Shortlist, rows: PackedRows) -> torch.Tensor:
        # A joined shortlist comes before its parts.
        found.shortlists.setdefault(len(device.events), shortlist)
        return scores_of_the_package(self, hidden, shortlist, rows)

    Stopwatch.section, DynamicLMHead.scores = section, scores
    try:
        yield found
    finally:
        Stopwatch.section, DynamicLMHead.scores = section_of_the_package, scores_of_the_package


def operations(events: list[Event]) -> int:
    """How many of these are operations."""
    return sum(one.is_operation for one in events)


def waits(events: list[Event]) -> int:
    """How many of these are waited for."""
    return sum(one.waits for one in events)


def random_model(layers: int, vocabulary: int, seed: int, width: int = 32) -> PreTrainedModel:
    """A small Llama that nobody trained, with hidden states of this width, and that ends texts by id 2."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = 2
    return model
