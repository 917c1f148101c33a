"""Cards: the typical example and the worst, plain names, and numbers in words."""

from pathlib import Path

import pytest

from gradveil.auditing.run_folder import RunFolder
from gradveil.metrics import interval, rate
from gradveil.protection.defense import DEFENSES
from gradveil.report.pictures import Card, Gallery, cards, typical_and_worst
from gradveil.report.plain import error_words, name_of
from gradveil.threats.rows import Floor, MeasuredExample, best_floor
from gradveil.threats.verdict import verdicts


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [([0.3, 0.1, 0.2], [2, 1]), ([0.4, 0.1, 0.3, 0.2], [3, 1]), ([0.5], [0, 0]), ([], []), ([float("nan")], [])],
)
def test_typical_is_the_median_and_worst_the_one_that_came_back_best(errors: list[float], chosen: list[int]) -> None:
    assert typical_and_worst([MeasuredExample(i, error=e) for i, e in enumerate(errors)]) == chosen


@pytest.fixture(scope="module")
def drawn(run_folder: Path) -> dict[str, Card]:
    store = RunFolder.open(run_folder)
    return {card.verdict.defense: card for card in cards(Gallery(store), store.rows, verdicts(store.rows))}


def test_pictures_on_a_card_are_of_the_same_two_examples(drawn: dict[str, Card]) -> None:
    for card in drawn.values():
        chosen = [shot.original for shot in card.originals]
        assert len(chosen) == 2
        assert all([shot.example for shot in s.shots] == chosen for s in card.servers if s.shots)
    assert drawn["gaussian:std=0.1"].main is not None
    assert drawn["gaussian:std=0.1"].main.who == "Adaptive server"


def test_a_card_says_it_in_words_and_with_intervals(drawn: dict[str, Card]) -> None:
    oblivious, knows, *rest = drawn["pruning:share=0.8"].servers
    near = "times closer than a blind guess"
    assert oblivious.says == f"gets traces of the images, 2 {near}; the worst image: 4 {near}"
    assert knows.says.startswith("gets the images back, ")
    assert knows.numbers.startswith("MSE 0.00038 [0.00032, 0.00043], blind guess 0.076, ")
    assert knows.numbers.count("[") == 2  # of the error and of the share identified
    assert knows.numbers.endswith("mask + newton, first round")
    assert [s.outcome for s in rest] == ["not_run"] * 3
    assert drawn["pruning:share=0.8"].cost == "Accuracy: 92.0%, against 93.0% without a defence"
    assert drawn["none"].servers[0].who == "Any server"
    void = drawn["<script>alert(1)</script>"].servers[0]
    assert void.says.startswith("resists this budget")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (1e-14, "to the last digit"),
        (1e-10, "to the last digit"),
        (2e-6, "closer than a screen can show"),
        (0.01, "10 times closer than a blind guess"),
        (0.08, "little better than a blind guess"),
        (0.2, "worse than a blind guess"),
    ],
)
def test_numbers_in_words(error: float, words: str) -> None:
    floor = Floor("grey", interval([0.1]), interval([0.1]), rate([0.0]), {0: 0.1})
    assert error_words(error, floor) == words


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("none", "No defence"),
        ("pruning:share=0.8", "Smallest gradients left out (pruning), share 80 %"),
        (
            "pruning:share=0.85+gaussian:scale=0.1",
            "Smallest gradients left out (pruning), share 85 % + Gaussian noise, scale 0.1",
        ),
        ("my_module:Own", "my_module:Own"),
        ("Own(strength=3)", "Own(strength=3)"),
        ("<b>", "<b>"),
    ],
)
def test_names_in_words(spec: str, name: str) -> None:
    assert name_of(spec) == name


def test_every_defence_has_a_plain_name() -> None:
    ours = [DEFENSES.get(name) for name in DEFENSES.names()]
    ours = [cls for cls in ours if cls.__module__.startswith("gradveil.defenses.") and cls.spec_name != "compose"]
    assert len(ours) > 15
    assert [cls.spec_name for cls in ours if not cls.title] == []


def test_the_floor_of_the_scene_is_where_the_words_think_it_is(run_folder: Path) -> None:
    floor = best_floor(RunFolder.open(run_folder).rows)
    assert floor is not None
    assert 0.07 <= floor.error.mean <= 0.08
