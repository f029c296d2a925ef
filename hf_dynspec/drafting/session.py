"""A drafting session: draft, then observe the target's verdict, round after round."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache

from ..drafters.base import Drafter, TargetCache
from ..protocol import Candidates, HeadRows, Needs, Prompt, Shortlist, SparseDistribution, Verdict, VocabularyInfo
from ..shortlists.base import ShortlistPolicy
from ..stats import DraftingStatistics, Stopwatch
from ..tree_config import TreeConfig
from .guards import closes_on_error, while_weights_stand
from .selector import Selector, rows_of, start_selectors
from .token_choice import TokenChoice
from .trees import DrawnTreeGrowth, TreeGrowth, candidates_of, grow
from .unread_features import UnreadFeatures

# Turns the logits of a draft step, fp32 [width], into a token, int64 [1], given its shortlist and the tokens drafted
# before it. Also returns the logits that the token was drawn from, and `Candidates.drawn_from`.
ChooseToken = Callable[
    [torch.Tensor, Shortlist, list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor, SparseDistribution | None]
]
# Whether a draft goes on after the token that was chosen last. May wait for the device.
GoesOn = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Feedback:
    """The target's feedback of one round. Tensors are on the drafter's device.

    Args:
        verified: int64 `[a + 1]`: the accepted candidates and the token that the target chose after them.
        verdict: the fields of `Verdict` that the policy needs.
        prompt: the fields of `Prompt` that it needs (None: nothing).
        features: `[m, d · layers]`: the target's hidden states at the tokens `features_end − m … features_end − 1` of
            the text, for a drafter that reads them.
        features_end: one past the last of these tokens.
    """

    verified: torch.Tensor
    verdict: Mapping[str, torch.Tensor]
    prompt: Mapping[str, torch.Tensor] | None = None
    features: torch.Tensor | None = None
    features_end: int = 0


class DraftSession:
    """The drafter's cache, the policies' states and the packed rows of one text. Not shared between threads.

    A session can be used again for another text, and then keeps its buffers. It can go on with a longer text, and then
    keeps its state of the common beginning. It is closed once: by its owner, by an error, or by the garbage collector,
    at the latest at the interpreter's exit.

    Args:
        drafter: the drafter.
        policy: selects the shortlists, or holds several policies that do, one in each round.
        vocabulary: the vocabulary to select from.
        memory: the policy's memory between calls, if it has one.
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
        # The selector of the current round.
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
        """Prepare the head for the policies' shortlists: it may copy rows and compile kernels."""
        for selector in self._selectors:
            selector.prepare(self._head)

    @property
    def needs(self) -> Needs:
        """The needs of the policy of this round."""
        return self._selector.needs

    @property
    def length(self) -> int:
        """The number of tokens of the text that the session has observed."""
        return self._prefix.shape[0]

    @property
    def selector(self) -> Selector:
        """The policy's part in this round."""
        return self._selector

    def use(self, policy: int) -> None:
        """Draft with the policy of this index from now on."""
        self._selector = self._selectors[policy]

    @property
    def is_closed(self) -> bool:
        """Whether the session was given up."""
        return not self._closing.alive

    def close(self) -> None:
        """Give the session up. Does nothing the second time."""
        self._closing()

    @closes_on_error
    def end_call(self) -> None:
        """Let policies store what they learned in the memory that other calls share."""
        for selector in self._selectors:
            if selector.seen:
                selector.state.end_call()

    @closes_on_error
    def rest(self) -> None:
        """Forget the text, so that its memory is free while the session waits for another one."""
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
            continues: keep the state of the longest common beginning of this text and the last one, and the policy's
                state. Waits for the device once.

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
        """Give the target's output rows to policies that need them, if the rows changed."""
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
        self,
        prefix: torch.Tensor,
        count: int,
        choose: ChooseToken,
        goes_on: GoesOn | None = None,
        read: TargetCache | None = None,
    ) -> Candidates:
        """Draft a chain.

        Args:
            prefix: int64 `[n]`: all verified tokens, without padding, on the drafter's device.
            count: the most tokens to draft, at least 1.
            choose: picks a token from the logits of a draft step.
            goes_on: asked after each token (None: draft `count` tokens).
            read: what the target has read, for a drafter that reads that.
        """
        token_ids, used_logits, shortlists, drawn_from = [], [], [], []
        hidden, fresh, is_block = self._advance(prefix, read), prefix[-1:], self._drafter.block_size is not None
        hidden = hidden[:count] if is_block else hidden[-1:]
        for depth in range(hidden.shape[0] if is_block else count):
            if depth and not is_block:
                with self.stopwatch.section("backbone"):
                    hidden = self._backbone.draft(fresh, observe_draft_inputs=self._selector.observe_draft_inputs)
            if not depth or not is_block:
                shortlist, logits = self._score(depth, fresh, hidden)
            with self.stopwatch.section("choice"):
                fresh, used, few = choose(logits[depth if is_block else 0], shortlist, token_ids)
            token_ids.append(fresh)
            used_logits.append(used)
            drawn_from.append(few)
            shortlists.append(shortlist)
            if goes_on is not None and not goes_on():
                break
        chosen = torch.cat(token_ids), tuple(shortlists), tuple(used_logits)
        return self._keep(Candidates(*chosen, drawn_from=tuple(drawn_from)))

    @closes_on_error
    @while_weights_stand
    def draft_tree(self, prefix: torch.Tensor, config: TreeConfig, most: int, choice: TokenChoice) -> Candidates:
        """Draft a dynamic tree of the most probable tokens (EAGLE-2, section 4), or of drawn ones (`DrawnTreeGrowth`).

        Args:
            prefix: as for `draft_chain`.
            config: the shape of the tree.
            most: the longest path that can be used, at least 1.
            choice: draws the children of nodes, or processes the logits of which the most probable are the children.
        """
        levels = min(config.depth + 1, most)
        if choice.do_sample:
            # Every level of a drawn tree has its share of the nodes.
            levels = min(levels, config.total_tokens - 1)
        growth = DrawnTreeGrowth(config, levels) if choice.do_sample else TreeGrowth(config)
        hidden, fresh, parents = self._advance(prefix)[-1:], prefix[-1:], None
        paths = prefix.new_empty(1, 0)
        shortlists = []
        for depth in range(levels):
            if depth:
                with self.stopwatch.section("backbone"):
                    hidden = self._backbone.draft(fresh, parents, self._selector.observe_draft_inputs)
            shortlist, logits = self._score(depth, fresh, hidden)
            shortlists.append(shortlist)
            with self.stopwatch.section("choice"):
                fresh, parents, paths = grow(growth, logits, shortlist, paths, choice)
        with self.stopwatch.section("choice"):
            candidates = candidates_of(growth, shortlists)
        return self._keep(candidates)

    @closes_on_error
    @while_weights_stand
    def read(self, text: torch.Tensor) -> tuple[Cache, torch.Tensor]:
        """Let the policy and the drafter read a text, int64 `[n]`, `n >= 2`, for rounds over fixed memory.

        Returns:
            The drafter's keys and values, which the session does not keep, and the hidden state at the token before
            the last one, `[1, f]`: the target's, if the drafter reads these, otherwise its own.
        """
        features = self._features.rows
        hidden = self._advance(text)
        read, self._backbone = self._backbone.read(), self._drafter.start()
        return read, hidden[-2:-1] if features is None else features[-1:]

    def _advance(self, prefix: torch.Tensor, read: TargetCache | None = None) -> torch.Tensor:
        """Bring the drafter to the verified prefix. Returns its hidden states at the last tokens, `[r, d]`."""
        self._prefix = prefix
        with self.stopwatch.section("backbone"):
            self._follow_weights()
        with self.stopwatch.section("policy"):
            if self._selector.seen < prefix.shape[0]:
                # Tokens generated while nothing was drafted, or another policy drafted.
                self._selector.read(prefix)
            self._selector.state.begin_round()
        with self.stopwatch.section("backbone"):
            if read is not None:
                self._backbone.see_target(read)
            hidden = self._backbone.advance(prefix, self._features.rows, self._selector.observe_draft_inputs)
        self._features.forget()
        return hidden

    def _follow_weights(self) -> None:
        """Follow changes of the drafter's weights since the last round."""
        version = self._drafter.weights_version
        if version == self._weights_version:
            return
        self._weights_version = version
        head, before = self._drafter.head, self._head
        has_moved = (head.weight.dtype, head.device) != (before.weight.dtype, before.device)
        if head is not before:
            self._head = head
            for selector in self._selectors:
                selector.rows.forget()
            self.prepare()
            if self.vocabulary.drafter_rows is not None:
                self._follow_rows(drafter_rows=rows_of(head))
        if has_moved or not self._drafter.keeps_states:
            self._backbone = self._drafter.start()

    def _score(self, depth: int, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[Shortlist, torch.Tensor]:
        """Select the shortlist of a draft step, and score it at each expanded token: fp32 `[m, width]`."""
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
            accepted: the number of accepted candidates.
            has_missed: see `Candidates.has_missed`.
            covered: `[n]`: the target's probability mass on the shortlists, if it is measured.
        """
        self.stats.record_verification(accepted)
        if self._candidates is not None:
            self.stats.record_verified_tokens(accepted, has_missed)
        if covered is not None:
            self.stats.record_coverage(covered)

    def count_background_work(self) -> None:
        """Count the work of policies' background threads since the last call."""
        for selector in self._selectors:
            self.stats.background_work += selector.state.take_background_work()

    @closes_on_error
    def learn(self, feedback: "Feedback") -> None:
        """Observe the target's feedback of a round, and roll the drafter back to the verified prefix."""
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
            self._selector.observe(Verdict(drafted, feedback.verified, start, **feedback.verdict))
        self._candidates = None

    def has_features_of(self, length: int) -> bool:
        """Whether the unread hidden states of the target reach as far as a draft after `length` verified tokens
        needs."""
        return self._features.reach(length - 1)

    def take_features(self, features: torch.Tensor, end: int) -> None:
        """Keep hidden states of the target for the next draft: see `UnreadFeatures.add`."""
        self._features.add(features, end)


def _close_all(selectors: tuple[Selector, ...]) -> None:
    """Close the states of all, even if one of them raises."""
    with ExitStack() as stack:
        for selector in selectors:
            stack.callback(selector.state.close)
