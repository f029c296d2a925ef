"""The drafting side of one call: hands the text to the session, asks for candidates, and feeds the verdicts back."""

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..kernels import top_k_ids
from ..protocol import Candidates, Needs
from ..session import DraftSession
from .token_choice import TokenChoice

# Prompt positions whose full-vocabulary logits are held at a time while looking for the most probable tokens.
_PROMPT_CHUNK = 64


class ChainDrafting:
    """Drafts chains for one `generate` call and feeds the target's verdicts back to the session.

    Args:
        session: the drafting session, not yet begun.
        needs: what the session's policy asks to be shown.
        target: the model that verifies.
        generation_config: the call's resolved configuration.
        input_ids: int64 `[1, n]`: the prompt, padding included.
        model_kwargs: what the target is called with.
        drafting_config: `num_assistant_tokens`, its schedule and `assistant_confidence_threshold`.
        logits_processor: the call's logits processors.
        continues: the session goes on with a longer text.
        measure_coverage: record the target's probability mass on the shortlists, which costs a softmax over the full
            vocabulary for every verified position.
    """

    def __init__(
        self,
        session: DraftSession,
        needs: Needs,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        drafting_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        continues: bool = False,
        measure_coverage: bool = False,
    ):
        # What the target's next forward is asked for besides logits.
        self.model_inputs: dict[str, Any] = {}
        self.num_assistant_tokens = int(drafting_config.num_assistant_tokens)
        self._schedule = drafting_config.num_assistant_tokens_schedule or "constant"
        self._threshold = float(drafting_config.assistant_confidence_threshold or 0.0)
        self._session = session
        self._device = session.vocabulary.device
        self._needs = needs
        self._target = target
        self._max_length = generation_config.max_length
        self._mask_length = getattr(generation_config, "_mask_length", None)
        self._user_wants_hidden_states = bool(generation_config.output_hidden_states)
        rows = target.get_output_embeddings().weight.shape[0]
        self._choose = TokenChoice(bool(generation_config.do_sample), logits_processor, rows, target.device)
        self._measure_coverage = measure_coverage
        self._candidates: Candidates | None = None
        self._prefix_length = 0
        self._begin(input_ids, model_kwargs, continues)

    @property
    def cached_prompt_tokens(self) -> int:
        """How many leading tokens of the prompt the target's cache holds already."""
        return self._skipped

    def propose(self, input_ids: torch.Tensor, outputs: Any) -> Candidates | None:
        """Draft the candidates of one round.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens, padding included.
            outputs: the target's output of the last round, None in the first.

        Returns:
            A chain, or None where only one more token is wanted.
        """
        if outputs is not None:
            self._observe(input_ids, outputs)
            self.model_inputs = {}
        self._prefix_length = input_ids.shape[1]
        count = min(self.num_assistant_tokens, self._max_length - input_ids.shape[1] - 1)
        if count < 1:
            return None
        prefix = self._without_padding(input_ids)
        self._choose.start_round(prefix)
        self._candidates = self._session.draft(prefix, count, self._choose, self._threshold)
        return self._candidates

    def observe_verification(self, input_ids: torch.Tensor, scores: torch.Tensor, accepted: int) -> None:
        """Count the round and adapt the draft length as transformers' schedules do.

        Args:
            input_ids: int64 `[1, n + a + 1]`: all verified tokens.
            scores: fp32 `[k + 1, V]`: the target's processed logits.
            accepted: how many candidates came out.
        """
        self._session.stats.record_verification(accepted)
        if self._candidates is not None:
            verified = input_ids[0, self._prefix_length :].to(self._device)
            self._session.stats.record_verified_tokens(self._candidates, verified)
            if self._measure_coverage:
                self._record_coverage(scores, accepted)
        if self._schedule in ("heuristic", "heuristic_transient"):
            change = 2 if accepted == scores.shape[0] - 1 else -1
            self.num_assistant_tokens = max(1, self.num_assistant_tokens + change)

    # The prompt ----------------------------------------------------------------------------------------------------

    def _begin(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], continues: bool) -> None:
        """Hand the prompt to the session and settle what the target's first forward must process and return."""
        self._prompt = input_ids[0]
        self._padded_length = input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] == self._padded_length:
            self._prompt = self._prompt[mask[0].to(input_ids.device).bool()]
        self._prompt = self._prompt.to(self._device)
        kept = self._session.begin(self._prompt, continues)
        self._skipped = self._cached_tokens_in(input_ids, model_kwargs)
        if self._needs.prompt_top_k:
            self._first_unseen = self._padded_length - self._prompt.shape[0] + kept
            if not self._user_wants_hidden_states:
                # The last hidden state is enough: projecting it in chunks never holds the whole prompt's logits.
                # Releases of transformers differ in whether entry 0 is the embedding: one of these is the last.
                layers = self._target.config.get_text_config().num_hidden_layers
                self.model_inputs["output_hidden_states"] = [layers - 1, layers]

    def _without_padding(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n]`: the verified tokens that the mask does not hide, on the drafter's device."""
        return torch.cat([self._prompt, input_ids[0, self._padded_length :].to(self._device)])

    def _cached_tokens_in(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
        """How many leading tokens of the prompt a passed-in cache holds already; 0 where only new ones were passed."""
        cache = model_kwargs.get("past_key_values")
        cached = 0 if cache is None else cache.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        mask_length = self._mask_length if mask is None else mask.shape[1]
        holds_all = mask_length is None or mask_length == input_ids.shape[1]
        return cached if holds_all else 0

    # The verdict ---------------------------------------------------------------------------------------------------

    def _observe(self, input_ids: torch.Tensor, outputs: Any) -> None:
        """Show the session what the target said of the last round."""
        if self._padded_length == self._prefix_length and self._needs.prompt_top_k:
            self._observe_prompt_logits(getattr(outputs, "hidden_states", None))
        if self._candidates is None:
            return
        verified = input_ids[0, self._prefix_length :].to(self._device)
        top_ids = None
        if self._needs.verify_top_k:
            drafted = self._candidates.token_ids.shape[0]
            logits = outputs.logits[0, -drafted - 1 :][: verified.shape[0]]
            with self._session.stopwatch.section("policy"):
                top_ids = top_k_ids(logits, self._needs.verify_top_k).to(self._device)
        self._session.observe(verified, top_ids)
        self._candidates = None

    def _observe_prompt_logits(self, hidden_states: tuple[torch.Tensor, ...] | None) -> None:
        """Find the target's most probable tokens at the prompt positions that the policy has not seen."""
        if not hidden_states:
            return
        end = self._padded_length - self._skipped
        start = max(0, self._first_unseen - self._skipped)
        if self._needs.prompt_positions is not None:
            start = max(start, end - self._needs.prompt_positions)
        if start >= end:
            return
        head = self._target.get_output_embeddings()
        chunks = hidden_states[-1][0, start:end].split(_PROMPT_CHUNK)
        with self._session.stopwatch.section("policy"):
            # A scale or cap after the projection does not change which tokens are the most probable.
            top_ids = [top_k_ids(head(chunk), self._needs.prompt_top_k) for chunk in chunks]
        self._session.observe_prompt_logits(torch.cat(top_ids).to(self._device))

    def _record_coverage(self, scores: torch.Tensor, accepted: int) -> None:
        positions = min(accepted + 1, len(self._candidates.shortlists))
        mass = [
            scores[i].softmax(-1).index_select(0, shortlist.ids().to(scores.device)).sum()
            for i, shortlist in enumerate(self._candidates.shortlists[:positions])
        ]
        self._session.stats.record_coverage(torch.stack(mass))
