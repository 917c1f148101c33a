"""What the paper's figures share: one way to make and to write them."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.files import write_atomically
from gradveil.metrics import Interval
from gradveil_studies.paper.rows import spread

# Okabe and Ito's colours, told apart by colour-blind readers; markers differ as well.
LOOKS: dict[str, dict[str, Any]] = {
    "none": {"color": "#000000", "marker": "*", "label": "none (control)"},
    "representation": {"color": "#D55E00", "marker": "o", "label": "ours"},
    "random_mask": {"color": "#E69F00", "marker": "X", "label": "random mask (control)"},
    "pruning": {"color": "#009E73", "marker": "s", "label": "GC (pruning)"},
    "gaussian": {"color": "#0072B2", "marker": "^", "label": "Gaussian noise"},
    "laplace": {"color": "#CC79A7", "marker": "v", "label": "Laplace noise"},
}
PROMISED, SOUND, REACHED, PAPER = (  # of what is not a defence
    {"color": "#D55E00", "marker": "o"}, {"color": "#009E73", "marker": "s"}, {"color": "#0072B2", "marker": "^"},
    {"color": "#000000", "marker": "*"},
)  # fmt: skip


@contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """Give an empty figure; afterwards write it as ``path`` with the endings .svg and .png, the same on every run."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Drawing figures", "report") from error
    with mpl.rc_context():
        mpl.rcdefaults()  # not those of a matplotlibrc that lies in the current folder
        mpl.rcParams.update({"svg.hashsalt": "gradveil", "font.size": 9})
        empty = Figure(figsize=(width, height), layout="constrained")
        yield empty
        for ending, extra in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
            drawn = io.BytesIO()
            empty.savefig(drawn, format=ending[1:], **extra)
            write_atomically(path.with_suffix(ending), drawn.getvalue())


@dataclass(frozen=True)
class Dot:
    """One line of a dot chart: a value and its range, looking as a family of defences does or as is said."""

    label: str
    value: Interval
    look: str | Mapping[str, str] = "none"

    @classmethod
    def of(cls, label: str, values: Iterable[float], look: str | Mapping[str, str] = "none") -> "Dot":
        """Return the dot of some values: their mean, the lowest and the highest."""
        return cls(label, spread(values), look)


def dots(
    axis: Any, found: Sequence[Dot], name: str, *, log: bool = False, lines: Mapping[str, float] | None = None
) -> None:
    """Draw dots from top to bottom, their ranges as bars, and upright lines by their labels; ``name``: of the axis."""
    styles = ((":", "grey"), ("-.", "black"))
    for (label, at), (style, colour) in zip((lines or {}).items(), styles, strict=False):
        axis.axvline(at, color=colour, linestyle=style, linewidth=1, label=label)
    for place, dot in enumerate(found):
        look = LOOKS.get(dot.look, LOOKS["none"]) if isinstance(dot.look, str) else dot.look
        mark = {"color": look["color"], "marker": look["marker"], "markersize": 5, "elinewidth": 0.8, "capsize": 2}
        x = dot.value
        reach = [[max(x.mean - x.low, 0.0)], [max(x.high - x.mean, 0.0)]]
        axis.errorbar([x.mean], [place], xerr=reach, linestyle="none", **mark)
    axis.set_yticks(range(len(found)), [dot.label for dot in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(name)
    axis.grid(axis="x", linewidth=0.3)
    if log:
        axis.set_xscale("log")
        _few_ticks(axis)


def _few_ticks(axis: Any) -> None:
    """Label a short logarithmic axis at 1 and 3 of each decade: at every digit the labels would run into each other."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    low, high = axis.get_xlim()
    axis.xaxis.set_minor_formatter(NullFormatter())
    if high < 1000 * low:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter(FormatStrFormatter("%g"))


def dot_panels(
    path: Path, panels: Mapping[str, Sequence[Dot]], name: str, *, log: bool = False,
    lines: Mapping[str, Mapping[str, float]] | None = None, columns: int = 3,
) -> None:  # fmt: skip
    """Write a figure of dot charts, one for each panel, ``lines`` by panel; the legend says what the lines are."""
    columns = max(1, min(columns, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    tallest = max((len(found) for found in panels.values()), default=1)
    with figure(path, 4.4 * columns, rows * (1.2 + 0.19 * tallest)) as empty:
        axes = empty.subplots(rows, columns, squeeze=False).flatten()
        for axis, (panel, found) in zip(axes, panels.items(), strict=False):
            dots(axis, found, name, log=log, lines=(lines or {}).get(panel))
            axis.set_title(panel)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        handles, labels = axes[0].get_legend_handles_labels()
        if handles:
            empty.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
