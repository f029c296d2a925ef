"""DynSpecAssistant: a drafter, its dynamic head and a shortlist policy, ready to be passed as `assistant_model`."""

import copy
import operator
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .alignment.aligner import Aligner
from .alignment.settings import OnlineAlignment
from .drafters import Drafter, as_drafter
from .drafting.automatic_call import LearntDrafting
from .drafting.session import DraftSession, outside_inference_mode
from .drafting.settings import as_tree_config, drafting_config
from .drafting.tree_config import TreeConfig
from .errors import NotBoundError, UnsupportedError
from .files import DEFAULT_SHARD_SIZE
from .generation.binding import TargetHook, attach
from .generation.call import Assistant
from .generation.conversation import Conversation
from .generation.generate_call import GenerateCall
from .generation.refusals import check_target
from .generation.round import draft_once
from .generation.sessions import SessionPool
from .generation.target import TargetForward
from .loading import draftable_eos_token_ids, shared_tokenizer, shared_vocabulary_size
from .modeling.parts import unwrapped
from .protocol import Candidates, VocabularyInfo
from .shortlists import ShortlistPolicy, as_policy
from .shortlists.validation import validated
from .stats import DraftingStatistics
from .vocabulary import require_tokenizer_of

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

    from .evaluation.doctor.diagnosis import Diagnosis


class DynSpecAssistant(Assistant):
    """Drafts with a small, context-dependent vocabulary; the target verifies with all of its own.

    ```python
    assistant = DynSpecAssistant(drafter, target=target)
    target.generate(**inputs, assistant_model=assistant)
    ```

    The settings that transformers reads from an assistant's `generation_config` live in `assistant.generation_config`
    here too: `num_assistant_tokens`, `num_assistant_tokens_schedule`, `assistant_confidence_threshold`. Each is taken
    from the constructor, else from the drafter's generation config where that sets it, else from the defaults below.

    Two `generate` calls on one assistant may run in two threads. A policy, drafter, tree or tokenizer that is assigned
    later takes effect at the next call, and is refused as it would be here. Weights of the models may change, adapters
    in them come and go: the next round drafts with what is there. A copy (`copy.deepcopy`) is an assistant with
    settings and statistics of its own, of the same models and bound to the same target.

    Args:
        drafter: a decoder-only causal language model of transformers with the target's tokenizer, which may be in
            wrappers (peft, `torch.compile`), or an `EagleDrafter`.
        policy: a `ShortlistPolicy`, the name of one (`"full"`, `"frequency"`, `"in_context"`, `"hybrid"`, `"screen"`,
            or `"auto"` for the fastest of several in each round), or None for `HybridShortlist()`, which needs nothing
            built or trained.
        target: the model to speed up; the same as calling `bind(target)` afterwards.
        tokenizer: the tokenizer of both models. By default it is looked up, on this computer only, where the models
            were loaded from; it tells how many token ids are real, as models pad their embeddings.
        num_assistant_tokens: tokens drafted per round (default 5), or `"auto"`: as many in each round, up to 12, as
            are expected to bring the most tokens per second, and none while drafting loses; of trees up to the size of
            `tree`. Greedy tokens are the same however many are drafted, and sampled ones have the same distribution,
            but what is drawn then depends on the clock too, and not on the seed alone. The same holds of the policy
            `"auto"`.
        assistant_confidence_threshold: stop a draft after a token that the drafter found less probable than this. Off
            by default; it costs one wait for the device per draft step.
        tree: draft dynamic trees (EAGLE-2; when sampling, of drawn tokens) of this shape, or of the default shape for
            True, instead of chains of `num_assistant_tokens`.
        profile: measure where the time goes. Slows the call down where it runs on a GPU.
        measure_coverage: measure the target's probability mass on the shortlists, for study; slows the call down.
        fast_target_head: on a CPU in fp32, compute the target's logits by this package's matrix product, which is
            faster than torch's there (default True). Plain `generate` does not have it, so part of what it wins is no
            merit of speculation; `hf-dynspec bench` tells the two apart.
        validate: check every shortlist that the policy returns, for those who write policies: a broken contract raises
            `PolicyError` at the draft step where it breaks. Slows the call down (default False).
        alignment: let the drafter learn, while it generates, from what the target says of its drafts (default None:
            it stays as it is). `assistant.alignment` is then an `alignment.aligner.Aligner`.

    Raises:
        UnsupportedError: the drafter or the target cannot be used, or they do not share a tokenizer.
        ConfigurationError: a setting is mistyped or out of range.
        ArtifactError: the policy's ranking was made for another tokenizer.
    """

    def __init__(
        self,
        drafter: PreTrainedModel | Drafter,
        policy: ShortlistPolicy | str | None = None,
        *,
        target: PreTrainedModel | None = None,
        tokenizer: Any = None,
        num_assistant_tokens: int | str | None = None,
        assistant_confidence_threshold: float | None = None,
        tree: bool | TreeConfig = False,
        profile: bool = False,
        measure_coverage: bool = False,
        fast_target_head: bool = True,
        validate: bool = False,
        alignment: OnlineAlignment | None = None,
    ):
        self._policy = as_policy(policy)
        self.generation_config = drafting_config(drafter, num_assistant_tokens, assistant_confidence_threshold)
        self._tree = as_tree_config(tree)
        self._drafter = as_drafter(drafter)
        self._given_tokenizer = tokenizer
        self._tokenizer = tokenizer
        self.profile = profile
        self.measure_coverage = measure_coverage
        self._fast_target_head = fast_target_head
        self._validate = validate
        self.stats = DraftingStatistics()
        self.stats_total = DraftingStatistics()
        # Counts may be published by the garbage collector, at any time.
        self._lock = threading.RLock()
        self._binding: _Binding | None = None
        self._sessions = SessionPool()
        self.learnt_drafting = LearntDrafting()
        self._aligner = None if alignment is None else Aligner(self._drafter, alignment)
        if target is not None:
            self.bind(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynSpecAssistant":
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin.generation_config = copy.deepcopy(self.generation_config)
        twin.stats, twin.stats_total = copy.deepcopy(self.stats), copy.deepcopy(self.stats_total)
        twin._lock, twin._sessions, twin._binding = threading.RLock(), SessionPool(), None
        twin.learnt_drafting = LearntDrafting()
        if self.target is not None:
            if self._aligner is not None:
                self._aligner.attach(twin, self.target)
            twin._adopt(self.target, self._binding, self.forward, self.policy.new_memory())
        return twin

    def __copy__(self) -> "DynSpecAssistant":
        return copy.deepcopy(self)

    # Settings ------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> ShortlistPolicy:
        """How shortlists are made. May be assigned: a policy, the name of one, or None for the default."""
        return self._policy

    @policy.setter
    def policy(self, policy: ShortlistPolicy | str | None) -> None:
        self._change(_policy=as_policy(policy))

    @property
    def drafter(self) -> Drafter:
        """What drafts. May be assigned: whatever the constructor takes."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: PreTrainedModel | Drafter) -> None:
        drafter, before = as_drafter(drafter), self._aligner
        if before is None or drafter is self._drafter:
            self._change(_drafter=drafter)
            return
        with before.standing_aside(self):
            self._change(_drafter=drafter, _aligner=Aligner(drafter, before.settings, before))

    @property
    def alignment(self) -> Aligner | None:
        """What aligns the drafter, None where nothing does. Another drafter that is assigned learns anew."""
        return self._aligner

    @property
    def tree(self) -> TreeConfig | None:
        """The shape of the trees to draft, None for chains. May be assigned: also True or False."""
        return self._tree

    @tree.setter
    def tree(self, tree: bool | TreeConfig | None) -> None:
        self._change(_tree=as_tree_config(tree or False))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of both models, None where it is not known. May be assigned."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._change(_given_tokenizer=tokenizer, _tokenizer=tokenizer)

    @property
    def fast_target_head(self) -> bool:
        """Whether the target's logits are computed by this package's product, where it is faster. May be assigned."""
        return self._fast_target_head

    @fast_target_head.setter
    def fast_target_head(self, fast_target_head: bool) -> None:
        self._change(_fast_target_head=bool(fast_target_head))

    @property
    def validate(self) -> bool:
        """Whether every shortlist of the policy is checked. May be assigned."""
        return self._validate

    @validate.setter
    def validate(self, validate: bool) -> None:
        self._change(_validate=bool(validate))

    def _change(self, **attributes: Any) -> None:
        """Set attributes and bind with them anew, or raise and leave everything as it was."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        target = self.target
        try:
            if target is not None:
                self.bind(target)
        except BaseException:
            vars(self).update(before)
            raise

    # Binding -------------------------------------------------------------------------------------------------------

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that this assistant is bound to, or None."""
        return None if self._binding is None else self._binding.target()

    def bind(self, target: PreTrainedModel) -> "DynSpecAssistant":
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
        self.drafter.require_target(target)
        before, pair = self._binding, (self.drafter, self._given_tokenizer)
        if before is not None and before.target() is target and all(map(operator.is_, before.pair, pair)):
            tokenizer, size = self.tokenizer, before.vocabulary_size
        else:
            tokenizer = shared_tokenizer(target, self.drafter, self._given_tokenizer)
            size = shared_vocabulary_size(target, self.drafter, tokenizer)
        require_tokenizer_of(self.policy.tokenizer_fingerprints, tokenizer)
        if self.tree is not None:
            self.drafter.require_trees()
        forward = TargetForward(target, self.fast_target_head, self.tree is not None)
        forward.require_states((), self.policy.needs)
        # What a policy cannot do for this pair it says now, and not in the first call.
        eos = draftable_eos_token_ids(target.generation_config, self.drafter, size)
        memory = self.policy.new_memory()
        session = self._make_session(eos, size, forward, memory)
        if self._aligner is not None:
            self._aligner.attach(self, target)
        self._tokenizer = tokenizer
        self._adopt(target, _Binding(weakref.ref(target), size, pair), forward, memory)
        self.return_session(self._sessions.take(session.vocabulary.eos_token_ids, lambda memory: session))
        return self

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
        self.learnt_drafting.forget()

    def unbind(self) -> None:
        """Leave the bound model as it was before. Does nothing where none is bound."""
        binding, self._binding = self._binding, None
        if binding is not None and binding.hook() is not None:
            binding.hook().remove(self)
        self._sessions.clear()
        if self._aligner is not None:
            self._aligner.detach(self)

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

    # Artifacts -----------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        directory: str | os.PathLike,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    ) -> Path:
        """Write the policy, its tensors and a model card; the models themselves are named, not copied.

        Args:
            directory: made if needed; what it holds is replaced atomically.
            provenance: JSON values that say how the policy was made, for the model card.
            results: measurements for the model card, see `DynSpecConfig`.
            max_shard_size: the most bytes of the tensors in one file, or a text such as `"500MB"`; beyond it they are
                split into shards.

        Returns:
            The folder.

        Raises:
            ArtifactError: the policy has tensors and no tokenizer is known, or the folder belongs to something else.
            ConfigurationError: `max_shard_size` is not a size.
        """
        from .artifacts.assistants import save_assistant

        return save_assistant(self, directory, provenance=provenance, results=results, max_shard_size=max_shard_size)

    @classmethod
    def from_pretrained(
        cls,
        directory_or_repo: str | os.PathLike,
        *,
        target: PreTrainedModel,
        drafter: PreTrainedModel | Drafter | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        **settings: Any,
    ) -> "DynSpecAssistant":
        """Load an artifact and bind it.

        Args:
            directory_or_repo: a folder that `save_pretrained` wrote, or a repository on the Hub.
            target: the model to speed up.
            drafter: the model that drafts (None: the one that the artifact names, in the target's dtype and on its
                device).
            tokenizer: as for the constructor.
            revision: branch, tag or commit of the repository. It is resolved once, for all files.
            cache_dir: where downloads are kept (None: the Hub's usual cache).
            token: for a private repository.
            settings: further arguments of the constructor; they take precedence over the artifact's.

        Raises:
            ArtifactError: the artifact is damaged, for another tokenizer, or names no drafter that can be loaded.
            UnsupportedError: as for the constructor.
        """
        from .artifacts.assistants import read_assistant

        stored = read_assistant(
            directory_or_repo,
            target=target,
            drafter=drafter,
            tokenizer=tokenizer,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
        )
        return cls(**{**stored, **settings})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        provenance: Mapping[str, Any] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        **options: Any,
    ) -> "CommitInfo":
        """Save and publish in one commit.

        Args:
            repo_id: the repository; made if needed.
            provenance: as for `save_pretrained`.
            results: as for `save_pretrained`.
            max_shard_size: as for `save_pretrained`.
            options: `private`, `token`, `commit_message`, `revision`, `create_pr`; see `artifacts.push_artifact`.

        Returns:
            The commit.

        Raises:
            ArtifactError: as for `save_pretrained`, or the repository belongs to something else.
        """
        from .artifacts.assistants import push_assistant

        return push_assistant(
            self, repo_id, provenance=provenance, results=results, max_shard_size=max_shard_size, **options
        )

    # What to expect ------------------------------------------------------------------------------------------------

    def diagnose(
        self,
        prompts: Sequence[str] | None = None,
        *,
        report: Callable[[str, int, int], None] = lambda activity, done, total: None,
        **settings: Any,
    ) -> "Diagnosis":
        """Measure whether drafting pays for the target and the drafter on this computer, with which settings, and why.

        Takes a minute or two, in which nothing else should run. The assistant and its models stay as they were.

        Args:
            prompts: texts to measure on (None: a few of several kinds). The more they are like yours, the better.
            report: called between generations with what is being done, the seconds that went by, and about how many
                there are in all.
            settings: of `evaluation.doctor.settings.DoctorSettings`, such as `policies`, `temperature`, `tree`,
                `max_new_tokens` or `seconds`.

        Returns:
            What was found. `print` shows it; `sentence` and `line` say what to do, `expectations` has every setting
            and `to_dict()` everything, as JSON values.

        Raises:
            NotBoundError: the assistant is not bound to a target.
            ConfigurationError: a setting is out of range, or the tokenizer is not known.
            WorkloadError: a prompt has no tokens or too many.
        """
        from .evaluation.doctor.measure import diagnose_assistant

        return diagnose_assistant(self, DynSpecAssistant, prompts, report, settings)

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
            UnsupportedError: not one sequence of at least two tokens.
        """
        if self.target is None:
            raise NotBoundError("bind the assistant to a target before drafting.")
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
            raise UnsupportedError(f"draft_round takes one sequence, int64 [1, n >= 2], got {tuple(input_ids.shape)}.")
        eos = self.scored_eos_token_ids(self.target.generation_config)
        if self._sessions.memory is None:
            session = self.take_session(eos)
        else:
            session = self._make_session(eos, self._binding.vocabulary_size, self.forward, None)
        try:
            return draft_once(
                self.forward,
                session,
                self.drafter.reads,
                self.generation_config,
                self.tree,
                input_ids.to(self.target.device),
            )
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
        vocabulary = VocabularyInfo(size, eos_token_ids, head.device, head.token_ids, head.weight.shape[1])
        if self.policy.needs.target_rows:
            vocabulary = replace(vocabulary, target_rows=forward.head_rows())
        policy = validated(self.policy) if self.validate else self.policy
        lock = None if self._aligner is None else self._aligner.drafting_lock
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
