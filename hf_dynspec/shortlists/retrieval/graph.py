"""The token co-occurrence graph: for each token its likeliest successors in text.

Source: EvoSpec, section 3.3 and appendix A.3. `hf-dynspec build graph` makes it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import ArtifactError, ConfigurationError
from ...storable import BUILD_AGAIN, Storable, TensorRule
from ...vocabulary import TokenizerFingerprint

# The most edges of a graph, for each token of the tokenizer.
MOST_SUCCESSORS = 2**10


def check_offsets(
    field: str, offsets: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that offsets `[tokenizer size + 1]` rise from 0. `CooccurrenceGraph` checks the edges.

    Raises:
        ArtifactError: they do not. Its `field` is `field`.
    """
    if offsets.shape[0] != tokenizer.size + 1:
        problem = f"gives {offsets.shape[0] - 1} tokens successors, and the tokenizer has {tokenizer.size}"
        raise ArtifactError(field, problem, BUILD_AGAIN)
    if int(offsets[0]) != 0 or int(offsets.diff().min()) < 0:
        raise ArtifactError(field, "do not rise from 0", BUILD_AGAIN)


def check_successors(
    field: str, successors: torch.Tensor, tokenizer: TokenizerFingerprint, eos_token_ids: tuple[int, ...]
) -> None:
    """Check that successors `[n]` are ids of the tokenizer.

    Raises:
        ArtifactError: they are not. Its `field` is `field`.
    """
    for token_id in (int(successors.min()), int(successors.max())):
        if not 0 <= token_id < tokenizer.size:
            problem = f"holds the id {token_id}, and ids run from 0 to {tokenizer.size - 1}"
            raise ArtifactError(field, problem, BUILD_AGAIN)


def _most_edges(tokenizer_size: int) -> int:
    return tokenizer_size * MOST_SUCCESSORS


class CooccurrenceGraph(Storable):
    """For each token its likeliest successors, in compressed sparse rows. Immutable and shareable.

    The successors of the token `u` are `successors[offsets[u] : offsets[u + 1]]`, the likeliest first.

    Args:
        offsets: int64 `[V + 1]`.
        successors: int32 `[E]`, token ids. Other integer dtypes are converted.
        probabilities: fp32 `[E]`: `p(v | u)`, above 0 and at most 1.

    Attributes:
        vocabulary_size: V.

    Raises:
        ConfigurationError: the three do not make a graph; the message says why.
    """

    name = "cooccurrence_graph"
    tensor_rules: ClassVar = {
        "graph_offsets": TensorRule(("I64",), (lambda tokenizer_size: tokenizer_size + 1,), check_offsets),
        "graph_successors": TensorRule(("I32",), (_most_edges,), check_successors),
        "graph_probabilities": TensorRule(("F32",), (_most_edges,)),
    }
    card_summary = (
        "A token co-occurrence graph (EvoSpec): for each token the tokens that most likely follow on it in text."
    )
    card_tags = ("evospec",)
    _TENSORS: ClassVar = {"offsets": torch.int64, "successors": torch.int32, "probabilities": torch.float32}

    def __init__(self, offsets: torch.Tensor, successors: torch.Tensor, probabilities: torch.Tensor):
        given = {"offsets": offsets, "successors": successors, "probabilities": probabilities}
        self.offsets, self.successors, self.probabilities = (
            _as_vector(name, tensor, self._TENSORS[name]) for name, tensor in given.items()
        )
        self.vocabulary_size = len(self.offsets) - 1
        self._require_rows()

    def _require_rows(self) -> None:
        offsets, successors, probabilities = self.offsets, self.successors, self.probabilities
        edges = len(successors)
        if len(offsets) < 2 or not edges or len(probabilities) != edges:
            sizes = f"{len(offsets)} offsets, {edges} successors and {len(probabilities)} probabilities"
            raise ConfigurationError(
                f"a graph has at least 2 offsets, and as many successors as probabilities: {sizes}"
            )
        degrees = offsets.diff()
        if int(offsets[0]) != 0 or int(offsets[-1]) != edges or int(degrees.min()) < 0:
            raise ConfigurationError(f"a graph's offsets rise from 0 to the number of its edges, which is {edges}")
        if int(successors.min()) < 0 or int(successors.max()) >= self.vocabulary_size:
            raise ConfigurationError(f"a graph's successors are ids from 0 to {self.vocabulary_size - 1}")
        if not bool((probabilities > 0).all()) or not bool((probabilities <= 1).all()):
            raise ConfigurationError("a graph's probabilities are above 0 and at most 1")
        sources = torch.repeat_interleave(torch.arange(self.vocabulary_size, device=degrees.device), degrees)
        same = sources[1:] == sources[:-1]
        if bool((same & (probabilities[1:] > probabilities[:-1])).any()):
            raise ConfigurationError("a graph's successors of a token must stand with the likeliest first")
        if len((sources * self.vocabulary_size + successors).unique()) != edges:
            raise ConfigurationError("a graph must not repeat an edge")

    @property
    def edges(self) -> int:
        """The number of edges."""
        return self.successors.shape[0]

    @property
    def sources(self) -> int:
        """The number of tokens with successors."""
        return int((self.offsets.diff() > 0).sum())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that rebuild this graph, by their names in artifacts."""
        return {f"graph_{name}": getattr(self, name).cpu() for name in self._TENSORS}

    @classmethod
    def _arguments_from(cls, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        missing = [name for name in cls.tensor_rules if name not in tensors]
        if missing:
            raise ConfigurationError(f"a co-occurrence graph needs {' and '.join(missing)}")
        # Other tensors belong to a policy. The reader of artifacts refuses unknown ones.
        return {name: tensors[f"graph_{name}"] for name in cls._TENSORS}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.edges:,} edges over {self.vocabulary_size:,} tokens)"


class WantedSuccessors:
    """For each token its likeliest successors that may come into a shortlist. Immutable and shareable.

    A core that was counted on the texts of the graph holds nearly all successors, so leaving those out makes look-ups
    of hundreds of tokens cheap.

    Args:
        graph: the graph.
        count: the most likely successors of each token to consider.
        is_wanted: bool `[V + 1]`: the ids that may come in; the last entry stands for all ids past the vocabulary.
    """

    def __init__(self, graph: CooccurrenceGraph, count: int, is_wanted: np.ndarray):
        offsets, successors = graph.offsets.numpy(), graph.successors.numpy()
        place = np.arange(len(successors)) - np.repeat(offsets[:-1], np.diff(offsets))
        stays = (place < count) & is_wanted[np.minimum(successors, len(is_wanted) - 1)]
        self._successors = successors[stays].astype(np.int64)
        # One more row, without successors, for ids that the graph does not know.
        first = np.concatenate([[0], np.cumsum(stays)])[offsets]
        self._offsets = np.append(first, first[-1])
        self._unknown = graph.vocabulary_size

    def of(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The successors, int64 `[m]`, of tokens, int64 `[n]`, one token after another and the likeliest first; and
        their number for each token, int64 `[n]`. Ids outside the graph, as of padding rows, have none."""
        is_known = (token_ids >= 0) & (token_ids < self._unknown)
        rows = np.where(is_known, token_ids, self._unknown)
        first = self._offsets[rows]
        counts = self._offsets[rows + 1] - first
        # The first successor of each token, less its place in the result.
        begin = np.repeat(first - np.cumsum(counts) + counts, counts)
        return self._successors[begin + np.arange(len(begin))], counts


def _as_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_right_kind = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() == dtype.is_floating_point
    if not is_right_kind or tensor.dim() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = "floating-point" if dtype.is_floating_point else "integer"
        raise ConfigurationError(f"a graph's {name} must be a one-dimensional {kind} tensor")
    return tensor.detach().cpu().to(dtype).contiguous()
