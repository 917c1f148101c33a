import math
from typing import Any

import pytest

from gradveil.auditing.run_folder import Row
from gradveil.metrics import Interval
from gradveil.threats.rows import best_floor, group, lines
from gradveil.threats.verdict import headline, verdicts

FLOOR = 0.08


def floor_rows(n: int) -> list[Row]:
    return [
        {"kind": "floor", "guess": guess, "example": i, "mse": mse, "identified": 0.0}
        for guess, mse in (("grey", 0.2), ("mean image", FLOOR))
        for i in range(n)
    ]


def attack_rows(defense: str, server: str, mses: list[float], attack: str = "newton", **more: Any) -> list[Row]:
    base = {
        "kind": "attack", "round": "first", "round_number": 1, "weights": "start", "unit": "u", "psnr": 10.0,
        "ssim": 0.1, "fft": 0.01, "label": 1.0, "gallery": 100, "objective": 0.0, "converged": True, "identified": 0.0,
    }  # fmt: skip
    return [
        base | {"defense": defense, "server": server, "attack": attack, "example": i, "index": i, "mse": m} | more
        for i, m in enumerate(mses)
    ]


GOOD, BAD = [1e-4] * 8, [0.25] * 8
CONTROL = attack_rows("none", "oblivious", GOOD, identified=1.0)


def judge(*groups: list[Row]) -> dict[str, Any]:
    rows = [*floor_rows(8), *(row for group in groups for row in group)]
    return {v.defense: v for v in verdicts(rows)}


def test_the_floor_is_the_blind_guess_with_the_lowest_mean() -> None:
    floor = best_floor(floor_rows(4))
    assert floor is not None
    assert floor.guess == "mean image"
    assert floor.mse.mean == pytest.approx(FLOOR)
    assert best_floor([]) is None


@pytest.mark.parametrize(
    ("mses", "identified", "grade"),
    [
        (GOOD, 1.0, "recovered"),
        ([1e-4] * 4 + [0.25] * 4, 0.0, "recovered"),
        ([1e-4] * 3 + [0.25] * 5, 0.0, "traces"),
        ([0.05] * 8, 1.0, "recognised"),
        ([0.03] * 8, 0.0, "traces"),  # under half of the blind guess
        ([0.05] * 8, 0.0, "nothing"),
        (BAD, 0.0, "nothing"),
    ],
)
def test_grades_follow_the_stated_rules(mses: list[float], identified: float, grade: str) -> None:
    rows = [*floor_rows(8), *CONTROL, *attack_rows("d", "drop", mses, identified=identified)]
    (line,) = [x for x in lines(rows) if x.defense == "d"]
    assert line.grade == grade


def test_an_image_that_is_easily_guessed_is_held_against_its_own_guess() -> None:
    """The same error recovers a hard image and not an easy one, whose blind guess is nearly as good."""
    floors = [
        {"kind": "floor", "guess": "grey", "example": i, "mse": m, "identified": 0.0} for i, m in ((0, 0.4), (1, 0.02))
    ]
    (line,) = lines([*floors, *attack_rows("none", "oblivious", [0.01, 0.01])])
    assert line.recovered.mean == 0.5


@pytest.mark.parametrize(("hits", "grade"), [(1, "nothing"), (2, "traces"), (4, "recognised")])
def test_one_lucky_identification_of_eight_is_chance_and_two_are_not(hits: int, grade: str) -> None:
    rows = attack_rows("d", "drop", BAD)
    for row in rows[:hits]:
        row["identified"] = 1.0
    (line,) = [x for x in lines([*floor_rows(8), *CONTROL, *rows]) if x.defense == "d"]
    assert line.grade == grade


def test_a_failed_attack_with_a_good_control_is_evidence() -> None:
    v = judge(CONTROL, attack_rows("d", "oblivious", BAD), attack_rows("d", "drop", BAD))["d"]
    assert v.outcome == "nothing"
    assert "Nothing found by this panel; nothing is proved. No audit can detect a defence that recognises" in v.text
    assert "worse than a blind guess at 0.08" in v.text


def test_a_failed_attack_whose_control_fails_is_void_and_never_protection() -> None:
    stuck = attack_rows("none", "oblivious", BAD, converged=False)
    v = judge(stuck, attack_rows("d", "oblivious", BAD), attack_rows("d", "drop", BAD))["d"]
    assert v.outcome == "void"
    assert "gets nothing" not in v.text
    assert "did not converge on 8 of 8" in v.text
    assert judge(stuck)["none"].outcome == "void"


def test_an_attack_without_any_control_is_void() -> None:
    v = judge(attack_rows("d", "oblivious", BAD), attack_rows("d", "drop", BAD))["d"]
    assert v.outcome == "void"
    assert "no undefended control" in v.text


def test_the_control_belongs_to_the_same_attack_round_and_weights() -> None:
    for change in ({"attack": "dlg"}, {"round": "last"}, {"weights": "other"}):
        mine = attack_rows("d", "oblivious", BAD, **({} if "attack" in change else change))
        if "attack" in change:
            mine = attack_rows("d", "oblivious", BAD, attack="dlg")
        assert judge(CONTROL, mine)["d"].outcome == "void"


def test_the_control_is_a_servers_with_less_to_go_on_where_its_own_tier_has_none() -> None:
    """An undefended client sends the same in each round: what one round gives is the control of the whole run."""
    tiers = {"adaptive": GOOD, "informed": BAD}
    controls = [
        row for tier, mses in tiers.items() for row in attack_rows("none", "inverter", mses, "inverter", tier=tier)
    ]
    mine = attack_rows("d", "inverter", BAD, "inverter", tier="multi-round")
    found = {line.tier: line for line in lines([*floor_rows(8), *controls, *mine]) if line.defense == "d"}
    assert found["multi-round"].counts
    told = lines([*floor_rows(8), *controls[8:], *mine])  # the class known alone: more to go on, and no control
    assert not next(line for line in told if line.defense == "d").counts


def test_half_an_audit_is_not_protection() -> None:
    """The oblivious attack failed soundly, but the only attack of the server that knows is void."""
    v = judge(CONTROL, attack_rows("d", "oblivious", BAD), attack_rows("d", "drop", BAD, attack="weak"))["d"]
    assert v.outcome == "void"


def test_a_leak_counts_even_where_the_control_fails() -> None:
    v = judge(attack_rows("none", "oblivious", BAD), attack_rows("d", "drop", GOOD, identified=1.0))["d"]
    assert v.outcome == "recovered"


def test_the_papers_picture_and_the_server_that_undoes_it_are_both_said() -> None:
    v = judge(CONTROL, attack_rows("ours", "oblivious", BAD), attack_rows("ours", "drop", GOOD, identified=1.0))["ours"]
    assert v.outcome == "recovered"
    assert v.text == (
        "The oblivious server gets nothing (MSE 0.25, worse than a blind guess at 0.08, identifies 0 of 8; newton, first "  # noqa: E501
        "round), but a server that knows the defence gets the images back (MSE 0.0001, without a defence 0.0001, "
        "identifies 8 of 8; drop + newton, first round). Not run: informed, multi-round, malicious. Nothing is proved."
    )


def test_a_picture_worse_than_a_blind_guess_may_still_tell_who_it_is() -> None:
    v = judge(CONTROL, attack_rows("d", "oblivious", BAD, identified=1.0))["d"]
    assert v.outcome == "recognised"
    assert "poor pixel by pixel but can still be told from 99 others (MSE 0.25, worse than a blind guess" in v.text


def test_the_strongest_attack_speaks_for_its_server() -> None:
    weak_control = attack_rows("none", "oblivious", BAD, attack="weak")
    v = judge(
        CONTROL,
        weak_control,
        attack_rows("d", "oblivious", BAD, attack="weak"),
        attack_rows("d", "oblivious", [0.03] * 8),
    )["d"]
    assert v.oblivious.attack == "newton"
    assert v.outcome == "traces"


def test_controls_at_other_weights_are_not_the_verdict_on_no_defence() -> None:
    at_others = attack_rows("none", "oblivious", GOOD, weights="d", round="last")
    assert judge(attack_rows("none", "oblivious", BAD), at_others)["none"].outcome == "void"


def test_the_accuracy_is_that_of_the_last_round_beside_the_undefended() -> None:
    trained = [
        {"kind": "accuracy", "defense": d, "round": n, "accuracy": a + n / 100, "loss": 0.1}
        for d, a in (("none", 0.9), ("d", 0.8))
        for n in (2, 1)
    ]
    v = judge(CONTROL, attack_rows("d", "oblivious", BAD), trained)["d"]
    assert (v.accuracy, v.baseline) == pytest.approx((0.82, 0.92))
    assert "Accuracy 82.0%, against 92.0% without a defence." in v.text


def test_the_headline_counts_what_was_given_away_and_to_whom() -> None:
    rows = [
        *floor_rows(8), *CONTROL,
        *attack_rows("a", "oblivious", BAD), *attack_rows("a", "drop", GOOD),
        *attack_rows("b", "oblivious", GOOD), *attack_rows("b", "drop", GOOD),
        *attack_rows("c", "oblivious", BAD), *attack_rows("c", "drop", BAD),
        *attack_rows("d", "oblivious", [0.03] * 8), *attack_rows("d", "drop", GOOD),
    ]  # fmt: skip
    assert headline(rows) == (
        "3 of 4 defences gave images away to this panel of attacks, 1 of them only to a server that knows the defence, "
        "1 of them more to a server that knows the defence than to one that does not; "
        "of 1 nothing was found by this panel, and nothing is proved."
    )


def test_without_the_truth_nothing_is_judged() -> None:
    rows = attack_rows("d", "oblivious", [math.nan])
    rows[0]["mse"] = None
    assert verdicts(rows) == []
    assert "truth was not given" in headline(rows)
    assert "no control" in headline(rows)
    assert headline([]) == "Nothing was attacked."


def test_rows_group_by_keys_and_objects_by_fields_in_the_order_they_come() -> None:
    rows = [{"a": 2, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    assert {key: len(mine) for key, mine in group(rows, "a", "b").items()} == {(2, "x"): 2, (1, "x"): 1, (2, "y"): 1}
    assert list(group(rows, "a")) == [(2,), (1,)]
    assert list(group([Interval(0.5, 0, 1, 4), Interval(0.5, 0, 1, 2)], "mean", "count")) == [(0.5, 4), (0.5, 2)]
