"""What all plots have in common: that they can be drawn is known before there is anything to draw, and an image is
replaced in one step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..files import replacing

# Lines and points differ in shape too, for black and white and for readers who do not see all colours.
MARKERS = "osD^vP*X<>"


def require_plot_file(path: Path, otherwise: str | None = None) -> None:
    """Refuse a plot that could not be drawn, before there is anything to draw. `otherwise` says what to do who wants
    none, as "leave --plot out".

    Raises:
        ConfigurationError: matplotlib is not installed, or the name's suffix is no image format that it writes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        fix = "install it with: pip install 'hf-dynspec[plots]'" + (f", or {otherwise}" if otherwise else "")
        raise ConfigurationError(f"a plot needs matplotlib; {fix}") from error
    suffix, formats = path.suffix.removeprefix(".").lower(), FigureCanvasAgg.get_supported_filetypes()
    if suffix not in formats:
        raise ConfigurationError(f"{path} has no suffix of an image, such as .png, .pdf or .svg")


@contextmanager
def plot_style(font_size: float = 10, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """What is drawn and saved in this context gives the same bytes each time, and texts of an SVG stay texts. The font
    size is in points, and `more` are other settings of matplotlib."""
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": "hf_dynspec", "font.size": font_size}
    with matplotlib.rc_context({**style, **(more or {})}):
        yield


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure in the format of the path's suffix, in one step: an image that was there stays until the new one
    is whole. Raises `OSError` if it cannot be written."""
    form = path.suffix.removeprefix(".").lower()
    metadata = {"Date": None} if form in ("svg", "svgz") else {"CreationDate": None} if form == "pdf" else None
    with replacing(path) as scratch:
        figure.savefig(scratch, dpi=dpi, format=form, metadata=metadata)
