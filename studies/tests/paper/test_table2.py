"""Table 2: what each level does to an update is measured, and the levels are held against the paper's ranges."""

import pytest

from gradveil_studies.paper import table2
from gradveil_studies.paper.base import Context
from gradveil_studies.paper.table2 import Table2, paper_range


def test_the_effects_are_those_of_the_defences() -> None:
    item = Table2(images=1, datasets=("digits",), networks=("lenet:width=3", "lenet:width=3"))
    rows = item.run("dlg-digits", Context())
    by = {r["defense"]: r for r in rows}
    assert by["none"]["change"] == 0
    ours = [by[f"representation:share={s}"] for s in (0.05, 0.2, 0.4)]
    assert ours[2]["zeroed_layer"] == pytest.approx(0.4, abs=0.05)
    assert ours[2]["taken"] == pytest.approx(0.4 * ours[2]["live"], abs=1)
    assert ours[0]["change"] < ours[1]["change"] < ours[2]["change"] < 1
    assert by["pruning:share=0.8"]["zeroed"] == pytest.approx(0.8, abs=0.02)
    noise = [by[f"gaussian:scale={s}"]["change"] for s in (0.001, 0.01)]
    assert noise[1] == pytest.approx(10 * noise[0], rel=0.2)
    assert by["gaussian:scale=0.01"]["zeroed"] == 0
    line = next(r for r in item.summary(rows) if r["defense"] == "representation:share=0.4")
    assert line["paper's range"] == "1 to 40 %"
    assert line["live entries of r taken"] == "42%"  # 5 of 12
    assert item.units(Context()) == ["dlg-digits", "gs-digits"]


def test_the_levels_are_the_papers_and_others_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Table2().verdicts([])
    assert len(verdicts) == 8
    assert {v.status for v in verdicts} == {"reproduced"}
    monkeypatch.setitem(table2.FULL, "dlg", tuple(d for d in table2.FULL["dlg"] if d != "representation:share=0.4"))
    judged = [v for v in Table2().verdicts([]) if v.status != "reproduced"]
    assert [v.claim.partition(",")[0] for v in judged] == ["Ours: p_fc (%)"]


def test_a_range_is_found_by_attack_and_defence() -> None:
    assert paper_range("gs-cifar10", "pruning:share=0.4") == "1 to 90 %"
    assert paper_range("dlg-mnist", "laplace:scale=0.1") == "0.0001 to 0.1"
    assert paper_range("dlg-mnist", "random_mask:share=0.4") == "-"
