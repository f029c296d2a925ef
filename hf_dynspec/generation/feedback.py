"""Feedback: what a round reads from the target besides the logits that verify, and who observes it."""

from typing import Any

import torch

from ..alignment.recording import Recorder
from ..drafting.session import DraftSession, Feedback
from ..kernels import top_k_ids
from ..modeling.head import finish_logits
from ..modeling.parts import scale_and_cap
from ..protocol import Candidates, Needs
from .target import TargetForward
from .verification import BestTokens, Outcome
from .verified_text import VerifiedText

# Prompt positions whose full-vocabulary logits are in memory at the same time.
_PROMPT_CHUNK = 64


class TargetFeedback:
    """Collects the feedback that the policy, the drafter and the recorder of one call ask for. Nothing else is read
    from the target or computed.

    Args:
        session: the drafting session. Its policy, and so the needs, may change from round to round.
        target: runs the target.
        reads: the indices of the target's hidden states that the drafter reads.
        text: the verified text.
        recorder: records rounds for the aligner (None: nothing is recorded).
        prefills_in_chunks: the target reads the prompt in several forwards.

    Attributes:
        read_ahead: the target's outputs for the chunks of the prompt before the last one.
    """

    def __init__(
        self,
        session: DraftSession,
        target: TargetForward,
        reads: tuple[int, ...],
        text: VerifiedText,
        recorder: Recorder | None,
        prefills_in_chunks: bool,
    ):
        self._session = session
        self._device = session.vocabulary.device
        self._target = target
        self._reads = reads
        self._text = text
        self._recorder = recorder
        self._prefills_in_chunks = prefills_in_chunks
        self._is_observed, self._keeps_features = True, True
        self.read_ahead: list[Any] = []
        self._prompt_logits: torch.Tensor | None = None

    @property
    def _needs(self) -> Needs:
        """What the policy of this round needs."""
        return self._session.needs

    # Requests to the target ------------------------------------------------------------------------------------------

    def begin_round(self, is_observed: bool, keeps_features: bool) -> None:
        """Settle who observes this round and the following ones, until the next call.

        Args:
            is_observed: the policy and the drafter observe the round. If there is a recorder, all three do.
            keeps_features: if not, the hidden states that the drafter reads are still kept for a later draft.
        """
        self._is_observed = is_observed or self._recorder is not None
        self._keeps_features = self._is_observed or keeps_features

    @property
    def best_count(self) -> int:
        """The number of most probable tokens wanted at each verified position."""
        if not self._is_observed:
            return 0
        return max(self._needs.verify_top_k, 0 if self._recorder is None else self._recorder.top_k)

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the forward over the prompt returns logits at several of its last positions. That is cheap for few
        positions. For many, the logits are computed from hidden states later, if the target has them."""
        if not self._is_observed or not self._text.is_unread:
            return False
        needs, most = self._needs, self._needs.prompt_positions
        if not needs.prompt_top_k or most == 0:
            return False
        are_few = most is not None and most <= _PROMPT_CHUNK and not self._prefills_in_chunks
        return (are_few and not needs.prompt_hidden_states) or not self._target.has_head_state

    def earlier_rows(self, unread: int) -> int:
        """The number of rows of logits wanted before the last verified token, if the target reads `unread` tokens."""
        if not self.wants_prompt_rows:
            return 0
        most = _PROMPT_CHUNK if self._needs.prompt_positions is None else self._needs.prompt_positions
        return max(1, min(unread, self._text.unknown, most, _PROMPT_CHUNK)) - 1

    def wanted_states(self, has_prompt_rows: bool = False) -> tuple[int, ...]:
        """The indices of the hidden states wanted from the target's next forward: see `TargetForward.state`.

        Args:
            has_prompt_rows: needs about the prompt are served from rows of logits.
        """
        if not self._is_observed:
            return self._reads if self._keeps_features else ()
        of_prompt = self._needs.of_prompt and not has_prompt_rows and self._text.is_unread
        if self._needs.hidden_states or (of_prompt and self._target.has_head_state):
            return (*self._reads, self._target.num_layers)
        return self._reads

    def take_prompt_rows(self, outputs: Any, earlier: int) -> None:
        """Move the rows of logits before the last verified token out of the target's outputs."""
        self._prompt_logits = outputs.logits[0, : earlier + 1]
        outputs.logits = outputs.logits[:, earlier:]

    # Reading the outputs ---------------------------------------------------------------------------------------------

    def of_round(
        self,
        outputs: Any,
        candidates: Candidates | None,
        outcome: Outcome,
        has_missed: torch.Tensor | None,
        best_tokens: BestTokens | None,
    ) -> Feedback | None:
        """Collect the feedback of a round, and give the recorder its part.

        Args:
            outputs: the target's outputs.
            candidates: the verified candidates (None: nothing was drafted).
            outcome: the verified tokens.
            has_missed: see `Candidates.has_missed`; None without candidates.
            best_tokens: the most probable tokens of the round's logits, if they were computed.

        Returns:
            What the session observes. None if it observes nothing: then at most the features are kept.
        """
        end = self._text.length + outcome.accepted
        if not self._is_observed:
            if self._reads and self._keeps_features:
                self._session.take_features(self._features(outputs, candidates, outcome), end)
            self.read_ahead = []
            return None
        prompt = self._of_prompt(outputs) if self._text.is_unread and self._needs.of_prompt else None
        features = self._features(outputs, candidates, outcome) if self._reads else None
        self.read_ahead = []
        verified = outcome.token_ids.to(self._device)
        with self._session.stopwatch.section("policy"):
            logits, top = _verified(outputs.logits[0], candidates, outcome), {}
            if self.best_count:
                best = None if best_tokens is None else best_tokens.ids(self.best_count)[: logits.shape[0]]
                with_logits = self._needs.top_logits or self._recorder is not None
                top = self._most_probable(logits, self.best_count, with_logits, best)
            verdict = self._of_verification(outputs, outcome, top, has_missed)
        if self._recorder is not None:
            shortlist = None if candidates is None else candidates.shortlists[0]
            self._recorder.add(logits, top, verified, shortlist, features, end)
        return Feedback(verified, verdict, prompt, features, end)

    def _states(self, outputs: Any, index: int) -> torch.Tensor:
        """`[n, d]`: the hidden states at all tokens that the target read in this round, over all chunks."""
        states = [self._target.state(one, index) for one in (*self.read_ahead, outputs)]
        return torch.cat(states) if self.read_ahead else states[0]

    def _features(self, outputs: Any, candidates: Candidates | None, outcome: Outcome) -> torch.Tensor:
        """`[m, d · layers]`: the hidden states at the tokens that the drafter reads next, at first the prompt's."""
        states = [self._states(outputs, index) for index in self._reads]
        first = states[0].shape[0] - outputs.logits.shape[1]
        if self._text.is_unread:
            states = [one[: first + 1] for one in states]
        else:
            states = [_verified(one[first:], candidates, outcome) for one in states]
        # One state is copied too, as it may be a view of a larger tensor.
        features = torch.cat(states, dim=-1)
        return (self._text.without_padding(features) if self._text.is_unread else features).to(self._device)

    def _of_verification(
        self, outputs: Any, outcome: Outcome, top: dict[str, torch.Tensor], has_missed: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The fields of `Verdict` that the policy needs of a verification."""
        fields: dict[str, torch.Tensor] = {}
        if self._needs.verify_top_k:
            names = ("top_ids", "top_logits") if self._needs.top_logits else ("top_ids",)
            fields = {name: top[name][:, : self._needs.verify_top_k] for name in names}
        if self._needs.hidden_states:
            states = self._target.state(outputs, self._target.num_layers)[-outputs.logits.shape[1] :]
            fields["hidden_states"] = states.index_select(0, outcome.rows.to(states.device)).to(self._device)
        if self._needs.out_of_vocabulary:
            missed = torch.zeros(outcome.accepted + 1, dtype=torch.bool, device=self._device)
            if has_missed is not None:
                missed[-1] = has_missed
            fields["out_of_vocabulary"] = missed
        return fields

    def _most_probable(
        self, logits: torch.Tensor, count: int, with_logits: bool, best: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The most probable tokens of rows of logits `[m, V]` (`best`, if known already), and on request their
        logits."""
        top_ids = top_k_ids(logits, min(count, logits.shape[1])) if best is None else best
        fields = {"top_ids": top_ids.to(self._device)}
        if with_logits:
            fields["top_logits"] = logits.gather(1, top_ids).float().to(self._device)
        return fields

    def _of_prompt(self, outputs: Any) -> dict[str, torch.Tensor] | None:
        """The fields of `Prompt` that the policy needs at the prompt positions that it has not observed; None if there
        are no such positions."""
        if self._prompt_logits is not None:
            logits, self._prompt_logits = self._prompt_logits, None
            with self._session.stopwatch.section("policy"):
                fields = self._most_probable(logits, self._needs.prompt_top_k, self._needs.top_logits)
                precede_text = self._precede_text(logits.shape[0])
                return fields if precede_text is None else {name: one[precede_text] for name, one in fields.items()}
        if not self._target.has_head_state:
            return None
        states = self._states(outputs, self._target.num_layers)
        end = states.shape[0] - outputs.logits.shape[1] + 1
        count = min(end, self._text.unknown)
        if count < 1 or self._needs.prompt_positions == 0:
            return None
        states, precede_text = states[end - count : end], self._precede_text(count)
        if precede_text is not None:
            states = states[precede_text.to(states.device)]
        with self._session.stopwatch.section("policy"):
            return self._of_prompt_states(states[-(self._needs.prompt_positions or count) :])

    def _precede_text(self, count: int) -> torch.Tensor | None:
        """bool `[count]`: the last positions of the prompt that are followed by text, and not by a placeholder of an
        image (None: all are)."""
        vocabulary = self._session.vocabulary
        if not vocabulary.placeholder_ids:
            return None
        following = self._text.prompt[self._text.prompt.shape[0] - count + 1 :]
        return torch.cat([vocabulary.is_text(following), following.new_ones(1, dtype=torch.bool)])

    def _of_prompt_states(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same fields, computed from the target's last hidden states `[m, d]` at these positions."""
        fields: dict[str, torch.Tensor] = {}
        if self._needs.prompt_top_k:
            model = self._target.model
            head = model.get_output_embeddings()
            wanted = self._needs.prompt_top_k, self._needs.top_logits
            # A scale or cap after the projection does not change which tokens are the most probable.
            chunks = [self._most_probable(head(chunk), *wanted) for chunk in states.split(_PROMPT_CHUNK)]
            fields = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
            if self._needs.top_logits:
                fields["top_logits"] = finish_logits(fields["top_logits"], *scale_and_cap(model))
        if self._needs.prompt_hidden_states:
            fields["hidden_states"] = states.to(self._device)
        return fields


def _verified(rows: torch.Tensor, candidates: Candidates | None, outcome: Outcome) -> torch.Tensor:
    """Select the `[a + 1, …]` rows that tokens were chosen from, among `[k + 1, …]` rows for the last verified token
    and each candidate."""
    if candidates is None or candidates.is_chain:
        # A view: copying rows of a large vocabulary takes longer than reading them.
        return rows[: outcome.accepted + 1]
    return rows.index_select(0, outcome.rows.to(rows.device))
