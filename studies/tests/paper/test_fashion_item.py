"""The defence on three data sets: one real panel, and verdicts that follow from rows."""

from pathlib import Path

from gradveil_studies.paper.base import BLIND, Context, Row
from gradveil_studies.paper.fashion import SHARES, Fashion
from gradveil_studies.paper.rows import GUESS


def rows(dataset: str, oblivious: float, knowing: float, control: float = 1e-6) -> list[Row]:
    """The rows of one panel: MSE of the oblivious server, of one that knows, and without a defence."""
    found = [("none", "oblivious", control), ("representation:share=0.4", "oblivious", oblivious)]
    found += [("representation:share=0.4", "drop", knowing), (BLIND, GUESS, 0.05)]
    place = {"panel": f"newton-{dataset}", "dataset": dataset, "model": "lenet", "attack": "newton", "image": 0}
    return [
        place | {"defense": d, "server": s, "mse": mse, "ssim": 0.9 if mse < 0.05 else 0.0, "identified": 0.0}
        for d, s, mse in found
    ]


def test_every_attack_is_tried_on_every_data_set_at_every_share() -> None:
    panels = Fashion().work(Context(scale="full"))
    assert {panel.dataset for panel in panels.values()} == {"mnist", "fashion_mnist", "cifar10"}
    assert len(panels) == 12
    assert all(len(panel.defenses) == 1 + len(SHARES) and panel.images >= 16 for panel in panels.values())


def test_a_panel_runs() -> None:
    item = Fashion(datasets=("digits",), network="lenet:width=3,strides=2/1", images=1)
    found = item.run("newton-digits", Context())
    assert {row["server"] for row in found if row["defense"].startswith("representation")} == {
        "oblivious",
        "drop",
        "mask",
    }
    assert {row["server"] for row in item.run("analytic-digits", Context()) if row["defense"] != BLIND} == {"oblivious"}
    (oblivious, knowing) = item.verdicts(found)
    assert knowing.status == "reproduced"
    assert "digits: MSE" in oblivious.ours


def test_the_verdicts_follow_from_the_rows(tmp_path: Path) -> None:
    both = rows("mnist", 0.3, 1e-5) + rows("fashion_mnist", 0.01, 0.2)
    hidden, recovered = Fashion().verdicts(both)
    assert hidden.status == "reproduced only on mnist"
    assert recovered.status == "reproduced only on mnist"
    failing = Fashion().verdicts(rows("mnist", 0.3, 0.3, control=0.3))
    assert {v.status for v in failing} == {"not measured"}  # without a control nothing follows
    assert Fashion().draw(both, tmp_path / "fashion")
    assert (tmp_path / "fashion.svg").stat().st_size > 1000
    table = Fashion().summary(both)
    assert [line["hidden"] for line in table if line["server"] == "oblivious"] == ["no", "yes", "no", "no"]
