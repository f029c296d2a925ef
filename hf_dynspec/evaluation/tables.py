"""Tables for terminals of any width: what does not fit side by side is shown in blocks below one another."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

# Where a label or a heading may go on in the next line: after these.
_PIECE = re.compile(r"[^\s,:+/·]*[\s,:+/·]*")
# What a column takes besides its cells, and the line that closes a table.
_FRAME, _EDGE = 3, 1
# Labels are not folded to fewer columns than this, nor headings.
_LEAST = 12


class FittedTable:
    """A table whose columns are shown whole at any width, each figure under its own heading.

    Where all columns are wider than the console, headings are folded between words, then labels; where that is not
    enough, the columns are shown in several blocks, each of which repeats the labels. Texts are shown as they are,
    without markup.

    Args:
        title: what is above the table.
        headings: of all columns, those of the labels first; may have several lines.
        caption: what is below it.
        labels: how many of the columns, at the left, say what a row is.
        rows: the cells of each row, which may have several lines; `add_row` adds more.
    """

    def __init__(
        self,
        title: str,
        headings: Sequence[str],
        caption: str = "",
        labels: int = 1,
        rows: Iterable[Sequence[str]] = (),
    ):
        self.title, self.headings, self._caption, self._labels = title, list(headings), caption, labels
        self.rows: list[list[str]] = []
        self._section_ends: set[int] = set()
        for row in rows:
            self.add_row(*row)

    def add_row(self, *cells: str, ends_section: bool = False) -> None:
        """Add a row with a cell for each heading, and draw a line below it if it ends a section. Raises `ValueError`
        if there are not as many cells as headings."""
        if len(cells) != len(self.headings):
            raise ValueError(f"a row of {len(self.headings)} cells is wanted, got {len(cells)}")
        self.rows.append(list(cells))
        if ends_section:
            self._section_ends.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        yield Text(self.title, style="italic")
        columns, blocks = self._fitted(options.max_width)
        for block in blocks:
            yield self._table([columns[index] for index in (*range(self._labels), *block)])
        if self._caption:
            yield Text(self._caption, style="dim italic")

    def _fitted(self, width: int) -> tuple[list[list[str]], list[list[int]]]:
        """All columns, each a heading and cells, and the numbers of the columns of figures in each block."""
        columns = [[heading, *(row[index] for row in self.rows)] for index, heading in enumerate(self.headings)]
        figures = list(range(self._labels, len(columns)))
        most = max(_LEAST, 2 * width // 5 // self._labels)
        narrow_labels = [[fold_label(cell, most) for cell in column] for column in columns[: self._labels]]
        # A column of figures must fit beside the labels.
        room = max(_LEAST, width - _total(narrow_labels) - _FRAME)
        narrow = [_with_folded_heading(column, room) for column in columns[self._labels :]]
        for one in (columns, [*columns[: self._labels], *narrow], [*narrow_labels, *narrow]):
            if _total(one) <= width:
                return one, [figures]
        columns = [*narrow_labels, *narrow]
        blocks: list[list[int]] = []
        left = 0
        for index in figures:
            needed = _width(columns[index]) + _FRAME
            if not blocks or needed > left:
                blocks.append([])
                left = width - _total(narrow_labels)
            blocks[-1].append(index)
            left -= needed
        return columns, blocks

    def _table(self, columns: list[list[str]]) -> Table:
        table = Table()
        for index, (heading, *_) in enumerate(columns):
            is_label = index < self._labels
            width = _width(columns[index])
            table.add_column(Text(heading), justify="left" if is_label else "right", no_wrap=True, min_width=width)
        for number, cells in enumerate(zip(*(column[1:] for column in columns), strict=True)):
            table.add_row(*map(Text, cells), end_section=number in self._section_ends)
        return table


def _total(columns: list[list[str]]) -> int:
    """How wide a table of these columns is."""
    return sum(_width(column) + _FRAME for column in columns) + _EDGE


def _width(column: list[str]) -> int:
    return max(cell_len(line) for cell in column for line in cell.split("\n"))


def _with_folded_heading(column: list[str], most: int) -> list[str]:
    """The column with its heading as narrow as its cells and the heading's longest word allow."""
    heading, *cells = column
    widths = [_width(cells)] if cells else []
    widths += [cell_len(piece.strip()) for piece in _PIECE.findall(heading)]
    return [fold_label(heading, min(most, max(widths))), *cells]


def decoding(temperature: float, top_k: int | None = None) -> str:
    """How was decoded, in words."""
    return "greedy" if temperature == 0 else f"temperature {temperature:g}" + (f", top-k {top_k}" if top_k else "")


def decoding_title(temperature: float, top_k: int) -> str:
    """The same above a table of what was decoded so."""
    all_tokens = "" if top_k or temperature == 0 else ", all tokens"
    return decoding(temperature, top_k).capitalize() + all_tokens


def cell(value: float | None, form: str) -> str:
    """A figure as text, if it was measured."""
    return "–" if value is None else format(value, form)


def shown_speed(tokens_per_second: float) -> str:
    """A speed in few digits: a whole number, or with a decimal where whole ones would make different speeds equal."""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 9.95 else f"{tokens_per_second:.1f}"


def parameter_count(count: int) -> str:
    """A number of parameters, as models are named by it: `8.2B`, `45.2M`, `14.6k`."""
    unit, size = next((one for one in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if count >= one[1]), ("", 1))
    return f"{count / size:,.1f}{unit}"


def fold_label(text: str, most: int) -> str:
    """The text in lines of at most `most` columns, broken between words and settings where that can be."""
    lines = []
    for given in text.split("\n"):
        line = ""
        for piece in _PIECE.findall(given):
            if line and cell_len((line + piece).rstrip()) > most:
                lines.append(line.rstrip())
                line = ""
            line += piece
            while cell_len(line.rstrip()) > most:
                # A letter may take two columns.
                lines.append(chop_cells(line, most)[0])
                line = line.removeprefix(lines[-1])
        lines.append(line.rstrip())
    return "\n".join(lines)
