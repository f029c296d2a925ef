"""EvoSpec's dynamic vocabulary: a static core, and tokens that are retrieved when the context leaves it."""

import copy
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...devices import is_host_memory, leaves_a_core
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

# The paper's settings (EvoSpec, table 5).
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
# The least ratio of core tokens to candidates at which a core is screened: screening takes time too.
_LEAST_TO_CHOOSE_FROM = 8
# The rank of the core's factor, relative to one of a whole head: with a fifth of the rows, columns cost little, and a
# better factor needs fewer candidates.
_RANKS = 2
# The most rounds without a trigger before their tokens are passed to the worker.
_MOST_PASSED = 64


class RetrievalShortlist(ShortlistPolicy):
    """A static core of frequent tokens ∪ a cache of retrieved ones (EvoSpec, section 3.3).

    Each verified position that `trigger` selects brings the target's `likely` most probable tokens, near tokens by
    `semantic`, and the most frequent successors of all these, if there is a `graph`. Tokens outside the core go into
    the cache. A thread beside the session does this, and the next round takes up its results: a slow answer never
    delays a round.

    Args:
        core: the ranking of the core, as for `FrequencyShortlist`.
        size: tokens of the core; 0 for the EOS ids alone.
        graph: co-occurrence graph, or the artifact of `hf-dynspec build graph` (None: no successors).
        dynamic: places of the cache beside the core.
        semantic: `"logits"`: no near tokens, only the target's likeliest ones, which verification computes anyway;
            `"index"`: also the tokens nearest to the target's hidden state, by an HNSW index over its head (the
            paper); `"token"`: also the tokens nearest to the verified one in the target's head, exactly.
        trigger: `"every"` verified position, or `"oov"`: only tokens outside the shortlist (the paper).
        cache: the tokens that stay: `"lrfu"`: the most probable ones lately; or `"arc"` (the paper).
        likely: the target's most probable tokens for a position, at most 1,024.
        neighbours: near tokens for a position.
        successors: successors of each other token.
        prompt_positions: take the target's likeliest tokens at this many last positions of the prompt, too.
        displaceable: this many of the core's rarest tokens give way to retrieved ones, the rarest first, once
            `dynamic` is full, so that there are at most `size + dynamic` rows. With 768 and 150 likely tokens in place
            of 0 and 100, drafts of German text, unknown to the ranking, kept 98.8% of the full vocabulary's acceptance
            length in place of 95.8% (model_cards/measured-pair.md).
        candidates: on a CPU, if the core is more than eight times as large, a low-rank factor of the drafter's head
            chooses this many tokens of the core at each draft step for exact scores, as `ScreenShortlist` does (None:
            score the whole core, as in the paper). The factor is computed when an assistant is bound, in less than a
            second for heads of 256 columns and in some seconds for 4,096, and perhaps anew when the drafter's weights
            change. Other devices score the whole core: on a GPU a screen drafted more slowly than the whole head
            (docs/on-a-gpu.md).
        synchronous: retrieve in the generating thread, so that runs are reproducible.

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
        # The index or table of a target's head. The table is held by its sessions only, as it holds that head's rows;
        # the index is also held here, as it takes seconds to open.
        self._made: weakref.ref[SemanticIndex | TokenNeighbours] | None = None
        self._index: SemanticIndex | None = None
        self._made_of: tuple[StorageWeakRef, int, int, torch.Size] | None = None
        self._screen: ScreenShortlist | None = None
        # The last `WantedSuccessors` and its arguments.
        self._wanted_successors: tuple[WantedSuccessors, CooccurrenceGraph, int, torch.Tensor] | None = None
        self.listener: RetrievalListener | None = None

    def heard_by(self, listener: RetrievalListener) -> "RetrievalShortlist":
        """A copy of this policy whose sessions report their retrieval to a listener, for study."""
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
        """The paper's whole setting (EvoSpec, section 3.3, table 5 and appendix A.3): a core of 32,000 tokens, and an
        adaptive replacement cache of 256. Each token outside the shortlist brings the target's 10 most probable
        tokens, 10 of the index, and 8 successors of each.

        Args:
            core: as for the class.
            graph: as for the class.
            settings: replace settings of the paper.
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
        """Begin a session over `vocabulary`. With `semantic="index"` this builds or opens the index.

        Raises:
            ConfigurationError: core or graph belong to another vocabulary.
            UnsupportedError: hnswlib is needed and not installed.
        """
        return RetrievalState(self, vocabulary)

    def core_ids(self, vocabulary: VocabularyInfo) -> torch.Tensor:
        """int64 `[n]`, `n >= 1`: the tokens of the core, the EOS ids first. The last of them are displaceable."""
        if self._core is not None:
            return self._core.leading_ids(vocabulary)
        eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=vocabulary.device)
        return eos if eos.numel() else FrequencyShortlist(size=1).leading_ids(vocabulary)

    def core_screen(self, vocabulary: VocabularyInfo, core: torch.Tensor) -> ScreenState | None:
        """The screen that chooses from the core's tokens, int64 `[n]`, at each draft step (None: score all of them).
        Sessions share its factor."""
        candidates, head = self.candidates, vocabulary.drafter_rows
        if candidates is None or head is None or vocabulary.device.type != "cpu":
            return None
        if core.shape[0] <= _LEAST_TO_CHOOSE_FROM * candidates:
            return None
        width = head.weight.shape[1]
        rank = min(usual_rank(_RANKS * width), width)
        # Weights that are not finite allow no factor. Their drafts are useless anyway, and the output stays right.
        with suppress(ConfigurationError):
            with self._lock:
                if self._screen is None or (self._screen.rank, self._screen.candidates) != (rank, candidates):
                    self._screen = ScreenShortlist(rank, candidates)
                screen = self._screen
            return ScreenState(screen, vocabulary, core)
        return None

    def semantic_of(self, rows: torch.Tensor, size: int) -> SemanticIndex | TokenNeighbours | None:
        """The index or the table of neighbours, made once for the rows of a head and shared by sessions.

        Args:
            rows: `[V', d]`: the target's rows.
            size: the number of rows that are tokens, from the first on.
        """
        if self.semantic == "logits":
            return None
        with self._lock:
            # The memory itself, as another head may later lie at the same address.
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
        """The graph's successors that may come in, bool `[V + 1]` on the CPU, made once and shared by sessions."""
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

    def tensors(self) -> dict[str, torch.Tensor]:
        core = {} if self._core is None else self._core.tensors()
        return core if self.graph is None else {**core, **self.graph.tensors()}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> "RetrievalShortlist":
        # Artifacts from before cores were screened score the whole core.
        return super().from_settings({"candidates": None, **settings}, tensors)

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        of_graph = {name: tensor for name, tensor in tensors.items() if name != "ranking"}
        graph = CooccurrenceGraph.from_settings({}, of_graph) if of_graph else None
        return {"core": tensors.get("ranking"), "graph": graph}


class _Changes(NamedTuple):
    """The changed slots, int64 `[n]`; their tokens, int64 `[n]`; and the least size that includes these slots."""

    places: torch.Tensor
    token_ids: torch.Tensor
    size: int


class RetrievalState(ShortlistState):
    """The slots of the core, and after them those of the cache, which first hold the displaceable tokens. The cache
    belongs to the worker. If the core is screened, only the EOS ids and the cache have slots."""

    carried = ("_shortlist",)
    observes_on_host = True

    def __init__(self, policy: RetrievalShortlist, vocabulary: VocabularyInfo):
        self._policy = policy
        core = policy.core_ids(vocabulary)
        always = max(len(vocabulary.eos_token_ids), 1)
        kept, displaceable = core.tensor_split([max(core.shape[0] - policy.displaceable, always)])
        self._displaceable = displaceable.tolist()
        self._screened = kept[always:]
        self._screen = policy.core_screen(vocabulary, self._screened)
        # bool [V + 1], for the trigger "oov"; the last entry stands for ids past the vocabulary.
        self._is_screened: torch.Tensor | None = None
        if self._screen is not None and policy.trigger == "oov":
            no_tokens = torch.zeros(vocabulary.size + 1, dtype=torch.bool, device=core.device)
            self._is_screened = no_tokens.index_fill(0, self._screened, True)
        self._joined: JoinedShortlist | None = None
        in_slots = kept if self._screen is None else kept[:always]
        self._kept = in_slots.shape[0]
        # The last slots are empty and not scored yet: caches fill their slots in order.
        self._first_slots = torch.cat([in_slots, displaceable, core[:1].expand(policy.dynamic)])
        self._first_size = self._kept + displaceable.shape[0]
        # Widths that change would change the shapes of a graph.
        self._order = None
        if not is_host_memory(core.device):
            self._order = torch.arange(self._first_slots.shape[0], device=core.device)
        self._cache = CACHES[policy.cache](len(self._displaceable) + policy.dynamic)
        self._cache.fill(self._displaceable)
        self._version = 0
        self._show(self._first_slots.clone(), self._first_size, replaced=None)
        # Whether it shows others than the first slots.
        self._has_results = False
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
        # Verified tokens without a trigger that the worker does not know of yet.
        self._passed: list[list[int]] = []
        # Results are taken at a round's first draft step, after the drafter's layers. When the round begins, the last
        # verdict is only microseconds old. Over fixed memory they are taken between two rounds.
        self._is_taken_up = True

    def _show(self, slots: torch.Tensor, size: int, replaced: torch.Tensor | None) -> None:
        """Show the first `size` slots, of which the `replaced` ones are new (None: this is the first shortlist)."""
        self._size = size
        self._version += replaced is not None
        if self._order is None:
            self._shortlist = Shortlist(slots, self._version, size, replaced=replaced)
        else:
            self._shortlist = Shortlist(slots, self._version, occupied=self._order < size, replaced=replaced)

    def begin_round(self) -> None:
        self._is_taken_up = False

    def settle(self) -> Shortlist:
        self._take_up()
        return self._shortlist

    def exchange(self, verdict: Verdict) -> None:
        self.observe(verdict)
        self._merge_results()

    def _take_up(self) -> None:
        if not self._is_taken_up:
            self._is_taken_up = True
            self._merge_results()

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        self._take_up()
        if self._screen is None:
            return self._shortlist
        chosen, rest = self._screen.select(depth, token_ids, features), self._shortlist
        if self._joined is None or self._joined.chosen is not chosen or self._joined.rest is not rest:
            self._joined = JoinedShortlist(chosen, rest, self._screened)
        return self._joined

    def _merge_results(self) -> None:
        """Take up the results that are there. A later round takes the others."""
        taken = self._worker.take()
        if self._policy.listener is not None:
            # Jobs with the result None were no retrievals, see `follow_weights`.
            self._policy.listener.on_taken(sum(one is not None for one in taken))
        changes = [one for one in taken if one]
        if not changes:
            return
        slots = self._shortlist.slots
        for one in changes:
            slots = slots.index_copy(0, one.places, one.token_ids)
        size = max(self._size, *(one.size for one in changes))
        self._show(slots, size, torch.cat([one.places for one in changes]))
        self._has_results = True

    def restart(self) -> None:
        if self._screen is not None:
            self._screen.restart()
        self._worker.finish()
        self._passed.clear()
        self._cache.clear()
        self._cache.fill(self._displaceable)
        if self._has_results:
            replaced = torch.arange(self._kept, self._first_slots.shape[0], device=self._first_slots.device)
            self._show(self._first_slots.clone(), self._first_size, replaced)
            self._has_results = False

    def observe_prompt(self, prompt: Prompt) -> None:
        if not self._takes_prompts:
            return
        if prompt.token_ids.numel():
            self._give(RetrievalEvent(prompt.token_ids, start=prompt.start))
        if prompt.top_ids is not None:
            no_tokens = torch.full_like(prompt.top_ids[:, 0], NO_TOKEN)
            # Likely tokens at a position are predictions for the next one.
            start = prompt.start + 1 - no_tokens.shape[0]
            self._give(RetrievalEvent(no_tokens, **self._likely(prompt), start=start))

    def observe(self, verdict: Verdict) -> None:
        is_trigger = self._triggers(verdict)
        # Without a trigger the worker need not be woken, which takes time. On other devices the check itself waits.
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
        """bool `[a + 1]`: the verified tokens that trigger retrieval (None: all)."""
        if self._policy.trigger != "oov":
            return None
        if self._is_screened is None:
            return verdict.out_of_vocabulary
        # A core token that the screen left out is no trigger: it could not come into the cache.
        screened = self._is_screened.take(verdict.verified.clamp_max(self._is_screened.shape[0] - 1))
        return verdict.out_of_vocabulary & ~screened

    def _likely(self, shown: Prompt | Verdict) -> dict[str, torch.Tensor]:
        """The target's likeliest tokens. A part of a union may get more than it needs."""
        likely, asked = {"top_ids": shown.top_ids}, self._policy.likely
        if self._policy.needs.top_logits:
            likely["top_logits"] = shown.top_logits
        return {name: tensor[:, :asked] for name, tensor in likely.items() if tensor is not None}

    def _give(self, event: RetrievalEvent) -> None:
        # The job must not hold this state, which would keep it alive.
        retriever, kept, device = self._retriever, self._kept, self._first_slots.device
        passed, self._passed = self._passed, []

        def retrieve() -> _Changes | tuple[()]:
            changes = retriever.retrieve(event, passed)
            if not changes:
                return ()
            # Copied in this thread, so that the round does not wait for the copy.
            places = torch.tensor([kept + slot for slot in changes], device=device)
            return _Changes(places, torch.tensor(list(changes.values()), device=device), kept + max(changes) + 1)

        self._worker.give(retrieve)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        rows, size = vocabulary.target_rows, vocabulary.size
        policy, retriever = self._policy, self._retriever
        if self._screen is not None:
            # If the new weights allow no factor, the old factor goes on choosing.
            with suppress(ConfigurationError):
                self._screen.follow_weights(vocabulary)
        if rows is not None:
            # In the worker, so that no search runs while an index is built.
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
