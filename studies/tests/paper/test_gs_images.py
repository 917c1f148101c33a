"""The images under GS: runs end to end at toy size, pictures survive, verdicts follow from rows."""

import json
from pathlib import Path

import pytest
import torch

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.gs_images import RATES, GSImages, decoded
from gradveil_studies.paper.panels import encoded


def row(defense: str, server: str, mse: float, identified: float) -> Row:
    place = {"panel": "gs-images", "dataset": "cifar10", "model": "convnet", "attack": "gs", "image": 0}
    figures = {"mse": mse, "normalised_mse": 16 * mse, "identified": identified, "psnr": 10.0}
    figures["ssim"] = 0.3 if defense.startswith("(") else 0.9 if mse < 0.06 else 0.05
    return place | {"defense": defense, "server": server} | figures


def world(ours: float, knowing: float, gc: float, control: float = 0.001) -> list[Row]:
    def seen(defense: str, server: str, mse: float) -> Row:
        return row(defense, server, mse, float(mse < 0.06))

    rows = [seen("none", "oblivious", control), row("(blind guess)", "mean image", 0.06, 0.0)]
    for rate in RATES:
        rows += [
            seen(f"representation:share={rate}", "oblivious", ours),
            seen(f"representation:share={rate}", "drop", 0.2),
        ]
        rows += [seen(f"representation:share={rate}", "mask", knowing)]
        rows += [seen(f"pruning:share={rate}", s, gc if rate <= 0.8 else 0.3) for s in ("oblivious", "mask")]
    return rows


@pytest.mark.parametrize(
    ("ours", "knowing", "gc", "status"),
    [
        (0.2, 0.001, 0.01, ["reproduced", "reproduced", "not reproduced", "reproduced"]),
        (0.01, 0.2, 0.1, ["not reproduced", "not reproduced", "reproduced", "not reproduced"]),
    ],
)
def test_both_sentences_are_judged_for_both_servers(ours: float, knowing: float, gc: float, status: list[str]) -> None:
    verdicts = GSImages().verdicts(world(ours, knowing, gc))
    assert [v.status for v in verdicts] == status
    assert "oblivious server" in verdicts[0].claim
    assert "server that knows" in verdicts[2].claim


def test_without_a_working_control_or_rows_nothing_is_judged() -> None:
    assert {v.status for v in GSImages().verdicts(world(0.2, 0.2, 0.01, control=0.05))} == {"not measured"}
    assert {v.status for v in GSImages().verdicts([])} == {"not measured"}


def test_an_image_hidden_at_seventy_but_not_at_eighty_percent_is_not_hidden() -> None:
    rows = world(0.2, 0.001, 0.01)
    rows = [
        r | {"mse": 0.01} if (r["defense"], r["server"]) == ("representation:share=0.8", "oblivious") else r
        for r in rows
    ]
    assert GSImages().verdicts(rows)[0].status == "not reproduced"


def test_it_runs_keeps_pictures_and_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = GSImages(images=2, shown=1, steps=2, network="lenet:activation=relu,init=default,width=3", dataset="digits")
    context = Context(scale="full")
    units = item.units(context)
    assert units == ["floors", *item.defenses()]
    rows = [r for unit in units for r in item.run(unit, context)]
    json.dumps(rows)
    shown = [r for r in rows if "picture" in r]
    assert {r["image"] for r in shown} == {0}
    assert len(shown) == 1 + 1 + len(RATES) * (3 + 2)  # original, undefended, ours by three servers, GC by two
    assert {r["server"] for r in rows if r["defense"].startswith("representation")} == {"oblivious", "drop", "mask"}
    table = item.summary(rows)
    assert {line["rate"] for line in table} == {"-", "50%", "60%", "70%", "80%", "90%"}
    assert len(item.verdicts(rows)) == 4
    assert item.draw(rows, tmp_path / "gs-images")
    assert (tmp_path / "gs-images.svg").stat().st_size > 1000
    assert (tmp_path / "gs-images.png").exists()


@pytest.mark.parametrize("shape", [(3, 5, 6), (1, 5, 6)])
def test_a_picture_in_a_row_is_the_image(shape: tuple[int, ...]) -> None:
    image = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(decoded(encoded(image / 255)).copy())
    assert torch.equal(pixels.long(), image.movedim(0, -1).squeeze(-1))
