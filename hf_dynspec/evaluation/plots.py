"""What all plots have in common: that they can be drawn is known before there is anything to draw."""

from pathlib import Path

from ..errors import ConfigurationError


def require_plot_file(path: Path) -> None:
    """Refuse a plot that could not be drawn, before there is anything to draw.

    Raises:
        ConfigurationError: matplotlib is not installed, or the name's suffix is no image format that it writes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigurationError(
            "a plot needs matplotlib; install it with: pip install 'hf-dynspec[plots]', or leave --plot out"
        ) from error
    suffix, formats = path.suffix.removeprefix(".").lower(), FigureCanvasAgg.get_supported_filetypes()
    if suffix not in formats:
        raise ConfigurationError(f"{path} has no suffix of an image, such as .png, .pdf or .svg")
