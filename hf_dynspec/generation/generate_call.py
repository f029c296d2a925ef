"""One `generate` call of an assistant: its session, its counts, and what drafts in it."""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..alignment.recording import Recorder
from ..devices import is_host_memory
from ..drafting.automatic_call import AutomaticCall
from ..drafting.session import DraftSession
from ..drafting.settings import require_drafting_settings, settled
from ..drafting.tree_config import AUTO
from ..modeling.parts import computes_in_fp32
from ..stats import DraftingStatistics, Stopwatch
from .call import Assistant, Call
from .round import Drafting


class GenerateCall(Call):
    """What one `generate` call uses: a session, counts, and the drafting that uses it. To be entered, and left when
    the call is over, however it ends.

    Attributes:
        is_kept: whether the session goes on in another call.
    """

    is_kept = False

    def __init__(self, assistant: Assistant):
        self._assistant = assistant
        self._session: DraftSession | None = None
        self._drafting: Drafting | None = None
        self._stats = DraftingStatistics()
        self._stats.calls = 1
        devices = (assistant.drafter.head.device, assistant.target.device)
        self._stopwatch = Stopwatch(assistant.profile, devices)
        self._start = self._began = 0.0
        self._aligner = assistant.alignment
        self._recorder: Recorder | None = None

    def __enter__(self) -> "GenerateCall":
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            # What was interrupted leaves nothing to learn from.
            self._recorder = None
        # Only here: of a loop of one's own nobody knows when it ended.
        if raised[0] is None and self._drafting is not None:
            self._drafting.end_call()
        self.close(has_failed=raised[0] is not None)
        if self._aligner is not None and raised[0] is None:
            self._aligner.learn()

    def kept_session(self) -> DraftSession | None:
        """The session to go on with, if it still fits."""
        return None

    def leave_session(self, session: DraftSession) -> None:
        """Leave the session to the next call."""
        self._assistant.return_session(session)

    def drafting(
        self,
        *,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
    ) -> Drafting:
        """See `Call.drafting`."""
        assistant = self._assistant
        require_drafting_settings(assistant.generation_config)
        is_fixed = assistant.tree is not None or self._shows_drafts(generation_config)
        config = settled(assistant.generation_config, is_fixed)
        # Before anything is asked of the head, it has to be the one that the drafter has now.
        _ = assistant.drafter.weights_version
        eos = assistant.scored_eos_token_ids(generation_config)
        kept = self.kept_session()
        # Every shortlist contains the EOS ids, so other ones start the conversation's memory anew, and so do another
        # policy and another drafter.
        continues = kept is not None and assistant.resume_session(kept, eos)
        self._session = kept if continues else assistant.take_session(eos)
        self._session.stats = self._stats
        self._session.stopwatch = self._stopwatch
        assistant.forward.prepare()
        assistant.forward.require_states(assistant.drafter.reads, assistant.policy.needs)
        if self._stopwatch.enabled:
            self._start = self._stopwatch.now()
        self._recorder = self._aligner and self._aligner.recorder()
        self._began = time.perf_counter()
        self._drafting = Drafting(
            self._session,
            assistant.drafter.reads,
            assistant.forward,
            generation_config,
            input_ids,
            model_kwargs,
            config,
            logits_processor,
            assistant.tree,
            is_kept=self.is_kept,
            continues=continues,
            measure_coverage=assistant.measure_coverage,
            recorder=self._recorder,
            automatic=self._automatic(config, generation_config),
        )
        return self._drafting

    def _shows_drafts(self, generation_config: GenerationConfig) -> bool:
        """Whether what is drafted shows in what comes of the call, beyond its speed: in what is drawn, learnt,
        measured or checked; or in which of two almost equal logits is the larger one, where rounding decides that."""
        assistant = self._assistant
        is_studied = assistant.measure_coverage or assistant.profile or assistant.validate
        is_learnt = self._aligner is not None
        return bool(generation_config.do_sample) or is_learnt or is_studied or not computes_in_fp32(assistant.target)

    def _automatic(self, config: GenerationConfig, generation_config: GenerationConfig) -> AutomaticCall | None:
        """What chooses the policy and how much to draft, where `config` leaves that open."""
        policies = len(self._assistant.policy.alternatives(None))
        if config.num_assistant_tokens != AUTO and policies == 1:
            return None
        names = ("temperature", "top_k", "top_p") if generation_config.do_sample else ()
        sampling = [getattr(generation_config, name) for name in names]
        setting = (config.num_assistant_tokens == AUTO, config.assistant_confidence_threshold, *sampling)
        version = self._assistant.drafter.weights_version
        tree = self._assistant.tree
        # How probable a token is can be asked for nothing only where nobody has to be waited for.
        ends_early = (
            config.num_assistant_tokens == AUTO and tree is None and is_host_memory(self._session.vocabulary.device)
        )
        return self._assistant.learnt_drafting.call_under(setting, tree, version, policies, ends_early)

    def close(self, has_failed: bool = False) -> None:
        """Leave the session, publish the counts, and hand over what was recorded.

        Args:
            has_failed: an error ended the call; what the policy learnt in it stays in its session.
        """
        if self._drafting is None:
            if self._session is not None:
                # It was interrupted before it could begin.
                self._session.close()
            return
        if self._stopwatch.enabled:
            elapsed = self._stopwatch.now() - self._start
            self._stats.seconds = dict(self._stopwatch.seconds)
            self._stats.seconds["other"] = max(0.0, elapsed - sum(self._stopwatch.seconds.values()))
        config = self._assistant.generation_config
        if config.num_assistant_tokens_schedule == "heuristic" and self._drafting.adapts_length:
            config.num_assistant_tokens = self._drafting.num_assistant_tokens
        if self._aligner is not None:
            self._aligner.take(self._recorder, time.perf_counter() - self._began)
        if not self._session.is_closed:
            self._session.count_background_work()
            if not has_failed:
                self._session.end_call()
        self.leave_session(self._session)
        self._assistant.publish(self._stats)
