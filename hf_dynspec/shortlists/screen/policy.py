"""The policy `screen`: rough scores of all tokens at each draft step, exact ones of the best. Nothing to train."""

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from ...errors import ConfigurationError
from ...fields import WholeNumber
from ...kernels import TILE_ROWS, Screen, TiledFactor, best_rows_for, prepare_best_rows, tiled
from ...protocol import HeadRows, Needs, Shortlist, VocabularyInfo
from ...vocabulary import TokenizerFingerprint
from ..base import ShortlistPolicy, ShortlistState
from ..registry import read_stored_policy
from .factor import MOST_RANKS, SCREEN_TENSOR_RULES, ScreenFactor


class ScreenShortlist(ShortlistPolicy):
    """The best tokens of a low-rank factor of the drafter's head for the hidden state of the draft step (SVD-softmax,
    Shim et al., 2017), and EOS. It reads nothing else, so it works for every topic.

    The factor of the drafter's head is computed when an assistant is bound, in less than a second for heads of 256
    columns and in some seconds for 4,096. Sessions share it, and it is computed anew when the head's weights change.
    `fitted` makes a factor for the drafter's hidden states, which is stored with the policy and belongs to the weights
    that it was made from.

    Args:
        rank: the rank of the factor, at most the head's columns (None: about a sixteenth of them, in the steps in
            which kernels read columns: 11 for 128 columns, 19 for 256).
        candidates: tokens that are scored exactly at each draft step, besides EOS.
        factor: a finished factor, or the artifact (folder or Hub repository) of a policy with one (None: a factor of
            the drafter's head).

    Raises:
        ConfigurationError: a setting is mistyped or out of range, or the factor has another rank.
        ArtifactError: the artifact is damaged or holds no factor.
    """

    name = "screen"
    setting_rules: ClassVar = {"rank": WholeNumber(1, MOST_RANKS, optional=True), "candidates": WholeNumber(1)}
    tensor_rules: ClassVar = SCREEN_TENSOR_RULES
    card_summary = (
        "A low-rank factor of the drafter's head scores all tokens roughly at each draft step, and the best of them "
        "are scored exactly (SVD-softmax)."
    )
    card_tags = ("svd-softmax",)

    def __init__(
        self,
        rank: int | None = None,
        candidates: int = 2048,
        factor: ScreenFactor | str | os.PathLike | None = None,
    ):
        self.rank, self.candidates = rank, candidates
        self.require_settings(self.settings())
        self.tokenizer: TokenizerFingerprint | None = None
        if isinstance(factor, (str, os.PathLike)):
            stored = read_stored_policy(factor, tensor="projection")
            self.tokenizer = stored.tokenizer
            factor = self._arguments_from(stored.tensors)["factor"]
        self.factor = factor
        if factor is not None:
            if not isinstance(factor, ScreenFactor):
                raise ConfigurationError(
                    f"factor must be a ScreenFactor or the name of an artifact, got {type(factor).__name__}"
                )
            if rank not in (None, factor.rank):
                raise ConfigurationError(f"rank is {rank}, and the factor's is {factor.rank}: leave it out")
            self.rank = factor.rank
        self._lock = threading.Lock()
        self._last: _Made | None = None

    @classmethod
    def fitted(
        cls,
        head_weight: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        rank: int | None = None,
        candidates: int = 2048,
    ) -> "ScreenShortlist":
        """A policy with a factor of its own, to be stored with it.

        Args:
            head_weight: `[V, d]`: the drafter's head.
            hidden_states: `[n, d]`: inputs of the drafter's head, some thousands from all kinds of texts that will be
                drafted; the factor is then the best for them (None: for hidden states of all directions).
            rank: as for the policy.
            candidates: as for the policy.

        Raises:
            ConfigurationError: a setting is mistyped or out of range, shapes do not fit together, or numbers are not
                finite.
        """
        cls.require_settings({"rank": rank, "candidates": candidates})
        return cls(None, candidates, ScreenFactor.of_head(head_weight, rank, hidden_states))

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        return () if self.tokenizer is None else (self.tokenizer,)

    @property
    def needs(self) -> Needs:
        return Needs(drafter_rows=True)

    def start(self, vocabulary: VocabularyInfo) -> "ScreenState":
        """Begin a session over `vocabulary`, which must have the drafter's rows.

        Raises:
            ConfigurationError: the factor was made for another drafter.
        """
        return ScreenState(self, vocabulary)

    def screen_for(self, vocabulary: VocabularyInfo, among: torch.Tensor | None = None) -> tuple[Screen, int]:
        """The screen of the drafter's rows, and the number of rows to choose. Sessions of one head share its factor.

        Args:
            vocabulary: has the drafter's rows.
            among: int64 `[n]`: the tokens to choose from, in the order of the screen's rows, for policies without a
                factor of their own (None: all tokens, in the order of the head's rows).

        Raises:
            ConfigurationError: the factor was made for another drafter.
        """
        head = vocabulary.drafter_rows
        with self._lock:
            if self._last is None or not self._last.is_of(head, vocabulary.size, among):
                made_of = weakref.ref(head.weight), vocabulary.size, among
                self._last = _Made(*made_of, *self._tiles(head.weight[_rows(vocabulary, among)]))
            made = self._last
        bias = _bias(vocabulary, among, made.factor.levels.shape[0])
        chosen = min(self.candidates + int(bias.isposinf().sum()), int((bias > -torch.inf).sum()))
        return Screen(made.projection, made.factor, bias), chosen

    def _tiles(self, weight: torch.Tensor) -> tuple[torch.Tensor, TiledFactor]:
        """The projection and the tiled rows of a factor for rows of a head, on its device."""
        factor, count = self.factor, weight.shape[0]
        if factor is None:
            factor = ScreenFactor.of_head(weight, self.rank)
        elif factor.width != weight.shape[1] or factor.rows.shape[0] < count:
            raise ConfigurationError(
                f"the screen was made of a head of {factor.rows.shape[0]} rows and {factor.width} columns, and the "
                f"drafter's has {count} and {weight.shape[1]}. Make one of this drafter, or leave it out."
            )
        # The residuals, which the kernel multiplies with the squared length of the state, are one more column.
        rows = torch.cat([factor.rows[:count].float(), factor.residuals[:count, None].float()], dim=1)
        device = weight.device
        return factor.projection.to(device=device, dtype=torch.float32), tiled(rows.to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.factor is None else self.factor.tensors()

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if not tensors:
            return {}
        if tensors.keys() != SCREEN_TENSOR_RULES.keys():
            raise ConfigurationError(
                f"a screen is stored as {', '.join(SCREEN_TENSOR_RULES)}, got {', '.join(tensors)}"
            )
        return {"factor": ScreenFactor(**tensors)}


@dataclass(frozen=True, eq=False)
class _Made:
    """The factor of a head's weight: a projection fp32 `[r, d]` and tiled rows of `r + 1` columns."""

    weight: "weakref.ref[torch.Tensor]"
    size: int
    among: torch.Tensor | None
    projection: torch.Tensor
    factor: TiledFactor

    def is_of(self, head: HeadRows, size: int, among: torch.Tensor | None) -> bool:
        """Whether it was made of the rows of these tokens in this head. A head with new weights is another one."""
        if self.weight() is not head.weight or self.size != size:
            return False
        if among is None or self.among is None:
            return among is self.among
        return torch.equal(among, self.among)


def _rows(vocabulary: VocabularyInfo, among: torch.Tensor | None) -> slice | torch.Tensor:
    """The rows of the head to choose from: int64 `[n]`, or a slice if they are the first ones."""
    head = vocabulary.drafter_rows
    if among is None:
        # Rows past the vocabulary are padding with arbitrary contents.
        return slice(None if head.token_ids is not None else vocabulary.size)
    if head.token_ids is None:
        return among
    in_order, places = head.token_ids.sort()
    return places[torch.searchsorted(in_order, among)]


def _bias(vocabulary: VocabularyInfo, among: torch.Tensor | None, tiles: int) -> torch.Tensor:
    """fp32 `[tiles, T]`: the head's bias, with −inf for rows never to choose (padding) and +inf for rows always to
    choose (EOS)."""
    head, rows = vocabulary.drafter_rows, _rows(vocabulary, among)
    ids = torch.arange(head.weight.shape[0], device=vocabulary.device) if head.token_ids is None else head.token_ids
    ids = ids[rows]
    count = ids.shape[0]
    eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device=ids.device)
    bias = torch.zeros_like(ids, dtype=torch.float32) if head.bias is None else head.bias[rows].float()
    # A head's own bias of −inf makes a token a bad choice, but not a forbidden one.
    bias = bias.clamp_min(torch.finfo(torch.float32).min).masked_fill(torch.isin(ids, eos), torch.inf)
    bias = bias.masked_fill(~vocabulary.can_draft(ids), -torch.inf)
    return functional.pad(bias, (0, tiles * TILE_ROWS - count), value=-torch.inf).view(tiles, TILE_ROWS)


class ScreenState(ShortlistState):
    """Chooses tokens for each draft step. Several hidden states, as in a tree, share the best tokens of any of them.

    Args:
        policy: has the factor and the number of tokens.
        vocabulary: the tokens to choose from, with the drafter's rows.
        among: int64 `[n]`: the only tokens to choose from (None: all).
    """

    carried = ()

    def __init__(self, policy: ScreenShortlist, vocabulary: VocabularyInfo, among: torch.Tensor | None = None):
        self._policy, self._among = policy, among
        self._version = 0
        self._best_rows = best_rows_for(vocabulary.device)
        if vocabulary.device.type == "cpu":
            prepare_best_rows()
        self.follow_weights(vocabulary)

    def follow_weights(self, vocabulary: VocabularyInfo) -> None:
        self._screen, self._count = self._policy.screen_for(vocabulary, self._among)
        self._token_ids = vocabulary.drafter_rows.token_ids if self._among is None else self._among
        self.restart()

    def restart(self) -> None:
        self._features: torch.Tensor | None = None
        self._shortlist: Shortlist | None = None

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        if features is not self._features:
            self._features = features
            self._shortlist = self._shortlist_for(features)
        return self._shortlist

    def _shortlist_for(self, features: torch.Tensor) -> Shortlist:
        rows = self._best_rows(features, self._screen, self._count)
        ids = rows if self._token_ids is None else self._token_ids.index_select(0, rows)
        self._version += 1
        return Shortlist(ids, self._version, is_transient=True)
