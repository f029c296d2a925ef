"""Hidden states of the target that the drafter has not read yet."""

import torch


class UnreadFeatures:
    """Hidden states of the target at consecutive tokens, which the drafter has not read yet.

    Attributes:
        rows: `[m, d · layers]`, a row for each token. None if there are none.
    """

    def __init__(self):
        self.rows: torch.Tensor | None = None
        # One past the last of these tokens.
        self._end = 0

    def add(self, rows: torch.Tensor, end: int) -> None:
        """Add rows. Earlier rows are dropped if there is a gap between.

        Args:
            rows: `[m, d · layers]`: the hidden states at the tokens `end − m … end − 1` of the text.
            end: one past the last of these tokens.
        """
        if self.rows is not None and end - rows.shape[0] == self._end:
            rows = torch.cat([self.rows, rows])
        self.rows, self._end = rows, end

    def reach(self, end: int) -> bool:
        """Whether the last row is that of the token before `end`."""
        return self.rows is not None and self._end == end

    def forget_past(self, end: int) -> None:
        """Drop the rows at and after token `end`."""
        if self.rows is not None and self._end > end:
            kept = end - (self._end - self.rows.shape[0])
            self.rows, self._end = (self.rows[:kept], end) if kept > 0 else (None, 0)

    def forget(self) -> None:
        """Drop all rows."""
        self.rows, self._end = None, 0
