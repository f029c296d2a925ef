"""A session of EvoSpec's dynamic vocabulary: its slots, and what changes them."""

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import ConfigurationError
from ...protocol import BackgroundWork, JoinedShortlist, Prompt, Shortlist, Verdict, VocabularyInfo
from ..base import ShortlistState
from .cache import CACHES
from .retriever import NO_TOKEN, RetrievalEvent, Retriever
from .worker import Worker

if TYPE_CHECKING:
    from .policy import RetrievalShortlist

# What was verified and triggered nothing is told with what does, or when it is of so many rounds.
_MOST_PASSED = 64


class _Changes(NamedTuple):
    """Slots that hold another token now, int64 `[n]`; these tokens, int64 `[n]`; one past the last of the slots."""

    places: torch.Tensor
    token_ids: torch.Tensor
    size: int


class RetrievalState(ShortlistState):
    """The slots that the core keeps, and after them those of the cache, which first hold the rest of the core. The
    cache itself belongs to the worker. Where the core is screened, its slots are those that are scored in any case."""

    def __init__(self, policy: "RetrievalShortlist", vocabulary: VocabularyInfo):
        self._policy = policy
        core = policy.core_ids(vocabulary)
        always = max(len(vocabulary.eos_token_ids), 1)
        kept, displaceable = core.tensor_split([max(core.shape[0] - policy.displaceable, always)])
        self._displaceable = displaceable.tolist()
        self._screened = kept[always:]
        self._screen = policy.core_screen(vocabulary, self._screened)
        # Where it matters; the last entry is for ids past the vocabulary.
        self._is_screened: torch.Tensor | None = None
        if self._screen is not None and policy.trigger == "oov":
            no_tokens = torch.zeros(vocabulary.size + 1, dtype=torch.bool, device=core.device)
            self._is_screened = no_tokens.index_fill(0, self._screened, True)
        self._joined: JoinedShortlist | None = None
        # Those of the cache come after them.
        in_slots = kept if self._screen is None else kept[:always]
        self._kept = in_slots.shape[0]
        # The last slots hold nothing yet, and are not scored: caches fill theirs in order.
        self._first_slots = torch.cat([in_slots, displaceable, core[:1].expand(policy.dynamic)])
        self._first_size = self._kept + displaceable.shape[0]
        self._cache = CACHES[policy.cache](len(self._displaceable) + policy.dynamic)
        self._cache.fill(self._displaceable)
        self._version = 0
        self._show(self._first_slots, self._first_size, replaced=None)
        self._takes_prompts = policy.prompt_positions > 0
        rows = vocabulary.target_rows
        semantic = None if rows is None else policy.semantic_of(rows.weight, vocabulary.size)
        is_wanted = _wanted_ids(vocabulary, kept)
        self._retriever = Retriever(
            self._cache,
            is_wanted,
            semantic,
            policy.neighbours,
            policy.successors_among(is_wanted),
            policy.listener,
        )
        self._worker = Worker(policy.synchronous)
        # Tokens that were verified and triggered nothing, of which the worker does not know yet.
        self._passed: list[torch.Tensor] = []
        # At the first draft step, before which the drafter's layers run. As a round begins, the last one's verdict is
        # microseconds old.
        self._is_taken_up = False

    def _show(self, slots: torch.Tensor, size: int, replaced: torch.Tensor | None) -> None:
        """Go on with the first of these slots, of which the replaced ones are new (None: the first there are)."""
        self._slots, self._size = slots, size
        self._version += replaced is not None
        self._shortlist = Shortlist(slots, self._version, size, replaced=replaced)

    def begin_round(self) -> None:
        self._is_taken_up = False

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        if not self._is_taken_up:
            self._is_taken_up = True
            self._take_up()
        if self._screen is None:
            return self._shortlist
        chosen, rest = self._screen.select(depth, token_ids, features), self._shortlist
        if self._joined is None or self._joined.chosen is not chosen or self._joined.rest is not rest:
            self._joined = JoinedShortlist(chosen, rest, self._screened)
        return self._joined

    def _take_up(self) -> None:
        """Take up what was retrieved. What is not there yet is taken up in a later round."""
        taken = self._worker.take()
        if self._policy.listener is not None:
            # What has no result at all was no retrieval, see `follow_weights`.
            self._policy.listener.take_up(sum(one is not None for one in taken))
        changes = [one for one in taken if one]
        if not changes:
            return
        slots = self._slots
        for one in changes:
            slots = slots.index_copy(0, one.places, one.token_ids)
        size = max(self._size, *(one.size for one in changes))
        self._show(slots, size, torch.cat([one.places for one in changes]))

    def restart(self) -> None:
        if self._screen is not None:
            self._screen.restart()
        self._worker.finish()
        self._passed.clear()
        self._cache.clear()
        self._cache.fill(self._displaceable)
        if self._slots is not self._first_slots:
            replaced = torch.arange(self._kept, self._slots.shape[0], device=self._slots.device)
            self._show(self._first_slots, self._first_size, replaced)

    def observe_prompt(self, prompt: Prompt) -> None:
        if not self._takes_prompts:
            return
        if prompt.token_ids.numel():
            self._give(RetrievalEvent(prompt.token_ids, start=prompt.start))
        if prompt.top_ids is not None:
            no_tokens = torch.full_like(prompt.top_ids[:, 0], NO_TOKEN)
            # What is likely at a position of the prompt is likely to stand at the next one.
            start = prompt.start + 1 - no_tokens.shape[0]
            self._give(RetrievalEvent(no_tokens, **self._likely(prompt), start=start))

    def observe(self, verdict: Verdict) -> None:
        is_trigger = self._triggers(verdict)
        # Nothing comes of it, and to wake the worker takes time. On other devices, to look is to wait.
        if is_trigger is not None and is_trigger.is_cpu and len(self._passed) < _MOST_PASSED and not is_trigger.any():
            self._passed.append(verdict.verified)
            return
        self._give(
            RetrievalEvent(
                verdict.verified,
                is_trigger,
                **self._likely(verdict),
                hidden_states=verdict.hidden_states,
                is_verified=True,
                start=verdict.start,
            )
        )

    def _triggers(self, verdict: Verdict) -> torch.Tensor | None:
        """bool `[a + 1]`: which of the verified tokens something is retrieved for; None for all."""
        if self._policy.trigger != "oov":
            return None
        if self._is_screened is None:
            return verdict.out_of_vocabulary
        # What a step did not choose of the core is no reason to retrieve: nothing of it could come in.
        screened = self._is_screened.take(verdict.verified.clamp_max(self._is_screened.shape[0] - 1))
        return verdict.out_of_vocabulary & ~screened

    def _likely(self, shown: Prompt | Verdict) -> dict[str, torch.Tensor]:
        """What was shown of the target's likeliest tokens. A part of a union may be shown more than it asked for."""
        likely, asked = {"top_ids": shown.top_ids}, self._policy.likely
        if self._policy.needs.top_logits:
            likely["top_logits"] = shown.top_logits
        return {name: tensor[:, :asked] for name, tensor in likely.items() if tensor is not None}

    def _give(self, event: RetrievalEvent) -> None:
        # The job must not hold this state, which would keep it from being given up.
        retriever, kept, device = self._retriever, self._kept, self._slots.device
        passed, self._passed = self._passed, []

        def retrieve() -> _Changes | tuple[()]:
            changes = retriever.retrieve(event, passed)
            if not changes:
                return ()
            # Copied from here, so that the round does not wait for the copy.
            places = torch.tensor([kept + slot for slot in changes], device=device)
            return _Changes(places, torch.tensor(list(changes.values()), device=device), kept + max(changes) + 1)

        self._worker.give(retrieve)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        rows, size = vocabulary.target_rows, vocabulary.size
        policy, retriever = self._policy, self._retriever
        if self._screen is not None:
            # Where the new ones allow no factor, that of the old ones goes on choosing.
            with suppress(ConfigurationError):
                self._screen.follow_weights(vocabulary)
        if rows is not None:
            # By the worker, between its other jobs, so that nothing is asked while an index is built.
            self._worker.give(lambda: retriever.take_semantic(policy.semantic_of(rows.weight, size)))

    def finish_background_work(self) -> None:
        self._worker.wait()

    def take_background_work(self) -> BackgroundWork:
        return self._worker.take_work()

    def close(self) -> None:
        self._worker.close()


def _wanted_ids(vocabulary: VocabularyInfo, core: torch.Tensor) -> torch.Tensor:
    """bool `[V + 1]`: see `Retriever`."""
    token_ids = torch.arange(vocabulary.size + 1, device=vocabulary.device)
    is_wanted = vocabulary.can_draft(token_ids).index_fill(0, core, False)
    return is_wanted.cpu()
