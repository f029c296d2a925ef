"""Drafting for transformers' own assisted-decoding loop, and for custom loops that follow its contract."""

import weakref
from contextlib import ExitStack
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache_names import CACHE, cached_tokens, passed_cache, returned_cache
from ..drafting.processors import may_keep_state
from ..errors import NotBoundError, UnsupportedError
from ..modeling.head import widen
from ..protocol import Candidates
from .bindable import Bindable
from .generate_call import GenerateCall
from .verification import Outcome


class DynSpecCandidateGenerator(CandidateGenerator):
    """Drafts chains with any policy and drafter of an assistant.

    `target.generate` uses it if the assistant was made within the call. In a custom loop:

    ```python
    generator = DynSpecCandidateGenerator(assistant, input_ids=input_ids, generation_config=generation_config)
    ```

    The loop passes `generator.model_kwargs_overrides` to every forward of the target, and the outputs to the next
    `get_candidates`, as transformers' loop does. That loop passes all candidates to logits processors, so nothing is
    drafted if a processor may keep state, and it asks custom stopping criteria once a round. The assistant's own loop
    has neither limit: bind before the call, as in `assistant.bind(target)`.

    Args:
        assistant: a bound assistant, or a conversation with one.
        input_ids: int64 `[1, n]`: the prompt.
        generation_config: a resolved configuration; `max_length` and `do_sample` are read.
        logits_processor: the processors that the loop applies to the target's logits.
        model_kwargs: the target's arguments; the cache, which must be empty, and `attention_mask` are read.

    Raises:
        UnsupportedError: the assistant drafts trees, the cache holds tokens, there is not one prompt, or no
            `max_length`.
        NotBoundError: the assistant is not bound to a target.
    """

    requires_model_outputs = True

    def __init__(
        self,
        assistant: Bindable,
        *,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ):
        if not hasattr(assistant, "open_call"):
            raise UnsupportedError(f"a {type(assistant).__name__} does not draft here: pass a DynSpecAssistant.")
        if assistant.target is None:
            raise NotBoundError("bind the assistant to a target before it drafts.")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise UnsupportedError(f"one prompt, int64 [1, n >= 1], is drafted for, got {list(input_ids.shape)}.")
        if generation_config.max_length is None:
            raise UnsupportedError("generation_config.max_length says where drafts end: set it.")
        processors = LogitsProcessorList() if logits_processor is None else logits_processor
        model_kwargs = model_kwargs or {}
        if cached_tokens(passed_cache(model_kwargs)):
            raise UnsupportedError(
                f"transformers' own loop would read again what {CACHE} holds: bind the assistant before the "
                "call, as in assistant = DynSpecAssistant(drafter, target=target), and pass it to target.generate."
            )
        calls = ExitStack()
        with calls:
            call: GenerateCall = assistant.open_call()
            # It is not known here if the loop was interrupted. Its recording is learned from after the next call of
            # the assistant's own loop.
            calls.callback(call.close)
            call.begin(generation_config, input_ids, processors, model_kwargs)
            if call.drafts_trees:
                raise UnsupportedError(
                    "transformers' own loop takes chains: set tree=False, or bind the assistant before the call, as "
                    "in assistant = DynSpecAssistant(drafter, tree=True, target=target), and pass it on."
                )
            calls = calls.pop_all()
        self._call = call
        self._drafts = not may_keep_state(processors)
        self._do_sample = bool(generation_config.do_sample)
        self._returns_all_states = bool(generation_config.output_hidden_states)
        self._drafted = 0
        # The call is closed with this object, however the loop ends.
        weakref.finalize(self, calls.close)

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """Arguments for the target's forward in this round: the hidden states to return."""
        wanted = self._call.wanted_states
        if self._returns_all_states or not wanted:
            return {}
        return {"output_hidden_states": wanted}

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        *,
        model_outputs: Any = None,
        n_last_matches: int = 0,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft one round.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens.
            model_outputs: the target's outputs in the round before; None in the first round.
            n_last_matches: how many candidates were accepted in it.
            unused: the loop's `model_kwargs` and `is_first_iteration`.

        Returns:
            int64 `[1, n + k]`, the tokens and the candidates after them, none past an EOS token; and, when sampling,
            fp32 `[1, k, V]`: the logits that each candidate was drawn from.
        """
        if model_outputs is not None:
            self._learn(input_ids, model_outputs, int(n_last_matches))
        candidates = self._call.propose(input_ids, ends_with_text=True, drafts=self._drafts)
        self._drafted = 0 if candidates is None else candidates.token_ids.shape[0]
        if candidates is None:
            return input_ids, None
        token_ids = torch.cat([input_ids, candidates.token_ids.to(input_ids.device).unsqueeze(0)], dim=1)
        return token_ids, self._widened(candidates) if self._do_sample else None

    def _widened(self, candidates: Candidates) -> torch.Tensor:
        wide = candidates.logits[0].new_full((1, self._drafted, self._call.vocabulary_rows), -torch.inf)
        for place, (logits, shortlist) in enumerate(zip(candidates.logits, candidates.shortlists, strict=True)):
            widen(logits, shortlist, wide[0, place])
        return wide

    def _learn(self, input_ids: torch.Tensor, outputs: Any, accepted: int) -> None:
        rows = torch.arange(accepted + 1, device=input_ids.device)
        outcome = Outcome(input_ids[0, input_ids.shape[1] - accepted - 1 :], rows, ())
        logits = outputs.logits[:, -self._drafted - 1 :]
        read = {CACHE: returned_cache(outputs)}
        self._call.learn(CausalLMOutputWithPast(logits=logits, hidden_states=outputs.hidden_states, **read), outcome)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count a round, and adapt the draft length.

        Args:
            input_ids: int64 `[1, n]`: all verified tokens.
            scores: fp32 `[1, k + 1, V]`: the target's processed logits.
            num_matches: how many candidates were accepted.
        """
        accepted = int(num_matches)
        rows = torch.arange(accepted + 1, device=input_ids.device)
        processed = tuple(scores[:, place] for place in range(accepted + 1))
        self._call.count(Outcome(input_ids[0, input_ids.shape[1] - accepted - 1 :], rows, processed))
