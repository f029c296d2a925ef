"""The contract of shortlist policies: an immutable policy starts one mutable state for each drafting session."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from ..protocol import BackgroundWork, BlockLayout, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from ..storable import Storable


class ShortlistState(ABC):
    """The state of a policy during one session. Not shared between threads.

    Attributes:
        layout: the layout of the shortlists' `blocks`, for policies that choose whole blocks.
        carried: for rounds over fixed memory, the attributes with tensors, shortlists or states that a round replaces
            and the next one reads. None: the state cannot take part in such rounds. In one that can, every round is
            the same operations on tensors of the same shapes, whatever the numbers are, and the host counts nothing
            but versions. Verdicts then have ids of no token, at or past the vocabulary's size, after the last verified
            token.
        observes_on_host: in rounds over fixed memory the host shows it each verdict, between two rounds (`exchange`).
        is_constant: shortlists depend on the draft step alone.
    """

    layout: BlockLayout | None = None
    carried: tuple[str, ...] | None = None
    observes_on_host: bool = False
    is_constant: bool = False

    @property
    def parts(self) -> "tuple[ShortlistState, ...]":
        """The states that it is made of; itself alone by default."""
        return (self,)

    @abstractmethod
    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        """Return the shortlist for one draft step. Must not wait for the device.

        Args:
            depth: the draft step, counted from 0 in each round.
            token_ids: int64 `[m]`: the tokens whose successors are about to be drafted (1 for a chain).
            features: `[m, d]`: the drafter's hidden states at those tokens.

        For a drafter of blocks it is called once in a round, at step 0, with the last verified token, `[1]`, and the
        hidden states of all places of the block, `[n, d]`, which all have the shortlist that it returns.
        """

    # Policies that learn nothing from the context override none of these.
    def begin_round(self) -> None:  # noqa: B027
        """Begin a round, and take up the results of a worker. Called once before the round's first
        `observe_draft_inputs` and `select`, not in rounds without a draft, nor in those over fixed memory. Must not
        wait for device or worker."""

    def exchange(self, verdict: Verdict) -> None:  # noqa: B027
        """Observe a verdict, whose tensors lie on the host, between two rounds over fixed memory, and take up the
        results of a worker. Called instead of `observe` if it `observes_on_host`. Must not wait for the worker."""

    def settle(self) -> Shortlist | None:
        """Take up all that was observed, between two rounds over fixed memory. Returns the next round's shortlist, or
        the part of it that is the same whatever its draft steps are given (None: nothing is)."""
        return None

    def observe_draft_inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> None:  # noqa: B027
        """Take in the inputs of the next draft step, if the policy asked for them (`Needs.draft_inputs`). Called once
        before each `select`, and before the drafter's layers run if the inputs are known by then.

        Args:
            embeddings: `[m, d]`: the drafter's embeddings of the tokens whose successors are about to be drafted.
            features: `[m, d]`: for each of these tokens, the feature that an EAGLE head reads beside the embedding, or
                an independent model's hidden state at the token before; zeros if there is none.
        """

    def restart(self) -> None:  # noqa: B027
        """Forget the context: another text follows. Slots that keep their ids keep their version. A state with a
        memory takes up the memory's present contents."""

    def resume(self, token_ids: torch.Tensor) -> None:  # noqa: B027
        """Go on with the text in another call of a conversation. Called in place of `restart`, before the new tokens
        are shown. Override it to begin each call anew.

        Args:
            token_ids: int64 `[n]`: the beginning of the text, known from earlier calls and not shown again.
        """

    def end_call(self) -> None:  # noqa: B027
        """End a call that raised no error: the place to fill the memory for other calls. It may wait for the device,
        which is idle then. In transformers' own loop this is called after errors too."""

    def observe_prompt(self, prompt: Prompt) -> None:  # noqa: B027
        """Take in new context. Called with the tokens before the first draft step and, if the policy needs the
        target's view of them, again without tokens when the target has read the prompt; later with the tokens of
        rounds without a draft, which were not shown then (`num_assistant_tokens="auto"`)."""

    def observe(self, verdict: Verdict) -> None:  # noqa: B027
        """Take in the target's verdict on the last round. Called after every verification and before the next round,
        mostly also if nothing was drafted; not after the last round of a text."""

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:  # noqa: B027
        """Take up the rows of a head whose weights changed. Called between rounds, and only for policies that asked
        for rows (`Needs.drafter_rows`, `Needs.target_rows`): they must override it.

        Args:
            vocabulary: as at the start, with the present rows.
        """

    def finish_background_work(self) -> None:  # noqa: B027
        """Wait for the policy's own thread, whose results the next round then takes up. Never called during
        generation, but when a text is replayed and no model takes time between the rounds."""

    def take_background_work(self) -> BackgroundWork:
        """The work of the policy's own thread since the last such call, for the statistics. Called when a call ends;
        must not wait."""
        return BackgroundWork()

    def close(self) -> None:  # noqa: B027
        """End what does not end by itself, such as a thread. Called once, by any thread, and nothing is called after
        it: when the assistant is unbound, gets another policy, has more idle sessions than it keeps or is gone, after
        an error in a round, and at the interpreter's exit. Should not take long. The state must hold neither the
        assistant nor the models, which would keep them alive."""


class ShortlistPolicy(Storable, ABC):
    """How shortlists are made. Immutable and shareable; artifacts store it, see `Storable`.

    Subclasses set `name` and `setting_rules`, and call `require_settings` on construction; those with tensors set
    `tensor_rules` too.

    Attributes:
        can_be_part: whether it may be a part of a union.
    """

    can_be_part: ClassVar[bool] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShortlistPolicy":
        return self

    @property
    def needs(self) -> Needs:
        """What the policy needs to see of target and drafter."""
        return Needs()

    def new_memory(self) -> Any:
        """Make the object that all states of one assistant share from call to call (None: they share nothing). The
        assistant passes it to `start`, and drops it and all sessions that hold it on `DynSpecAssistant.forget`, when
        it gets another policy, drafter, target or tokenizer, when the drafter moves to another device, and when it is
        unbound. Several threads, and sessions with different EOS ids, use it at once."""
        return None

    @abstractmethod
    def start(self, vocabulary: VocabularyInfo, memory: Any = None) -> ShortlistState:
        """Begin a session over `vocabulary`.

        Args:
            vocabulary: the tokens to select from.
            memory: the result of `new_memory`, the same for all sessions of an assistant. Passed only if it is not
                None, so policies without a memory need no such argument; a session may be started without it.
        """

    def alternatives(self, memory: Any) -> "tuple[tuple[ShortlistPolicy, Any], ...]":
        """The policies that a session chooses from in each round, each with its memory; this policy alone by default.

        Args:
            memory: the result of `new_memory`.
        """
        return ((self, memory),)

    @property
    def tokenizer_fingerprints(self) -> tuple[Any, ...]:
        """The known tokenizers (`vocabulary.TokenizerFingerprint`) of the policy's ids. An assistant refuses models
        with another tokenizer."""
        return ()

    @property
    def static_core(self) -> "ShortlistPolicy | None":
        """The tokens that this policy always starts from, as a `FrequencyShortlist`, for engines that take one fixed
        list (None: there are none). A fixed list is its own core."""
        return None

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{type(self).__name__}({shown})"


def start_state(policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any) -> ShortlistState:
    """Begin a session of a policy, with its memory if it has one."""
    return policy.start(vocabulary) if memory is None else policy.start(vocabulary, memory)
