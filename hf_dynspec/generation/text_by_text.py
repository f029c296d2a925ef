"""Texts of one call that draft and accept alone, while the target verifies the drafts of all in one forward."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..kernels import QueryRows
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from ..modeling.masks import descent
from ..protocol import Candidates
from ..tree_config import AUTO, LONGEST_DRAFT
from .bindable import Assistant
from .texts import FIRST_POSITIONS, CommonCriteria, Text, Texts
from .verification import Outcome


class TextByText(Texts):
    """See `Texts`.

    Args:
        reason: why this cannot be done in rounds of fixed shape.
    """

    def __init__(
        self, assistant: Assistant, texts: Sequence[Text], longest: int, criteria: CommonCriteria, reason: str
    ):
        super().__init__(assistant, texts, longest, criteria)
        self.lane = f"fixed memory, drafts text by text: {reason}"
        self._forward = assistant.forward
        self._decoder = FixedDecoder(assistant.target)
        self._most_nodes = _most_nodes(assistant)
        self._memory: FixedMemory | None = None

    def generate(self, streamer: Any) -> None:
        for number, text in enumerate(self.texts):
            read, length = text.read_prompt(streamer), text.length - 1
            if self._memory is None:
                config = self._forward.model.config.get_text_config()
                capacity = self._capacity(length + FIRST_POSITIONS)
                self._memory = FixedMemory.like(read, config, len(self.texts), capacity, self._most_nodes)
            self._reserve(length)
            self._memory.begin(number, read, length, text.shift)
            # It takes as much memory as the copy.
            del read
        self._criteria.ask()
        while self._leave_ended():
            for text in self.texts:
                text.propose()
            self._reserve(max(text.length for text in self.texts))
            with self._stopwatch.section("verification"):
                outputs = self._verify()
            outcomes = [text.observe(one, streamer) for text, one in zip(self.texts, outputs, strict=True)]
            self._keep(outcomes)
            self._criteria.ask()

    def _capacity(self, positions: int) -> int:
        return min(positions, self._longest) + self._most_nodes

    def _reserve(self, length: int) -> None:
        """Have memory for texts of that length and the nodes after them."""
        if length + self._most_nodes > self._memory.capacity:
            everyone = torch.arange(len(self._memory.lengths), device=self._memory.lengths.device)
            self._memory = self._memory.copy(everyone, self._capacity(2 * length))

    def _leave_ended(self) -> bool:
        """Drop texts that ended. Whether any is left."""
        going_on = [number for number, text in enumerate(self.texts) if not text.is_done]
        if len(going_on) < len(self.texts):
            kept = torch.tensor(going_on, device=self._memory.lengths.device)
            if going_on:
                self._memory = self._memory.copy(kept, self._memory.capacity)
            self.texts = [self.texts[number] for number in going_on]
        return bool(going_on)

    def _verify(self) -> list[CausalLMOutputWithPast]:
        """The target's outputs for each text, as if it had been verified alone."""
        device = self._memory.lengths.device
        trees = [_nodes_of(text.candidates, device) for text in self.texts]
        width = max(len(one.levels) for one in trees)
        token_ids = torch.zeros(len(trees), width, dtype=torch.int64, device=device)
        # What fills a text up to the width of the widest one attends to itself alone.
        within = torch.eye(width, dtype=torch.bool, device=device).repeat(len(trees), 1, 1)
        levels = torch.zeros_like(token_ids)
        for number, (text, tree) in enumerate(zip(self.texts, trees, strict=True)):
            count = len(tree.levels)
            token_ids[number, :1] = text.input_ids[0, -1:]
            if text.candidates is not None:
                token_ids[number, 1:count] = text.candidates.token_ids.to(device)
            within[number, :count, :count], levels[number, :count] = tree.within, tree.levels
        wanted = [text.call.wanted_states for text in self.texts]
        entries = True if True in wanted else sorted({entry for one in wanted if one for entry in one})
        inputs = {"output_hidden_states": entries} if entries else {}
        rows = QueryRows(self._memory.lengths, within, levels)
        outputs = self._decoder(token_ids, self._memory, rows, **inputs)
        logits = self._forward.logits(outputs.last_hidden_state)
        divided = []
        for number, (text, tree) in enumerate(zip(self.texts, trees, strict=True)):
            own = (slice(number, number + 1), slice(len(tree.levels)))
            states = outputs.hidden_states
            states = states and tuple(None if state is None else state[own] for state in states)
            one = CausalLMOutputWithPast(logits=logits[own], hidden_states=states)
            text.call.has_verified(one)
            divided.append(one)
        return divided

    def _keep(self, outcomes: list[Outcome]) -> None:
        """Keep the accepted nodes of all texts."""
        device = self._memory.lengths.device
        counts = torch.tensor([one.accepted + 1 for one in outcomes], device=device)
        path = None
        if not all(text.candidates is None or text.candidates.is_chain for text in self.texts):
            path = torch.zeros(len(outcomes), max(len(one.rows) for one in outcomes), dtype=torch.int64, device=device)
            for row, outcome in zip(path, outcomes, strict=True):
                row[: len(outcome.rows)] = outcome.rows.to(device)
        self._memory.keep(counts, path)


class _Nodes(NamedTuple):
    """The root and the candidates after it: bool `[q, q]` and int64 `[q]`, see `QueryRows`."""

    within: torch.Tensor
    levels: torch.Tensor


def _nodes_of(candidates: Candidates | None, device: torch.device) -> _Nodes:
    if candidates is None or candidates.is_chain:
        levels = torch.arange(1 if candidates is None else 1 + len(candidates.token_ids), device=device)
        return _Nodes(levels.unsqueeze(1) >= levels, levels)
    root = torch.zeros(1, dtype=torch.int64, device=device)
    parents = torch.cat([root - 1, candidates.parents.to(device) + 1])
    levels = torch.cat([root, candidates.depths.to(device) + 1])
    return _Nodes(descent(parents, len(candidates.shortlists) + 1), levels)


def _most_nodes(assistant: Assistant) -> int:
    """The most nodes of a round, the root included."""
    config = assistant.generation_config
    if assistant.tree is not None:
        return assistant.tree.total_tokens
    tokens = DEFAULT_NUM_ASSISTANT_TOKENS if config.num_assistant_tokens is None else config.num_assistant_tokens
    is_fixed = tokens != AUTO and config.num_assistant_tokens_schedule in (None, "constant")
    return 1 + (tokens if is_fixed else LONGEST_DRAFT)
