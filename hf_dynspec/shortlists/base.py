"""The contract of shortlist policies: an immutable policy starts one mutable state for each drafting session."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ..protocol import BackgroundWork, BlockLayout, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from ..storable import Storable


class ShortlistState(ABC):
    """What a policy remembers during one session. Not shared between threads.

    Attributes:
        layout: what the shortlists' `blocks` are blocks of, for policies that choose whole blocks.
    """

    layout: BlockLayout | None = None

    @abstractmethod
    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        """Return the shortlist for one draft step. Must not wait for the device.

        Args:
            depth: the draft step, counted from 0 in each round.
            token_ids: int64 `[m]`: the tokens whose successors are about to be drafted (1 for a chain).
            features: `[m, d]`: the drafter's hidden states at those tokens.
        """

    # Policies that learn nothing from the context leave these as they are.
    def begin_round(self) -> None:  # noqa: B027
        """A round of drafting begins: the place to take up what a worker has found since the last one. Called once
        before the round's first `observe_draft_inputs` and `select`, and must wait neither for the device nor for the
        worker. Rounds in which nothing is drafted have no such call."""

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:  # noqa: B027
        """Take in what the next draft step starts from, where the policy asked for it (`Needs.draft_inputs`). Called
        once before each `select`, and before the drafter's layers run wherever the drafter has it by then.

        Args:
            embeddings: `[m, d]`: the drafter's embeddings of the tokens whose successors are about to be drafted.
            features: `[m, d]`: what the drafter knew before each of these tokens: the feature that an EAGLE head reads
                beside the embedding, or an independent model's hidden state at the token before; zeros where there
                is none.
        """

    def restart(self) -> None:  # noqa: B027
        """Forget the context: what follows is another text. Slots that keep their ids keep their version. A state that
        was started with a memory takes up what is there now."""

    def resume(self, token_ids: torch.Tensor) -> None:  # noqa: B027
        """Another call goes on with the text, in a conversation. Called in place of `restart`, before the state is
        shown what is new; those that are to begin each call anew override it.

        Args:
            token_ids: int64 `[n]`: the beginning of the text that earlier calls had too, which is not shown again.
        """

    def end_call(self) -> None:  # noqa: B027
        """A call is over, without an error: the place to put into the memory what other calls are to know. It may wait
        for the device, which has nothing else to do then. transformers' own loop does not say how it ended, and there
        this is called after errors too."""

    def observe_prompt(self, prompt: Prompt) -> None:  # noqa: B027
        """Take in new context. Called with the tokens before the first draft step and, where the policy needs to know
        what the target says of them, once more (with no tokens) when the target has read the prompt; later with the
        tokens of rounds that were not shown, as nothing was drafted in them (`num_assistant_tokens="auto"`)."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027
        """Take in what the target said in the last round. Called after every verification, mostly also where nothing
        had been drafted, and before the next round begins; not after the one that ends a text for good, which nothing
        follows."""

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:  # noqa: B027
        """Take up the rows of a head whose weights changed. Called between rounds, and only where the policy asked for
        rows (`Needs.drafter_rows`, `Needs.target_rows`): such policies must override it.

        Args:
            vocabulary: as at the start, with the rows as they are now.
        """

    def finish_background_work(self) -> None:  # noqa: B027
        """Wait for what a thread of the policy's own was given, which the next round then takes up. Not called while
        texts are generated, but where a state is led along a text and no model takes its time between the rounds."""

    def take_background_work(self) -> BackgroundWork:
        """What a thread of the policy's own did since this was last asked, for the statistics of a call. Asked when
        the call ends; must wait for nothing."""
        return BackgroundWork()

    def close(self) -> None:  # noqa: B027
        """End whatever does not end by itself, such as a thread. Called once, when the session is given up: when the
        assistant is unbound, gets another policy, has more idle sessions than it keeps, or is gone, after an error in
        a round, and at the interpreter's exit. It may be called by any thread, and should not take long. Nothing is
        called after it. The state must hold neither the assistant nor the models, which would keep them for good."""


class ShortlistPolicy(Storable, ABC):
    """How shortlists are made. Immutable and shareable; this is what an artifact stores, see `Storable`.

    Subclasses set `name` and `setting_rules`, and hold their settings against them on construction
    (`require_settings`); where they have tensors, they set `tensor_rules` too.

    Attributes:
        can_be_part: whether it may be a part of a union.
    """

    can_be_part: ClassVar[bool] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShortlistPolicy":
        return self

    @property
    def needs(self) -> Needs:
        """What the policy asks to be shown of the target."""
        return Needs()

    def new_memory(self) -> Any:
        """Make what all states within one assistant are to share from call to call; None, as here, where they share
        nothing. The assistant hands it to `start`, and lets go of it, and of all sessions that know it, when somebody
        calls `DynSpecAssistant.forget`, when it gets another policy, drafter, target or tokenizer, when the drafter is
        moved to another device, and when it is unbound. Several threads use it at once, and sessions with different
        EOS ids."""
        return None

    @abstractmethod
    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        """Begin a session over `vocabulary`.

        Args:
            vocabulary: what to select from.
            memory: what `new_memory` returned, the same for all sessions of an assistant. Given only where that is
                not None, so that policies without a memory need no such argument; a session may be begun without.
        """

    def alternatives(self, memory: Any) -> "tuple[tuple[ShortlistPolicy, Any], ...]":
        """The policies that a session drafts with, one in each round, and what each of them remembers: this one alone,
        but for those that others are chosen from.

        Args:
            memory: what `new_memory` returned.
        """
        return ((self, memory),)

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        """The tokenizers (`vocabulary.TokenizerFingerprint`) that the policy's ids belong to, where they are known.
        An assistant refuses models with another one."""
        return ()

    @property
    def static_core(self) -> "ShortlistPolicy | None":
        """The tokens that this policy always starts from, as a `FrequencyShortlist`: the nearest thing to it for an
        engine that takes one list for good. None where there is none; a policy that is such a list is its own."""
        return None

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{type(self).__name__}({shown})"


def start_state(policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any) -> ShortlistState:
    """Begin a session of a policy, with its memory where it has one."""
    return policy.start(vocabulary) if memory is None else policy.start(vocabulary, memory)
