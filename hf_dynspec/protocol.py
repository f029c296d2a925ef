"""What one stage of a round hands the next: shortlists, candidates and verdicts. Shapes are documented here, once.

Letters: `V` rows of the output projection, `C` slots of a shortlist, `k` drafted tokens of a round, `a` accepted ones.
Positions count the tokens of the text from 0, padding not among them.
"""

import functools
from dataclasses import dataclass

import torch

from .devices import is_free_to_look


@dataclass(frozen=True, eq=False)
class HeadRows:
    """The rows of an output projection, as they lie in the model: to be read, and never written to or copied whole.

    Args:
        weight: `[V, d]`, of the model's dtype and on the device of the projection.
        bias: `[V]`, or None.
        token_ids: int64 `[V]`: the token id that each row scores, without repeats; None where row `i` scores id `i`.
            Rows past the vocabulary's size are padding.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True)
class VocabularyInfo:
    """What a policy may know of the vocabulary it selects from.

    Args:
        size: ids `0 … size-1` are real tokens of the tokenizer that both models can score. Rows past it are padding.
        eos_token_ids: the end-of-sequence ids, each below `size`, without repeats; every shortlist contains them.
        device: where shortlists live, which is where the drafter's head lives.
        draftable: int64 `[n]` on that device: the only ids that the head can score, each below `size`, row by row of
            the head (None: all of them, row `i` being id `i`). Shortlists hold no others.
        width: numbers of the hidden states and embeddings that a policy is shown (None: not known).
        drafter_rows: the rows of the drafter's output projection. None where the policy did not ask for them.
        target_rows: those of the target's, likewise.
    """

    size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device
    draftable: torch.Tensor | None = None
    width: int | None = None
    drafter_rows: HeadRows | None = None
    target_rows: HeadRows | None = None

    @functools.cached_property
    def _is_draftable(self) -> torch.Tensor:
        """bool `[size + 1]`: for each id; the last entry is for ids past the vocabulary."""
        table = torch.zeros(self.size + 1, dtype=torch.bool, device=self.device)
        return table.index_fill(0, self.draftable, True)

    def can_draft(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool, of the shape of `token_ids` (on the device): which of these ids the head can score."""
        if self.draftable is None:
            return token_ids < self.size
        return self._is_draftable.take(token_ids.to(torch.int64).clamp_max(self.size))


@dataclass(frozen=True)
class Needs:
    """What a policy asks to be shown. Nothing that no policy asks for is computed. A part of a union may be shown what
    another part asked for.

    Args:
        verify_top_k: ids of the target's most probable tokens wanted for every verified position (0: none).
        prompt_top_k: ids of the target's most probable tokens wanted for every prompt position (0: none).
        prompt_positions: limits what is wanted of prompt positions to the last so many (None: all of them).
        draft_inputs: the embeddings and features that draft steps start from
            (`ShortlistState.observe_draft_inputs`).
        top_logits: the logits of the most probable tokens, beside their ids.
        out_of_vocabulary: whether each verified token was outside the shortlist.
        hidden_states: the target's last hidden state at every verified position.
        prompt_hidden_states: likewise at every prompt position.
        drafter_rows: the rows of the drafter's output projection (`VocabularyInfo.drafter_rows`).
        target_rows: those of the target's.
    """

    verify_top_k: int = 0
    prompt_top_k: int = 0
    prompt_positions: int | None = None
    draft_inputs: bool = False
    top_logits: bool = False
    out_of_vocabulary: bool = False
    hidden_states: bool = False
    prompt_hidden_states: bool = False
    drafter_rows: bool = False
    target_rows: bool = False

    @property
    def of_prompt(self) -> bool:
        """Whether anything is wanted of the target at prompt positions."""
        return bool(self.prompt_top_k) or self.prompt_hidden_states

    @property
    def of_states(self) -> bool:
        """Whether the target's hidden states are wanted."""
        return self.hidden_states or self.prompt_hidden_states

    def __or__(self, other: "Needs") -> "Needs":
        """The needs of both."""
        limits = [needs.prompt_positions for needs in (self, other) if needs.of_prompt]
        switches = ("draft_inputs", "top_logits", "out_of_vocabulary", "hidden_states", "prompt_hidden_states")
        return Needs(
            verify_top_k=max(self.verify_top_k, other.verify_top_k),
            prompt_top_k=max(self.prompt_top_k, other.prompt_top_k),
            prompt_positions=None if None in limits or not limits else max(limits),
            **{
                name: getattr(self, name) or getattr(other, name)
                for name in (*switches, "drafter_rows", "target_rows")
            },
        )


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Token ids in blocks of `T`, so that a head can hold its rows in the same order and score whole blocks.

    Args:
        token_ids: int64 `[B, T]` on the head's device.
        is_token: bool `[B, T]`: which of them count; the others hold any valid id.
        vocabulary_size: all ids are below it.
    """

    token_ids: torch.Tensor
    is_token: torch.Tensor
    vocabulary_size: int

    @functools.cached_property
    def sizes(self) -> torch.Tensor:
        """int64 `[B + 1]`: how many tokens each block holds; the last entry, 0, is what −1 finds, for no block."""
        return torch.nn.functional.pad(self.is_token.sum(1), (0, 1))

    @functools.cached_property
    def _block_of(self) -> torch.Tensor:
        """int64 `[vocabulary_size + 1]`: the block of each token id; the last entry is for ids past the vocabulary."""
        blocks = torch.arange(self.token_ids.shape[0], device=self.token_ids.device).unsqueeze(1)
        held = torch.where(self.is_token, blocks, -2)
        table = blocks.new_full((self.vocabulary_size + 1,), -2)
        return table.scatter_reduce_(0, self.token_ids.flatten(), held.flatten(), "amax")

    def block_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of `token_ids`: the block that holds each of them, −2 where none does."""
        # Unlike an index, which would read a single number back.
        return self._block_of.take(token_ids.to(torch.int64).clamp_max(self.vocabulary_size))


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The token ids that the drafter may propose at one draft step: the active vocabulary `V_t`.

    Slots keep their place while a shortlist evolves, so that a packed copy of the head's rows is updated row by row.

    Args:
        slots: int64 `[C]` on the head's device. Slot `i` holds a token id below `VocabularyInfo.size`.
        version: grows whenever `slots` may have changed, and never otherwise than with new context; it never shrinks.
        size: the first `size` slots are scored (None: all `C`). Nested shortlists share `slots` and differ in `size`.
        occupied: bool `[C]`, the slots that count (None: all). The ids of occupied slots are unique; an unoccupied
            slot holds any valid id and its logit is −inf.
        replaced: int64 `[r]`, the only slots that may differ from those of version `version - 1` (None: all may).
        is_prefix: slot `i` is row `i` of the head, so that its own leading rows can be scored where they lie.
        is_transient: made for one draft step and not worth a packed copy, so that its rows are scored where they lie.
    """

    slots: torch.Tensor
    version: int
    size: int | None = None
    occupied: torch.Tensor | None = None
    replaced: torch.Tensor | None = None
    is_prefix: bool = False
    is_transient: bool = False

    @property
    def width(self) -> int:
        """Number of slots that are scored."""
        return self.slots.shape[0] if self.size is None else self.size

    @property
    def scored_slots(self) -> torch.Tensor:
        """int64 `[width]`: the ids of the slots that are scored, occupied or not."""
        return self.slots[: self.width]

    @property
    def scored_occupied(self) -> torch.Tensor | None:
        """bool `[width]`, or None where every slot counts."""
        return None if self.occupied is None else self.occupied[: self.width]

    @property
    def count(self) -> int | torch.Tensor:
        """How many token ids `V_t` has. A tensor, int64 `[]`, where the device knows it alone."""
        return self.width if self.occupied is None else self.scored_occupied.sum()

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        """int64, of the shape of `columns`: the ids of these of the scored slots."""
        return self.slots[columns]

    def ids(self) -> torch.Tensor:
        """int64 `[n]`: the unique token ids of `V_t`. Has a data-dependent shape, so it waits for the device."""
        occupied = self.scored_occupied
        return self.scored_slots if occupied is None else self.scored_slots[occupied]

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool, of the shape of `token_ids`: which of these ids are in `V_t`. Does not wait for the device."""
        matches = token_ids.unsqueeze(-1) == self.scored_slots
        occupied = self.scored_occupied
        return (matches if occupied is None else matches & occupied).any(-1)


class BlockShortlist(Shortlist):
    """The tokens of whole blocks, one block after another, so that the head can score them from a copy of its rows in
    the same order. Its slots are looked up when they are first asked for, and most draft steps never ask.

    Args:
        blocks: int64 `[n]`: which blocks of the layout; −1 for a block without tokens.
        layout: the blocks of `T` slots. Shortlists of one policy share it.
        version: as for every shortlist.
    """

    is_transient = True

    def __init__(self, blocks: torch.Tensor, layout: BlockLayout, version: int):
        # Past the dataclass's own, which would want the slots.
        vars(self).update(blocks=blocks, layout=layout, version=version)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        return self.layout.token_ids.index_select(0, self.blocks.clamp_min(0)).flatten()

    @functools.cached_property
    def occupied(self) -> torch.Tensor:
        is_token = self.layout.is_token.index_select(0, self.blocks.clamp_min(0))
        return (is_token & (self.blocks >= 0).unsqueeze(1)).flatten()

    @property
    def width(self) -> int:
        return self.blocks.shape[0] * self.layout.token_ids.shape[1]

    @property
    def count(self) -> torch.Tensor:
        return self.layout.sizes[self.blocks].sum()

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        block_rows = self.layout.token_ids.shape[1]
        if columns.numel() == 1 and is_free_to_look(columns.device):
            # A chain's only token: reading numbers takes less time than computing with tensors of one.
            place, row = divmod(columns.item(), block_rows)
            return self.layout.token_ids[self.blocks[place].item(), row].view(columns.shape)
        places = columns // block_rows
        # From where the block lies in the shortlist to where it lies in the layout; the block −1 finds the last one.
        return self.layout.token_ids.take(columns.add(self.blocks.take(places) - places, alpha=block_rows))

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Two entries more than there are blocks: −1, for no block, finds the last one, and −2, of ids that are in no
        # block, the one before it.
        is_chosen = torch.zeros(self.layout.token_ids.shape[0] + 2, dtype=torch.bool, device=self.blocks.device)
        is_chosen.index_fill_(0, self.blocks, True)
        return is_chosen.take(self.layout.block_of(token_ids))


class JoinedShortlist(Shortlist):
    """Whole blocks, and after them the slots of another shortlist, so that the head scores each as it does alone.

    Args:
        blocks: the blocks.
        rest: no token of the blocks is in one of its occupied slots.
    """

    is_transient = True

    def __init__(self, blocks: BlockShortlist, rest: Shortlist):
        vars(self).update(blocks=blocks, rest=rest, version=blocks.version + rest.version)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        return torch.cat([self.blocks.slots, self.rest.scored_slots])

    @functools.cached_property
    def occupied(self) -> torch.Tensor:
        of_rest = self.rest.scored_occupied
        if of_rest is None:
            of_rest = torch.ones_like(self.rest.scored_slots, dtype=torch.bool)
        return torch.cat([self.blocks.occupied, of_rest])

    @property
    def width(self) -> int:
        return self.blocks.width + self.rest.width

    @property
    def count(self) -> torch.Tensor:
        return self.blocks.count + self.rest.count

    def ids_at(self, columns: torch.Tensor) -> torch.Tensor:
        past_blocks = columns - self.blocks.width
        in_blocks = self.blocks.ids_at(columns.clamp_max(self.blocks.width - 1))
        return torch.where(past_blocks < 0, in_blocks, self.rest.ids_at(past_blocks.clamp_min(0)))

    def contains(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.blocks.contains(token_ids) | self.rest.contains(token_ids)


@dataclass(frozen=True, eq=False)
class Draws:
    """What the nodes of a tree were drawn from, without replacement: the first child of a node from these
    probabilities, the second from what they are without the first one's token, scaled back to 1, and so on.

    Args:
        token_ids: for each depth int64 `[w, n]`: the tokens that the children of each of the `w` expanded nodes could
            become. Those that can be drawn occur once in a row.
        probabilities: for each depth fp32 `[w, n]`: of these tokens, 0 for those that cannot be drawn.
        rows: int64 `[k]`: for each candidate the row of its depth's probabilities that it was drawn by.
        columns: int64 `[k]`: for each candidate its column in that row. Where a row has fewer tokens that can be drawn
            than children, the last children are others, of probability 0, and do not count.
        most_siblings: no node has more children.
    """

    token_ids: tuple[torch.Tensor, ...]
    probabilities: tuple[torch.Tensor, ...]
    rows: torch.Tensor
    columns: torch.Tensor
    most_siblings: int


@dataclass(frozen=True)
class FewWeights:
    """What a token is drawn from where little of a vocabulary is left, as numbers of the host.

    Args:
        token_ids: distinct ids.
        weights: one for each; all others have none. Probabilities are in proportion to them.
    """

    token_ids: list[int]
    weights: list[float]


@dataclass(frozen=True, eq=False)
class Candidates:
    """What one round of drafting proposes: a tree of tokens, of which a chain is the special case.

    Args:
        token_ids: int64 `[k]` on the drafter's device. Parents come before their children, and siblings lie side by
            side, in the order in which they were drawn if they were.
        shortlists: one shortlist for each depth, which is what that depth's tokens were chosen from.
        logits: for a chain, the processed fp32 logits `[width]` that each token was chosen by, over the slots of its
            depth's shortlist. When sampling, their softmax is the distribution that it was drawn from. Empty for a
            tree.
        parents: int64 `[k]`: for each token the index of its parent among the candidates, −1 for a child of the
            verified prefix. None for a chain, where each token is the parent of the next.
        depths: int64 `[k]`: for each token the number of its ancestors among the candidates. None for a chain.
        scores: fp32 `[k]`: for each token of a tree what it was kept for. Of a tree of the likeliest tokens the
            log-probability of its path in the drafter's view, which is over the shortlists; of a drawn one the
            logarithm of a bound on the estimated probability that it is accepted, −inf for nodes that do not count.
            None for a chain.
        draws: what the tokens of a tree were drawn from. None for a chain, and for a tree of the likeliest tokens.
        drawn_from: for a chain, what each token was drawn from, where that is little and nothing was waited for. None
            where `logits` alone tell. Empty for a tree.
    """

    token_ids: torch.Tensor
    shortlists: tuple[Shortlist, ...]
    logits: tuple[torch.Tensor, ...] = ()
    parents: torch.Tensor | None = None
    depths: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    draws: Draws | None = None
    drawn_from: tuple[FewWeights | None, ...] = ()

    @property
    def is_chain(self) -> bool:
        """Whether each token is the only child of the one before it."""
        return self.parents is None

    def has_missed(self, verified: torch.Tensor) -> torch.Tensor | None:
        """bool `[]`: whether the last of the verified tokens, int64 `[a + 1]`, was outside the shortlist of its depth;
        None where it had no shortlist, as after a fully accepted draft. Those before it came out of theirs."""
        depth = verified.shape[0] - 1
        return ~self.shortlists[depth].contains(verified[depth]) if depth < len(self.shortlists) else None


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one verification said: the only thing that feeds policies.

    All tensors are on the drafter's device. What only some policies need is None where none asked (`Needs`). Logits
    and states are the target's own, before any logits processor; of a tree, those along the verified path.

    Args:
        drafted: int64 `[k]`: the candidates of the round; empty where there were none.
        verified: int64 `[a + 1]`: the accepted candidates and the token that the target chose after them.
        start: the position of the first verified token: that of `verified[i]` is `start + i`.
        out_of_vocabulary: bool `[a + 1]`: whether each verified token was outside the shortlist of its depth, as a
            whole: for a part of a union, outside of what all parts selected. False where there was no shortlist, as
            after a fully accepted draft and in rounds without candidates.
        top_ids: int64 `[a + 1, verify_top_k]`: ids of the target's most probable tokens at each verified position,
            most probable first; ids may lie at or past the vocabulary's size where the target's head is padded. A
            smaller vocabulary has fewer.
        top_logits: fp32, of the shape of `top_ids`: their logits.
        hidden_states: `[a + 1, d_target]`, of the target's dtype: what its output projection was given where each
            verified token was chosen, that is at the token before it.
    """

    drafted: torch.Tensor
    verified: torch.Tensor
    start: int
    out_of_vocabulary: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Prompt:
    """The part of the context that a policy has not seen yet, at the start of a call or after rounds without drafts.

    A state is told twice: the tokens before anything is drafted, and what the target says of them, if somebody asked
    for that, as soon as it has read them; there are no tokens then.

    Args:
        token_ids: int64 `[n]`, without padding.
        start: the position of the first of these tokens; where there are none, one past the last of the text.
        top_ids: int64 `[m, prompt_top_k]`: the target's most probable next tokens at the last `m` positions before
            `start`; None where nobody asked or the target has not seen the prompt yet.
        top_logits: fp32, of the shape of `top_ids`: their logits.
        hidden_states: `[m, d_target]`: what the target's output projection is given at these positions.
    """

    token_ids: torch.Tensor
    start: int
    top_ids: torch.Tensor | None = None
    top_logits: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


@dataclass(frozen=True)
class BackgroundWork:
    """What a policy did in a thread of its own, and what of that the thread that generates had to spend time on.

    Args:
        jobs: how many jobs are done.
        seconds: processor time of these jobs.
        exposed_seconds: time that the thread that generates spent on handing jobs over, on taking their results and on
            waiting; where there is no other thread, on the jobs themselves.
        late_rounds: rounds that were drafted without some of the results, as these were not there yet.
    """

    jobs: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    late_rounds: int = 0

    @property
    def hidden_share(self) -> float | None:
        """The share of the jobs' time that the thread that generates did not spend. None where they took none."""
        return max(0.0, 1.0 - self.exposed_seconds / self.seconds) if self.seconds else None

    def __add__(self, other: "BackgroundWork") -> "BackgroundWork":
        return BackgroundWork(
            self.jobs + other.jobs,
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
            self.late_rounds + other.late_rounds,
        )
