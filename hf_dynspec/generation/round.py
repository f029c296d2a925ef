"""The drafting side of one call: hands the text to the session, asks for candidates, and feeds the verdicts back."""

from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from ..alignment.recording import Recorder
from ..devices import is_free_to_look
from ..drafting.automatic_call import AutomaticCall
from ..drafting.draft_shapes import DraftShape, shape_of
from ..drafting.session import DraftSession, Feedback, outside_inference_mode
from ..drafting.settings import DEFAULT_NUM_ASSISTANT_TOKENS
from ..drafting.token_choice import TokenChoice
from ..drafting.tree_config import AUTO, LONGEST_DRAFT, TreeConfig
from ..kernels import top_k_ids
from ..modeling.head import finish_logits
from ..modeling.parts import output_rows, scale_and_cap
from ..protocol import Candidates, Needs
from ..stats import DraftingStatistics
from .target import RowsBuffer, TargetForward, entries_with
from .verification import BestTokens, Outcome

# Prompt positions whose full-vocabulary logits are held at a time while looking for the most probable tokens.
_PROMPT_CHUNK = 64


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
        # Whether nobody is shown what the target says in this round, and whether the drafter reads its features.
        self._is_unshown, self._reads_features = False, True
        self._schedule = drafting_config.num_assistant_tokens_schedule or "constant"
        self._threshold = float(drafting_config.assistant_confidence_threshold or 0.0)
        self._session = session
        self._device = session.vocabulary.device
        self._reads = reads
        self._target = target
        self._tree = tree
        self._is_kept = is_kept
        self._max_length = generation_config.max_length
        self._mask_length = getattr(generation_config, "_mask_length", None)
        self._prefill_chunk_size = generation_config.prefill_chunk_size
        self._measure_coverage = measure_coverage
        self._recorder = recorder
        self._logits = RowsBuffer()
        # What the target returned for the chunks of the prompt before the last one.
        self._read_ahead: list[Any] = []
        self._prompt_logits: torch.Tensor | None = None
        # Of the round's verification, where all rows are looked at: see `verification.BestTokens`.
        self.best_tokens: BestTokens | None = None
        self._candidates: Candidates | None = None
        # Of the round's last verified token: see `Candidates.has_missed`.
        self._has_missed: torch.Tensor | None = None
        self._prefix_length = input_ids.shape[1]
        if recorder is not None and generation_config.do_sample:
            # Where it is None, transformers leaves logits as they are.
            recorder.temperature = 1.0 if generation_config.temperature is None else generation_config.temperature
        if session.vocabulary.target_rows is not None:
            session.follow_target(target.head_rows())
        self._begin(input_ids, model_kwargs, continues)
        padding = self._padded_length - self._prompt.shape[0]
        rows = output_rows(target.model)
        self._choice = TokenChoice(
            bool(generation_config.do_sample), logits_processor, rows, padding, self._session.vocabulary.device
        )

    @property
    def _needs(self) -> Needs:
        """What the policy of this round asks to be shown."""
        return self._session.needs

    @property
    def drafts_trees(self) -> bool:
        """Whether candidates are trees."""
        return self._tree is not None

    @property
    def wants_scores(self) -> bool:
        """Whether outcomes have to have their scores."""
        return self._measure_coverage

    @property
    def vocabulary_rows(self) -> int:
        """Width of the target's logits, `V`."""
        return output_rows(self._target.model)

    @property
    def wanted_states(self) -> bool | list[int]:
        """What `output_hidden_states` of the target's next forward has to be: False where none are wanted."""
        states = self._wanted_states(self._needs.of_prompt)
        return entries_with(states) if states else False

    def _wanted_states(self, of_prompt: bool) -> tuple[int, ...]:
        if self._is_unshown:
            return self._reads if self._reads_features else ()
        of_prompt = of_prompt and self._is_unread and self._target.has_head_state
        if self._needs.hidden_states or of_prompt:
            return (*self._reads, self._target.num_layers)
        return self._reads

    @property
    def _wanted_best(self) -> int:
        """How many of the target's most probable tokens are asked for at each verified position."""
        if self._is_unshown:
            return 0
        return max(self._needs.verify_top_k, 0 if self._recorder is None else self._recorder.top_k)

    @property
    def _is_unread(self) -> bool:
        """Whether the target has not read the prompt yet."""
        return self._prefix_length == self._padded_length

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
        self._prefix_length = input_ids.shape[1]
        most = self._most_steps(input_ids) if drafts else 0
        count, tree = self.num_assistant_tokens, self._tree
        if self._automatic is not None:
            count, tree = self._choose(most)
        if most < 1 or count < 1:
            return None
        prefix = self._without_padding(input_ids)
        self._choice.start_round(prefix)
        if tree is not None:
            draw = self._choice.draw_children if self._choice.do_sample else None
            self._candidates = self._session.draft_tree(prefix, tree, most, draw)
        else:
            self._candidates = self._session.draft_chain(prefix, min(count, most), self._choice, self._threshold)
            if ends_with_text:
                self._candidates = _up_to_end(self._candidates, self._session.vocabulary.eos_token_ids)
        return self._candidates

    def _most_steps(self, input_ids: torch.Tensor) -> int:
        """How long a path may be drafted; none where it is below 1."""
        if self._is_unread and (self._tree is not None or self._reads):
            return 0
        most = self._max_length - input_ids.shape[1] - 1
        length = self.cached_before + input_ids.shape[1]
        room = self._target.room(length, length - self._hidden_by_mask)
        if self._tree is None:
            return min(most, room)
        return most if room >= self._tree.total_tokens - 1 else 0

    def _choose(self, most: int) -> tuple[int, TreeConfig | None]:
        """Choose the policy and how many steps to draft, at most `most` of which are of use, and for trees their
        shape."""
        if self._reads and not self._session.has_features_of(self._length):
            most = 0
        shape = self._automatic.begin_round(most, self._fixed_shape())
        if shape.steps:
            self._session.use(shape.policy)
        # What a session was not shown it reads when it drafts again, and nothing before that.
        lags = not shape.steps and self._session.length < self._length
        rests = self._automatic.is_resting or (most > 0 and not shape.steps)
        self._is_unshown = (rests or lags) and self._recorder is None
        self._reads_features = not self._is_unshown or self._automatic.reads_features
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

    @property
    def _length(self) -> int:
        """How many verified tokens there are, without padding."""
        return self._prompt.shape[0] + self._prefix_length - self._padded_length

    def verify(
        self, input_ids: torch.Tensor, candidates: Candidates | None, is_first: bool, model_kwargs: dict[str, Any]
    ) -> Any:
        """Run the target on the candidates. See `TargetForward.run`."""
        shows_rows = self._is_unread and not self._is_unshown and self._shows_prompt_rows
        unread, states = 1, self._wanted_states(self._needs.of_prompt and not shows_rows)
        if is_first:
            unread = input_ids.shape[1] - self._skipped if self._skipped else None
        with self._session.stopwatch.section("verification"):
            if is_first and self._prefill_chunk_size:
                length = input_ids.shape[1] if unread is None else unread
                size = self._prefill_chunk_size
                self._read_ahead = self._target.read_ahead(input_ids, length, size, model_kwargs, states)
                unread = length - size * len(self._read_ahead)
            rows = self._earlier_rows(input_ids.shape[1] if unread is None else unread) if shows_rows else 0
            outputs = self._target.run(
                input_ids,
                candidates,
                unread,
                is_first,
                model_kwargs,
                states,
                self._logits,
                rows,
                self.cached_before,
                alone=bool(self._read_ahead),
            )
        if shows_rows:
            self._prompt_logits = outputs.logits[0, : rows + 1]
            outputs.logits = outputs.logits[:, rows:]
        logits = outputs.logits[0]
        has_few_rows = candidates is None or candidates.is_chain
        self.best_tokens = (
            BestTokens(logits, self._wanted_best) if has_few_rows and is_free_to_look(logits.device) else None
        )
        return outputs

    @property
    def _shows_prompt_rows(self) -> bool:
        """Whether the target's logits at the prompt's last positions are had together with those of the last one:
        for few of them that takes little longer, and for many they follow from states, if at all."""
        needs, most = self._needs, self._needs.prompt_positions
        if not needs.prompt_top_k or most == 0:
            return False
        are_few = most is not None and most <= _PROMPT_CHUNK and not self._prefill_chunk_size
        return (are_few and not needs.prompt_hidden_states) or not self._target.has_head_state

    def _earlier_rows(self, unread: int) -> int:
        """How many rows of logits before the last verified token are wanted, where any are."""
        new = self._prompt.shape[0] - self._kept
        most = _PROMPT_CHUNK if self._needs.prompt_positions is None else self._needs.prompt_positions
        return max(1, min(unread, new, most, _PROMPT_CHUNK)) - 1

    @outside_inference_mode
    def observe(self, outputs: Any, outcome: Outcome, is_done: bool) -> None:
        """Count the round, and show the session what the target said.

        Args:
            outputs: the target's.
            outcome: the tokens that came out.
            is_done: the call ends here. A session that is not kept for a longer text then learns nothing any more,
                unless the call is recorded.
        """
        counts = self._counts(outcome)
        is_of_use = not is_done or self._is_kept or self._recorder is not None
        feedback = self._feedback(outputs, outcome) if is_of_use else None
        self._session.count(*counts)
        if feedback is not None:
            self._session.learn(feedback)

    @outside_inference_mode
    def count(self, outcome: Outcome) -> None:
        """Count the round, and adapt the draft length."""
        self._session.count(*self._counts(outcome))

    @outside_inference_mode
    def learn(self, outputs: Any, outcome: Outcome) -> None:
        """Show the session what the target said."""
        feedback = self._feedback(outputs, outcome)
        if feedback is not None:
            self._session.learn(feedback)

    # The prompt ----------------------------------------------------------------------------------------------------

    def _begin(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], continues: bool) -> None:
        """Hand the prompt to the session and settle what the target's first forward must process."""
        self._prompt = input_ids[0]
        self._padded_length = input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        self._is_token: torch.Tensor | None = None
        if mask is not None and mask.shape[1] >= self._padded_length:
            self._is_token = mask[0, mask.shape[1] - self._padded_length :].to(input_ids.device).bool()
            self._prompt = self._prompt[self._is_token]
        self._prompt = self._prompt.to(device=self._device, dtype=torch.int64)
        if self._recorder is not None:
            self._recorder.begin(self._prompt)
        self._kept = self._session.begin(self._prompt, continues)
        self._settle_cached(input_ids, model_kwargs)

    def _without_padding(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]`: the verified tokens that the mask does not hide, on the drafter's device."""
        new = input_ids[0, self._padded_length :].to(device=self._device, dtype=torch.int64)
        return torch.cat([self._prompt, new])

    def _settle_cached(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """Settle how many leading tokens of the prompt a passed-in cache holds already, or how many there are before
        the prompt where only new tokens were passed; and how many of all of them the mask hides."""
        cache = model_kwargs.get("past_key_values")
        cached = 0 if cache is None else cache.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        mask_length = self._mask_length if mask is None else mask.shape[1]
        holds_all = mask_length is None or mask_length == input_ids.shape[1]
        self._skipped, self.cached_before = (cached, 0) if holds_all else (0, cached)
        self._hidden_by_mask = 0 if mask is None else int((mask[0] == 0).sum())

    def _states(self, outputs: Any, index: int) -> torch.Tensor:
        """`[n, d]`: hidden states of what the target read in this round, in however many chunks."""
        return torch.cat([self._target.state(one, index) for one in (*self._read_ahead, outputs)])

    # The verdict ---------------------------------------------------------------------------------------------------

    def _counts(self, outcome: Outcome) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
        """What `DraftSession.count` takes. Adapts the draft length as transformers' schedules do."""
        candidates = self._candidates
        if self._automatic is not None:
            self._automatic.end_round(outcome.accepted)
        if candidates is None:
            return outcome.accepted, None, None
        if self._schedule != "constant" and self._tree is None and self._has_fixed_shape:
            change = 2 if outcome.accepted == candidates.token_ids.shape[0] else -1
            self.num_assistant_tokens = min(LONGEST_DRAFT, max(1, self.num_assistant_tokens + change))
        covered = _covered_mass(candidates, outcome.scores) if self._measure_coverage else None
        return outcome.accepted, self._missed(outcome), covered

    def _feedback(self, outputs: Any, outcome: Outcome) -> Feedback | None:
        """What the target said in this round, as far as drafter and policy asked for it. None where it is not shown:
        then at most the features are kept."""
        end = self._length + outcome.accepted
        if self._is_unshown:
            if self._reads and self._reads_features:
                self._session.take_features(self._features(outputs, outcome), end)
            self._read_ahead = []
            return None
        prompt = self._shown_of_prompt(outputs) if self._is_unread and self._needs.of_prompt else None
        features = self._features(outputs, outcome) if self._reads else None
        self._read_ahead = []
        verified = outcome.token_ids.to(self._device)
        with self._session.stopwatch.section("policy"):
            logits, top = self._verified_logits(outputs, outcome), {}
            if self._wanted_best:
                best = None if self.best_tokens is None else self.best_tokens.ids(self._wanted_best)[: logits.shape[0]]
                with_logits = self._needs.top_logits or self._recorder is not None
                top = self._most_probable(logits, self._wanted_best, with_logits, best)
            shown = self._shown(outputs, outcome, top)
        if self._recorder is not None:
            shortlist = None if self._candidates is None else self._candidates.shortlists[0]
            self._recorder.add(logits, top, verified, shortlist, features, end)
        return Feedback(verified, shown, prompt, features, end)

    def _features(self, outputs: Any, outcome: Outcome) -> torch.Tensor:
        """`[m, d · layers]`: the hidden states at the tokens that the drafter will read, the prompt's at first."""
        states = torch.cat([self._states(outputs, index) for index in self._reads], dim=-1)
        rows = outputs.logits.shape[1]
        features = states[states.shape[0] - rows :][outcome.rows]
        if self._is_unread:
            features = states[: states.shape[0] - rows + 1]
            if self._is_token is not None:
                features = features[self._is_token[self._padded_length - features.shape[0] :].to(features.device)]
        return features.to(self._device)

    def _shown(self, outputs: Any, outcome: Outcome, top: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the policy asked to be shown of a verification, by the names that `Verdict` has."""
        shown: dict[str, torch.Tensor] = {}
        if self._needs.verify_top_k:
            names = ("top_ids", "top_logits") if self._needs.top_logits else ("top_ids",)
            shown = {name: top[name][:, : self._needs.verify_top_k] for name in names}
        if self._needs.hidden_states:
            states = self._target.state(outputs, self._target.num_layers)[-outputs.logits.shape[1] :]
            shown["hidden_states"] = states.index_select(0, outcome.rows.to(states.device)).to(self._device)
        if self._needs.out_of_vocabulary:
            missed = torch.zeros(outcome.accepted + 1, dtype=torch.bool, device=self._device)
            has_missed = self._missed(outcome)
            if has_missed is not None:
                missed[-1] = has_missed
            shown["out_of_vocabulary"] = missed
        return shown

    def _missed(self, outcome: Outcome) -> torch.Tensor | None:
        """`Candidates.has_missed` of the round, found once for the statistics and the policy."""
        if self._has_missed is None and self._candidates is not None:
            self._has_missed = self._candidates.has_missed(outcome.token_ids.to(self._device))
        return self._has_missed

    def _verified_logits(self, outputs: Any, outcome: Outcome) -> torch.Tensor:
        """`[a + 1, V]`: the target's where the verified tokens were chosen."""
        if self._candidates is None or self._candidates.is_chain:
            # Where they lie: to copy rows of a large vocabulary takes longer than to look at them.
            return outputs.logits[0, : outcome.accepted + 1]
        return outputs.logits[0].index_select(0, outcome.rows.to(outputs.logits.device))

    def _most_probable(
        self, logits: torch.Tensor, count: int, with_logits: bool, best: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The most probable tokens of rows of logits `[m, V]`, where they are not known yet, and where asked for,
        their logits."""
        top_ids = top_k_ids(logits, min(count, logits.shape[1])) if best is None else best
        shown = {"top_ids": top_ids.to(self._device)}
        if with_logits:
            shown["top_logits"] = logits.gather(1, top_ids).float().to(self._device)
        return shown

    def _shown_of_prompt(self, outputs: Any) -> dict[str, torch.Tensor] | None:
        """What the policy asked to be shown of the prompt positions that it has not seen, by the names that `Prompt`
        has; None where there are none."""
        if self._prompt_logits is not None:
            logits, self._prompt_logits = self._prompt_logits, None
            with self._session.stopwatch.section("policy"):
                return self._most_probable(logits, self._needs.prompt_top_k, self._needs.top_logits)
        if not self._target.has_head_state:
            return None
        states = self._states(outputs, self._target.num_layers)
        end = states.shape[0] - outputs.logits.shape[1] + 1
        first_read = self._padded_length - end
        start = max(0, self._padded_length - self._prompt.shape[0] + self._kept - first_read)
        if self._needs.prompt_positions is not None:
            start = max(start, end - self._needs.prompt_positions)
        if start >= end:
            return None
        with self._session.stopwatch.section("policy"):
            return self._shown_of_states(states[start:end])

    def _shown_of_states(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same, given the target's last hidden states `[m, d]` at these positions."""
        shown: dict[str, torch.Tensor] = {}
        if self._needs.prompt_top_k:
            model = self._target.model
            head = model.get_output_embeddings()
            wanted = self._needs.prompt_top_k, self._needs.top_logits
            # A scale or cap after the projection does not change which tokens are the most probable.
            chunks = [self._most_probable(head(chunk), *wanted) for chunk in states.split(_PROMPT_CHUNK)]
            shown = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
            if self._needs.top_logits:
                shown["top_logits"] = finish_logits(shown["top_logits"], *scale_and_cap(model))
        if self._needs.prompt_hidden_states:
            shown["hidden_states"] = states.to(self._device)
        return shown


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


def draft_once(
    target: TargetForward,
    session: DraftSession,
    reads: tuple[int, ...],
    drafting_config: GenerationConfig,
    tree: TreeConfig | None,
    input_ids: torch.Tensor,
) -> Candidates:
    """Draft after a text as the second round of a greedy call does, whose first round ended with its last token.

    Args:
        target: as for `Drafting`, likewise the next five.
        input_ids: int64 `[1, n]`, `n >= 2`.

    Returns:
        The candidates, with parents, depths and scores for chains too.
    """
    session.stats = DraftingStatistics()
    prompt, last = input_ids[:, :-1], input_ids[0, -1:]
    cache = DynamicCache(config=target.model.config)
    kwargs = {"past_key_values": cache, "use_cache": True, "attention_mask": torch.ones_like(prompt)}
    longest = GenerationConfig(max_length=input_ids.shape[1] + LONGEST_DRAFT + 1)
    drafting = Drafting(
        session, reads, target, longest, prompt, dict(kwargs), drafting_config, LogitsProcessorList(), tree
    )
    outputs = drafting.verify(prompt, None, True, kwargs)
    drafting.observe(outputs, Outcome(last, torch.zeros_like(last), ()), False)
    candidates = drafting.propose(input_ids)
    if not candidates.is_chain:
        return candidates
    steps = torch.arange(candidates.token_ids.shape[0], device=candidates.token_ids.device)
    log_probabilities = [
        torch.where(shortlist.scored_slots == token_id, logits.log_softmax(-1), -torch.inf).amax()
        for token_id, logits, shortlist in zip(
            candidates.token_ids, candidates.logits, candidates.shortlists, strict=True
        )
    ]
    return replace(candidates, parents=steps - 1, depths=steps, scores=torch.stack(log_probabilities).cumsum(0))
