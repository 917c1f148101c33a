"""The rules of a verdict, each held by a check that notices when the rule is weakened."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BAD, GOOD = 0.25, 1e-4
Rows = list[dict[str, Any]]
MODULES = {"rows": "threats.rows", "judge": "threats.verdict", "gate": "auditing.gate"}


def measured(
    defense: str, tier: str, mse: float, server: str | None = None, attack: str = "newton", **more: Any
) -> Rows:
    """Return the rows of one line over eight images."""
    who = "oblivious" if tier == "oblivious" else server or "drop"
    about = {"defense": defense, "tier": tier, "server": who, "attack": attack, "round": "first", "round_number": 1}
    said = {"identified": float(mse < 0.01), "gallery": 100, "converged": True, "details": {}, "weights": "start"}
    return [{"kind": "attack", **about, **said, "example": i, "mse": mse, **more} for i in range(8)]


def rows_of(*parts: Rows) -> Rows:
    floor: Rows = [{"kind": "floor", "guess": "mean", "example": i, "mse": 0.08, "identified": 0.0} for i in range(8)]
    return [*floor, *(row for part in parts for row in part)]


def probed(defense: str, errors: tuple[str, ...] = (), assessed: bool = True) -> Rows:
    return [{"kind": "probe", "defense": defense, "errors": list(errors), "notes": [], "assessed": assessed}]


def bound(chance: float, defense: str = "d", **more: Any) -> Rows:
    row = {"kind": "certificate", "certificate": "guess", "defense": defense, "layer": "the whole run", "sound": True}
    said = {"says": f"One of 100 is picked with a chance of at most {chance}.", "assumptions": ["The noise is secret."]}
    return [{**row, **said, "mse": None, "chance": chance, "tiers": ["informed"], **more}]


CONTROL = measured("none", "oblivious", GOOD)
FAILED = [*CONTROL, *measured("d", "oblivious", BAD), *measured("d", "adaptive", BAD)]


def outcome(code: Any, rows: Rows, tier: str = "adaptive") -> str:
    verdict = next(v for v in code.judge.verdicts(rows) if v.defense == "d")
    return next(str(t.outcome) for t in verdict.tiers if t.tier == tier)


def knows_acts_naively(code: Any) -> None:
    rows = rows_of(CONTROL, measured("d", "oblivious", GOOD), measured("d", "adaptive", BAD))
    assert outcome(code, rows) == "recovered"


def oblivious_does_not_know(code: Any) -> None:
    rows = rows_of(CONTROL, measured("d", "oblivious", BAD), measured("d", "adaptive", GOOD))
    assert outcome(code, rows, "oblivious") == "nothing"


def a_tier_speaks_for_itself(code: Any) -> None:
    rows = rows_of(FAILED, measured("d", "multi-round", GOOD))
    assert outcome(code, rows) == "nothing"
    assert outcome(code, rows, "multi-round") == "recovered"
    assert outcome(code, rows, "malicious") == "not_run"
    assert "1 more to a multi-round server" in code.judge.headline(rows)


def more_includes_less(code: Any) -> None:
    rows = rows_of(
        CONTROL, measured("d", "adaptive", GOOD), *(measured("d", t, BAD) for t in ("informed", "malicious"))
    )
    assert {outcome(code, rows, t) for t in ("informed", "malicious")} == {"recovered"}


def what_was_not_run_is_said(code: Any) -> None:
    rows = rows_of(CONTROL, measured("d", "oblivious", BAD))
    assert outcome(code, rows) == "not_run"
    verdict = next(v for v in code.judge.verdicts(rows) if v.defense == "d")
    assert verdict.outcome == "not_run"
    assert "knows the defence was not run" in verdict.text


def a_wrong_declaration_is_no_protection(code: Any) -> None:
    rows = rows_of(FAILED, probed("d", ("It is said to add noise and adds none.",)))
    assert outcome(code, rows) == "not_assessed"
    assert code.judge.declaration_errors(rows)[0].endswith("adds none.")
    gate = code.gate.gates(rows, "recognised")["d"]
    assert gate.result == "uninformative"
    assert "its declaration is wrong" in gate.why


def an_unknown_secret_is_no_protection(code: Any) -> None:
    rows = rows_of(FAILED, probed("d", assessed=False))
    assert outcome(code, rows) == "not_assessed"
    assert code.gate.gates(rows, "recognised")["d"].result == "uninformative"


def a_known_secret_may_hold(code: Any) -> None:
    rows = rows_of(FAILED, probed("d"))
    assert outcome(code, rows) == "nothing"
    assert code.gate.gates(rows, "recognised")["d"].result == "passed"


def a_failed_control_is_no_protection(code: Any) -> None:
    for tier in ("oblivious", "adaptive"):
        rows = rows_of(measured("none", "oblivious", BAD), FAILED[8:])
        assert outcome(code, rows, tier) == "void"
    assert code.gate.gates(rows, "recognised")["d"].result == "uninformative"


def half_an_audit_is_no_protection(code: Any) -> None:
    weak = measured("d", "adaptive", BAD, attack="weak")
    assert outcome(code, rows_of(CONTROL, measured("d", "oblivious", BAD), weak)) == "void"


def a_void_part_is_what_is_said(code: Any) -> None:
    """An attack of an informed server that had no time: what an oblivious one gets does not stand for it."""
    late = measured("d", "informed", BAD, attack="candidates", details={"out_of_time": 1.0})
    rows = rows_of(measured("none", "oblivious", 0.0, attack="candidates"), FAILED, late)
    assert outcome(code, rows, "informed") == "void"
    verdict = next(v for v in code.judge.verdicts(rows) if v.defense == "d")
    text = next(t.text for t in verdict.tiers if t.tier == "informed")
    assert "resists this budget" in text
    assert "gets nothing" not in text


def a_control_is_of_the_same_attack_and_tier(code: Any) -> None:
    failing = measured("none", "informed", BAD, attack="candidates")
    mine = measured("d", "informed", BAD, attack="candidates")
    assert (
        outcome(
            code, rows_of(FAILED, failing, measured("none", "oblivious", GOOD, attack="candidates"), mine), "informed"
        )
        == "void"
    )


def a_leak_counts_whatever_the_control(code: Any) -> None:
    rows = rows_of(measured("none", "oblivious", BAD), measured("d", "adaptive", GOOD))
    assert outcome(code, rows) == "recovered"
    assert code.gate.gates(rows, "recovered")["d"].result == "failed"


def no_time_is_no_protection(code: Any) -> None:
    late = measured("d", "adaptive", BAD, details={"out_of_time": 1.0})
    rows = rows_of(CONTROL, measured("d", "oblivious", BAD), late)
    assert outcome(code, rows) == "void"
    assert code.gate.gates(rows, "recognised")["d"].result == "uninformative"


def a_control_that_was_stopped_as_early_counts(code: Any) -> None:
    def stopped(steps: int) -> dict[str, Any]:
        return {"details": {"out_of_time": 1.0}, "stopped_at": steps}

    control = measured("none", "oblivious", GOOD, **stopped(20))
    rest = measured("d", "oblivious", BAD, **stopped(20))
    assert outcome(code, rows_of(control, rest, measured("d", "adaptive", BAD, **stopped(20)))) == "nothing"
    assert outcome(code, rows_of(control, rest, measured("d", "adaptive", BAD, **stopped(19)))) == "void"


def a_control_that_failed_speaks_for_those_that_waited(code: Any) -> None:
    why = "its control failed, so a failure would prove nothing, and no time was left"
    waited = [
        {"kind": "skip", "defense": "d", "tier": "adaptive", "round": "first", "weights": "start", "attack": "gs",
         "control_failed": "gs:steps=60", "why": why, "out_of_time": False}
    ]  # fmt: skip
    rows = rows_of(measured("none", "oblivious", BAD, attack="gs:steps=60"), waited)
    assert outcome(code, rows) == "void"
    verdict = next(v for v in code.judge.verdicts(rows) if v.defense == "d")
    assert "what would settle it" in next(t.text for t in verdict.tiers if t.tier == "adaptive")


def who_picks_from_a_list_identifies(code: Any) -> None:
    listed = measured("d", "informed", 0.0, attack="candidates")
    assert (
        outcome(code, rows_of(measured("none", "oblivious", 0.0, attack="candidates"), listed), "informed")
        == "identified"
    )


def the_gate_looks_at_the_tiers_it_is_told(code: Any) -> None:
    rows = rows_of(FAILED, measured("d", "multi-round", GOOD))
    assert code.gate.gates(rows, "recognised")["d"].result == "passed"
    assert code.gate.gates(rows, "recognised", ("oblivious", "multi-round"))["d"].result == "failed"


def one_lucky_guess_is_no_control(code: Any) -> None:
    """One example that is told from few others by chance says nothing: neither of a control nor of a defence."""
    lucky = measured("none", "oblivious", BAD, identified=1.0, gallery=61)[:1]
    rows = rows_of(lucky, *(measured("d", tier, BAD)[:1] for tier in ("oblivious", "adaptive")))
    assert outcome(code, rows) == "void"


def one_right_pick_of_five_is_chance(code: Any) -> None:
    """Of a list of a hundred the first pick of five is right once in twenty tries; two are none."""
    control = measured("none", "oblivious", 0.0, attack="candidates")
    for hits, expected in ((1, "nothing"), (2, "traces"), (3, "identified")):
        listed = measured("d", "informed", BAD, attack="candidates")[:5]
        for row in listed[:hits]:
            row |= {"mse": 0.0, "identified": 1.0}
        assert outcome(code, rows_of(control, FAILED, listed), "informed") == expected


def nothing_is_proved_of_a_defence_without_an_account(code: Any) -> None:
    assert code.gate.gates(rows_of(FAILED), "unproved")["d"].result == "failed"
    assert code.gate.gates(rows_of(FAILED, bound(0.2)), "unproved")["d"].result == "passed"
    assert (
        code.gate.gates(rows_of(CONTROL, measured("d", "adaptive", GOOD), bound(0.2)), "unproved")["d"].result
        == "failed"
    )


RULES: list[Callable[[Any], None]] = [
    knows_acts_naively, oblivious_does_not_know, a_tier_speaks_for_itself, more_includes_less, what_was_not_run_is_said,
    a_wrong_declaration_is_no_protection, an_unknown_secret_is_no_protection, a_known_secret_may_hold,
    a_failed_control_is_no_protection, half_an_audit_is_no_protection, a_control_is_of_the_same_attack_and_tier,
    a_leak_counts_whatever_the_control, no_time_is_no_protection, the_gate_looks_at_the_tiers_it_is_told,
    a_control_that_was_stopped_as_early_counts, a_control_that_failed_speaks_for_those_that_waited,
    who_picks_from_a_list_identifies, one_lucky_guess_is_no_control, one_right_pick_of_five_is_chance,
    nothing_is_proved_of_a_defence_without_an_account, a_void_part_is_what_is_said,
]  # fmt: skip

WEAKENED = [
    ("judge", '"adaptive": ("oblivious", "adaptive"),', '"adaptive": ("adaptive",),'),
    ("judge", '"oblivious": ("oblivious",),', '"oblivious": ("oblivious", "adaptive"),'),
    ("judge", '"adaptive": ("oblivious", "adaptive"),', '"adaptive": ("oblivious", "adaptive", "multi-round"),'),
    ("judge", '"malicious": ("oblivious", "adaptive", "malicious"),', '"malicious": ("malicious",),'),
    ("judge", 'return "nothing" if tier == "oblivious" or self.assessed else "not_assessed"', 'return "nothing"'),
    ("judge", "return not self.errors and all(", "return all("),
    ("judge", 'all(row["assessed"] for row in mine)', "True"),
    ("judge", 'if not best.counts:\n            return "void"', 'if False:\n            return "void"'),
    ("judge", "best = open_  # a part", "pass  # a part"),
    ("judge", 'if best.grade != "nothing":\n            return', "if False:\n            return"),
    ("judge", 'outcome = got if got in ("recovered", "recognised", "traces", "void") else "not_run"', "outcome = got"),
    ("rows", "or self.void is None", "or True"),
    ("rows", 'for tier in (one.tier, "oblivious", "adaptive")', 'for tier in ("oblivious", "adaptive")'),
    ("rows", 'if void is None and late and got == "nothing" and not _as_long(mine, control):', "if False:"),
    ("rows", "m.stopped_at >= enough > 0", "True"),
    ("rows", 'if got in ("recovered", "recognised"):', "if True:"),
    ("rows", "    if listed:\n", "    if False:\n"),
    ("judge", 'if best.from_list and best.grade != "traces"', "if best.from_list"),
    ("gate", 'if fail_on == "unproved" and not proved.holds:', "if False:"),
    ("rows", "if luck < SIGNIFICANT and identified.mean >= HALF:", "if identified.mean >= HALF:"),
    ("gate", 'if judged is not None and judged.errors:', "if False:"),
    ("gate", 'if judged is not None and judged.outcome == "not_assessed":', "if False:"),
    ("gate", "if its and all(line.void for line in its):", "if False:"),
    ("gate", "and x.tier in tiers]", "]"),
    ("gate", "GRADES.index(line.grade) >= limit", "GRADES.index(line.grade) > limit"),
]  # fmt: skip


@contextmanager
def changed(module: str = "", old: str = "", new: str = "") -> Iterator[Any]:
    """Within, the modules of the verdict with one place changed."""
    names = [f"gradveil.{name}" for name in MODULES.values()]
    kept = {name: import_module(name) for name in names}
    made: dict[str, ModuleType] = {}
    try:
        for short, name in zip(MODULES, names, strict=True):
            source = Path(str(kept[name].__file__)).read_text()
            if short == module:
                assert source.count(old) == 1, f"{old!r} is not in {short}.py once"
                source = source.replace(old, new)
            sys.modules[name] = made[short] = ModuleType(name)
            exec(compile(source, name, "exec"), made[short].__dict__)
        yield SimpleNamespace(**made)
    finally:
        sys.modules.update(kept)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_holds(rule: Callable[[Any], None]) -> None:
    with changed() as code:
        rule(code)


@pytest.mark.parametrize(("module", "old", "new"), WEAKENED, ids=[f"{m}: {old[:50]}" for m, old, _ in WEAKENED])
def test_a_weakened_rule_is_noticed(module: str, old: str, new: str) -> None:
    noticed = []
    with changed(module, old, new) as code:
        for rule in RULES:
            try:
                rule(code)
            except AssertionError:
                noticed.append(rule.__name__)
    assert noticed


def said_of(*parts: Rows) -> Any:
    from gradveil.threats.verdict import verdicts

    return next(v for v in verdicts(rows_of(*parts)) if v.defense == "d")


def test_both_axes_are_said_in_order() -> None:
    unproved = said_of(FAILED)
    assert unproved.text.count("Nothing found by this panel; nothing is proved. No audit can detect") == 1
    proved = said_of(FAILED, bound(0.2))
    assert "Nothing found by this panel; proved: over the whole run, one of 100 is picked with" in proved.text
    assert proved.proved.conditions == ("The noise is secret.",)
    assert "No audit can detect" not in proved.text
    beyond = said_of(FAILED, measured("d", "malicious", GOOD))
    assert (beyond.outcome, beyond.found) == ("nothing", "recovered")
    assert "Nothing found" not in beyond.text
    leaky = said_of(CONTROL, measured("d", "oblivious", GOOD))
    assert "Nothing is proved" in leaky.text
    assert "Nothing found" not in leaky.text


@pytest.mark.parametrize(
    "against",
    [
        bound(1.0),  # no limit
        [*bound(0.01), *measured("d", "informed", 0.0, attack="candidates")],  # picked far more often
        [*bound(0.2), {"kind": "certificate", "certificate": "measured", "defense": "d", "layer": "one release",
                       "mse": None, "reasons": ["μ is above"], "mu_proved": 1.0}],
        [*bound(0.2), *probed("d", ("It is said to add noise and adds none.",))],
        bound(0.2, defense="e"),
        bound(0.2, layer="one update"),
    ],
)  # fmt: skip
def test_a_proof_that_says_nothing_or_is_contradicted_is_none(against: Rows) -> None:
    assert not said_of(FAILED, against).proved.holds
    assert said_of(FAILED, against).proved.text.startswith("nothing is proved")


SAYS = {
    "recovered": "gets the images back",
    "traces": "gets traces",
    "nothing": "gets nothing",
    "void": "resists this budget",
}


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["oblivious", "adaptive", "informed", "multi-round", "malicious"]),
        st.sampled_from([BAD, 0.03, GOOD]),
    ),
    st.sampled_from([BAD, GOOD]),
    st.booleans(),
)
def test_a_badge_never_contradicts_its_text(got: dict[str, float], control: float, assessed: bool) -> None:
    from gradveil.threats.verdict import verdicts

    lines = [measured("d", tier, mse, identified=float(mse == GOOD)) for tier, mse in got.items()]
    for verdict in verdicts(rows_of(measured("none", "oblivious", control), probed("d", assessed=assessed), *lines)):
        for tier in verdict.tiers:
            if tier.outcome in SAYS:
                assert SAYS[tier.outcome] in tier.text
                assert not [said for name, said in SAYS.items() if name != tier.outcome and said in tier.text]
            if tier.outcome == "nothing":
                assert not [t for t in verdict.tiers[:1] if t.outcome in ("recovered", "recognised", "traces")]
        by = {t.tier: t for t in verdict.tiers}
        order = ["nothing", "traces", "recognised", "recovered"]
        if by["adaptive"].oracle is not None and by["oblivious"].oracle is not None:
            assert by["adaptive"].oracle <= by["oblivious"].oracle
        if by["oblivious"].outcome in order[1:] and verdict.defense != "none":
            assert order.index(by["adaptive"].outcome) >= order.index(by["oblivious"].outcome)
