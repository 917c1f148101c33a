"""The table of all certificates: one real network, and lines and verdicts that follow from rows."""

import pytest

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.certificates import KINDS, NETWORKS, Certificates


def row(kind: str, mse: float | None, image: int = 0, **more: float) -> Row:
    name = {"dataset": "mnist", "network": "sigmoid", "p": "2", "kind": kind, "draw": 0, "image": image}
    return name | {"mse": mse, "blind": 0.06, "largest": 0.9, "distance": 2.0, "unreachable": 0.0} | more


@pytest.mark.parametrize("net", NETWORKS)
def test_every_kind_is_there_and_the_sound_ones_lie_below_the_estimate(net: str) -> None:
    item = Certificates(datasets=("digits",), images=1)
    rows = [r for p in KINDS for r in item.run(f"digits {net} p={p} draw=1", Context(scale="full"))]
    found = {(r["p"], r["kind"]): r for r in rows}
    assert list(found) == [(p, kind) for p, kinds in KINDS.items() for kind in kinds]
    for p in KINDS:
        low, box, estimate = (found[p, kind]["mse"] for kind in ("global", "box", "local"))
        assert 0 < low <= box <= estimate
    assert (net == "sigmoid") == bool(found["2", "reach"]["unreachable"])
    inverted = found["2", "empirical"]
    assert inverted["proved"] <= inverted["mse"] <= inverted["largest"]
    assert inverted["proved"] < found["2", "global"]["mse"]  # its residual is taken off
    assert item.verdicts(rows)[-1].status == "reproduced"
    assert item.summary(rows)[0]["global"] == f"{found['2', 'global']['mse']:.2g}"


def test_lines_are_means_and_verdicts_count() -> None:
    item = Certificates()
    rows = [row("local", 1.0), row("local", 1.5, 1), row("global", 0.02), row("global", 0.04, 1)]
    rows += [row("reach", None, unreachable=1.0), row("reach", 0.2, 1)]
    rows += [row("empirical", 0.3, residual=1.0, proved=0.001), row("empirical", 0.1, 1, residual=1.0, proved=0.2)]
    (line,) = item.summary(rows)
    assert (line["local (estimate)"], line["global"], line["box"], line["cases"]) == (
        "1.2 (1 to 1.5)",
        "0.03 (0.02 to 0.04)",
        "",
        2,
    )
    assert line["reach"] == "0.2; no image has r′ for 1"
    assert line["inversion of r′ (‖f(X′)−r′‖ / ‖r−r′‖)"] == "0.2 (0.50)"
    above, held = item.verdicts(rows)
    assert (above.status, above.ours) == ("not reproduced", "above it on 2 of 2 cases")
    assert (held.status, held.ours) == ("not reproduced", "held on 1 of 2 cases")
    assert item.verdicts([]) == []


def test_units_are_networks_data_sets_and_norms() -> None:
    assert len(set(Certificates().units(Context()))) == 2 * 3 * 1
    assert len(Certificates().units(Context(scale="full"))) == 2 * 2 * 3 * 3
