"""One policy's part in a drafting session."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..modeling.head import DynamicLMHead, PackedRows
from ..protocol import HeadRows, Prompt, Verdict, VocabularyInfo
from ..shortlists.base import ShortlistPolicy, start_state


class Selector:
    """A policy's state, how much of the text it was shown, and the rows that are packed for its shortlists.

    Args:
        policy: what the state is of.
        vocabulary: what it selects from.
        memory: what the policy keeps between calls, if anything.

    Attributes:
        name: the policy's.
        needs: what it asks to be shown.
        seen: the tokens of the text that it was shown.
    """

    def __init__(self, policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any):
        self.name, self.needs = policy.name, policy.needs
        self._vocabulary = vocabulary
        self.state = start_state(policy, vocabulary, memory)
        self.observe_draft_inputs = self.state.observe_draft_inputs if self.needs.draft_inputs else None
        self.rows = PackedRows()
        self.seen = 0

    def prepare(self, head: DynamicLMHead) -> None:
        """Copy and compile what the head needs to score the policy's shortlists."""
        head.prepare(self.state.layout)

    def restart(self) -> None:
        """Forget the text."""
        self.state.restart()
        self.seen = 0

    def resume(self, beginning: torch.Tensor) -> None:
        """Another call goes on with a text of which this beginning, int64 `[n]`, is known."""
        self.seen = min(self.seen, beginning.shape[0])
        self.state.resume(beginning[: self.seen])

    def read(self, text: torch.Tensor) -> None:
        """Show it what it has not seen of the text, int64 `[n]`."""
        self.state.observe_prompt(Prompt(text[self.seen :], self.seen))
        self.seen = text.shape[0]

    def observe(self, verdict: Verdict) -> None:
        """Show it what the target said, right after the tokens that it has seen."""
        self.state.observe(verdict)
        self.seen = verdict.start + verdict.verified.shape[0]

    def follow_rows(self, **rows: HeadRows) -> None:
        """Tell it which rows a head has now: `drafter_rows`, `target_rows`, where it asked for them."""
        wanted = {name: value for name, value in rows.items() if getattr(self.needs, name)}
        if wanted:
            self._vocabulary = replace(self._vocabulary, **wanted)
            self.state.follow_weights(self._vocabulary)


def start_selectors(policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any) -> tuple[Selector, ...]:
    """Begin with all that a session can draft with.

    Args:
        policy: see `ShortlistPolicy.alternatives`.
        vocabulary: what is selected from, with the rows that any of them asks for.
        memory: what the policy keeps between calls, if anything.
    """
    with ExitStack() as stack:
        selectors = []
        for one, own in policy.alternatives(memory):
            known = replace(
                vocabulary,
                drafter_rows=vocabulary.drafter_rows if one.needs.drafter_rows else None,
                target_rows=vocabulary.target_rows if one.needs.target_rows else None,
            )
            selectors.append(Selector(one, known, own))
            # Where a later one cannot be started, nobody else would know of this one.
            stack.callback(selectors[-1].state.close)
        stack.pop_all()
    return tuple(selectors)


def rows_of(head: DynamicLMHead) -> HeadRows:
    """The rows of a head as policies are shown them."""
    return HeadRows(head.weight, head.bias, head.token_ids)
