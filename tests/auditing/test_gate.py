"""The gate passes nothing that shows nothing either way."""

from typing import Any

import pytest

from auditing.test_rows import BAD, CONTROL, GOOD, attack_rows, floor_rows
from gradveil.auditing.gate import FailOn, gates, overall
from gradveil.auditing.run_folder import Row

KNOWS: list[Row] = [{"kind": "defense", "defense": "d", "server": "mask", "why": "Knows."}]
FAILED_CONTROL = attack_rows("none", "oblivious", BAD)
NAIVE_FAILS, KNOWING_FAILS = attack_rows("d", "oblivious", BAD), attack_rows("d", "mask", BAD)
SKIPPED: list[Row] = [{"kind": "skip", "defense": "d", "server": "mask", "attack": "newton", "why": "refused"}]
UNKNOWN = attack_rows("d", "oblivious", [None] * 8)  # type: ignore[list-item]
POOR = {"identified": 1.0}  # recognised, not recovered


@pytest.mark.parametrize(
    ("rows", "fail_on", "result"),
    [
        ([CONTROL, KNOWS, NAIVE_FAILS, KNOWING_FAILS], "recognised", "passed"),
        ([CONTROL, KNOWS, NAIVE_FAILS, attack_rows("d", "mask", GOOD)], "recovered", "failed"),
        ([CONTROL, KNOWS, attack_rows("d", "oblivious", GOOD), KNOWING_FAILS], "recovered", "failed"),
        ([CONTROL, KNOWS, NAIVE_FAILS, attack_rows("d", "mask", BAD, **POOR)], "recovered", "passed"),
        ([CONTROL, KNOWS, NAIVE_FAILS, attack_rows("d", "mask", BAD, **POOR)], "recognised", "failed"),
        ([CONTROL, NAIVE_FAILS], "recovered", "passed"),  # there is nothing to know about the defence
        ([CONTROL, KNOWS, NAIVE_FAILS, SKIPPED], "recovered", "uninformative"),
        ([FAILED_CONTROL, KNOWS, NAIVE_FAILS, KNOWING_FAILS], "recovered", "uninformative"),
        ([KNOWS, NAIVE_FAILS, KNOWING_FAILS], "recovered", "uninformative"),  # no control at all
        ([FAILED_CONTROL, KNOWS, NAIVE_FAILS, attack_rows("d", "mask", GOOD)], "recovered", "failed"),
        # traces do not say that the attack could have got more
        ([FAILED_CONTROL, attack_rows("d", "oblivious", [1e-4, *BAD[1:]])], "recovered", "uninformative"),
        ([CONTROL, UNKNOWN], "recovered", "uninformative"),  # a control on stand-ins, and no truth
        ([CONTROL, KNOWS], "recovered", "uninformative"),  # nothing arrived
        ([CONTROL], "recovered", "failed"),  # no defence: the undefended update
        ([FAILED_CONTROL], "recovered", "uninformative"),
        ([], "recovered", "uninformative"),
    ],
)  # fmt: skip
def test_a_gate_goes_by_the_strongest_server_and_by_the_controls(
    rows: list[list[Row]], fail_on: FailOn, result: str
) -> None:
    assert overall(gates([*floor_rows(8), *(row for group in rows for row in group)], fail_on)).result == result


def test_the_worst_defence_decides_and_a_round_without_a_control_is_named() -> None:
    last: dict[str, Any] = {"round": "last", "round_number": 3, "weights": "d"}
    rows = [*CONTROL, *NAIVE_FAILS, *attack_rows("d", "oblivious", BAD, **last), *attack_rows("e", "oblivious", GOOD)]
    each = gates([*floor_rows(8), *rows], "recovered")
    assert [gate.result for gate in each.values()] == ["passed", "failed"]
    assert "the last round shows nothing either way" in each["d"].why
    assert overall(each).why == "e: recovered by newton (oblivious server, first round)"
