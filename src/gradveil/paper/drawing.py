"""What the paper's figures share: one way to make and to write them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradveil.errors import MissingExtraError

# Okabe and Ito's colours, told apart by colour-blind readers; markers differ as well.
LOOKS: dict[str, dict[str, Any]] = {
    "none": {"color": "#000000", "marker": "*", "label": "none (control)"},
    "representation": {"color": "#D55E00", "marker": "o", "label": "ours"},
    "random_mask": {"color": "#E69F00", "marker": "X", "label": "random mask (control)"},
    "pruning": {"color": "#009E73", "marker": "s", "label": "GC (pruning)"},
    "gaussian": {"color": "#0072B2", "marker": "^", "label": "Gaussian noise"},
    "laplace": {"color": "#CC79A7", "marker": "v", "label": "Laplace noise"},
}


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Give an empty figure; afterwards write it as ``path`` with the endings .svg and .png, the same on every run."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Drawing figures", "report") from error
    with mpl.rc_context({"svg.hashsalt": "gradveil", "font.size": 9}):
        empty = Figure(figsize=(width, height), layout="constrained")
        yield empty
        for ending, extra in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
            empty.savefig(path.with_suffix(ending), **extra)
