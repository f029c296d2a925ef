"""The drafting side of one call: hands the text to the session, asks for candidates, and feeds the verdicts back."""

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..alignment.recording import Recorder
from ..devices import is_host_memory, without_attention_plans
from ..drafting.automatic_call import AutomaticCall
from ..drafting.draft_shapes import DraftShape, shape_of
from ..drafting.guards import outside_inference_mode
from ..drafting.session import DraftSession, Feedback
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..drafting.token_choice import TokenChoice
from ..drafting.tree_config import AUTO, LONGEST_DRAFT, TreeConfig
from ..modeling.parts import output_rows
from ..protocol import Candidates
from .feedback import TargetFeedback
from .target import RowsBuffer, TargetForward, entries_with
from .verification import BestTokens, Outcome
from .verified_text import VerifiedText


class Drafting:
    """Drafts for one `generate` call, has the target verify, and feeds its verdicts back to the session.

    Args:
        session: the drafting session, not yet begun.
        reads: the hidden states of the target that the drafter reads.
        target: runs the model that verifies.
        generation_config: the call's resolved configuration.
        input_ids: int64 `[1, n]`: the prompt, padding included.
        model_kwargs: what the target is called with.
        drafting_config: `num_assistant_tokens`, its schedule and `assistant_confidence_threshold`.
        logits_processor: the call's logits processors.
        tree: draft trees of this shape (None: chains).
        is_kept: the session will go on with a longer text after this call.
        continues: it goes on with a longer text in this call.
        measure_coverage: record the target's probability mass on the shortlists, which costs a softmax over the full
            vocabulary for every verified position.
        recorder: takes in what the target says, to learn from it (None: nobody does).
        automatic: chooses the policy of each round, and how much it drafts where the drafting configuration leaves
            that open, at most `tree` (None: all rounds draft the same).
    """

    @outside_inference_mode
    def __init__(
        self,
        session: DraftSession,
        reads: tuple[int, ...],
        target: TargetForward,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        drafting_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        tree: TreeConfig | None = None,
        is_kept: bool = False,
        continues: bool = False,
        measure_coverage: bool = False,
        recorder: Recorder | None = None,
        automatic: AutomaticCall | None = None,
    ):
        tokens = drafting_config.num_assistant_tokens
        self.num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS if tokens == AUTO else int(tokens)
        self._automatic = automatic
        self._has_fixed_shape = automatic is None or tokens != AUTO
        self._schedule = drafting_config.num_assistant_tokens_schedule or "constant"
        self._threshold = float(drafting_config.assistant_confidence_threshold or 0.0)
        self._session = session
        self._reads = reads
        self._target = target
        self._tree = tree
        self._is_kept = is_kept
        self._max_length = generation_config.max_length
        self._prefill_chunk_size = generation_config.prefill_chunk_size
        self._measure_coverage = measure_coverage
        self._recorder = recorder
        self._logits = RowsBuffer()
        # Of the round's verification, where all rows are looked at: see `verification.BestTokens`.
        self.best_tokens: BestTokens | None = None
        self._candidates: Candidates | None = None
        # Of the round's last verified token: see `Candidates.has_missed`.
        self._has_missed: torch.Tensor | None = None
        if recorder is not None and generation_config.do_sample:
            # Where it is None, transformers leaves logits as they are.
            recorder.temperature = 1.0 if generation_config.temperature is None else generation_config.temperature
        if session.vocabulary.target_rows is not None:
            session.follow_target(target.head_rows())
        device = session.vocabulary.device
        self._steady_attention = without_attention_plans(device, target.model.device)
        self._text = VerifiedText(input_ids, model_kwargs, getattr(generation_config, "_mask_length", None), device)
        if recorder is not None:
            recorder.begin(self._text.prompt)
        self._text.known = session.begin(self._text.prompt, continues)
        in_chunks = bool(self._prefill_chunk_size)
        self._feedback = TargetFeedback(session, target, reads, self._text, recorder, in_chunks)
        rows = output_rows(target.model)
        self._choice = TokenChoice(
            bool(generation_config.do_sample), logits_processor, rows, self._text.padding, device
        )

    @property
    def drafts_trees(self) -> bool:
        """Whether candidates are trees."""
        return self._tree is not None

    @property
    def adapts_length(self) -> bool:
        """Whether drafts become longer and shorter as transformers' schedules say."""
        return self._schedule != "constant" and self._tree is None and self._has_fixed_shape

    @property
    def wants_scores(self) -> bool:
        """Whether outcomes have to have their scores."""
        return self._measure_coverage

    @property
    def vocabulary_rows(self) -> int:
        """Width of the target's logits, `V`."""
        return output_rows(self._target.model)

    @property
    def cached_before(self) -> int:
        """How many tokens are in the target's cache before those of the text."""
        return self._text.cached_before

    @property
    def wanted_states(self) -> bool | list[int]:
        """What `output_hidden_states` of the target's next forward has to be: False where none are wanted."""
        states = self._feedback.wanted_states()
        return entries_with(states) if states else False

    @outside_inference_mode
    def propose(self, input_ids: torch.Tensor, ends_with_text: bool = False, drafts: bool = True) -> Candidates | None:
        """Draft the candidates of one round.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens, padding included.
            ends_with_text: leave out what a chain has after an end of the text, which waits for the device.
            drafts: False where nothing is to be drafted.

        Returns:
            Candidates, or None where only one more token is wanted, or the target has to read the prompt first.
        """
        self._candidates = self._has_missed = None
        self._text.extend(input_ids)
        most = self._most_steps(input_ids.shape[1]) if drafts else 0
        count, tree = self.num_assistant_tokens, self._tree
        if self._automatic is not None:
            count, tree = self._choose(most)
        if most < 1 or count < 1:
            return None
        prefix = self._text.tokens(input_ids)
        self._choice.start_round(prefix)
        steps = None
        if tree is not None:
            draw = self._choice.draw_children if self._choice.do_sample else None
            with self._steady_attention:
                self._candidates = self._session.draft_tree(prefix, tree, most, draw)
        else:
            goes_on = self._is_sure if self._threshold > 0 else None
            if self._automatic is not None and self._automatic.ends_early:
                self._automatic.begin_draft(prefix)
                goes_on = self._is_worth_more
            with self._steady_attention:
                self._candidates = self._session.draft_chain(prefix, min(count, most), self._choice, goes_on)
            steps = self._candidates.token_ids.shape[0]
            if ends_with_text:
                self._candidates = _up_to_end(self._candidates, self._session.vocabulary.eos_token_ids)
        if self._automatic is not None:
            self._automatic.has_drafted(steps)
        return self._candidates

    def _is_sure(self, token_id: torch.Tensor) -> bool:
        """See `session.GoesOn`: as long as tokens are as probable as the call asks for."""
        return self._choice.probability() >= self._threshold

    def _is_worth_more(self, token_id: torch.Tensor) -> bool:
        """See `session.GoesOn`: as long as another token is worth its time, too."""
        # It is told of each token.
        is_worth_more = self._automatic.goes_on_after(token_id, self._choice)
        return is_worth_more and (self._threshold <= 0 or self._is_sure(token_id))

    def _most_steps(self, length: int) -> int:
        """How long a path may be drafted after a text of that length, padding included; none where it is below 1."""
        if self._text.is_unread and (self._tree is not None or self._reads):
            return 0
        most = self._max_length - length - 1
        room = self._target.room(self._text.positions, self._text.visible_positions)
        if self._tree is None:
            return min(most, room)
        return most if room >= self._tree.total_tokens - 1 else 0

    def _choose(self, most: int) -> tuple[int, TreeConfig | None]:
        """Choose the policy and how many steps to draft, at most `most` of which are of use, and for trees their
        shape."""
        if self._reads and not self._session.has_features_of(self._text.length):
            most = 0
        # What a conversation's session reads serves its later turns too, and heads are a layer or so.
        may_wait = not self._is_kept and not self._reads
        behind = self._text.length - self._session.read if may_wait else 0
        shape = self._automatic.begin_round(most, self._fixed_shape(), behind)
        if shape.steps:
            self._session.use(shape.policy)
        # What a session was not shown it reads when it drafts again, and nothing before that.
        lags = not shape.steps and self._session.length < self._text.length
        # What is drafted is shown, also where another call finds meanwhile that drafting is to rest.
        rests = not shape.steps and (most > 0 or self._automatic.is_resting)
        self._feedback.begin_round(not (rests or lags), self._automatic.reads_features)
        if self._has_fixed_shape:
            return self.num_assistant_tokens, self._tree
        if self._tree is None or not shape.steps:
            return shape.steps, None
        return shape.steps, replace(self._tree, total_tokens=shape.nodes + 1, depth=shape.steps - 1)

    def _fixed_shape(self) -> DraftShape | None:
        """The one to choose a policy for; None where the shape is to be chosen too."""
        if not self._has_fixed_shape:
            return None
        return shape_of(self.num_assistant_tokens, self._tree)

    def verify(
        self, input_ids: torch.Tensor, candidates: Candidates | None, is_first: bool, model_kwargs: dict[str, Any]
    ) -> Any:
        """Run the target on the candidates. See `TargetForward.run`."""
        has_prompt_rows = self._feedback.wants_prompt_rows
        states = self._feedback.wanted_states(has_prompt_rows)
        unread = 1
        if is_first:
            unread = input_ids.shape[1] - self._text.skipped if self._text.skipped else None
        with self._session.stopwatch.section("verification"), self._steady_attention:
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
        logits = outputs.logits[0]
        has_few_rows = candidates is None or candidates.is_chain
        looks_at_all = has_few_rows and is_host_memory(logits.device)
        self.best_tokens = BestTokens(logits, self._feedback.best_count) if looks_at_all else None
        return outputs

    @outside_inference_mode
    def observe(self, outputs: Any, outcome: Outcome, is_done: bool) -> None:
        """Count the round, and show the session what the target said.

        Args:
            outputs: the target's.
            outcome: the tokens that came out.
            is_done: the call ends here. A session that is not kept for a longer text then learns nothing any more,
                unless the call is recorded.
        """
        counts = self._counts(outcome, is_done)
        is_of_use = not is_done or self._is_kept or self._recorder is not None
        feedback = self._feedback_of(outputs, outcome) if is_of_use else None
        self._session.count(*counts)
        if feedback is not None:
            self._session.learn(feedback)

    def end_call(self) -> None:
        """The call is over: what is learnt of rounds is learnt of the last one too."""
        if self._automatic is not None:
            self._automatic.end_call()

    @outside_inference_mode
    def count(self, outcome: Outcome) -> None:
        """Count the round, and adapt the draft length. The text ends where its last token is one that ends texts."""
        is_done = False
        if self._automatic is not None:
            is_done = int(outcome.token_ids[-1]) in self._session.vocabulary.eos_token_ids
        self._session.count(*self._counts(outcome, is_done))

    @outside_inference_mode
    def learn(self, outputs: Any, outcome: Outcome) -> None:
        """Show the session what the target said."""
        feedback = self._feedback_of(outputs, outcome)
        if feedback is not None:
            self._session.learn(feedback)

    def _feedback_of(self, outputs: Any, outcome: Outcome) -> Feedback | None:
        """See `TargetFeedback.of_round`."""
        missed = self._missed(outcome)
        return self._feedback.of_round(outputs, self._candidates, outcome, missed, self.best_tokens)

    def _counts(self, outcome: Outcome, is_done: bool = False) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
        """What `DraftSession.count` takes. Adapts the draft length as transformers' schedules do."""
        candidates = self._candidates
        if self._automatic is not None:
            self._automatic.end_round(outcome.accepted, is_done)
        if candidates is None:
            return outcome.accepted, None, None
        if self.adapts_length:
            change = 2 if outcome.accepted == candidates.token_ids.shape[0] else -1
            self.num_assistant_tokens = min(LONGEST_DRAFT, max(1, self.num_assistant_tokens + change))
        covered = _covered_mass(candidates, outcome.scores) if self._measure_coverage else None
        return outcome.accepted, self._missed(outcome), covered

    def _missed(self, outcome: Outcome) -> torch.Tensor | None:
        """`Candidates.has_missed` of the round, found once for the statistics and the policy."""
        if self._has_missed is None and self._candidates is not None:
            self._has_missed = self._candidates.has_missed(outcome.token_ids.to(self._session.vocabulary.device))
        return self._has_missed


def _covered_mass(candidates: Candidates, scores: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`[n]`: the target's probability mass on the shortlists of the verified positions that had one."""
    mass = [
        row[0].softmax(-1).index_select(0, shortlist.ids().to(row.device)).sum()
        for row, shortlist in zip(scores, candidates.shortlists, strict=False)
    ]
    return torch.stack(mass)


def _up_to_end(chain: Candidates, eos_token_ids: tuple[int, ...]) -> Candidates:
    """A chain without what comes after its first end of the text."""
    ends = [place for place, token_id in enumerate(chain.token_ids.tolist()) if token_id in eos_token_ids]
    if not ends:
        return chain
    count = ends[0] + 1
    leading = {name: getattr(chain, name)[:count] for name in ("token_ids", "shortlists", "logits", "drawn_from")}
    return replace(chain, **leading)
