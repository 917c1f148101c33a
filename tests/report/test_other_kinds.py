"""Rows and sequences: the same page, with what fits them in place of pictures, and never the word image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browsing import faint, open_page
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.modalities import Modality
from gradveil.modalities.table import Table
from gradveil.modalities.tokens import Tokens
from gradveil.report.page import write_report
from gradveil.threats.rows import modality_rows
from gradveil.threats.setup import AuditConfig

ROWS = 4
WORDS = ("<padding>", "<unknown>", "the", "multi-round", "sleeps", "badly")
NOISE = "gaussian:std=0.1"


def write_other(folder: Path, modality: Modality, truth: torch.Tensor) -> Path:
    """Write a run in which one cell in four of the last example comes back wrong, and none of the others."""
    store = RunFolder.start(folder, AuditConfig(defenses=("none", NOISE), images=ROWS))
    guess = truth.roll(1, dims=1)
    found = truth.clone()
    found[-1, 0] = truth[-1, 1]

    def measured(x: torch.Tensor, **about: Any) -> list[Row]:
        values, _ = modality.measure(x, truth, truth.roll(1, dims=0)[:1], (0.0, 1.0))
        return [
            {**about, "example": i, "index": i, "label": 1.0, **{name: float(v[i]) for name, v in values.items()}}
            for i in range(ROWS)
        ]

    store.add(
        "truth", [*modality_rows(modality), *measured(guess, kind="floor", guess="mean or mode")],
        {"truth": truth.numpy().astype(np.float32), "mean or mode": guess.numpy().astype(np.float32)},
    )  # fmt: skip
    for defense, score in (("none", 0.9), (NOISE, 0.8)):
        head = {"kind": "attack", "round": "first", "round_number": 1, "weights": "start", "attack": "newton"}
        servers = {"oblivious": "oblivious", "whiten": "adaptive"} if defense != "none" else {"oblivious": "oblivious"}
        for server, tier in servers.items():
            about = head | {"defense": defense, "server": server, "tier": tier, "gallery": 100, "converged": True}
            arrays = {"found": found.numpy().astype(np.float32)}
            store.add(f"attack/{defense}/{server}", measured(found, **about, objective=0.0, details={}), arrays)
        store.add(
            f"train/{defense}", [{"kind": "accuracy", "defense": defense, "round": 1, "accuracy": score, "loss": 1.0}]
        )
    store.close()
    return write_report(folder)


@pytest.fixture(params=["table", "tokens"])
def address(request: pytest.FixtureRequest, tmp_path: Path, rng: torch.Generator) -> str:
    if request.param == "table":
        truth = torch.rand(ROWS, 4, generator=rng)
        page = write_other(tmp_path / "run", Table.of_vectors(truth), truth)
    else:
        truth = torch.stack([torch.randperm(4, generator=rng) for _ in range(ROWS)]).float() + 2
        page = write_other(tmp_path / "run", Tokens(WORDS), truth)
    return page.resolve().as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_a_typical_one_and_the_worst_without_pictures(browser: Any, address: str, scheme: str) -> None:
    page, trouble = open_page(browser, address, 360, scheme)
    assert trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.images.length") == 0
    assert faint(page) == []
    text = page.evaluate(
        "[...document.querySelectorAll('body > :not(#run):not(script)')].map(e => e.textContent).join()"
    )
    assert "image" not in text.lower().replace("--images", "")
    assert "picture" not in text.lower()
    hero = page.locator(".hero.rows")
    assert hero.locator(".got").count() == 8  # two examples of four cells, all right
    assert page.locator(".card details").count() == 2
    folded = page.locator("#pictures details .cells, #pictures details .texts")
    assert folded.count() == page.locator("#pictures .cells, #pictures .texts").count() > 0
    assert not folded.first.is_visible()
    assert not page.locator("#table table").is_visible()
    page.close()
