"""The stages of a round: draft, verify, accept, keep, observe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from ..devices import is_host_memory
from ..drafters.fixed import FixedDrafter, ObserveDraftInputs, rows_at
from ..drafting.draft_processors import SeenTokens
from ..drafting.selector import Selector
from ..drafting.token_choice import TokenChoice
from ..drafting.trees import DrawnTreeGrowth, TreeGrowth, candidates_of, grow
from ..kernels import QueryRows, top_k_ids
from ..memory.fixed import FixedMemory
from ..modeling.head import DynamicLMHead, RowsSideBySide
from ..modeling.masks import descent
from ..protocol import Candidates, Shortlist, Verdict
from ..shortlists.base import ShortlistState
from ..stats import Stopwatch
from ..tree_config import TreeConfig


class Verification(NamedTuple):
    """The target's answer at nodes.

    Args:
        logits: fp32 `[B, q, V]`.
        features: `[B, q, f]`: the hidden states that the drafter reads (None: it reads none).
        states: `[B, q, d]`: the inputs of the output projection.
    """

    logits: torch.Tensor
    features: torch.Tensor | None
    states: torch.Tensor


# Lets the target read nodes, int64 [B, q], which the rows place after the texts in its memory.
Verify = Callable[[torch.Tensor, FixedMemory, QueryRows], Verification]


class Walk(Protocol):
    """The target's choices along one text's candidates: see `verification.BatchedWalk`."""

    token_ids: torch.Tensor
    rows: torch.Tensor
    goes_on: torch.Tensor


# Walks along the candidates of a text, given the logits at its nodes, fp32 [q, V], and the text's tokens in any order,
# int64 [1, n] (none if no processor looks at them).
Accept = Callable[[torch.Tensor, Candidates | None, torch.Tensor], Walk]
# Returns the target's tokens at all nodes of several texts' chains, int64 [B, k + 1], given the logits there, fp32
# [B, k + 1, V].
AcceptChains = Callable[[torch.Tensor, Sequence[Candidates | None]], torch.Tensor]
# Notes the target's answer at some tokens for alignment: logits, fp32 [n, V], the tokens, int64 [n], and the ids and
# logits of the most probable ones there, [n, k].
Note = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class DraftShape:
    """The shape of all drafts.

    Args:
        steps: draft steps, and so the most tokens of a path.
        tree: the shape of trees (None: chains).
        is_drawn: tokens are drawn.
    """

    steps: int
    tree: TreeConfig | None = None
    is_drawn: bool = False

    @classmethod
    def of(cls, tokens: int, tree: TreeConfig | None, is_drawn: bool) -> "DraftShape":
        """The shape for chains of so many tokens, or for a tree."""
        if tree is None:
            return cls(tokens, None, is_drawn)
        steps = min(tree.depth + 1, tree.total_tokens - 1) if is_drawn else tree.depth + 1
        return cls(steps, tree, is_drawn)

    @property
    def most_nodes(self) -> int:
        """The most tokens that the target or the drafter reads after a text in a round."""
        if self.tree is None:
            return self.steps + 1
        return max(self.tree.total_tokens, self.steps * self.tree.top_k, self.steps + 1)


@dataclass(frozen=True, eq=False)
class RoundText:
    """What belongs to one text of a round.

    Args:
        selector: the policy's state. Its shapes must be fixed (`ShortlistState.carried`).
        choice: chooses draft tokens.
        accept: walks along the candidates.
        accept_chains: does so for all texts at once (None: processors look at tokens, or on a host).
        seen: the set of its tokens (None: no processor looks at them).
        note: notes the answers of the target (None: nothing is noted).
        noted_top_k: the most probable tokens to note.
    """

    selector: Selector
    choice: TokenChoice
    accept: Accept
    accept_chains: AcceptChains | None = None
    seen: SeenTokens | None = None
    note: Note | None = None
    noted_top_k: int = 0


class TextOutcome(NamedTuple):
    """What the host reads of a text's round.

    Args:
        token_ids: the accepted candidates, and the target's own token after them.
        has_missed: whether the shortlist did not hold the last of them (None: it had no shortlist).
        active: the number of tokens of the shortlist at each draft step.
        drafted_at: the number of candidates at each draft step.
    """

    token_ids: list[int]
    has_missed: bool | None
    active: list[int]
    drafted_at: list[int]


class Round:
    """Rounds of `B` texts.

    Args:
        verify: lets the target read nodes.
        memory: the target's, with all tokens of each text but the last.
        drafter: has read the texts up to their last tokens.
        head: the drafter's output projection.
        texts: one for each text.
        shape: the shape of all drafts.
        stopwatch: times the stages.
        rows: the packed rows of all texts in one block, which their selectors use (None: not in one).

    Attributes:
        steps: the draft steps of a round of chains, at most those of the shape; 0 if nothing is drafted.
        report: what the last round leaves to the host.
    """

    def __init__(
        self,
        verify: Verify,
        memory: FixedMemory,
        drafter: FixedDrafter,
        head: DynamicLMHead,
        texts: Sequence[RoundText],
        shape: DraftShape,
        stopwatch: Stopwatch,
        rows: RowsSideBySide | None = None,
    ):
        self._rows = rows
        self.memory, self.drafter = memory, drafter
        self._verify_nodes, self._head, self.texts, self.shape = verify, head, list(texts), shape
        self._stopwatch = stopwatch
        count, steps, device = len(self.texts), shape.steps, head.device
        self._order = torch.arange(steps + 1, device=device)
        self._levels = self._order.unsqueeze(0)
        self._is_before = (self._order.unsqueeze(1) >= self._order).unsqueeze(0)
        # The tokens that the last round brought: the first `accepted + 1` count. A text that has ended gets no more.
        self._token_ids = torch.zeros(count, steps + 1, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(count, dtype=torch.int64, device=device)
        self._goes_on = torch.ones(count, dtype=torch.int64, device=device)
        # The target's hidden states at the token before each.
        self._features: torch.Tensor | None = None
        self.steps = steps
        self.report: Report | None = None

    def begin(self, text: int, last_token: torch.Tensor, before: torch.Tensor | None) -> None:
        """Begin a text.

        Args:
            text: its index.
            last_token: int64 `[1]`: its last token.
            before: `[1, f]`: the target's hidden state at the token before, if the drafter reads it.
        """
        self._token_ids[text, 0] = last_token[0]
        self._accepted[text] = 0
        self._goes_on[text] = 1
        if before is not None:
            if self._features is None:
                self._features = before.new_zeros(*self._token_ids.shape, before.shape[1])
            self._features[text, 0] = before[0]

    def end(self, text: int) -> None:
        """Let a text stand still: it has ended."""
        self._goes_on[text] = 0

    def resize(self, kept: torch.Tensor, memory: FixedMemory) -> None:
        """Keep some of the texts, int64 `[b]`, whose tokens the target has in this memory. For use between rounds."""
        if len(kept) < len(self.texts):
            # The block has the rows of all.
            self._rows = None
        self.texts = [self.texts[text] for text in kept.tolist()]
        self.memory = memory
        self.drafter.resize(kept, memory.capacity)
        for name in ("_token_ids", "_accepted", "_goes_on", "_features"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.index_select(0, kept))

    @property
    def _is_constant(self) -> bool:
        """Whether all texts have the same shortlist, so that its rows are packed and read once."""
        return self.texts[0].selector.state.is_constant

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._token_ids.device

    @torch.no_grad()
    def run(self) -> None:
        """Run one round of all texts."""
        roots = self._token_ids.gather(1, self._accepted.unsqueeze(1))
        candidates = self._draft_chains(roots) if self.shape.tree is None else self._draft_trees(roots)
        with self._stopwatch.section("verification"):
            answer = self._verify(roots, candidates)
        walks = self._accept(roots, answer.logits, candidates)
        features = answer.features
        if features is not None and self.shape.tree is not None:
            features = rows_at(features, walks.rows)
        with self._stopwatch.section("policy"):
            self._observe(answer, candidates, walks, features)
        self._keep(features, walks)

    def settle(self) -> None:
        """Let the policies take up what they have observed, and pack the rows that this brings. A round before which
        they did so finds everything as every other round does."""
        # Texts share the rows of a shortlist that is the same for all.
        for text in self.texts[:1] if self._is_constant else self.texts:
            shortlist = text.selector.state.settle()
            if shortlist is not None and not (shortlist.is_transient or shortlist.is_prefix):
                text.selector.rows.update(self._head, shortlist)

    def exchange(self, text: int, count: int, start: int) -> None:
        """Let the parts of a policy that observe on the host observe the round that was read.

        Args:
            text: the index of the text.
            count: its verified tokens.
            start: the position of the first of them.
        """
        verdict = self.report.answers[text].verdict
        if verdict is not None:
            verdict = verdict.on_host(count, start)
            for part in self.texts[text].selector.state.parts:
                if part.observes_on_host:
                    part.exchange(verdict)

    # Draft -----------------------------------------------------------------------------------------------------------

    def _draft_chains(self, roots: torch.Tensor) -> list[Candidates | None]:
        """Chains after the last token of each text, int64 `[B, 1]` (None: nothing is drafted)."""
        drafted: list[list[torch.Tensor]] = [[] for _ in self.texts]
        shortlists: list[list[Shortlist]] = [[] for _ in self.texts]
        used: list[list[torch.Tensor]] = [[] for _ in self.texts]
        fresh, hidden = roots, self._advance()
        for depth in range(self.steps):
            if depth:
                within = self._is_before[:, depth - 1 : depth, :depth]
                rows = QueryRows(self.drafter.memory.lengths, within, self._levels[:, :depth])
                with self._stopwatch.section("backbone"):
                    hidden = self.drafter.draft(fresh, None, rows, self._observer())
            scored = self._score(depth, fresh, hidden)
            with self._stopwatch.section("choice"):
                fresh, logits_used = self._choose(scored, drafted)
            for number, (shortlist, _) in enumerate(scored):
                drafted[number].append(fresh[number])
                shortlists[number].append(shortlist)
                used[number].append(logits_used[number])
        return [
            Candidates(torch.cat(tokens), tuple(of_text), tuple(logits)) if tokens else None
            for tokens, of_text, logits in zip(drafted, shortlists, used, strict=True)
        ]

    def _choose(
        self, scored: list[tuple[Shortlist, torch.Tensor]], drafted: list[list[torch.Tensor]]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The next token of each chain, int64 `[B, 1]`, and for each the logits that it was chosen by."""
        shortlists, logits = zip(*scored, strict=True)
        width = shortlists[0].width
        if self.texts[0].accept_chains is not None and all(
            type(one) is Shortlist and one.width == width for one in shortlists
        ):
            slots = torch.stack([one.scored_slots for one in shortlists])
            return self.texts[0].choice.of_texts(torch.cat(logits), slots)
        chosen = [
            text.choice(some[0], shortlist, before)
            for text, shortlist, some, before in zip(self.texts, shortlists, logits, drafted, strict=True)
        ]
        return torch.stack([token for token, _, _ in chosen]), [logits_used for _, logits_used, _ in chosen]

    def _draft_trees(self, roots: torch.Tensor) -> list[Candidates]:
        """Trees as `DraftSession.draft_tree` grows them."""
        config, steps, is_drawn = self.shape.tree, self.shape.steps, self.shape.is_drawn
        growths = [DrawnTreeGrowth(config, steps) if is_drawn else TreeGrowth(config) for _ in self.texts]
        shortlists: list[list[Shortlist]] = [[] for _ in self.texts]
        fresh, hidden = roots, self._advance()
        paths = [fresh.new_empty(1, 0) for _ in self.texts]
        parents, within, widths = None, None, []
        for depth in range(steps):
            if depth:
                rows = self._level_rows(widths, within)
                with self._stopwatch.section("backbone"):
                    hidden = self.drafter.draft(fresh, parents if depth > 1 else None, rows, self._observer())
            scored = self._score(depth, fresh, hidden)
            with self._stopwatch.section("choice"):
                grown = []
                for number, (text, (shortlist, logits)) in enumerate(zip(self.texts, scored, strict=True)):
                    shortlists[number].append(shortlist)
                    *level, paths[number] = grow(growths[number], logits, shortlist, paths[number], text.choice)
                    grown.append(level)
                fresh, parents = (torch.stack(one) for one in zip(*grown, strict=True))
                itself = torch.eye(fresh.shape[1], dtype=torch.bool, device=fresh.device).expand(len(grown), -1, -1)
                within = itself if within is None else torch.cat([rows_at(within, parents), itself], dim=2)
                widths.append(fresh.shape[1])
        with self._stopwatch.section("choice"):
            return [candidates_of(*one) for one in zip(growths, shortlists, strict=True)]

    def _level_rows(self, widths: list[int], within: torch.Tensor) -> QueryRows:
        """The last level of nodes, which attend to nodes of earlier levels too: bool `[B, w, t]`."""
        levels = torch.cat([self._order[depth : depth + 1].expand(width) for depth, width in enumerate(widths)])
        return QueryRows(self.drafter.memory.lengths, within, levels.unsqueeze(0))

    def _advance(self) -> torch.Tensor:
        """Let the drafter read the last round's tokens. Returns the hidden state at the last one of each text,
        `[B, 1, d]`."""
        with self._stopwatch.section("backbone"):
            hidden = self.drafter.advance(self._token_ids, self._features, self._accepted, self._observer())
            self.drafter.memory.keep((self._accepted + 1) * self._goes_on)
        return hidden

    def _observer(self) -> ObserveDraftInputs | None:
        """Shows each policy the draft inputs of its text, if policies look at them and something is drafted: a router
        would go on in a stream of its own, which only `select` waits for."""
        if self.texts[0].selector.observe_draft_inputs is None or not self.steps:
            return None

        def observe(embeddings: torch.Tensor, features: torch.Tensor) -> None:
            for text, *inputs in zip(self.texts, embeddings, features, strict=True):
                text.selector.observe_draft_inputs(*inputs)

        return observe

    def _score(
        self, depth: int, token_ids: torch.Tensor, hidden: torch.Tensor
    ) -> list[tuple[Shortlist, torch.Tensor]]:
        """For each text the shortlist of a draft step, and its scores at the expanded tokens, fp32 `[w, width]`."""
        with self._stopwatch.section("policy"):
            shortlists = [
                text.selector.state.select(depth, *inputs)
                for text, *inputs in zip(self.texts, token_ids, hidden, strict=True)
            ]
        with self._stopwatch.section("head"):
            if self._is_constant:
                scores = self._head.scores(hidden.flatten(0, 1), shortlists[0], self.texts[0].selector.rows)
                return list(zip(shortlists, scores.unflatten(0, hidden.shape[:2]), strict=True))
            if self._rows is not None and type(shortlists[0]) is Shortlist and not shortlists[0].is_transient:
                return list(zip(shortlists, self._head.scores_of_texts(hidden, shortlists, self._rows), strict=True))
            return [
                (shortlist, self._head.scores(states, shortlist, text.selector.rows))
                for text, shortlist, states in zip(self.texts, shortlists, hidden, strict=True)
            ]

    # Verify and accept -----------------------------------------------------------------------------------------------

    def _verify(self, roots: torch.Tensor, candidates: list[Candidates | None]) -> Verification:
        nodes, lengths = roots, self.memory.lengths
        if self.steps:
            nodes = torch.cat([roots, torch.stack([one.token_ids for one in candidates])], dim=1)
        if self.shape.tree is None:
            count = self.steps + 1
            rows = QueryRows(lengths, self._is_before[:, :count, :count], self._levels[:, :count])
        else:
            root = roots.new_full((1,), -1)
            parents = [torch.cat([root, one.parents + 1]) for one in candidates]
            within = torch.stack([descent(one, self.shape.steps + 1) for one in parents])
            rows = QueryRows(lengths, within, torch.stack([pad(one.depths + 1, (1, 0)) for one in candidates]))
        return self._verify_nodes(nodes, self.memory, rows)

    def _accept(self, roots: torch.Tensor, logits: torch.Tensor, candidates: list[Candidates | None]) -> "_Walks":
        if self.shape.tree is None and self.texts[0].accept_chains is not None:
            token_ids = self.texts[0].accept_chains(logits, candidates)
            accepted = roots.new_zeros(len(roots))
            if self.steps:
                drafted = torch.stack([one.token_ids for one in candidates])
                accepted = (token_ids[:, :-1] == drafted).to(torch.int64).cumprod(1).sum(1)
            token_ids = pad(token_ids, (0, self.shape.steps - self.steps))
            return _Walks(token_ids, self._levels.expand_as(token_ids), accepted)
        tokens, rows, accepted = [], [], []
        for text, root, of_text, one in zip(self.texts, roots, logits, candidates, strict=True):
            walk = text.accept(of_text, one, root[:0].unsqueeze(0) if text.seen is None else text.seen.ids(root))
            # A draft may be shorter than the shape's, and on a host walks end where the target disagrees.
            missing = self.shape.steps + 1 - walk.token_ids.shape[0]
            tokens.append(pad(walk.token_ids, (0, missing)))
            rows.append(pad(walk.rows, (0, missing)))
            accepted.append((walk.goes_on > 0).to(torch.int64).cumprod(0).sum(0, keepdim=True))
        return _Walks(torch.stack(tokens), torch.stack(rows), torch.cat(accepted))

    # Observe and keep ------------------------------------------------------------------------------------------------

    def _observe(
        self,
        answer: Verification,
        candidates: list[Candidates | None],
        walks: "_Walks",
        features: torch.Tensor | None,
    ) -> None:
        """Write what the host reads, and let the policies observe the verdict."""
        results, known_counts, answers = [], [], []
        for number, (text, one) in enumerate(zip(self.texts, candidates, strict=True)):
            tokens, accepted = walks.token_ids[number], walks.accepted[number : number + 1]
            has_missed, counts, drafted_at = torch.zeros_like(accepted), [], []
            if one is not None:
                has_missed = _has_missed(one, tokens[: self.steps + 1], accepted)
                counts = [shortlist.count for shortlist in one.shortlists]
                if not one.is_chain:
                    drafted_at = [(one.depths.unsqueeze(0) == self._levels[0, :-1, None]).sum(1)]
            known_counts.append([count if isinstance(count, int) else None for count in counts])
            on_device = [count.view(1) for count in counts if not isinstance(count, int)]
            results.append(torch.cat([accepted, has_missed, tokens, *on_device, *drafted_at]))
            if text.seen is not None:
                text.seen.add(torch.where(self._order <= accepted, tokens, answer.logits.shape[-1]))
            of_text = self._show(text, answer, one, walks, number, has_missed)
            answers.append(of_text if features is None else of_text._replace(features=features[number]))
        self.report = Report(torch.stack(results), known_counts, self.steps, self.shape.steps, answers)

    def _show(
        self,
        text: RoundText,
        answer: Verification,
        candidates: Candidates | None,
        walks: "_Walks",
        number: int,
        has_missed: torch.Tensor,
    ) -> "Answer":
        """Let a policy observe a verdict: on a CPU, of the tokens that count; elsewhere of all, and past those that
        count, ids are those of no token."""
        needs, parts = text.selector.needs, text.selector.state.parts
        is_observed = any(type(part).observe is not ShortlistState.observe for part in parts)
        if not is_observed and text.note is None:
            return Answer()
        nowhere, accepted = text.selector.vocabulary_size, walks.accepted[number]
        order = self._order[: 1 + (int(accepted) if is_host_memory(self.device) else self.steps)]
        counts, tokens = order <= accepted, walks.token_ids[number, : len(order)]
        path = walks.rows[number, : len(order)]

        def along_path(rows: torch.Tensor) -> torch.Tensor:
            is_chain = candidates is None or candidates.is_chain
            return rows[number, : len(order)] if is_chain else rows[number].index_select(0, path)

        fields: dict[str, torch.Tensor] = {}
        most, note = max(needs.verify_top_k, text.noted_top_k), None
        if most:
            rows = along_path(answer.logits)
            top_ids = top_k_ids(rows, min(most, rows.shape[1]))
            if needs.top_logits or text.note is not None:
                top_logits = rows.gather(1, top_ids)
            if text.note is not None:
                note = text.note(rows, tokens, *(one[:, : text.noted_top_k] for one in (top_ids, top_logits)))
            if needs.top_logits:
                fields["top_logits"] = top_logits[:, : needs.verify_top_k]
            if needs.verify_top_k:
                fields["top_ids"] = torch.where(counts.unsqueeze(1), top_ids[:, : needs.verify_top_k], nowhere)
        if needs.out_of_vocabulary:
            fields["out_of_vocabulary"] = has_missed.bool() & (order == accepted)
        if needs.hidden_states:
            fields["hidden_states"] = along_path(answer.states)
        drafted = tokens[:0] if candidates is None else candidates.token_ids
        verdict = Verdict(drafted, torch.where(counts, tokens, nowhere), 0, **fields)
        for part in parts:
            if not part.observes_on_host:
                part.observe(verdict)
        shortlist = None if candidates is None else candidates.shortlists[0]
        return Answer(verdict if any(part.observes_on_host for part in parts) else None, note, shortlist)

    def _keep(self, features: torch.Tensor | None, walks: "_Walks") -> None:
        """Make the verified tokens a part of the texts."""
        self.memory.keep((walks.accepted + 1) * self._goes_on, None if self.shape.tree is None else walks.rows)
        self._token_ids.copy_(walks.token_ids)
        self._accepted.copy_(walks.accepted)
        if features is not None:
            self._features[:, : features.shape[1]].copy_(features)


class Answer(NamedTuple):
    """The target's answer at the candidates of a text, of which the first tokens count.

    Args:
        verdict: for a policy that observes on the host (None: there is none).
        note: for alignment (None: nothing was noted).
        shortlist: of the first draft step, if something was noted and drafted.
        features: the hidden states that the drafter reads, `[n, f]`, if it reads any.
    """

    verdict: Verdict | None = None
    note: Any = None
    shortlist: Shortlist | None = None
    features: torch.Tensor | None = None


class Report(NamedTuple):
    """What a round leaves to the host.

    Args:
        numbers: int64 `[B, …]`: for each text the accepted candidates, whether the last token was missed, the tokens,
            and counts that the host does not know.
        known_counts: for each text and draft step the tokens of the shortlist (None: among the numbers).
        steps: draft steps.
        most_steps: those of the shape.
        answers: for each text.
    """

    numbers: torch.Tensor
    known_counts: list[list[int | None]]
    steps: int
    most_steps: int
    answers: list[Answer]

    def read(self) -> list[TextOutcome]:
        """The outcome for each text. Waits for the device once."""
        outcomes = []
        for (accepted, has_missed, *numbers), known in zip(self.numbers.tolist(), self.known_counts, strict=True):
            counts = iter(numbers[self.most_steps + 1 :])
            active = [next(counts) if count is None else count for count in known]
            drafted_at = list(counts) or [1] * self.steps
            missed = None if accepted == self.steps else bool(has_missed)
            outcomes.append(TextOutcome(numbers[: accepted + 1], missed, active, drafted_at))
        return outcomes


class _Walks(NamedTuple):
    """The walks of all texts: tokens and rows, int64 `[B, steps + 1]`, of which the first `accepted + 1` count."""

    token_ids: torch.Tensor
    rows: torch.Tensor
    accepted: torch.Tensor


def _has_missed(candidates: Candidates, token_ids: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """`[1]`: whether the token after the accepted ones, int64 `[1]`, is outside the shortlist of its draft step; 0 if
    all were accepted. `token_ids` has one more than there are steps, int64 `[n + 1]`."""
    shortlists = candidates.shortlists
    if is_host_memory(accepted.device):
        missed = candidates.has_missed(token_ids[: int(accepted) + 1])
        return torch.zeros_like(accepted) if missed is None else missed.view(1)
    drafted = token_ids[:-1]
    if all(one is shortlists[0] for one in shortlists):
        held = shortlists[0].contains(drafted)
    else:
        held = torch.cat([one.contains(token) for one, token in zip(shortlists, drafted.split(1), strict=True)])
    return ~pad(held, (0, 1), value=True).take(accepted)
