"""Draw the convergence item: loss curves, the long run, and the gap under the bounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradveil.certificates.convergence import printed_bound, theorem_a
from gradveil.paper.base import Row
from gradveil.paper.convergence import constants_of, local_steps, short_runs
from gradveil.paper.figures import figure

LOOK: dict[str, dict[str, Any]] = {
    "none": {"color": "#0072B2", "linestyle": "-", "label": "no defence"},
    "ours": {"color": "#D55E00", "linestyle": "--", "label": "representation perturbation"},
}


def draw(rows: Sequence[Row], path: Path, count: int) -> None:
    """Write ``path`` with the endings .svg and .png."""
    with figure(path, 11, 6.4) as empty:
        axes = empty.subplots(2, 3)
        settings = [(e, k) for e in (5, 10) for k in (5, 10)]
        places = [axes[0, 0], axes[0, 1], axes[1, 0], axes[1, 1]]
        for place, (e, k) in zip(places, settings, strict=True):
            _curves(place, [r for r in short_runs(rows) if _is(r, e, k)])
            place.set_title(f"E = {e}, K = {k}, lr 0.01")
        _curves(axes[0, 2], [r for r in rows if r["kind"] == "long"])
        axes[0, 2].set_title("E = 10, K = 10, lr 0.1, constant")
        _gaps(axes[1, 2], rows, count)
        drawn = next((a for a in places if a.get_legend_handles_labels()[0]), None)
        if drawn is not None:
            drawn.legend(frameon=False)


def _is(row: Row, epochs: int, devices: int) -> bool:
    return bool(row["epochs"] == epochs and row["devices"] == devices)


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    for defense, look in LOOK.items():
        for seed in sorted({r["seed"] for r in rows}):
            mine = [r for r in rows if r["defense"] == defense and r["seed"] == seed]
            shown = look if seed == 0 else {k: v for k, v in look.items() if k != "label"}
            axis.plot([r["round"] for r in mine], [r["loss"] for r in mine], linewidth=1.2, **shown)
    axis.set_xlabel("round")
    axis.set_ylabel("F(W), training loss")


def _gaps(axis: Any, rows: Sequence[Row], count: int) -> None:
    row = next((r for r in rows if r["kind"] == "constants"), None)
    mine = [r for r in rows if r["kind"] == "schedule"]
    if row is None or not mine:
        axis.set_axis_off()
        return
    c, steps = constants_of(row), local_steps(10)
    rounds = sorted({r["round"] for r in mine})
    bias = max(r["bias"] for r in mine)
    for defense, look in LOOK.items():
        curve = [r for r in mine if r["defense"] == defense]
        axis.plot([r["round"] for r in curve], [r["loss"] - row["lowest"] for r in curve], linewidth=1.2, **look)
    printed = [printed_bound(c, count, steps, 10, t * steps) for t in rounds]
    corrected = [theorem_a(c, steps, 10, t * steps, bias).value for t in rounds]
    axis.plot(rounds, printed, color="black", linestyle=":", label="theorem 2, printed (false)")
    axis.plot(rounds, corrected, color="black", linestyle="-.", label="theorem A, measured bias")
    axis.set_yscale("log")
    axis.set_xlabel("round")
    axis.set_ylabel("F(W) − F*")
    axis.set_title("the theorems' steps: gap and bounds")
    axis.legend(frameon=False, fontsize=7)
