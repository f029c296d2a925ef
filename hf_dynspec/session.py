"""Everything that changes during one `generate` call: draft, then observe what the target said, round after round."""

from collections.abc import Callable

import torch

from .drafters.base import Drafter
from .head import PackedRows
from .protocol import Candidates, Prompt, Shortlist, Verdict, VocabularyInfo
from .shortlists.base import ShortlistPolicy
from .stats import DraftingStatistics, Stopwatch

# Turns the logits of a draft step, fp32 [width], into a token, int64 [1], given its shortlist and the tokens drafted
# before it. Also returns the logits that the token was drawn by.
ChooseToken = Callable[[torch.Tensor, Shortlist, list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


class DraftSession:
    """The drafter's cache, the policy's state and the packed rows of one text. Not shared between threads.

    A session can be used again for another text, and then keeps its buffers; or be continued with a longer text, and
    then keeps what it knows of the part that stayed the same.
    """

    def __init__(self, drafter: Drafter, policy: ShortlistPolicy, vocabulary: VocabularyInfo):
        self.vocabulary = vocabulary
        self._head = drafter.head
        self._drafter = drafter
        self._state = policy.start(vocabulary)
        self._rows = PackedRows()
        self._prefix = torch.empty(0, dtype=torch.int64, device=vocabulary.device)
        self._candidates: Candidates | None = None
        self._backbone = drafter.start()
        self.stats = DraftingStatistics()
        self.stopwatch = Stopwatch(enabled=False)

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
        else:
            self._state.restart()
            self._backbone = self._drafter.start()
        self._prefix = prompt
        with self.stopwatch.section("policy"):
            self._state.observe_prompt(Prompt(prompt[kept:]))
        return kept

    def observe_prompt_logits(self, top_ids: torch.Tensor) -> None:
        """Tell the policy the target's most probable tokens, int64 `[m, k]`, at the last `m` prompt positions."""
        with self.stopwatch.section("policy"):
            self._state.observe_prompt(Prompt(self._prefix[:0], top_ids))

    def draft(self, prefix: torch.Tensor, count: int, choose: ChooseToken, threshold: float = 0.0) -> Candidates:
        """Draft a chain.

        Args:
            prefix: int64 `[n]`: all verified tokens, without padding, on the drafter's device.
            count: how many tokens to draft, at least 1.
            choose: picks a token from the logits of a draft step.
            threshold: stop after a token that was less probable than this. Above 0 it waits for the device each step.
        """
        self._prefix = prefix
        token_ids, used_logits, shortlists = [], [], []
        # A target with more rows than the drafter may say a token that the drafter has no embedding for.
        fresh = prefix[self._backbone.length :].clamp_max(self._head.weight.shape[0] - 1)
        for depth in range(count):
            with self.stopwatch.section("backbone"):
                hidden = self._backbone.extend(fresh)[-1:]
            with self.stopwatch.section("policy"):
                shortlist = self._state.select(depth, fresh[-1:], hidden)
            with self.stopwatch.section("head"):
                logits = self._head.scores(hidden, shortlist, self._rows)[0]
            with self.stopwatch.section("choice"):
                fresh, logits = choose(logits, shortlist, token_ids)
            token_ids.append(fresh)
            used_logits.append(logits)
            shortlists.append(shortlist)
            if threshold > 0 and bool((_probability(logits, shortlist, fresh) < threshold).item()):
                break
        drafted = len(token_ids)
        self._candidates = Candidates(
            token_ids=torch.cat(token_ids),
            parents=tuple(range(-1, drafted - 1)),
            depths=tuple(range(drafted)),
            shortlists=tuple(shortlists),
            logits=tuple(used_logits),
        )
        self.stats.record_draft(self._candidates)
        return self._candidates

    def observe(self, verified: torch.Tensor, top_ids: torch.Tensor | None) -> None:
        """Take in the verdict on the last draft and roll the drafter back to the verified prefix.

        Args:
            verified: int64 `[a + 1]`: the accepted candidates and the target's own token after them.
            top_ids: see `Verdict`.
        """
        if self._candidates is None:
            return
        with self.stopwatch.section("backbone"):
            confirmed = self._prefix.shape[0] + verified.shape[0] - 1
            self._backbone.truncate(min(self._backbone.length, confirmed))
        with self.stopwatch.section("policy"):
            self._state.observe(Verdict(self._candidates.token_ids, verified, top_ids))
        self._candidates = None


def _probability(logits: torch.Tensor, shortlist: Shortlist, token_id: torch.Tensor) -> torch.Tensor:
    """`[1]`: the probability that the logits `[width]` give to a token of the shortlist."""
    is_token = shortlist.scored_slots == token_id
    return logits.softmax(-1).masked_fill(~is_token, 0.0).amax(keepdim=True)
