"""EvoSpec's dynamic vocabulary: a static core, and tokens that are retrieved where the context leaves it."""

import copy
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...devices import leaves_a_core
from ...errors import ConfigurationError
from ...fields import LARGEST_TOP_K, OneOf, Switch, WholeNumber
from ...protocol import BackgroundWork, JoinedShortlist, Needs, Prompt, Shortlist, Verdict, VocabularyInfo
from ...vocabulary import TokenizerFingerprint
from ..base import ShortlistPolicy, ShortlistState
from ..frequency import FrequencyShortlist
from ..registry import read_stored_policy
from ..screen.factor import usual_rank
from ..screen.policy import ScreenShortlist, ScreenState
from .cache import CACHES
from .graph import CooccurrenceGraph, WantedSuccessors
from .index import SemanticIndex
from .neighbours import TokenNeighbours
from .retriever import NO_TOKEN, RetrievalEvent, RetrievalListener, Retriever
from .worker import Worker

SEMANTICS = ("logits", "index", "token")
TRIGGERS = ("every", "oov")

# What the paper takes of the target's likeliest tokens, of the index and of the graph (EvoSpec, table 5).
_PAPER = {
    "size": 32000,
    "likely": 10,
    "semantic": "index",
    "trigger": "oov",
    "cache": "arc",
    "prompt_positions": 0,
    "displaceable": 0,
    "candidates": None,
}
# A core is screened that has more than so many times as many tokens as are chosen from it: choosing takes time too.
_LEAST_TO_CHOOSE_FROM = 8
# Its factor has so many times the rank of one of a whole head: with a fifth of the rows, columns cost little, and
# fewer candidates do.
_RANKS = 2
# What was verified and triggered nothing is told with what does, or when it is of so many rounds.
_MOST_PASSED = 64


class RetrievalShortlist(ShortlistPolicy):
    """A static core of frequent tokens ∪ a cache of retrieved ones (EvoSpec, section 3.3).

    At each verified position that `trigger` chooses, the target's `likely` most probable tokens are taken and, by
    `semantic`, what is near to them; then, where there is a `graph`, the tokens that most often follow each of these.
    What the core does not hold goes into the cache. All of this runs in a thread beside the session, and its results
    are taken up at the next round's boundary: a slow answer never delays a round.

    Args:
        core: the ranking of the core, as for `FrequencyShortlist`.
        size: tokens of the core; 0 for the EOS ids alone.
        graph: co-occurrence graph, or the artifact that `hf-dynspec build graph` wrote (None: no successors).
        dynamic: places of the cache beside those of the core.
        semantic: `"logits"`: the target's own likeliest tokens, which verification has computed anyway; `"index"`:
            and the nearest rows of the target's head to its hidden state, by an HNSW index (the paper); `"token"`: and
            the nearest rows to that of the verified token, exactly.
        trigger: `"every"` verified position, or only those whose token was out of the shortlist, `"oov"` (the paper).
        cache: which of the retrieved tokens stay: `"lrfu"`, those that were most probable lately; or `"arc"` (the
            paper).
        likely: the target's most probable tokens that are taken at a position, at most 1,024.
        neighbours: what the index or the table of neighbours gives for a position.
        successors: tokens that are taken from the graph for each of the others.
        prompt_positions: take the target's likeliest tokens at the last so many positions of the prompt, too.
        displaceable: so many tokens of the core, the rarest, give their places to retrieved ones where those of
            `dynamic` are full, the rarest first. There are never more than `size + dynamic` rows. With 768 and 150
            likely tokens in place of none and 100, drafts of German text, of which the ranking had seen nothing, kept
            98.8% of the full vocabulary's acceptance length in place of 95.8% (model_cards/measured-pair.md).
        candidates: on a CPU, of a core that is more than eight times as large, a low-rank factor of the drafter's head
            chooses so many tokens at each draft step, as `ScreenShortlist` does of all tokens, and only those are
            scored exactly (None: the whole core is, as in the paper). The factor is made when an assistant is bound,
            in less than a second for heads of 256 columns and in some for 4,096, and may be made anew when weights of
            the drafter change. On other devices the whole core is scored: on a GPU a screen drafted more slowly than
            the whole head (docs/on-a-gpu.md).
        synchronous: retrieve in the thread that generates, so that every run is the same.

    Raises:
        ConfigurationError: a setting is mistyped or out of range.
        UnsupportedError: `semantic="index"` without hnswlib, at binding.
        ArtifactError: an artifact is damaged, or holds no ranking or graph.
    """

    name = "retrieval"
    setting_rules: ClassVar = {
        "size": WholeNumber(0),
        "dynamic": WholeNumber(1, 2**16),
        "semantic": OneOf(SEMANTICS),
        "trigger": OneOf(TRIGGERS),
        "cache": OneOf(tuple(CACHES)),
        "likely": WholeNumber(0, LARGEST_TOP_K),
        "neighbours": WholeNumber(1, LARGEST_TOP_K),
        "successors": WholeNumber(1, 64),
        "prompt_positions": WholeNumber(0),
        "displaceable": WholeNumber(0, 2**16),
        "candidates": WholeNumber(1, optional=True),
        "synchronous": Switch(),
    }
    tensor_rules: ClassVar = {**FrequencyShortlist.tensor_rules, **CooccurrenceGraph.tensor_rules}
    card_summary = (
        "A static core of frequent tokens beside a cache of retrieved ones (EvoSpec): what the target finds likely, "
        "what is near to it, and what most often follows in text."
    )
    card_tags = ("evospec",)

    def __init__(
        self,
        core: Sequence[int] | torch.Tensor | str | os.PathLike | None = None,
        size: int = 32768,
        graph: CooccurrenceGraph | str | os.PathLike | None = None,
        dynamic: int = 256,
        semantic: str = "logits",
        trigger: str = "every",
        cache: str = "lrfu",
        likely: int = 150,
        neighbours: int = 10,
        successors: int = 8,
        prompt_positions: int = 64,
        displaceable: int = 768,
        candidates: int | None = 1024,
        synchronous: bool = False,
    ):
        self.size = size
        self.dynamic = dynamic
        self.semantic = semantic
        self.trigger = trigger
        self.cache = cache
        self.likely = likely
        self.neighbours = neighbours
        self.successors = successors
        self.prompt_positions = prompt_positions
        self.displaceable = displaceable
        self.candidates = candidates
        self.synchronous = synchronous
        self.require_settings(self.settings())
        self._core = FrequencyShortlist(core, size=max(size, 1)) if size else None
        self._of_graph: TokenizerFingerprint | None = None
        if isinstance(graph, (str, os.PathLike)):
            stored = read_stored_policy(graph, tensor="graph_offsets")
            graph, self._of_graph = CooccurrenceGraph.from_settings({}, stored.tensors), stored.tokenizer
        self.graph = graph
        self._lock = threading.Lock()
        # What was made of a target's head. A table of neighbours only for as long as a session uses it, as it holds
        # that head's rows; an index takes seconds to open.
        self._made: weakref.ref[SemanticIndex | TokenNeighbours] | None = None
        self._index: SemanticIndex | None = None
        self._made_of: tuple[StorageWeakRef, int, int, torch.Size] | None = None
        self._screen: ScreenShortlist | None = None
        # What the graph leads to, of which graph and how many successors of a token, and which tokens may come in.
        self._wanted_successors: tuple[WantedSuccessors, CooccurrenceGraph, int, torch.Tensor] | None = None
        self.listener: RetrievalListener | None = None

    def heard_by(self, listener: RetrievalListener) -> "RetrievalShortlist":
        """A twin of this policy whose sessions tell a listener what they retrieve, for study."""
        twin = copy.copy(self)
        twin.listener = listener
        return twin

    @classmethod
    def paper(
        cls,
        core: Sequence[int] | torch.Tensor | str | os.PathLike | None = None,
        graph: CooccurrenceGraph | str | os.PathLike | None = None,
        **settings: Any,
    ) -> "RetrievalShortlist":
        """The paper's setting, whole (EvoSpec, section 3.3, table 5 and appendix A.3): 32,000 tokens and places for
        256 others; on a token out of the shortlist the target's 10 most probable tokens, 10 of the index, and 8
        successors of each, into an adaptive replacement cache.

        Args:
            core: as for the class.
            graph: as for the class.
            settings: in the place of the paper's.
        """
        return cls(core, graph=graph, **{**_PAPER, **settings})

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        of_core = () if self._core is None else self._core.tokenizer_fingerprints
        return of_core if self._of_graph is None else (*of_core, self._of_graph)

    @property
    def static_core(self) -> FrequencyShortlist | None:
        return self._core

    @property
    def needs(self) -> Needs:
        """The target's likeliest tokens, what semantic and trigger look at, and the rows that the core is screened
        by."""
        return Needs(
            verify_top_k=self.likely,
            prompt_top_k=self.likely if self.prompt_positions else 0,
            prompt_positions=self.prompt_positions or None,
            top_logits=self.cache == "lrfu",
            out_of_vocabulary=self.trigger == "oov",
            hidden_states=self.semantic == "index",
            drafter_rows=self.candidates is not None,
            target_rows=self.semantic != "logits",
        )

    def start(self, vocabulary: VocabularyInfo) -> "RetrievalState":
        """Begin a session over `vocabulary`. Builds or opens the index where there is one.

        Raises:
            ConfigurationError: core or graph are those of another vocabulary.
            UnsupportedError: there is no hnswlib.
        """
        return RetrievalState(self, vocabulary)

    def core_ids(self, vocabulary: VocabularyInfo) -> torch.Tensor:
        """int64 `[n]`, `n >= 1`: the tokens of the core, the EOS ids first. The last of them are displaceable."""
        if self._core is not None:
            return self._core.leading_ids(vocabulary)
        eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=vocabulary.device)
        return eos if eos.numel() else FrequencyShortlist(size=1).leading_ids(vocabulary)

    def core_screen(self, vocabulary: VocabularyInfo, core: torch.Tensor) -> ScreenState | None:
        """What chooses from the tokens of a core, int64 `[n]`, at each draft step; None where all of them are scored.
        Sessions share the factor."""
        candidates, head = self.candidates, vocabulary.drafter_rows
        if candidates is None or head is None or vocabulary.device.type != "cpu":
            return None
        if core.shape[0] <= _LEAST_TO_CHOOSE_FROM * candidates:
            return None
        width = head.weight.shape[1]
        # Numbers that are not finite allow no factor. Drafts are worth nothing by them, and texts stay what they are.
        with suppress(ConfigurationError):
            return ScreenState(self._screen_of_rank(min(usual_rank(_RANKS * width), width)), vocabulary, core)
        return None

    def _screen_of_rank(self, rank: int) -> ScreenShortlist:
        """The screen that sessions share."""
        with self._lock:
            if self._screen is None or (self._screen.rank, self._screen.candidates) != (rank, self.candidates):
                self._screen = ScreenShortlist(rank, self.candidates)
            return self._screen

    def semantic_of(self, rows: torch.Tensor, size: int) -> SemanticIndex | TokenNeighbours | None:
        """What finds tokens that are near: made once for the rows of a head, and shared by sessions.

        Args:
            rows: `[V', d]`: the target's.
            size: tokens are the first so many of them.
        """
        if self.semantic == "logits":
            return None
        with self._lock:
            # By the memory itself, as another head may come to lie at the address of one that is gone.
            made_of = StorageWeakRef(rows.untyped_storage()), rows.storage_offset(), rows._version, rows.shape
            semantic = self._made and self._made()
            if semantic is None or self._made_of != made_of:
                if self.semantic == "index":
                    semantic = self._index = SemanticIndex.of_head(rows[:size])
                else:
                    semantic = TokenNeighbours(rows[:size], self.neighbours)
                self._made, self._made_of = weakref.ref(semantic), made_of
            return semantic

    def successors_among(self, is_wanted: torch.Tensor) -> WantedSuccessors | None:
        """What the graph leads to, made once for those tokens that may come in, and shared by sessions.

        Args:
            is_wanted: bool `[V + 1]`, on the CPU: see `WantedSuccessors`.
        """
        graph, count = self.graph, self.successors
        if graph is None:
            return None
        with self._lock:
            if self._wanted_successors is not None:
                made, of_graph, of_count, wanted = self._wanted_successors
                if of_graph is graph and of_count == count and torch.equal(wanted, is_wanted):
                    return made
            made = WantedSuccessors(graph, count, is_wanted.numpy())
            self._wanted_successors = made, graph, count, is_wanted
            return made

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.setting_rules}

    def tensors(self) -> dict[str, torch.Tensor]:
        core = {} if self._core is None else self._core.tensors()
        return {**core, **({} if self.graph is None else self.graph.tensors())}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "RetrievalShortlist":
        # What was stored before cores were screened scores the whole of its core.
        return super().from_settings({"candidates": None, **settings}, tensors)

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        of_graph = {name: tensor for name, tensor in tensors.items() if name != "ranking"}
        graph = CooccurrenceGraph.from_settings({}, of_graph) if of_graph else None
        return {"core": tensors.get("ranking"), "graph": graph}


class _Changes(NamedTuple):
    """Slots that hold another token now, int64 `[n]`; these tokens, int64 `[n]`; one past the last of the slots."""

    places: torch.Tensor
    token_ids: torch.Tensor
    size: int


class RetrievalState(ShortlistState):
    """The slots that the core keeps, and after them those of the cache, which first hold the rest of the core. The
    cache itself belongs to the worker. Where the core is screened, its slots are those that are scored in any case."""

    def __init__(self, policy: RetrievalShortlist, vocabulary: VocabularyInfo):
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
        self._worker = Worker(policy.synchronous, leaves_a_core(vocabulary.device))
        # Tokens that were verified and triggered nothing, of which the worker does not know yet.
        self._passed: list[list[int]] = []
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
            self._merge_results()
        if self._screen is None:
            return self._shortlist
        chosen, rest = self._screen.select(depth, token_ids, features), self._shortlist
        if self._joined is None or self._joined.chosen is not chosen or self._joined.rest is not rest:
            self._joined = JoinedShortlist(chosen, rest, self._screened)
        return self._joined

    def _merge_results(self) -> None:
        """Take up what was retrieved. What is not there yet is taken up in a later round."""
        taken = self._worker.take()
        if self._policy.listener is not None:
            # What has no result at all was no retrieval, see `follow_weights`.
            self._policy.listener.on_taken(sum(one is not None for one in taken))
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
            self._passed.append(verdict.verified.tolist())
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
