"""Static shortlists from a frequency ranking: FR-Spec, VocabTrim, and the position-aware PA-FR of DynaSpec."""

import os
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..errors import ConfigurationError
from ..fields import Switch, WholeNumber
from ..protocol import Shortlist, VocabularyInfo
from ..storable import token_ranking
from ..vocabulary import TokenizerFingerprint
from .base import ShortlistPolicy, ShortlistState
from .registry import read_stored_policy


def position_aware_size(largest: int, depth: int) -> int:
    """The size of PA-FR's shortlist at draft step `depth` (DynaSpec, appendix A.1): `largest` at 0 and 1, then
    `⌊largest / (depth + 1)⌋`, at least one."""
    return largest if depth <= 1 else max(1, largest // (depth + 1))


class FrequencyShortlist(ShortlistPolicy):
    """The most frequent tokens of a ranking (FR-Spec; VocabTrim if the ranking counts the target's own output).

    Args:
        ranking: token ids, most frequent first: a list or int64/int32 tensor `[n]` of unique ids, or the artifact
            (folder or Hub repository) of `hf-dynspec build frequency`. None takes the ids in ascending order, which is
            the tokenizer's merge order and needs no corpus. SentencePiece's vocabularies, such as Gemma's, have single
            characters last: build a ranking for them.
        size: tokens of a shortlist. The whole ranking is stored, so the size may change later.
        position_aware: shrink the shortlist with depth as PA-FR does (DynaSpec, appendix A.1).

    Raises:
        ConfigurationError: the ranking is empty, repeats an id or holds a negative one; a setting is mistyped or out
            of range.
        ArtifactError: the ranking's artifact is damaged or holds no ranking.
    """

    name = "frequency"
    setting_rules: ClassVar = {"size": WholeNumber(1), "position_aware": Switch()}
    tensor_rules: ClassVar = {"ranking": token_ranking()}
    card_summary = (
        "A static shortlist of the most frequent tokens (FR-Spec, VocabTrim). The whole ranking is stored, so that "
        "its size can be chosen at load."
    )
    card_tags = ("fr-spec", "vocabtrim")

    def __init__(
        self,
        ranking: Sequence[int] | torch.Tensor | str | os.PathLike | None = None,
        size: int = 32768,
        position_aware: bool = False,
    ):
        self.size = size
        self.position_aware = position_aware
        self.require_settings(self.settings())
        self.tokenizer: TokenizerFingerprint | None = None
        if isinstance(ranking, (str, os.PathLike)):
            stored = read_stored_policy(ranking, tensor="ranking")
            ranking, self.tokenizer = stored.tensors["ranking"], stored.tokenizer
        self.ranking = None if ranking is None else as_ranking(ranking)

    @property
    def tokenizer_fingerprints(self) -> tuple[TokenizerFingerprint, ...]:
        return () if self.tokenizer is None else (self.tokenizer,)

    @property
    def static_core(self) -> "FrequencyShortlist":
        return FrequencyShortlist(self.ranking, self.size) if self.position_aware else self

    def start(self, vocabulary: VocabularyInfo) -> "FrequencyState":
        """Begin a session over `vocabulary`.

        Raises:
            ConfigurationError: the ranking holds no token that the drafter can score.
        """
        return FrequencyState(self.leading_ids(vocabulary), vocabulary, self.position_aware)

    def leading_ids(self, vocabulary: VocabularyInfo, size: int | None = None) -> torch.Tensor:
        """int64 `[n]` on the head's device: the first tokens, EOS before all, so that every prefix holds it. `size`
        (default: the policy's own) limits their number."""
        eos = torch.tensor(vocabulary.eos_token_ids, dtype=torch.int64, device="cpu")
        size = max(size or self.size, len(eos))
        ranking = torch.arange(vocabulary.size, device="cpu") if self.ranking is None else self.ranking
        ranking = ranking[vocabulary.can_draft(ranking.to(vocabulary.device)).cpu()]
        ranking = ranking[~torch.isin(ranking, eos)]
        leading = torch.cat([eos, ranking])[:size].to(vocabulary.device)
        if not leading.numel():
            raise ConfigurationError(
                f"no id of the ranking is one of the {vocabulary.size} tokens that the drafter scores. Use the "
                "ranking of its tokenizer."
            )
        return leading

    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.ranking is None else {"ranking": self.ranking}


class FrequencyState(ShortlistState):
    """Nested prefixes of one list, so that no depth needs rows of its own."""

    carried = ()
    is_constant = True

    def __init__(self, slots: torch.Tensor, vocabulary: VocabularyInfo, position_aware: bool):
        self._slots = slots
        self._largest = slots.shape[0]
        self._smallest = max(1, len(vocabulary.eos_token_ids))
        self._position_aware = position_aware
        self._by_size: dict[int, Shortlist] = {}

    def settle(self) -> Shortlist:
        return self.select(0, self._slots, self._slots)

    def select(self, depth: int, token_ids: torch.Tensor, features: torch.Tensor) -> Shortlist:
        size = self._largest
        if self._position_aware:
            size = max(self._smallest, position_aware_size(self._largest, depth))
        if size not in self._by_size:
            self._by_size[size] = Shortlist(self._slots, version=0, size=size)
        return self._by_size[size]


def as_ranking(ranking: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Check a ranking and return it as int64 `[n]` on the CPU.

    Raises:
        ConfigurationError: not a one-dimensional list of unique, non-negative integer ids, or empty.
    """
    try:
        tensor = torch.as_tensor(ranking, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"a ranking must be a list or tensor of token ids: {error}") from error
    if tensor.dim() != 1 or tensor.numel() == 0:
        raise ConfigurationError(f"a ranking must be a non-empty list of token ids, got shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigurationError(f"a ranking must hold integer token ids, got {tensor.dtype}")
    tensor = tensor.to(torch.int64).contiguous()
    if int(tensor.min()) < 0:
        raise ConfigurationError("a ranking must not hold negative token ids")
    repeats = tensor.numel() - tensor.unique().numel()
    if repeats:
        raise ConfigurationError(f"a ranking must not repeat ids, but {repeats} of {tensor.numel()} are repeats")
    return tensor
