"""An assistant's binding to a target, and the sessions that draft for the calls of that."""

import copy
import operator
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..drafters import Drafter
from ..drafting.automatic import ChooserPool
from ..drafting.guards import outside_inference_mode
from ..drafting.session import DraftSession
from ..errors import NotBoundError, UnsupportedError, naming_source, shown_value
from ..generation.bindable import Assistant
from ..generation.binding import TargetHook, attach
from ..generation.conversation import Conversation
from ..generation.draft_once import draft_once
from ..generation.generate_call import GenerateCall
from ..generation.refusals import check_clocks, check_target
from ..generation.sessions import Lane, SessionPool
from ..generation.target import TargetForward
from ..loading import draftable_eos_token_ids, scored_rows, shared_rows, shared_tokenizer, shared_vocabulary_size
from ..modeling.parts import placeholder_ids, unwrapped
from ..protocol import Candidates, VocabularyInfo
from ..shortlists.validation import validated
from ..stats import DraftingStatistics
from ..vocabulary import require_tokenizer_of

_Self = TypeVar("_Self", bound="BoundAssistant")


class BoundAssistant(Assistant):
    """Binds to a target and makes sessions for its calls, as the settings say that `DynSpecAssistant` has."""

    # The tokenizer that was given, and the one that is used, which is looked up where none was.
    _given_tokenizer: Any
    _tokenizer: Any
    _drafter: Drafter
    fast_target_head: bool
    validate: bool

    def __init__(self) -> None:
        self.stats = DraftingStatistics()
        self.stats_total = DraftingStatistics()
        # Counts may be published by the garbage collector, at any time.
        self._lock = threading.RLock()
        self._binding: _Binding | None = None
        self._sessions = SessionPool()
        self.choosers = ChooserPool()

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.generation_config = copy.deepcopy(self.generation_config)
        twin.stats, twin.stats_total = copy.deepcopy(self.stats), copy.deepcopy(self.stats_total)
        twin._lock, twin._sessions, twin._binding = threading.RLock(), SessionPool(), None
        twin.choosers = ChooserPool()
        if self.target is not None:
            if self.alignment is not None:
                self.alignment.attach(twin, self.target)
            twin._adopt(self.target, self._binding, self.forward, self.policy.new_memory())
        return twin

    def __copy__(self: _Self) -> _Self:
        return copy.deepcopy(self)

    # Binding -------------------------------------------------------------------------------------------------------

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that this assistant is bound to, or None."""
        return None if self._binding is None else self._binding.target()

    def bind(self: _Self, target: PreTrainedModel) -> _Self:
        """Attach to one model object, and leave the one bound before. Returns the assistant.

        Args:
            target: a model of transformers, which may be in wrappers (peft, `torch.compile`).

        Raises:
            UnsupportedError: the target cannot be used, or has another tokenizer than the drafter.
            ArtifactError: the drafter is a head for a target of another size.
            ConfigurationError: the policy was made for another drafter or vocabulary.

        Whatever is raised, everything is then as it was before, an earlier binding too.
        """
        target = unwrapped(target)
        check_target(target)
        given = self._drafter
        self._drafter = given.for_target(target)
        try:
            self._bind(target)
        except BaseException:
            self._drafter = given
            raise
        return self

    def _bind(self, target: PreTrainedModel) -> None:
        """Attach to a target that the drafter drafts for."""
        check_clocks(target, self, self.generation_config)
        before, pair = self._binding, (self.drafter, self._given_tokenizer)
        if before is not None and before.target() is target and all(map(operator.is_, before.pair, pair)):
            tokenizer = self.tokenizer
            size = min(before.vocabulary_size, shared_rows(*scored_rows(target, self.drafter)))
        else:
            tokenizer = shared_tokenizer(target, self.drafter, self._given_tokenizer)
            size = shared_vocabulary_size(target, self.drafter, tokenizer)
        with naming_source(f"policy {self.policy.name}"):
            require_tokenizer_of(self.policy.tokenizer_fingerprints, tokenizer)
        if self.tree is not None:
            self.drafter.require_trees()
        forward = TargetForward(target, self.fast_target_head, self.tree is not None)
        forward.require_states((), self.policy.needs)
        # What a policy cannot do for this pair it says now, and not in the first call.
        eos = draftable_eos_token_ids(target.generation_config, self.drafter, size)
        memory = self.policy.new_memory()
        session = self._make_session(eos, size, forward, memory)
        if self.alignment is not None:
            self.alignment.attach(self, target)
        self._tokenizer = tokenizer
        self._adopt(target, _Binding(weakref.ref(target), size, pair), forward, memory)
        self.return_session(self._sessions.take(session.vocabulary.eos_token_ids, lambda memory: session))

    def _adopt(self, target: PreTrainedModel, binding: "_Binding", forward: TargetForward, memory: Any) -> None:
        """Attach to a target, and only then leave the one before, with all that was remembered of it."""
        hook = attach(target, self, forward)
        pool = weakref.ref(self._sessions)

        def target_is_gone(gone: Any) -> None:
            sessions = pool()
            if sessions is not None:
                sessions.clear()

        binding = replace(binding, target=weakref.ref(target, target_is_gone), hook=weakref.ref(hook))
        before, self._binding = self._binding, binding
        if before is not None and before.hook() not in (None, hook):
            before.hook().remove(self)
        self._sessions.clear(memory)
        self.choosers.forget()

    def unbind(self) -> None:
        """Leave the bound model as it was before. Does nothing where none is bound."""
        binding, self._binding = self._binding, None
        if binding is not None and binding.hook() is not None:
            binding.hook().remove(self)
        self._sessions.clear()
        if self.alignment is not None:
            self.alignment.detach(self)

    def conversation(self) -> Conversation:
        """Return something to pass as `assistant_model` in every turn of one conversation.

        It keeps the policy's memory, such as an in-context window, and the drafter's cache from turn to turn, where
        the assistant itself starts every call anew.
        """
        return Conversation(self)

    def forget(self) -> None:
        """Forget what policies remember of earlier calls: to be called where another person's texts begin, before the
        first of them, if the policy remembers from call to call (`memory="assistant"`) or conversations go on.

        Whatever thread calls it: sessions that wait are given up, conversations begin anew at their next turn, and
        what calls that still run learn is known to no later one. The output is the same either way.
        """
        self._sessions.clear(None if self.target is None else self.policy.new_memory())

    # One round -----------------------------------------------------------------------------------------------------

    @outside_inference_mode
    def draft_round(self, input_ids: torch.Tensor) -> Candidates:
        """Draft one round after a text, greedily, and verify nothing. For study and for comparison.

        Everything is computed anew, so that the result depends on the text alone; a policy that learns from the
        context has seen the text, and what the target finds likely in it, but no earlier round.

        Args:
            input_ids: int64 `[1, n]`, `n >= 2`: the text, without padding. Its last token counts as the one that the
                target chose last, and which it has not read yet: the root of a tree.

        Returns:
            The nodes: their tokens, parents, depths and scores, in fp32 log-probabilities of the path, for chains too.

        Raises:
            NotBoundError: the assistant is not bound to a target.
            UnsupportedError: not one sequence of at least two tokens; or one so near to the length at which the
                target's rotary embedding changes that no round would draft there.
        """
        if self.target is None:
            raise NotBoundError("bind the assistant to a target before drafting.")
        shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else None
        if shape is None or len(shape) != 2 or shape[0] != 1 or shape[1] < 2:
            got = shown_value(input_ids) if shape is None else shape
            raise UnsupportedError(f"draft_round takes one sequence, int64 [1, n >= 2], got {got}.")
        eos = self.scored_eos_token_ids(self.target.generation_config)
        if self._sessions.memory is None:
            session = self.take_session(eos)
        else:
            session = self._make_session(eos, self._binding.vocabulary_size, self.forward, None)
        try:
            return draft_once(self, session, input_ids.to(self.target.device))
        finally:
            self.return_session(session)

    # One call ------------------------------------------------------------------------------------------------------

    def open_call(self) -> GenerateCall:
        """See `Bindable.open_call`."""
        return GenerateCall(self)

    @property
    def forward(self) -> TargetForward:
        """What runs the bound target. It belongs to the target, so that nothing of that is kept alive from here."""
        return self._binding.hook().forward_of(self)

    def require_rows(self) -> None:
        """See `Assistant.require_rows`."""
        rows, size = min(scored_rows(self.target, self.drafter)), self._binding.vocabulary_size
        if rows < size:
            raise UnsupportedError(
                f"the models score {rows:,} token ids since their embeddings were resized, and {size:,} were in use "
                "when the assistant was bound: call assistant.bind(target) again."
            )

    def scored_eos_token_ids(self, generation_config: GenerationConfig) -> tuple[int, ...]:
        """Return the EOS ids of a call that the drafter can score, without repeats."""
        return draftable_eos_token_ids(generation_config, self.drafter, self._binding.vocabulary_size)

    def take_session(self, eos_token_ids: tuple[int, ...]) -> DraftSession:
        """Return an idle session for these EOS ids, or a new one."""
        size = self._binding.vocabulary_size

        def make(memory: Any) -> DraftSession:
            return self._make_session(eos_token_ids, size, self.forward, memory)

        session = self._sessions.take(eos_token_ids, make)
        if session.vocabulary.device != self.drafter.head.device:
            # The drafter was moved to another device.
            session.close()
            self.forget()
            session = self._sessions.take(eos_token_ids, make)
        return session

    @outside_inference_mode
    def _make_session(
        self, eos_token_ids: tuple[int, ...], size: int, forward: TargetForward, memory: Any
    ) -> DraftSession:
        # Before the head is looked at, it has to be the one that the model has now.
        _ = self.drafter.weights_version
        head = self.drafter.head
        vocabulary = VocabularyInfo(
            size,
            eos_token_ids,
            head.device,
            head.token_ids,
            head.weight.shape[1],
            placeholder_ids(forward.model.config),
        )
        if self.policy.needs.target_rows:
            vocabulary = replace(vocabulary, target_rows=forward.head_rows())
        policy = validated(self.policy) if self.validate else self.policy
        lock = None if self.alignment is None else self.alignment.drafting_lock
        session = DraftSession(self.drafter, policy, vocabulary, memory, lock)
        session.prepare()
        return session

    def resume_session(self, session: DraftSession, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether a conversation's session can go on: it is one of this assistant as it is now, for these EOS ids.
        Otherwise it is given up."""
        vocabulary, device = session.vocabulary, self.drafter.head.device
        can_go_on = vocabulary.eos_token_ids == eos_token_ids and vocabulary.device == device
        if self._sessions.resume(session) and can_go_on:
            return True
        session.close()
        return False

    def hold_session(self, session: DraftSession) -> None:
        """Let a conversation keep a session until its next call."""
        self._sessions.hold(session)

    def return_session(self, session: DraftSession) -> None:
        """Keep a session for the next call, with its buffers."""
        self._sessions.give(session)

    def take_lane(self, key: Any) -> Lane | None:
        """See `Assistant.take_lane`."""
        return self._sessions.take_lane(key)

    def return_lane(self, key: Any, lane: Lane) -> None:
        """Keep a lane for the next call like it."""
        self._sessions.give_lane(key, lane)

    def publish(self, stats: DraftingStatistics) -> None:
        """Make the counts of a finished call the last ones and add them to the total."""
        with self._lock:
            self.stats = stats
            self.stats_total.add(stats)


@dataclass(frozen=True)
class _Binding:
    """What an assistant knows of the target that it is bound to, and for which drafter and given tokenizer."""

    target: weakref.ref[PreTrainedModel]
    vocabulary_size: int
    pair: tuple[Drafter, Any]
    hook: weakref.ref[TargetHook] | None = None
