"""The claims of the text: every rule is met and missed on made-up rows, and missing rows are not measured."""

import pytest

from gradveil_studies.paper.base import Context, Judgement, Row
from gradveil_studies.paper.claims import Claims

Point = tuple[str, str, float, float | None]  # defence, server, MSE, accuracy

BASE: list[Point] = [("none", "oblivious", 0.0005, 0.9)]


def rows(panel: str, points: list[Point], unclamped: float = 1.0) -> list[Row]:
    attack, _, dataset = panel.partition("-")
    place = {"item": "tradeoff", "panel": panel, "dataset": dataset, "model": "lenet", "attack": attack, "image": 0}
    found = [place | {"defense": "(blind guess)", "server": "mean image", "mse": 0.06, "ssim": 0.3}]
    for defense, server, mse, accuracy in points:
        hit = {
            "mse": mse,
            "unclamped_mse": mse * unclamped,
            "normalised_mse": 16 * mse,
            "identified": float(mse < 0.06),
        }
        hit["ssim"] = 0.9 if mse < 0.06 else 0.05
        found.append(place | {"defense": defense, "server": server} | hit)
        if accuracy is not None and server == "oblivious":
            done = {"seed": 0, "round": 9, "rounds": 9, "accuracy": accuracy}
            found.append(
                {
                    "item": "accuracy",
                    "panel": f"lenet-{dataset}",
                    "dataset": dataset,
                    "model": "lenet:init=kaiming",
                    "defense": defense,
                }
                | done
            )
    return found


def judge(found: list[Row], words: str, who: str = "does not know") -> Judgement:
    (verdict,) = [v for v in Claims().verdicts(found) if words in v.claim and who in v.claim]
    return verdict


OURS = "representation:share=0.4"


def test_no_drop_holds_where_a_hiding_share_costs_nothing() -> None:
    kept = [*BASE, (OURS, "oblivious", 0.3, 0.895), (OURS, "mask", 0.001, None)]
    assert judge(rows("dlg-mnist", kept), "No drop").status == "reproduced"
    assert judge(rows("dlg-mnist", kept), "No drop", "that knows").status == "not reproduced"
    paid = [*BASE, (OURS, "oblivious", 0.3, 0.85)]
    assert judge(rows("dlg-mnist", paid), "No drop").status == "not reproduced"
    both = rows("dlg-mnist", kept) + rows("dlg-cifar10", paid)
    assert judge(both, "No drop").status == "reproduced only on dlg-mnist"
    unknown = [*BASE, (OURS, "oblivious", 0.3, None)]
    assert judge(rows("dlg-mnist", unknown), "No drop").status == "not measured"


@pytest.mark.parametrize(("unclamped", "status"), [(1.0, "not reproduced"), (100.0, "reproduced")])
def test_160_times_depends_on_the_unit(unclamped: float, status: str) -> None:
    points: list[Point] = [*BASE, (OURS, "oblivious", 0.3, 0.9), ("pruning:share=0.8", "oblivious", 0.1, 0.9)]
    found = rows("dlg-mnist", points)
    for r in found:
        if r["defense"] == OURS and "mse" in r:
            r["unclamped_mse"] = 0.3 * unclamped
    assert judge(found, "160 x the MSE of the baselines at no loss of accuracy: clamped").status == "not reproduced"
    verdict = judge(found, "160 x the MSE of the baselines at no loss of accuracy: MSE in")
    assert verdict.status == status
    assert verdict.ours == f"dlg-mnist {0.3 * unclamped / 0.1:.3g} x"


def test_160_times_counts_only_baselines_and_shares_without_loss() -> None:
    points: list[Point] = [
        *BASE, (OURS, "oblivious", 0.3, 0.9), ("representation:share=0.8", "oblivious", 9.0, 0.5),
        ("pruning:share=0.8", "oblivious", 0.001, 0.9), ("gaussian:scale=0.1", "oblivious", 0.3, 0.5),
    ]  # fmt: skip
    verdict = judge(rows("dlg-mnist", points), "at no loss of accuracy: clamped")
    assert (verdict.status, verdict.ours) == ("reproduced", "dlg-mnist 300 x")
    lossy: list[Point] = [*BASE, (OURS, "oblivious", 0.3, 0.5), ("pruning:share=0.8", "oblivious", 0.001, 0.9)]
    assert judge(rows("dlg-mnist", lossy), "at no loss of accuracy: clamped").status == "not reproduced"


@pytest.mark.parametrize(("accuracy", "status"), [(0.84, "reproduced"), (0.88, "not reproduced")])
def test_baselines_are_judged_where_they_hide_the_image(accuracy: float, status: str) -> None:
    points: list[Point] = [
        *BASE, ("gaussian:scale=0.1", "oblivious", 0.3, accuracy), ("gaussian:scale=0.01", "oblivious", 0.01, 0.1),
        ("pruning:share=0.8", "oblivious", 0.3, 0.9), ("laplace:scale=0.1", "oblivious", 0.3, 0.2),
        ("laplace:scale=0.01", "oblivious", 0.3, accuracy),
    ]  # fmt: skip
    assert judge(rows("dlg-mnist", points), "lose up to 6%").status == status
    assert judge(rows("dlg-mnist", points), "lose up to 9%").status == "not measured"
    weak: list[Point] = [
        *BASE,
        points[1],
        ("gaussian:scale=0.001", "oblivious", 0.01, 0.9),
    ]  # the cheap level hides nothing
    assert judge(rows("dlg-mnist", weak), "lose up to 6%").status == status


@pytest.mark.parametrize(("mse", "status"), [(0.9, "reproduced"), (0.3, "not reproduced")])
def test_accuracy_kept_until_an_mse(mse: float, status: str) -> None:
    points: list[Point] = [*BASE, (OURS, "oblivious", mse, 0.9), ("representation:share=0.8", "oblivious", 5.0, 0.5)]
    assert judge(rows("dlg-mnist", points), "until MSE 0.8: clamped").status == status
    assert judge(rows("dlg-mnist", points, 10.0), "until MSE 0.8: MSE in").status == "reproduced"


def test_a_panel_whose_control_fails_supports_nothing() -> None:
    points: list[Point] = [
        ("none", "oblivious", 0.05, 0.9),
        (OURS, "oblivious", 0.9, 0.9),
        ("pruning:share=0.8", "oblivious", 1e-4, 0.9),
    ]
    assert {v.status for v in Claims().verdicts(rows("dlg-mnist", points))} == {"not measured"}


def test_without_rows_everything_is_not_measured() -> None:
    assert {v.status for v in Claims().verdicts([])} == {"not measured"}
    assert Claims().summary([]) == []
    assert Claims().units(Context()) == []
    only_attacks = [r for r in rows("dlg-mnist", [*BASE, (OURS, "oblivious", 0.3, 0.9)]) if r["item"] == "tradeoff"]
    assert {v.status for v in Claims().verdicts(only_attacks)} == {"not measured"}


def test_the_summary_names_the_best_without_loss() -> None:
    points: list[Point] = [*BASE, (OURS, "oblivious", 0.3, 0.9), (OURS, "mask", 0.001, None)]
    table = {line["server"]: line for line in Claims().summary(rows("dlg-mnist", points))}
    assert table["oblivious"]["ours, no loss"] == f"{OURS}: MSE 0.3000, lost +0.000"
    assert table["knowing"]["ours, no loss"] == f"{OURS}: MSE 0.0010, lost +0.000"
    assert table["oblivious"]["best baseline, no loss"] == "none measured"


def test_noise_on_the_uploaded_weights_is_told_beside_the_baselines() -> None:
    found = rows("dlg-mnist", [*BASE, (OURS, "oblivious", 0.3, 0.9), ("gaussian:scale=0.1", "oblivious", 0.3, 0.9)])
    assert "uploaded" not in judge(found, "lose up to 6%").ours
    done = {"seed": 0, "round": 9, "rounds": 9, "accuracy": 0.4}
    other = {
        "item": "accuracy",
        "panel": "lenet-mnist",
        "dataset": "mnist",
        "model": "lenet",
        "defense": "gaussian:scale=0.1,on=weights",
    } | done
    verdict = judge([*found, other], "lose up to 6%")
    assert verdict.ours.endswith("lenet mnist gaussian:scale=0.1,on=weights lost +0.500")
    assert verdict.status == "not reproduced"
