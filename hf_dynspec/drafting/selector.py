"""One policy's part in a drafting session."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..modeling.head import DynamicLMHead, PackedRows
from ..protocol import HeadRows, Prompt, Verdict, VocabularyInfo
from ..shortlists.base import ShortlistPolicy, start_state


class Selector:
    """A policy's state, and the rows that are packed for its shortlists.

    Args:
        policy: the policy.
        vocabulary: the vocabulary to select from.
        memory: the policy's memory between calls, if it has one.

    Attributes:
        name: the policy's name.
        needs: the policy's needs.
        vocabulary_size: token ids lie below it.
        seen: the number of tokens of the text that the state has observed.
    """

    def __init__(self, policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any):
        self.name, self.needs = policy.name, policy.needs
        self._vocabulary = vocabulary
        self.vocabulary_size = vocabulary.size
        self.state = start_state(policy, vocabulary, memory)
        self.observe_draft_inputs = self.state.observe_draft_inputs if self.needs.draft_inputs else None
        self.rows = PackedRows()
        self.seen = 0

    def prepare(self, head: DynamicLMHead) -> None:
        """Prepare the head for the policy's shortlists."""
        head.prepare(self.state.layout)

    def restart(self) -> None:
        """Forget the text."""
        self.state.restart()
        self.seen = 0

    def resume(self, beginning: torch.Tensor) -> None:
        """Go on with a text that has this beginning, int64 `[n]`, in common with the last one."""
        self.seen = min(self.seen, beginning.shape[0])
        self.state.resume(beginning[: self.seen])

    def read(self, text: torch.Tensor) -> None:
        """Let the state observe the rest of the text, int64 `[n]`, without placeholders of images."""
        tokens = text[self.seen :]
        if self._vocabulary.placeholder_ids:
            tokens = tokens[self._vocabulary.is_text(tokens)]
        self.state.observe_prompt(Prompt(tokens, self.seen))
        self.seen = text.shape[0]

    def observe(self, verdict: Verdict) -> None:
        """Let the state observe a verdict, which follows the tokens that it has seen."""
        self.state.observe(verdict)
        self.seen = verdict.start + verdict.verified.shape[0]

    def follow_rows(self, **rows: HeadRows) -> None:
        """Give the state new output rows (`drafter_rows`, `target_rows`), if it needs them."""
        wanted = {name: value for name, value in rows.items() if getattr(self.needs, name)}
        if wanted:
            self._vocabulary = replace(self._vocabulary, **wanted)
            self.state.follow_weights(self._vocabulary)


def start_selectors(policy: ShortlistPolicy, vocabulary: VocabularyInfo, memory: Any) -> tuple[Selector, ...]:
    """Start a selector for each policy of a session.

    Args:
        policy: see `ShortlistPolicy.alternatives`.
        vocabulary: the vocabulary to select from, with the rows that any of them needs.
        memory: the policy's memory between calls, if it has one.
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
            # Closed again if a later one cannot be started.
            stack.callback(selectors[-1].state.close)
        stack.pop_all()
    return tuple(selectors)


def rows_of(head: DynamicLMHead) -> HeadRows:
    """The rows of a head as policies get them."""
    return HeadRows(head.weight, head.bias, head.token_ids, head.clusters)
