"""One `generate` call of an assistant. The decoding loop asks it to propose candidates, to have the target verify
them, and to observe the outcome."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList

from ..alignment.recording import Notes, Recorder
from ..cache_names import passed_cache, returned_cache
from ..devices import is_host_memory, without_attention_plans
from ..drafters.base import TargetCache
from ..drafting.automatic import AutomaticCall, DraftPlan
from ..drafting.guards import outside_inference_mode
from ..drafting.scheduler import DraftScheduler
from ..drafting.session import DraftSession
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS, require_drafting_settings
from ..drafting.token_choice import TokenChoice
from ..memory.recurrent import Rollback
from ..modeling.parts import output_rows
from ..protocol import Candidates
from ..rounds import Answer, Note
from ..stats import DraftingStatistics, Stopwatch
from ..tree_config import AUTO, LONGEST_DRAFT
from .bindable import Assistant
from .feedback import TargetFeedback
from .refusals import check_clocks
from .target import RowsBuffer, entries_with
from .verification import BestTokens, Outcome
from .verified_text import VerifiedText


class GenerateCall:
    """One `generate` call: its session, its counts, and the state of its current round.

    It is entered before transformers prepares the call, and begun by the decoding loop. It is left when the call is
    over, however that ends.

    Args:
        assistant: a bound assistant.
        lent: the session to use, which its owner keeps (None: one of the assistant's).

    Attributes:
        keeps_session: the session goes on with a longer text in another call.
        publishes: its counts become the assistant's when it is closed.
        texts: the number of texts that are generated together, whose time this call shares.
        settings: of drafting, which may be assigned before the call begins.
        best_tokens: of the round's verification, if all rows are looked at.
    """

    keeps_session = False
    publishes = True
    texts = 1
    # Whether automatic drafting may choose, and the aligner may learn.
    _learns = True

    def __init__(self, assistant: Assistant, lent: DraftSession | None = None):
        self._assistant, self.settings = assistant, assistant.generation_config
        self._lent = lent
        self._target = assistant.forward
        self._reads = assistant.drafter.reads
        # What the target has read, while it holds all tokens but the last.
        self._cache: Cache | None = None
        self._session: DraftSession | None = None
        self._stats = DraftingStatistics()
        self._stats.calls = 1
        devices = (assistant.drafter.head.device, assistant.target.device)
        self._stopwatch = Stopwatch(assistant.profile, devices)
        self._start = self._began = 0.0
        self._has_begun = False
        self._aligner = assistant.alignment if self._learns else None
        self._recorder: Recorder | None = None
        self._temperature = 0.0
        self._logits = RowsBuffer()
        self.best_tokens: BestTokens | None = None
        # Of the current round: its candidates, and `Candidates.has_missed` once it is known.
        self._candidates: Candidates | None = None
        self._has_missed: torch.Tensor | None = None

    def __enter__(self) -> "GenerateCall":
        return self

    def __exit__(self, *raised: object) -> None:
        has_failed = raised[0] is not None
        if has_failed:
            # An interrupted call leaves nothing to learn from.
            self._recorder = None
        elif self._has_begun:
            # A user's own loop does not say when it ends, so only here is the last round known to be over.
            self._scheduler.end_call()
        self.close(has_failed)
        if self._aligner is not None and not has_failed:
            self._aligner.learn()

    # The call --------------------------------------------------------------------------------------------------------

    @outside_inference_mode
    def begin(
        self,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ) -> None:
        """Begin, given the decoding loop's own arguments.

        Args:
            generation_config: the call's resolved configuration.
            input_ids: int64 `[1, n]`: the prompt, padding included.
            logits_processor: the call's logits processors.
            model_kwargs: the keyword arguments of the target's forward.

        Raises:
            ConfigurationError: a setting of drafting is mistyped or out of range.
        """
        assistant, target = self._assistant, self._target
        require_drafting_settings(self.settings)
        check_clocks(target.model, assistant, self.settings)
        # Reading the version makes the drafter take up a head that was replaced.
        _ = assistant.drafter.weights_version
        assistant.require_rows()
        self._session, continues = self._open_session(assistant.scored_eos_token_ids(generation_config))
        session = self._session
        session.stats, session.stopwatch = self._stats, self._stopwatch
        target.prepare()
        target.require_states(self._reads, assistant.policy.needs)
        if self._stopwatch.enabled:
            self._start = self._stopwatch.now()
        self._recorder = self._aligner and self._aligner.recorder()
        self._began = time.perf_counter()
        self._scheduler = DraftScheduler(self.settings, assistant.tree, self._automatic(generation_config))
        self._max_length = int(generation_config.max_length)
        self._prefill_chunk_size = generation_config.prefill_chunk_size
        device = session.vocabulary.device
        self._steady_attention = without_attention_plans(device, target.model.device)
        if generation_config.do_sample:
            # transformers leaves logits as they are if the temperature is None.
            temperature = generation_config.temperature
            self._temperature = 1.0 if temperature is None else temperature
        if self._recorder is not None:
            self._recorder.temperature = self._temperature
        if session.vocabulary.target_rows is not None:
            session.follow_target(target.head_rows())
        self._text = VerifiedText(input_ids, model_kwargs, getattr(generation_config, "_mask_length", None), device)
        self._cache = passed_cache(model_kwargs)
        if self._recorder is not None:
            self._recorder.begin(self._text.prompt)
        self._text.known = session.begin(self._text.prompt, continues)
        if not self._text.is_text_alone:
            # Placeholders of an image and its features are read at once.
            self._prefill_chunk_size = None
        in_chunks = bool(self._prefill_chunk_size)
        self._feedback = TargetFeedback(session, target, self._reads, self._text, self._recorder, in_chunks)
        self._choice = TokenChoice(
            bool(generation_config.do_sample), logits_processor, self.vocabulary_rows, self._text.padding, device
        )
        self._has_begun = True

    def _open_session(self, eos_token_ids: tuple[int, ...]) -> tuple[DraftSession, bool]:
        """The session for these EOS ids, and whether it goes on with the text of an earlier call."""
        return self._lent or self._assistant.take_session(eos_token_ids), False

    def _leave_session(self, session: DraftSession) -> None:
        """Leave the session to the next call."""
        if self._lent is None:
            self._assistant.return_session(session)

    def _automatic(self, generation_config: GenerationConfig) -> AutomaticCall | None:
        """Chooses the policy and the draft length, if the settings leave one of them open."""
        assistant = self._assistant
        config, tree = self.settings, assistant.tree
        policies = len(assistant.policy.alternatives(None))
        is_open = config.num_assistant_tokens == AUTO
        if not self._learns or not (is_open or policies > 1):
            return None
        names = ("temperature", "top_k", "top_p") if generation_config.do_sample else ()
        sampling = (config.assistant_confidence_threshold, *(getattr(generation_config, name) for name in names))
        # On a GPU, looking at probabilities would wait for the device at each draft step.
        stops_early = is_open and tree is None and is_host_memory(self._session.vocabulary.device)
        fixed = None
        if not is_open:
            tokens = config.num_assistant_tokens or DEFAULT_NUM_ASSISTANT_TOKENS
            fixed = DraftPlan(tokens, tokens) if tree is None else DraftPlan(tree.depth + 1, tree.total_tokens - 1)
        version = assistant.drafter.weights_version
        chooser = assistant.choosers.chooser(sampling, version, tree, policies, stops_early, fixed)
        return AutomaticCall(chooser, stops_early)

    @property
    def stats(self) -> DraftingStatistics:
        """The counts of this call."""
        return self._stats

    @property
    def session(self) -> DraftSession:
        """The session, once the call has begun."""
        return self._session

    @property
    def choice(self) -> TokenChoice:
        """Chooses draft tokens, once the call has begun."""
        return self._choice

    @property
    def rollback(self) -> Rollback:
        """Rolls the target's cache back."""
        return self._target.rollback

    @property
    def drafts_trees(self) -> bool:
        """Whether candidates are trees."""
        return self._scheduler.tree is not None

    @property
    def wants_scores(self) -> bool:
        """Whether outcomes must have their scores."""
        return self._assistant.measure_coverage

    @property
    def vocabulary_rows(self) -> int:
        """Width of the target's logits, `V`."""
        return output_rows(self._target.model)

    @property
    def cached_before(self) -> int:
        """How many tokens the target's cache holds before those of the text."""
        return self._text.cached_before

    @property
    def wanted_states(self) -> bool | list[int]:
        """The value of `output_hidden_states` for the target's next forward: False if none are wanted."""
        states = self._feedback.wanted_states()
        return entries_with(states) if states else False

    # A round over fixed memory ---------------------------------------------------------------------------------------

    def notes(self) -> tuple[Note | None, int]:
        """`RoundText.note` and `RoundText.noted_top_k`. Graphs note also for calls that are not recorded."""
        if self._aligner is None:
            return None, 0
        return partial(Notes.of, self._temperature), self._aligner.settings.top_k

    def note(self, answer: Answer, count: int, end: int) -> None:
        """Record a round, if this call is recorded.

        Args:
            answer: the target's.
            count: the verified tokens of the round.
            end: the length of the text with them.
        """
        if self._recorder is not None:
            self._recorder.add_notes(answer.note, count, answer.shortlist, answer.features, end - 1)

    def plan_round(self) -> int:
        """The draft steps of the next round."""
        return self._scheduler.begin_round(LONGEST_DRAFT).steps

    def end_round(self, steps: int, accepted: int, is_done: bool, is_usual: bool) -> None:
        """Learn from a round.

        Args:
            steps: its draft steps.
            accepted: the accepted candidates.
            is_done: the text has ended.
            is_usual: its time is that of others like it.
        """
        self._scheduler.has_drafted(steps, is_usual)
        self._scheduler.end_round(accepted, steps, is_done)

    # A round ---------------------------------------------------------------------------------------------------------

    @outside_inference_mode
    def propose(self, input_ids: torch.Tensor, ends_with_text: bool = False, drafts: bool = True) -> Candidates | None:
        """Draft the candidates of one round.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens, padding included.
            ends_with_text: cut a chain after an EOS token, which waits for the device.
            drafts: False if nothing is to be drafted.

        Returns:
            Candidates, or None if nothing is drafted.
        """
        self._candidates = self._has_missed = None
        self._text.extend(input_ids)
        most = self._room(input_ids.shape[1]) if drafts else 0
        plan = self._scheduler.begin_round(most)
        if plan.steps:
            self._session.use(plan.policy)
        self._begin_feedback(plan.steps > 0)
        if not plan.steps:
            return None
        prefix = self._text.tokens(input_ids)
        self._choice.start_round(prefix)
        with self._steady_attention:
            if plan.tree is not None:
                self._candidates = self._session.draft_tree(prefix, plan.tree, plan.steps, self._choice)
            else:
                stop_rule = self._scheduler.stop_rule(self._choice)
                read = self._read() if self._assistant.drafter.reads_cache else None
                self._candidates = self._session.draft_chain(prefix, plan.steps, self._choice, stop_rule, read)
                self._scheduler.has_drafted(self._candidates.token_ids.shape[0])
        if ends_with_text and plan.tree is None:
            self._candidates = _up_to_end(self._candidates, self._session.vocabulary.eos_token_ids)
        return self._candidates

    def _room(self, length: int) -> int:
        """The longest path that may be drafted after a text of that length, padding included; below 1 if none may."""
        tree = self._scheduler.tree
        # The target reads the prompt before the first tree, and before a head that reads its states. Beside images,
        # some count the placeholders in what they read. A recurrent state is not rolled back into the prompt.
        reads_first = self._reads or self._target.rollback.has_states or not self._text.is_text_alone
        if self._text.is_unread and (tree is not None or reads_first):
            return 0
        # A drafter starts from a token, and a head from a token and the target's states at the one before.
        if self._text.length < (2 if self._reads else 1):
            return 0
        if self._reads and not self._session.has_features_of(self._text.length):
            return 0
        if self._assistant.drafter.reads_cache and not self._holds_text():
            return 0
        most = self._max_length - length - 1
        block = self._assistant.drafter.block_size
        most = most if block is None else min(most, block)
        positions = self._assistant.drafter.most_positions
        if positions is not None:
            # The drafter reads the text and all drafted tokens but the last.
            most = min(most, positions - self._text.length + 1)
        room = self._target.room(self._text.positions, self._text.visible_positions)
        if tree is None:
            return min(most, room)
        return most if room >= tree.total_tokens - 1 else 0

    def _holds_text(self) -> bool:
        """Whether the target's cache is there, and holds all tokens but the last."""
        return self._cache is not None and self._cache.get_seq_length() == self._text.positions - 1

    def _read(self) -> TargetCache:
        return TargetCache(self._cache, self._text.is_visible, self._text.visible_positions - 1)

    def _begin_feedback(self, is_drafting: bool) -> None:
        """Settle who observes the target's answer. A session that lags behind the text reads it at its next draft."""
        lags = self._session.length < self._text.length
        is_left_out = not is_drafting and (self._scheduler.is_backing_off or lags)
        self._feedback.begin_round(not is_left_out, self._scheduler.keeps_features)

    def verify(
        self, input_ids: torch.Tensor, candidates: Candidates | None, is_first: bool, model_kwargs: dict[str, Any]
    ) -> Any:
        """Run the target on the candidates. See `TargetForward.run`."""
        has_prompt_rows = self._feedback.wants_prompt_rows
        states = self._feedback.wanted_states(has_prompt_rows)
        unread = 1
        if is_first:
            unread = input_ids.shape[1] - self._text.skipped if self._text.skipped else None
        with self._stopwatch.section("verification"), self._steady_attention:
            if is_first and self._prefill_chunk_size:
                length, size = input_ids.shape[1] if unread is None else unread, self._prefill_chunk_size
                self._feedback.read_ahead = self._target.read_ahead(input_ids, length, size, model_kwargs, states)
                unread = length - size * len(self._feedback.read_ahead)
            earlier_rows = self._feedback.earlier_rows(input_ids.shape[1] if unread is None else unread)
            outputs = self._target.run(
                input_ids,
                candidates,
                unread,
                is_first,
                model_kwargs,
                states,
                self._logits,
                earlier_rows,
                self._text.cached_before,
                alone=bool(self._feedback.read_ahead),
            )
        if has_prompt_rows:
            self._feedback.take_prompt_rows(outputs, earlier_rows)
        self.has_verified(outputs)
        return outputs

    def has_verified(self, outputs: Any) -> None:
        """Take note of the target's outputs for the candidates of the round."""
        logits = outputs.logits[0]
        is_chain = self._candidates is None or self._candidates.is_chain
        looks_at_all = is_chain and is_host_memory(logits.device)
        self.best_tokens = BestTokens(logits, self._feedback.best_count) if looks_at_all else None

    @outside_inference_mode
    def observe(self, outputs: Any, outcome: Outcome, is_done: bool) -> None:
        """Count the round, and let the session observe the outcome.

        Args:
            outputs: the target's.
            outcome: the tokens that came out.
            is_done: the call ends here. The outcome is then of use only to a kept session or a recorder.
        """
        self.count(outcome, is_done)
        if not is_done or self.keeps_session or self._recorder is not None:
            self.learn(outputs, outcome)

    @outside_inference_mode
    def count(self, outcome: Outcome, is_done: bool = False) -> None:
        """Count the round, and adapt the draft length."""
        candidates, accepted = self._candidates, outcome.accepted
        drafted = None if candidates is None else candidates.token_ids.shape[0]
        self._scheduler.end_round(accepted, drafted, is_done)
        covered = None
        if candidates is not None and self._assistant.measure_coverage:
            covered = _covered_mass(candidates, outcome.scores)
        self._session.count(accepted, self._missed(outcome), covered)

    @outside_inference_mode
    def learn(self, outputs: Any, outcome: Outcome) -> None:
        """Let the session observe the outcome."""
        self._cache = returned_cache(outputs)
        missed = self._missed(outcome)
        feedback = self._feedback.of_round(outputs, self._candidates, outcome, missed, self.best_tokens)
        if feedback is not None:
            self._session.learn(feedback)

    def _missed(self, outcome: Outcome) -> torch.Tensor | None:
        """`Candidates.has_missed` of the round, computed once for the statistics and the policy."""
        if self._has_missed is None and self._candidates is not None:
            self._has_missed = self._candidates.has_missed(outcome.token_ids.to(self._session.vocabulary.device))
        return self._has_missed

    def close(self, has_failed: bool = False) -> None:
        """Leave the session, publish the counts, and hand over the recording. The garbage collector may do this, too.

        Args:
            has_failed: an error ended the call. Then the policy's memory of it is not shared with other calls.
        """
        if not self._has_begun:
            if self._session is not None:
                # The call was interrupted before it began.
                self._session.close()
            return
        if self._stopwatch.enabled:
            elapsed = self._stopwatch.now() - self._start
            self._stats.seconds = dict(self._stopwatch.seconds)
            self._stats.seconds["other"] = max(0.0, elapsed - sum(self._stopwatch.seconds.values()))
        config = self.settings
        if config.num_assistant_tokens_schedule == "heuristic" and self._scheduler.adapts_length:
            config.num_assistant_tokens = self._scheduler.num_assistant_tokens
        if self._aligner is not None:
            self._aligner.take(self._recorder, (time.perf_counter() - self._began) / self.texts)
        if not self._session.is_closed:
            self._session.count_background_work()
            if not has_failed:
                self._session.end_call()
        self._leave_session(self._session)
        if self.publishes:
            self._assistant.publish(self._stats)


def _covered_mass(candidates: Candidates, scores: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`[n]`: the target's probability mass on the shortlists of the verified positions that had one."""
    mass = [
        row[0].softmax(-1).index_select(0, shortlist.ids().to(row.device)).sum()
        for row, shortlist in zip(scores, candidates.shortlists, strict=False)
    ]
    return torch.stack(mass)


def _up_to_end(chain: Candidates, eos_token_ids: tuple[int, ...]) -> Candidates:
    """A chain up to its first EOS token."""
    ends = [place for place, token_id in enumerate(chain.token_ids.tolist()) if token_id in eos_token_ids]
    if not ends:
        return chain
    count = ends[0] + 1
    leading = {name: getattr(chain, name)[:count] for name in ("token_ids", "shortlists", "logits", "drawn_from")}
    return replace(chain, **leading)
