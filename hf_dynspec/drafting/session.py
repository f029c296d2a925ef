"""Everything that changes during one `generate` call: draft, then observe what the target said, round after round."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafters.base import Drafter
from ..kernels import top_k_ids
from ..protocol import Candidates, HeadRows, Needs, Prompt, Shortlist, SparseDistribution, Verdict, VocabularyInfo
from ..shortlists.base import ShortlistPolicy
from ..stats import DraftingStatistics, Stopwatch
from ..tree_config import TreeConfig
from .guards import closes_on_error, while_weights_stand
from .selector import Selector, rows_of, start_selectors
from .trees import DrawnTreeGrowth, TreeGrowth
from .unread_features import UnreadFeatures

# Turns the logits of a draft step, fp32 [width], into a token, int64 [1], given its shortlist and the tokens drafted
# before it. Also returns the logits that the token was drawn by, and what is left of them (`Candidates.drawn_from`).
ChooseToken = Callable[
    [torch.Tensor, Shortlist, list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor, SparseDistribution | None]
]
# Whether a draft goes on after the token that was chosen last. May wait for the device.
GoesOn = Callable[[], bool]

# Draws children of the nodes that a draft step expands. Takes their logits, fp32 [w, width], the shortlist, the paths
# to them, int64 [w, depth], and how many children each gets. Returns what they are drawn from, token ids and
# probabilities (see `protocol.Draws`), and their columns in it, int64 [w, c], in the order in which they were drawn.
DrawChildren = Callable[[torch.Tensor, Shortlist, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Feedback:
    """What the target said in one round. Tensors are on the drafter's device.

    Args:
        verified: int64 `[a + 1]`: the accepted candidates and the token that the target chose after them.
        shown: what the policy asked to be shown of them, by the names that `Verdict` has.
        prompt: what it asked to be shown of prompt positions, by the names that `Prompt` has (None: nothing).
        features: `[m, d · layers]`: the target's hidden states at the tokens `features_end − m … features_end − 1` of
            the text, for a drafter that reads them.
        features_end: one past the last of these tokens.
    """

    verified: torch.Tensor
    shown: Mapping[str, torch.Tensor]
    prompt: Mapping[str, torch.Tensor] | None = None
    features: torch.Tensor | None = None
    features_end: int = 0


class DraftSession:
    """The drafter's cache, the states of policies and the packed rows of one text. Not shared between threads.

    A session can be used again for another text, and then keeps its buffers; or be continued with a longer text, and
    then keeps what it knows of the part that stayed the same. It is closed once: by whoever gives it up, by an error,
    or when nobody holds it any more, at the latest at the interpreter's exit.

    Args:
        drafter: what drafts.
        policy: selects the shortlists, or knows those that do, one in each round.
        vocabulary: what they are selected from.
        memory: what the policy keeps between calls, if anything.
        drafting_lock: is held by every draft (None: nobody writes to the drafter's weights meanwhile).
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: ShortlistPolicy,
        vocabulary: VocabularyInfo,
        memory: Any = None,
        drafting_lock: AbstractContextManager[None] | None = None,
    ):
        self._drafting_lock = drafting_lock or nullcontext()
        if policy.needs.drafter_rows:
            vocabulary = replace(vocabulary, drafter_rows=rows_of(drafter.head))
        self.vocabulary = vocabulary
        self._drafter = drafter
        self._selectors = start_selectors(policy, vocabulary, memory)
        # The one that drafts, and is shown what the target says of it.
        self._selector = self._selectors[0]
        self._closing = weakref.finalize(self, _close_all, self._selectors)
        self._prefix = torch.empty(0, dtype=torch.int64, device=vocabulary.device)
        self._candidates: Candidates | None = None
        self._weights_version = drafter.weights_version
        self._head = drafter.head
        self._backbone = drafter.start()
        self._features = UnreadFeatures()
        self.stats = DraftingStatistics()
        self.stopwatch = Stopwatch(enabled=False)

    @closes_on_error
    def prepare(self) -> None:
        """Copy and compile what the head needs to score the shortlists."""
        for selector in self._selectors:
            selector.prepare(self._head)

    @property
    def needs(self) -> Needs:
        """What the policy that drafts asks to be shown."""
        return self._selector.needs

    @property
    def length(self) -> int:
        """The tokens of the text that the session was told."""
        return self._prefix.shape[0]

    def use(self, policy: int) -> None:
        """Draft with another policy from now on: the number of it among those that there are."""
        self._selector = self._selectors[policy]

    @property
    def is_closed(self) -> bool:
        """Whether the session was given up."""
        return not self._closing.alive

    def close(self) -> None:
        """Give the session up. Does nothing where that was done before."""
        self._closing()

    @closes_on_error
    def end_call(self) -> None:
        """Let policies put what they learnt where other calls of the assistant find it."""
        for selector in self._selectors:
            if selector.seen:
                selector.state.end_call()

    @closes_on_error
    def rest(self) -> None:
        """Forget the text, so that nothing of it is held while the session waits for another one."""
        for selector in self._selectors:
            selector.restart()
        self._backbone = self._drafter.start()
        self._features.forget()
        self._prefix = self._prefix[:0].clone()
        self._candidates = None

    @closes_on_error
    def begin(self, prompt: torch.Tensor, continues: bool) -> int:
        """Start on a text.

        Args:
            prompt: int64 `[n]`, without padding, on the drafter's device.
            continues: keep what is known of the longest common beginning of this text and the last one, and what the
                policy remembers. Waits for the device once.

        Returns:
            The length of the common beginning that was kept.
        """
        self._candidates = None
        kept = 0
        if continues:
            n = min(prompt.shape[0], self._prefix.shape[0])
            differs = prompt[:n] != self._prefix[:n]
            kept = n if not bool(differs.any()) else int(differs.to(torch.int8).argmax())
            # The last token is processed again, for its hidden state.
            self._backbone.truncate(min(kept, self._backbone.length, prompt.shape[0] - 1))
            self._features.forget_past(kept)
            with self.stopwatch.section("policy"):
                for selector in self._selectors:
                    selector.resume(prompt[:kept])
        else:
            for selector in self._selectors:
                selector.restart()
            self._backbone = self._drafter.start()
            self._features.forget()
        self._prefix = prompt
        with self.stopwatch.section("policy"):
            self._selector.read(prompt)
        return kept

    @closes_on_error
    def follow_target(self, rows: HeadRows) -> None:
        """Tell policies that asked for the target's rows which they are, where they are others than before."""
        if rows is not self.vocabulary.target_rows:
            with self.stopwatch.section("policy"):
                self._follow_rows(target_rows=rows)

    def _follow_rows(self, **rows: HeadRows) -> None:
        self.vocabulary = replace(self.vocabulary, **rows)
        for selector in self._selectors:
            selector.follow_rows(**rows)

    @closes_on_error
    @while_weights_stand
    def draft_chain(
        self, prefix: torch.Tensor, count: int, choose: ChooseToken, goes_on: GoesOn | None = None
    ) -> Candidates:
        """Draft a chain.

        Args:
            prefix: int64 `[n]`: all verified tokens, without padding, on the drafter's device.
            count: how many tokens to draft at most, at least 1.
            choose: picks a token from the logits of a draft step.
            goes_on: asked after each token (None: draft `count` tokens).
        """
        token_ids, used_logits, shortlists, drawn_from = [], [], [], []
        hidden, fresh = self._advance(prefix), prefix[-1:]
        while True:
            shortlist, logits = self._score(len(token_ids), fresh, hidden)
            with self.stopwatch.section("choice"):
                fresh, used, few = choose(logits[0], shortlist, token_ids)
            token_ids.append(fresh)
            used_logits.append(used)
            drawn_from.append(few)
            shortlists.append(shortlist)
            if goes_on is not None and not goes_on():
                break
            if len(token_ids) == count:
                break
            with self.stopwatch.section("backbone"):
                hidden = self._backbone.draft(fresh, observe_draft_inputs=self._selector.observe_draft_inputs)
        chosen = torch.cat(token_ids), tuple(shortlists), tuple(used_logits)
        return self._keep(Candidates(*chosen, drawn_from=tuple(drawn_from)))

    @closes_on_error
    @while_weights_stand
    def draft_tree(
        self, prefix: torch.Tensor, config: TreeConfig, most: int, draw: DrawChildren | None = None
    ) -> Candidates:
        """Draft a dynamic tree: of the likeliest tokens (EAGLE-2, section 4), or of drawn ones (`DrawnTreeGrowth`).

        Args:
            prefix: as for `draft_chain`.
            config: the shape of the tree.
            most: the longest path that is of use, at least 1.
            draw: draws the children of nodes (None: they are the most probable ones).
        """
        levels = min(config.depth + 1, most)
        if draw is not None:
            # Every level of a drawn tree has its share of the nodes.
            levels = min(levels, config.total_tokens - 1)
        growth = TreeGrowth(config) if draw is None else DrawnTreeGrowth(config, levels)
        hidden, fresh, parents = self._advance(prefix), prefix[-1:], None
        paths = prefix.new_empty(1, 0)
        shortlists = []
        for depth in range(levels):
            if depth:
                with self.stopwatch.section("backbone"):
                    hidden = self._backbone.draft(fresh, parents, self._selector.observe_draft_inputs)
            shortlist, logits = self._score(depth, fresh, hidden)
            shortlists.append(shortlist)
            with self.stopwatch.section("choice"):
                if draw is None:
                    best = top_k_ids(logits, min(config.top_k, shortlist.width))
                    log_probabilities = logits.gather(1, best) - logits.logsumexp(-1, keepdim=True)
                    fresh, parents = growth.add_level(shortlist.ids_at(best), log_probabilities)
                else:
                    fresh, parents = growth.add_level(*draw(logits, shortlist, paths, growth.most_children))
                    paths = torch.cat([paths.index_select(0, parents), fresh.unsqueeze(1)], dim=1)
        with self.stopwatch.section("choice"):
            token_ids, scores, parents, depths = growth.choose()
            draws = None if draw is None else growth.draws()
        return self._keep(Candidates(token_ids, tuple(shortlists), (), parents, depths, scores, draws))

    def _advance(self, prefix: torch.Tensor) -> torch.Tensor:
        """Bring the drafter to the verified prefix. Returns the hidden state `[1, d]` that predicts what follows."""
        self._prefix = prefix
        with self.stopwatch.section("backbone"):
            self._follow_weights()
        with self.stopwatch.section("policy"):
            if self._selector.seen < prefix.shape[0]:
                # What came out while nothing was drafted, or another policy drafted.
                self._selector.read(prefix)
            self._selector.state.begin_round()
        with self.stopwatch.section("backbone"):
            hidden = self._backbone.advance(prefix, self._features.rows, self._selector.observe_draft_inputs)[-1:]
        self._features.forget()
        return hidden

    def _follow_weights(self) -> None:
        """Take up weights of the drafter that changed since the last round."""
        version = self._drafter.weights_version
        if version == self._weights_version:
            return
        self._weights_version = version
        head, before = self._drafter.head, self._head
        is_of_another_kind = (head.weight.dtype, head.device) != (before.weight.dtype, before.device)
        if head is not before:
            self._head = head
            for selector in self._selectors:
                selector.rows.forget()
            self.prepare()
            if self.vocabulary.drafter_rows is not None:
                self._follow_rows(drafter_rows=rows_of(head))
        if is_of_another_kind or not self._drafter.keeps_states:
            self._backbone = self._drafter.start()

    def _score(self, depth: int, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[Shortlist, torch.Tensor]:
        """Select the shortlist of a draft step and score it for every token that is expanded, fp32 `[m, width]`."""
        with self.stopwatch.section("policy"):
            shortlist = self._selector.state.select(depth, token_ids, hidden)
        with self.stopwatch.section("head"):
            return shortlist, self._head.scores(hidden, shortlist, self._selector.rows)

    def _keep(self, candidates: Candidates) -> Candidates:
        self._candidates = candidates
        self.stats.record_draft(candidates, self._selector.name)
        return candidates

    def count(self, accepted: int, has_missed: torch.Tensor | None, covered: torch.Tensor | None) -> None:
        """Count the round of the last candidates.

        Args:
            accepted: how many of them were accepted, one below the other.
            has_missed: see `Candidates.has_missed`.
            covered: `[n]`: the target's probability mass on the shortlists, where it is measured.
        """
        self.stats.record_verification(accepted)
        if self._candidates is not None:
            self.stats.record_verified_tokens(accepted, has_missed)
        if covered is not None:
            self.stats.record_coverage(covered)

    def count_background_work(self) -> None:
        """Count what policies did in a thread of their own since the last call."""
        for selector in self._selectors:
            self.stats.background_work += selector.state.take_background_work()

    @closes_on_error
    def learn(self, feedback: "Feedback") -> None:
        """Take in what the target said in a round, and roll the drafter back to the verified prefix."""
        if feedback.prompt is not None:
            with self.stopwatch.section("policy"):
                prompt = Prompt(self._prefix[:0], self._prefix.shape[0], **feedback.prompt)
                self._selector.state.observe_prompt(prompt)
        if feedback.features is not None:
            self.take_features(feedback.features, feedback.features_end)
        start, drafted = self._prefix.shape[0], self._prefix[:0]
        if self._candidates is not None:
            drafted = self._candidates.token_ids
            with self.stopwatch.section("backbone"):
                self._backbone.truncate(min(self._backbone.length, start + feedback.verified.shape[0] - 1))
        self._prefix = torch.cat([self._prefix, feedback.verified])
        with self.stopwatch.section("policy"):
            self._selector.observe(Verdict(drafted, feedback.verified, start, **feedback.shown))
        self._candidates = None

    def has_features_of(self, length: int) -> bool:
        """Whether there are hidden states of the target, not read by the drafter yet, up to those that a draft after
        `length` verified tokens starts from."""
        return self._features.reach(length - 1)

    def take_features(self, features: torch.Tensor, end: int) -> None:
        """Keep hidden states of the target for the next draft: see `UnreadFeatures.add`."""
        self._features.add(features, end)


def _close_all(selectors: tuple[Selector, ...]) -> None:
    """Close the states of all, also where one cannot be."""
    with ExitStack() as stack:
        for selector in selectors:
            stack.callback(selector.state.close)
