"""Exact nearest tokens of a token, by the rows of the target's head."""

import threading

import torch

# Rows of a batch.
_ROWS = 256


class TokenNeighbours:
    """The tokens whose rows in the target's head have the largest inner product with a token's own row, computed on
    first use and kept. Shareable between threads.

    Args:
        rows: floating point `[V, d]`. Not copied.
        count: neighbours of each token, without the token itself.
    """

    def __init__(self, rows: torch.Tensor, count: int):
        self._rows = rows.detach()
        self._count = min(count, rows.shape[0] - 1)
        self._known = torch.zeros(rows.shape[0], dtype=torch.bool, device="cpu")
        self._table = torch.zeros(rows.shape[0], self._count, dtype=torch.int32, device="cpu")
        self._lock = threading.Lock()

    def of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[n, count]` on the CPU: the neighbours of token ids `[n]`, nearest first; −1 for ids past the rows,
        such as padding of a head."""
        token_ids = token_ids.cpu()
        is_row = token_ids < self._known.shape[0]
        asked = token_ids.where(is_row, 0)
        with self._lock:
            unknown = asked[is_row & ~self._known[asked]].unique()
            for part in unknown.split(_ROWS):
                if part.numel():
                    self._table[part] = self._nearest(part.to(self._rows.device)).to("cpu", torch.int32)
                    self._known[part] = True
            return self._table[asked].to(torch.int64).masked_fill(~is_row.unsqueeze(1), -1)

    def _nearest(self, token_ids: torch.Tensor) -> torch.Tensor:
        products = (self._rows.index_select(0, token_ids) @ self._rows.T).float()
        products.scatter_(1, token_ids.unsqueeze(1), -torch.inf)
        return products.topk(self._count, dim=1).indices
