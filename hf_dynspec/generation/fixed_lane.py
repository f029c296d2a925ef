"""Rounds over fixed memory for the texts of one call, and which calls they can generate."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache

from ..devices import has_graphs, is_host_memory
from ..drafters.causal_lm import rows_of_position_table
from ..drafters.traceable_decoder import SteadyDecoder, are_known, may_be_recorded
from ..drafters.weights_watch import WeightsWatch
from ..drafting.automatic import LONGEST
from ..drafting.session import DraftSession
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..errors import UnsupportedError
from ..kernels import QueryRows, given_way, in_plain_torch
from ..memory.fixed import FixedMemory
from ..memory.fixed_decoder import FixedDecoder
from ..modeling.head import PackedRows, RowsSideBySide
from ..modeling.parts import decoder_of
from ..rounds import (
    DraftShape,
    RecordedRound,
    Round,
    RoundText,
    TextOutcome,
    Verification,
    Verify,
    recorded_forward_agrees,
)
from ..stats import Stopwatch
from ..tree_config import AUTO
from .bindable import Assistant
from .target import entries_with, hidden_states
from .texts import FIRST_POSITIONS, CommonCriteria, Text, Texts

# Positions in the smallest memory of a graph.
_FEWEST_POSITIONS_OF_GRAPHS = 2048
# A lane whose memory of the target is larger is not kept for the next call.
_MOST_KEPT_BYTES = 2**31


def why_not(assistant: Assistant, texts: int = 1, longest: int = 0) -> str | None:
    """Why rounds of fixed shape cannot generate so many texts of up to a length with an assistant's present settings
    (None: they can)."""
    config, drafter = assistant.generation_config, assistant.drafter
    # A graph of a chain has some lengths to choose from. On a CPU drafts end early instead.
    has_lengths = texts == 1 and assistant.tree is None and has_graphs(drafter.head.device)
    is_open = config.num_assistant_tokens == AUTO and not has_lengths
    has_schedule = assistant.tree is None and config.num_assistant_tokens_schedule not in (None, "constant")
    reasons = {
        "the output projection learns": _learns_projection(assistant),
        "the policy is chosen in each round": len(assistant.policy.alternatives(None)) > 1,
        "the length of drafts is chosen in each round": is_open or has_schedule,
        "drafts end at a low confidence": bool(config.assistant_confidence_threshold),
        "coverage is measured": assistant.measure_coverage,
        "shortlists are checked": assistant.validate,
        "drafter and target lie on different devices": drafter.head.device != assistant.target.device,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        return reason
    try:
        drafter.require_fixed_memory()
    except UnsupportedError as error:
        return str(error)
    steps = shape_of_drafts(assistant, False).steps
    tables = (drafter.most_positions, rows_of_position_table(assistant.target))
    most = min((one for one in tables if one is not None), default=None)
    if most is not None and longest + steps > most:
        return f"a draft after the longest text could pass the models' {most} positions"
    return None


def _learns_projection(assistant: Assistant) -> bool:
    """Whether alignment replaces more than numbers that a round reads at their addresses."""
    aligner = assistant.alignment
    return aligner is not None and not assistant.drafter.replaces_numbers(aligner.learner.base_weights())


def why_no_graph(assistant: Assistant) -> str | None:
    """Why rounds are not recorded as a graph (None: they are)."""
    device, target = assistant.drafter.head.device, assistant.target
    if not has_graphs(device):
        return f"no graphs on {device.type}"
    if assistant.profile:
        return "the time of sections is measured"
    if torch.is_autocast_enabled(device.type):
        # A graph would compute in other dtypes than plain generate in the calls after this one.
        return "autocast is on"
    for model in (target, getattr(assistant.drafter, "model", None)):
        modules = [] if model is None else list(decoder_of(model).modules())
        if modules and not may_be_recorded(model, modules):
            return f"{type(model).__name__} has hooks, is in training mode, is offloaded or lies on several devices"
        # Such as adapters and quantised layers.
        if not are_known(modules) and not recorded_forward_agrees(model):
            return f"{type(model).__name__} has parts of other packages that cannot be recorded"
    return None


def shape_of_drafts(assistant: Assistant, is_drawn: bool) -> DraftShape:
    """The shape of an assistant's drafts."""
    tokens = assistant.generation_config.num_assistant_tokens
    tokens = LONGEST if tokens == AUTO else DEFAULT_NUM_ASSISTANT_TOKENS if tokens is None else tokens
    return DraftShape.of(tokens, assistant.tree, is_drawn)


class FixedLane:
    """The memory, the sessions and the rounds of one call after another with as many texts.

    Args:
        assistant: a bound assistant.
        sessions: one for each text, for this lane alone.
        shape: the shape of drafts.
        is_recorded: record the rounds as a graph.

    Attributes:
        sessions: of the texts that are left.
        is_recorded: as given. All texts then stay to the end of the call.
    """

    def __init__(self, assistant: Assistant, sessions: Sequence[DraftSession], shape: DraftShape, is_recorded: bool):
        self.sessions, self._shape, self.is_recorded = list(sessions), shape, is_recorded
        self._drafter, self._forward = assistant.drafter, assistant.forward
        self._version = self._version_now
        aligner = assistant.alignment
        self._drafting_lock = nullcontext() if aligner is None else aligner.drafting_lock
        self._target: SteadyDecoder | None = None
        self._target_head: WeightsWatch | None = None
        # The round has it, which the lane has: it knows neither, as gigabytes of memory would wait for the collector.
        self._verify = _verifier(assistant)
        # The kernels in whose place plain torch computes.
        self._given_way: dict[str, str] = {}
        self._rows: RowsSideBySide | None = None
        if len(self.sessions) > 1 and not is_host_memory(self._drafter.head.device):
            # One product for all texts is one operation. On a CPU each text's rows have a compiled kernel.
            self._rows = RowsSideBySide(len(self.sessions))
            for session, rows in zip(self.sessions, self._rows.parts, strict=True):
                session.selector.rows = rows
        self.memory: FixedMemory | None = None
        self._round: Round | None = None
        self._recorded: RecordedRound | None = None

    @property
    def name(self) -> str:
        """For `DraftingStatistics.lane`."""
        failure = self._recorded.failure if self._recorded is not None else None
        how = ", as a graph" if self.is_recorded and failure is None else f", no graph: {failure}" if failure else ""
        return f"fixed memory{how}{in_plain_torch(self._given_way)}"

    def still_holds(self) -> bool:
        """Whether the models are as they were, so that another call can use the lane."""
        if self._target is None or self.memory.nbytes > _MOST_KEPT_BYTES:
            return False
        target, decoder, head = self._forward.model, self._target.watch, self._target_head
        return (
            decoder.module is decoder_of(target)
            and head.module is target.get_output_embeddings()
            and not decoder.has_changed()
            and not head.has_changed()
            and self._target.still_holds()
            and self._version_now == self._version
        )

    @property
    def _version_now(self) -> int:
        """Changes when the drafter's weights do, except numbers that are replaced at their addresses."""
        return self._drafter.weights_version - self._drafter.replacements

    def take_prompt(self, text: int, read: Cache, length: int, longest: int, shift: int | None) -> None:
        """Take the target's keys and values of a prompt.

        Args:
            text: its index.
            read: what a forward of the prompt alone has left.
            length: the tokens of the prompt.
            longest: the most tokens that a text may have.
            shift: see `FixedMemory.begin`.
        """
        if self.memory is None:
            config, nodes = self._forward.model.config.get_text_config(), self._shape.most_nodes
            capacity = self._capacity(length + FIRST_POSITIONS, longest)
            self.memory = FixedMemory.like(read, config, len(self.sessions), capacity, nodes)
        self.reserve(length, longest)
        self.memory.begin(text, read, length, shift)

    def _capacity(self, length: int, longest: int) -> int:
        """Positions for texts of that length. A new capacity takes a new graph, so graphs have more than they need."""
        if self.is_recorded:
            return max(_FEWEST_POSITIONS_OF_GRAPHS, 1 << (length - 1).bit_length()) + self._shape.most_nodes
        return min(length, longest) + self._shape.most_nodes

    def begin(self, texts: Sequence[RoundText], tokens: Sequence[torch.Tensor], stopwatch: Stopwatch) -> None:
        """Begin texts, whose prompts were taken.

        Args:
            texts: the part of each text.
            tokens: int64 `[n]` each: all tokens of each text, on the drafter's device.
            stopwatch: times the stages.
        """
        for number, (session, text) in enumerate(zip(self.sessions, tokens, strict=True)):
            read, before = session.read(text)
            if self._round is None:
                capacity, nodes = self.memory.capacity, self._shape.most_nodes
                fixed = self._drafter.fixed(read, len(self.sessions), capacity, nodes)
                head = self._drafter.head
                self._round = Round(self._verify, self.memory, fixed, head, texts, self._shape, stopwatch, self._rows)
                if self.is_recorded:
                    self._recorded = RecordedRound(self._round)
                    # Only now, as transformers adds hooks where hidden states are asked for.
                    target = self._forward.model
                    self._target = SteadyDecoder(WeightsWatch(decoder_of(target)))
                    self._target_head = WeightsWatch(target.get_output_embeddings())
            self._round.drafter.begin(number, read, before)
            self._round.begin(number, text[-1:], before if self._drafter.reads else None)
        # Sets of tokens stay where a graph reads them.
        seen = [one.seen for one in self._round.texts]
        self._round.texts = [replace(text, seen=one) for text, one in zip(texts, seen, strict=True)]
        for text, of_text in zip(self._round.texts, tokens, strict=True):
            if text.seen is not None:
                text.seen.begin(of_text)
                text.choice.look_at(text.seen)
        if self._recorded is not None:
            if self._recorded.failure is not None:
                self._recorded.forget()
            self._recorded.settle()

    def reserve(self, length: int, longest: int) -> None:
        """Have memory for texts of that length, of which the longest may have `longest` tokens."""
        if length + self._shape.most_nodes > self.memory.capacity:
            self._resize(range(len(self.sessions)), self._capacity(2 * length, longest))

    def leave(self, ended: Sequence[int], kept: Sequence[int]) -> None:
        """Leave texts that have ended. In a graph they stand still, otherwise only others are kept."""
        if self.is_recorded:
            for text in ended:
                self._round.end(text)
        else:
            self.sessions = [self.sessions[text] for text in kept]
            self._resize(kept, self.memory.capacity)

    def _resize(self, kept: Sequence[int], capacity: int) -> None:
        places = torch.tensor(list(kept), device=self.memory.lengths.device)
        self.memory = self.memory.copy(places, capacity)
        if self._round is not None:
            self._round.resize(places, self.memory)
        if self._recorded is not None:
            self._recorded.forget()

    def run(self, steps: int | None = None) -> tuple[list[TextOutcome], bool]:
        """Run a round, and read what came out of it for each text. Waits for the device once.

        Args:
            steps: draft steps of chains (None: those of the shape).

        Returns:
            The outcomes, and whether the time of the round is that of others like it.
        """
        self._round.steps, is_usual = self._shape.steps if steps is None else steps, True
        with self._drafting_lock:
            if self._recorded is None:
                self._round.run()
            else:
                is_usual = self._recorded.run()
            self._given_way |= given_way()
            return self._round.report.read(), is_usual

    def show(self, number: int, text: Text, count: int) -> None:
        """Show the round that was read to the parts that observe it on the host.

        Args:
            number: the index of a text.
            text: the text with its verified tokens.
            count: how many of these are of the round.
        """
        text.call.note(self._round.report.answers[number], count, text.length)
        if not text.is_done:
            self._round.exchange(number, count, text.length - count)

    def settle(self) -> None:
        """Let the next round find what these parts have taken up."""
        parts = (part for session in self.sessions for part in session.selector.state.parts)
        if self._recorded is not None and any(part.observes_on_host for part in parts):
            self._recorded.settle()

    @property
    def has_common_rows(self) -> bool:
        """Whether the sessions pack their rows in one block."""
        return self._rows is not None

    def close(self) -> None:
        """Give the sessions, the memory and the graphs up."""
        for session in self.sessions:
            session.close()
        self.memory = self._round = self._recorded = self._target = None


def _verifier(assistant: Assistant) -> Verify:
    """Lets the target of an assistant read nodes."""
    forward, reads, decoder = assistant.forward, assistant.drafter.reads, FixedDecoder(assistant.target)
    inputs = {"output_hidden_states": entries_with(reads)} if reads else {}

    def verify(token_ids: torch.Tensor, memory: FixedMemory, rows: QueryRows) -> Verification:
        outputs: Any = decoder(token_ids, memory, rows, **inputs)
        states, features, layers = outputs.last_hidden_state, None, forward.num_layers
        if reads:
            features = torch.cat([hidden_states(outputs, index, layers) for index in reads], dim=-1)
        return Verification(forward.logits(states).float(), features, states)

    return verify


class InRounds(Texts):
    """Texts that are generated in rounds of fixed shape: see `Texts`."""

    def __init__(self, assistant: Assistant, texts: Sequence[Text], longest: int, criteria: CommonCriteria):
        super().__init__(assistant, texts, longest, criteria)
        config = texts[0].prepared.generation_config
        eos, shape = assistant.scored_eos_token_ids(config), shape_of_drafts(assistant, bool(config.do_sample))
        # What a graph depends on besides the models.
        processors = tuple((type(one), repr(vars(one))) for one in texts[0].prepared.logits_processor)
        precision = torch.get_float32_matmul_precision(), torch.is_autocast_enabled(assistant.target.device.type)
        self._key = len(texts), eos, shape, processors, precision, texts[0].shift is not None
        self._lane: FixedLane | None = assistant.take_lane(self._key)
        if self._lane is None:
            sessions = [assistant.take_session(eos) for _ in texts]
            self._lane = FixedLane(assistant, sessions, shape, why_no_graph(assistant) is None)
        self._sessions = list(self._lane.sessions)

    @property
    def lane(self) -> str:
        return self._lane.name

    def why_not(self) -> str | None:
        """Why the states of the policy cannot take part (None: they can). Then sessions are left."""
        selector = self._sessions[0].selector
        if selector.state.carried is not None:
            return None
        self._leave_sessions(has_failed=False)
        return f"the policy {selector.name} decides on the host"

    def _take_sessions(self) -> Sequence[DraftSession]:
        return self._sessions

    def _leave_sessions(self, has_failed: bool) -> None:
        if has_failed:
            self._lane.close()
        elif self._lane.still_holds():
            self._assistant.return_lane(self._key, self._lane)
        else:
            for session in self._sessions:
                if self._lane.has_common_rows:
                    session.selector.rows = PackedRows()
                self._assistant.return_session(session)

    def generate(self, streamer: Any) -> None:
        lane, texts = self._lane, self.texts
        for number, text in enumerate(texts):
            read, length = text.read_prompt(streamer), text.length - 1
            lane.take_prompt(number, read, length, self._longest, text.shift)
            del read
        device = self._assistant.drafter.head.device
        self._criteria.ask()
        if not lane.is_recorded:
            texts = self._leave_ended(texts)
        if texts:
            lane.begin(
                [text.for_rounds() for text in texts],
                [text.input_ids[0].to(device) for text in texts],
                self._stopwatch,
            )
        for text in texts:
            text.input_ids = text.input_ids.cpu()
        texts = self._leave_ended(texts)
        while texts:
            lane.reserve(max(text.length for text in texts), self._longest)
            first = texts[0].call
            steps = first.plan_round() if self._assistant.tree is None else None
            outcomes, is_usual = lane.run(steps)
            for number, (text, outcome) in enumerate(zip(texts, outcomes, strict=True)):
                if not text.is_done:
                    lane.show(number, text, text.take(outcome, streamer))
            lane.settle()
            if steps is not None:
                first.end_round(steps, len(outcomes[0].token_ids) - 1, texts[0].is_done, is_usual)
            self._criteria.ask()
            texts = self._leave_ended(texts)

    def _leave_ended(self, texts: list[Text]) -> list[Text]:
        """Leave texts that have ended. Returns those that are left, with the ones that stand still; none if all have
        ended."""
        ended = [number for number, text in enumerate(texts) if text.is_done]
        kept = [number for number, text in enumerate(texts) if not text.is_done]
        if not kept or not ended:
            return texts if kept else []
        self._lane.leave(ended, kept)
        return texts if self._lane.is_recorded else [texts[number] for number in kept]
