"""Draw accuracy against MSE: solid for the server that does not know the defence, dashed for the one that does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.paper.figures import LOOKS, figure
from gradveil.paper.settings import KNOWING, NAIVE, Case, control_works, strongest

LINES = {NAIVE: "-", KNOWING: "--"}
SMALLEST = 1e-9  # MSE under which a mark is drawn here
FAINT = 0.35  # of the bars, 1 for the marks
STRIP = 0.12  # of the axis' height, for settings whose accuracy was not measured


def draw(found: Sequence[Case], path: Path) -> None:
    """Write ``path`` with the endings .svg and .png, a panel beside the other."""
    panels = list(dict.fromkeys(s.panel for s in found))
    with figure(path, 4.2 * max(1, len(panels)), 4.4) as empty:
        axes = empty.subplots(1, max(1, len(panels)), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=False):
            _panel(axis, [s for s in found if s.panel == panel], panel)
        handles: dict[str, Any] = {}
        for axis in axes:
            handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        empty.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=2 * len(axes) - len(axes) // 2,
            frameon=False,
            fontsize=8,
        )


def _panel(axis: Any, found: Sequence[Case], panel: str) -> None:
    known = [s.accuracy for s in found if s.accuracy is not None]
    low, high = (min(a.low for a in known), max(a.high for a in known)) if known else (0.0, 1.0)
    room = max(high - low, 0.02)
    strip = low - 2.5 * STRIP * room  # where settings without an accuracy are drawn
    for kind, line in LINES.items():
        mine = strongest(found, kind)
        for family in dict.fromkeys(s.family for s in mine):
            if family != "none" or kind == NAIVE:
                _curve(axis, [s for s in mine if s.family == family], family, kind, line, strip)
    axis.axvline(found[0].blind, color="grey", linestyle=":", linewidth=1, label="blind guess (mean image)")
    if any(s.accuracy is None for s in found):
        axis.axhspan(strip - STRIP * room, strip + STRIP * room, color="0.93", zorder=0)
        axis.text(0.5, strip - 0.9 * STRIP * room, "accuracy not measured", fontsize=7, color="0.4", ha="center",
                  transform=axis.get_yaxis_transform())  # fmt: skip
        axis.set_ylim(strip - STRIP * room, high + STRIP * room)
    void = control_works(found, panel) is False
    axis.set_title(f"{panel}{' (void: the control fails)' if void else ''}")
    axis.set_xscale("log")
    axis.set_xlabel("clamped MSE, mean over images")
    axis.set_ylabel("accuracy after the last round")


def _curve(axis: Any, mine: Sequence[Case], family: str, kind: str, line: str, strip: float) -> None:
    look = dict(LOOKS.get(family, {"color": "0.3", "marker": "d", "label": family}))
    if kind == KNOWING:
        look |= {"markerfacecolor": "white", "label": f"{look['label']}, server knows"}
    look |= {"linewidth": 1, "elinewidth": 0.7, "capsize": 1.5}
    look |= {"markersize": 9, "zorder": 4} if family == "none" else {"markersize": 5}
    measured = [s for s in mine if s.accuracy is not None]
    others = [s for s in mine if s.accuracy is None]
    for part, height in ((measured, None), (others, strip)):
        if not part:
            continue
        at = [max(s.mse.mean, SMALLEST) for s in part]
        across = [[max(x - s.mse.low, 0.0) for x, s in zip(at, part, strict=True)],
                  [max(s.mse.high - x, 0.0) for x, s in zip(at, part, strict=True)]]  # fmt: skip
        marks = [s.accuracy for s in part if s.accuracy is not None]
        heights = [a.mean for a in marks] if height is None else [height] * len(part)
        up = [[a.mean - a.low for a in marks], [a.high - a.mean for a in marks]] if height is None else None
        style = line if height is None else "none"
        _, caps, bars = axis.errorbar(at, heights, xerr=across, yerr=up, linestyle=style, **look)
        for piece in (*caps, *bars):
            piece.set_alpha(FAINT)  # so that the marks are seen where many ranges cross
