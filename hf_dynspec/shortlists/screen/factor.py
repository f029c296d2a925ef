"""A low-rank factor of an LM head: rough scores of all tokens at a fraction of the cost.

Source: SVD-softmax (Shim et al., 2017), section 3. Given the covariance of hidden states, the factor is the best one
for them; SpecVocab (arXiv 2602.13836) trains such a factor.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from ...errors import ConfigurationError
from ...fields import LARGEST_COUNT
from ...kernels import TILE_COLUMNS
from ...storable import WEIGHT_DTYPES, TensorRule

# The limits on the dimensions of stored factors.
MOST_RANKS = 2**12
MOST_COLUMNS = 2**16
SCREEN_TENSOR_RULES = {
    "rows": TensorRule(WEIGHT_DTYPES, (LARGEST_COUNT, MOST_RANKS)),
    "projection": TensorRule(WEIGHT_DTYPES, (MOST_RANKS, MOST_COLUMNS)),
    "residuals": TensorRule(WEIGHT_DTYPES, (LARGEST_COUNT,)),
}
# Columns of the head for each column of a factor, unless its rank is given.
_COLUMNS_PER_RANK = 16
# Up to this width, all directions of the head are computed, which takes time by the cube of the width; beyond it only
# the leading ones, which takes time by the square.
_WIDEST_EXACT = 1024
# Additional directions, and passes over the head, for accurate leading directions.
_MORE_DIRECTIONS = 32
_PASSES = 3
# Numbers of the head in one chunk: 64 MiB in fp32.
_CHUNK_NUMBERS = 2**24
# The least variance of each direction as a share of the mean variance, since few states do not show all directions.
_LEAST_VARIANCE = 0.1
# Seconds before the first message about progress, and between two.
_SILENCE = 5.0

_log = logging.getLogger(__name__)


def usual_rank(width: int) -> int:
    """The default rank of a factor for a head with `width` columns: a sixteenth of them, rounded up. Kernels read
    columns in groups, and the last column of the last group holds the residuals."""
    columns = max(1, width // _COLUMNS_PER_RANK) + 1
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS - 1


@dataclass(frozen=True, eq=False)
class ScreenFactor:
    """Scores the rows of a head roughly: `rows · (projection · h) + residuals · |h|²`. Immutable.

    The product is the part of a logit along the head's leading directions, for the hidden state `h`. The rest acts
    like noise, and the expected `exp` of a logit grows with half the variance of its noise, which is added. Without
    it, tokens whose rows lie off the leading directions would be missed.

    Args:
        rows: floating-point `[n, r]`, one for each row of the head.
        projection: floating-point `[r, d]`, applied to hidden states.
        residuals: floating-point `[n]`, at least 0: half the variance of each logit's remainder for a hidden state of
            squared length 1.

    Raises:
        ConfigurationError: the shapes do not fit together.
    """

    rows: torch.Tensor
    projection: torch.Tensor
    residuals: torch.Tensor

    def __post_init__(self):
        n, rank = (*self.rows.shape, 0, 0)[:2]
        width = self.projection.shape[-1] if self.projection.dim() else 0
        wanted = {"rows": (n, rank), "projection": (rank, width), "residuals": (n,)}
        for name, shape in wanted.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not tensor.numel():
                described = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
                raise ConfigurationError(f"{name} of a screen must be floating-point {list(shape)}, got {described}")

    @property
    def rank(self) -> int:
        """The number of columns `r`."""
        return self.rows.shape[1]

    @property
    def width(self) -> int:
        """The width `d` of the hidden states."""
        return self.projection.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The three tensors by name, on the CPU."""
        return {one.name: getattr(self, one.name).cpu().contiguous() for one in fields(self)}

    @classmethod
    @torch.no_grad()
    def of_head(
        cls, weight: torch.Tensor, rank: int | None = None, hidden_states: torch.Tensor | None = None
    ) -> "ScreenFactor":
        """Compute the best factor of a head. Progress is logged after a few seconds.

        Args:
            weight: `[V, d]`, of any floating-point dtype and on any device. Read in chunks.
            rank: the rank of the factor, at most `d` (None: see `usual_rank`).
            hidden_states: `[n, d]`: inputs of the drafter's head, some thousands from all kinds of texts; the factor
                is then the best for their covariance (None: for hidden states of all directions).

        Returns:
            A factor on the weight's device, with rows in bf16.

        Raises:
            ConfigurationError: shapes do not fit together, or numbers are not finite.
        """
        _require_numbers("head_weight", weight, weight)
        width = weight.shape[1]
        rank = min(usual_rank(width) if rank is None else rank, width)
        root, length = None, float(width)
        if hidden_states is not None:
            _require_numbers("hidden_states", hidden_states, weight)
            root = _root_of_covariance(hidden_states)
            length = float(hidden_states.float().square().sum(1).mean())
        progress = _Progress()
        directions = _leading_directions(weight, root, rank, progress)
        # States are root · z, so the head's rows for z are W · root.
        combined = directions if root is None else root @ directions
        projection = directions if root is None else torch.linalg.solve_triangular(root.T, directions, upper=True)
        rows, residuals = [], []
        combined, root = (None if one is None else one.float().to(weight.device) for one in (combined, root))
        for chunk in progress.through(_chunks(weight)):
            rows.append(chunk.float() @ combined)
            whole = chunk.float() if root is None else chunk.float() @ root
            remainder = whole.square().sum(1) - rows[-1].square().sum(1)
            residuals.append(remainder.clamp_min(0) / (2 * length))
        return cls(
            torch.cat(rows).to(torch.bfloat16),
            projection.T.float().contiguous().to(weight.device),
            torch.cat(residuals),
        )


def _require_numbers(name: str, numbers: torch.Tensor, weight: torch.Tensor) -> None:
    is_tensor = isinstance(numbers, torch.Tensor)
    is_matrix = is_tensor and numbers.dim() == 2 and numbers.numel() and numbers.is_floating_point()
    if not is_matrix or numbers.shape[1] != weight.shape[1]:
        shown = f"{numbers.dtype} {list(numbers.shape)}" if is_tensor else repr(numbers)
        wanted = "[V, d]"
        if numbers is not weight:
            wanted = f"[n, {weight.shape[1]}], as the head has {weight.shape[1]} columns"
        raise ConfigurationError(f"{name} must be floating-point {wanted}; got {shown.removeprefix('torch.')}")


def _chunks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight.split(max(1, _CHUNK_NUMBERS // weight.shape[1]))


def _require_finite(name: str, numbers: torch.Tensor) -> None:
    if not bool(numbers.isfinite().all()):
        raise ConfigurationError(f"{name} holds numbers that are not finite, so that no factor can be made of it")


def _root_of_covariance(hidden_states: torch.Tensor) -> torch.Tensor:
    """fp64 `[d, d]` on the CPU, lower triangular: `root · rootᵀ` is the mean of `h · hᵀ` over the states `[n, d]` plus
    a small multiple of the identity."""
    total = 0.0
    for chunk in _chunks(hidden_states):
        total = total + (chunk.float().T @ chunk.float()).cpu().double()
    mean = total / hidden_states.shape[0]
    _require_finite("hidden_states", mean)
    mean_variance = mean.diagonal().mean()
    if mean_variance == 0:
        raise ConfigurationError("hidden_states are all zero")
    identity = torch.eye(mean.shape[0], dtype=mean.dtype, device=mean.device)
    return torch.linalg.cholesky(mean + _LEAST_VARIANCE * mean_variance * identity)


def _leading_directions(
    weight: torch.Tensor, root: torch.Tensor | None, rank: int, progress: "_Progress"
) -> torch.Tensor:
    """fp64 `[d, rank]` on the CPU: the right singular vectors of `weight · root` with the largest singular values.

    Sums over the weight's rows are in fp32 within a chunk and in fp64 over chunks. Wide weights use subspace iteration
    (Halko et al., 2011, algorithm 4.4).
    """
    width = weight.shape[1]
    count = rank + _MORE_DIRECTIONS
    if width <= _WIDEST_EXACT or count >= width:
        squares = _squared(weight, None, progress, passes=2)
        if root is not None:
            squares = root.T @ squares @ root
        return torch.linalg.eigh(squares).eigenvectors[:, -rank:]
    basis = torch.randn(width, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    for left in range(_PASSES, 0, -1):
        basis = torch.linalg.qr(basis).Q
        image = _squared(weight, basis if root is None else root @ basis, progress, passes=left + 1)
        image = image if root is None else root.T @ image
        before, basis = basis, image
    # The leading directions in coordinates of the last basis.
    within = torch.linalg.eigh(before.T @ image).eigenvectors[:, -rank:]
    return before @ within


def _squared(
    weight: torch.Tensor, directions: torch.Tensor | None, progress: "_Progress", passes: int
) -> torch.Tensor:
    """fp64 `[d, c]` on the CPU: `Wᵀ · W · directions` `[d, c]`, or `Wᵀ · W`; `passes` are left, with this one."""
    directions = None if directions is None else directions.float().to(weight.device)
    total = 0.0
    for chunk in progress.through(_chunks(weight), passes):
        rows = chunk.float()
        total = total + (rows.T @ (rows if directions is None else rows @ directions)).cpu().double()
    _require_finite("the head", total)
    return total


class _Progress:
    """Logs the progress of a factor that takes long."""

    def __init__(self):
        self._start = self._said = time.monotonic()
        self._done = 0

    def through(self, chunks: Sequence[torch.Tensor], passes: int = 1) -> Iterator[torch.Tensor]:
        """Yield the chunks. `passes` through them are left, with this one."""
        total = self._done + passes * len(chunks)
        for chunk in chunks:
            yield chunk
            self._done += 1
            now = time.monotonic()
            if now - self._said > _SILENCE:
                self._said = now
                left = (now - self._start) * (total / self._done - 1)
                _log.warning("factoring the LM head: %.0f%%, about %.0f s left", 100 * self._done / total, left)
