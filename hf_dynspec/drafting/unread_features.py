"""The target's hidden states that wait for the drafter to read them."""

import torch


class UnreadFeatures:
    """Hidden states of the target, at tokens one after another, that the drafter has not read yet.

    Attributes:
        rows: `[m, d · layers]`, a row for each token. None where there are none.
    """

    def __init__(self):
        self.rows: torch.Tensor | None = None
        # One past the last token that they are of.
        self._end = 0

    def add(self, rows: torch.Tensor, end: int) -> None:
        """Keep more of them. Earlier ones are forgotten where these do not follow upon them.

        Args:
            rows: `[m, d · layers]`: the hidden states at the tokens `end − m … end − 1` of the text.
            end: one past the last of these tokens.
        """
        if self.rows is not None and end - rows.shape[0] == self._end:
            rows = torch.cat([self.rows, rows])
        self.rows, self._end = rows, end

    def reach(self, end: int) -> bool:
        """Whether the last of them is that of the token before `end`."""
        return self.rows is not None and self._end == end

    def forget_past(self, end: int) -> None:
        """Forget those at and after `end`."""
        if self.rows is not None and self._end > end:
            kept = end - (self._end - self.rows.shape[0])
            self.rows, self._end = (self.rows[:kept], end) if kept > 0 else (None, 0)

    def forget(self) -> None:
        """Forget all of them."""
        self.rows, self._end = None, 0
