"""The texts of one call in fixed memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import cache_inputs, returned_cache
from ..devices import is_host_memory
from ..drafting.draft_processors import SeenTokens
from ..drafting.session import DraftSession
from ..kernels import given_way, in_plain_torch
from ..protocol import Candidates
from ..rounds import RoundText, TextOutcome
from ..stats import DraftingStatistics, Stopwatch
from .bindable import Assistant
from .generate_call import GenerateCall
from .media import Media
from .verification import BatchedWalk, BestTokens, Outcome, Verifier, divide_criteria

# Positions that memory has beyond the longest prompt at first. It is doubled when a text outgrows it.
FIRST_POSITIONS = 256


class Prepared(NamedTuple):
    """A call of one text, as transformers prepared it for a decoding loop."""

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig


class Text:
    """One text.

    Args:
        target: the model that verifies.
        prepared: the text, and its processors and criteria.
        keeps_scores: the scores of its tokens are wanted.
        media: its images and the like (None: the texts have none).

    Attributes:
        prepared: as given.
        shift: see `FixedMemory.begin`.
        verifier: accepts candidates.
        input_ids: int64 `[1, n]`: all verified tokens.
        call: a call of its own, once it is open.
        is_done: whether the text has ended.
        candidates: of the current round, if the text drafts alone.
    """

    call: GenerateCall

    def __init__(self, target: PreTrainedModel, prepared: Prepared, keeps_scores: bool, media: Media | None = None):
        self.prepared, self.input_ids, self._target = prepared, prepared.input_ids, target
        self._media, self.shift = media, None if media is None else media.shift
        processors, (criteria, _) = prepared.logits_processor, divide_criteria(prepared.stopping_criteria)
        self.verifier = Verifier(processors, criteria, bool(prepared.generation_config.do_sample), keeps_scores)
        self.is_done = False
        self.candidates: Candidates | None = None

    @property
    def most_tokens(self) -> int:
        """The most tokens that the text may have."""
        # A user may give a whole number as a float.
        return int(self.prepared.generation_config.max_length)

    @property
    def length(self) -> int:
        """The tokens of the text."""
        return self.input_ids.shape[1]

    @property
    def new_tokens(self) -> torch.Tensor:
        """int64 `[m]`: the tokens after the prompt."""
        return self.input_ids[0, self.prepared.input_ids.shape[1] :]

    def why_refused(self) -> str | None:
        """Why the text cannot be generated in fixed memory (None: it can)."""
        return "a logits processor may keep a state, which texts cannot share" if self.verifier.is_stepwise else None

    def cut(self, count: int) -> None:
        """End the text after so many new tokens."""
        self.input_ids = self.input_ids[:, : self.prepared.input_ids.shape[1] + count]
        self.is_done = True

    def read_prompt(self, streamer: Any) -> Cache:
        """Let the target read the prompt alone, and choose the first token. Returns what it has read."""
        cache = DynamicCache(config=self._target.config.get_text_config())
        cache.activate_past_recording()
        kwargs = cache_inputs(cache) | {"attention_mask": torch.ones_like(self.input_ids)}
        kwargs |= {} if self._media is None else self._media.kwargs
        config, processors = self.prepared.generation_config, self.prepared.logits_processor
        self.call.begin(config, self.input_ids, processors, dict(kwargs))
        self.call.propose(self.input_ids, drafts=False)
        outputs = self.call.verify(self.input_ids, None, True, kwargs)
        cache = returned_cache(outputs)
        cache.crop(0)
        self._media = None
        self.observe(outputs, streamer)
        return cache

    # In rounds of fixed shape ----------------------------------------------------------------------------------------

    def why_not_in_rounds(self) -> str | None:
        """Why such rounds cannot generate this text (None: they can)."""
        return "a logits processor looks at the order of tokens" if self.verifier.looks_at_order else None

    def for_rounds(self) -> RoundText:
        """The part of this text in such rounds."""

        def accept(logits: torch.Tensor, candidates: Candidates | None, tokens: torch.Tensor) -> BatchedWalk:
            best = BestTokens(logits) if is_host_memory(logits.device) else None
            return self.verifier.walk(logits, tokens, candidates, best)

        seen, along_chains, device = None, None, self.call.session.vocabulary.device
        if self.verifier.looks_at_ids:
            seen = SeenTokens(self.call.vocabulary_rows, device)
        elif not (self.call.choice.looks_at_ids or is_host_memory(device)):
            along_chains = self.verifier.along_chains
        notes = self.call.notes()
        return RoundText(self.call.session.selector, self.call.choice, accept, along_chains, seen, *notes)

    def take(self, outcome: TextOutcome, streamer: Any) -> int:
        """Append the tokens of such a round. The text lies in the host's memory. Returns how many they are."""
        count, self.is_done = self.verifier.end(outcome.token_ids, self.input_ids)
        tokens = torch.tensor(outcome.token_ids[:count], device=self.input_ids.device)
        self.input_ids = torch.cat([self.input_ids, tokens.unsqueeze(0)], dim=1)
        if streamer is not None:
            streamer.put(tokens)
        stats, drafted_at = self.call.stats, outcome.drafted_at
        stats.record_verification(count - 1)
        if drafted_at:
            stats.record_steps(sum(drafted_at), drafted_at, outcome.active, self.call.session.selector.name)
            # A candidate that ends the text came out of its shortlist.
            is_whole = count == len(outcome.token_ids)
            stats.record_verified_tokens(count - 1, outcome.has_missed if is_whole else False)
        return count

    # Alone -----------------------------------------------------------------------------------------------------------

    def propose(self) -> None:
        """Draft the candidates of a round."""
        self.candidates = self.call.propose(self.input_ids)

    def observe(self, outputs: CausalLMOutputWithPast, streamer: Any) -> Outcome:
        """Accept candidates, and let the call observe the outcome."""
        logits = outputs.logits[0].to(device=self.input_ids.device, dtype=torch.float32)
        verified = self.verifier.verify(logits, self.input_ids, self.candidates, None, self.call.best_tokens)
        outcome, self.is_done = verified
        self.input_ids = torch.cat([self.input_ids, outcome.token_ids.unsqueeze(0)], dim=1)
        if streamer is not None:
            streamer.put(outcome.tokens_on_host())
        self.call.observe(outputs, outcome, self.is_done)
        return outcome


class CommonCriteria:
    """Criteria of a user's own, which may do anything. They are asked as plain generate asks them: after each token of
    all texts, about the whole batch, in which a text that has ended is followed by padding. Texts that are ahead of
    others are cut when the others are there.

    Args:
        criteria: the criteria.
        texts: all texts.
        prompts: int64 `[B, n]`: their prompts, padded.
        padding: the token after texts that have ended.
    """

    def __init__(self, criteria: list[StoppingCriteria], texts: Sequence[Text], prompts: torch.Tensor, padding: int):
        self._criteria, self._texts, self._prompts, self._padding = criteria, list(texts), prompts, padding
        self._asked = 0

    def ask(self) -> None:
        """Ask about the tokens that all texts have by now, and end texts."""
        while self._criteria and self._asked < self._count():
            self._asked += 1
            rows = self._prompts.new_full((len(self._texts), self._asked), self._padding)
            for row, text in zip(rows, self._texts, strict=True):
                new = text.new_tokens[: self._asked]
                row[: len(new)] = new
            batch = torch.cat([self._prompts, rows], dim=1)
            stops = [torch.as_tensor(one(batch, None)).expand(len(rows)) for one in self._criteria]
            ends = torch.stack([one.to(stops[0].device) for one in stops]).any(0).tolist()
            for text, is_end in zip(self._texts, ends, strict=True):
                if is_end and len(text.new_tokens) >= self._asked:
                    text.cut(self._asked)

    def _count(self) -> int:
        """The tokens that all texts have which have not ended; if all have ended, those of the longest."""
        going_on = [text for text in self._texts if not text.is_done]
        counts = [len(text.new_tokens) for text in going_on or self._texts]
        return min(counts) if going_on else max(counts)


class Texts(ABC):
    """Generates the texts of one call while it is entered.

    Args:
        assistant: a bound assistant.
        texts: the texts.
        longest: the most tokens that a text may have.
        criteria: asked after each round.

    Attributes:
        texts: the texts that have not ended.
        lane: for `DraftingStatistics.lane`.
    """

    lane: str

    def __init__(self, assistant: Assistant, texts: Sequence[Text], longest: int, criteria: CommonCriteria):
        self._assistant, self.texts, self._longest = assistant, list(texts), longest
        self._criteria = criteria
        self._open = ExitStack()
        devices = (assistant.drafter.head.device, assistant.target.device)
        self._stopwatch = Stopwatch(assistant.profile, devices)
        self._start = self._stopwatch.now() if self._stopwatch.enabled else 0.0
        self._calls: list[GenerateCall] = []

    def __enter__(self) -> "Texts":
        for text, session in zip(self.texts, self._take_sessions(), strict=True):
            text.call = self._open.enter_context(GenerateCall(self._assistant, session))
            # All texts together make the counts of one call.
            text.call.publishes, text.call.texts = False, len(self.texts)
            self._calls.append(text.call)
        return self

    def __exit__(self, *raised: Any) -> None:
        try:
            self._open.__exit__(*raised)
        finally:
            self._leave_sessions(has_failed=raised[0] is not None)
            self._publish()

    def _take_sessions(self) -> Sequence[DraftSession | None]:
        """The sessions of the texts (None: one of the assistant's)."""
        return [None] * len(self.texts)

    def _leave_sessions(self, has_failed: bool) -> None:  # noqa: B027
        """Leave the sessions that were taken. After an error their states are undefined."""

    @abstractmethod
    def generate(self, streamer: Any) -> None:
        """Generate until all texts have ended. The streamer gets the new tokens of each round."""

    def _publish(self) -> None:
        """Make the counts of all texts together the assistant's."""
        total = DraftingStatistics()
        for call in self._calls:
            total.add(call.stats)
        total.lane = self.lane + in_plain_torch(given_way())
        if self._stopwatch.enabled:
            # A text waits for the others, so the rest of its time is not its own.
            total.seconds = {name: total.seconds.get(name, 0.0) + own for name, own in self._stopwatch.seconds.items()}
            total.seconds["other"] = max(0.0, self._stopwatch.now() - self._start - sum(total.seconds.values()))
        self._assistant.publish(total)
