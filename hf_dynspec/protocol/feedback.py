"""What policies ask to be shown, what they are shown of the text and of the target, and what they did meanwhile."""

from dataclasses import dataclass, fields

import torch


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

    def on_host(self, count: int, start: int) -> "Verdict":
        """The verdict on the first `count` verified tokens, from this position on, in memory of the host."""
        tensors = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("drafted", "start")}
        cut = {name: tensor[:count].cpu() for name, tensor in tensors.items() if tensor is not None}
        return Verdict(self.drafted.cpu(), start=start, **cut)


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
