"""``gradveil verify``: the gate, a trainer of one's own, and what is refused."""

import json
from pathlib import Path

import pytest
from conftest import Command

QUICK = "--model logistic --engine sequential --canaries 16 --trials 24 --seed 1"


@pytest.fixture
def trainer(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file with a loop of Gaussian sums, the noise of which a second function halves."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def train(model, inputs, labels, present, noise=1.0):\n"
        "    generator = torch.Generator().manual_seed(int((present * 2 ** torch.arange(len(present))).sum()))\n"
        "    total = torch.zeros(sum(p.numel() for p in model.parameters()))\n"
        "    for x, y in zip(inputs[present], labels[present]):\n"
        "        loss = torch.nn.functional.cross_entropy(model(x[None]), y[None])\n"
        "        g = torch.cat([d.flatten() for d in torch.autograd.grad(loss, list(model.parameters()))])\n"
        "        total += g / max(1.0, float(g.norm()))\n"
        "    return [total + noise * torch.randn(total.shape, generator=generator)]\n"
        "def broken(model, inputs, labels, present):\n"
        "    return train(model, inputs, labels, present, 0.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_sound_run_says_both_numbers_and_ends_with_0(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("verify", *QUICK.split(), "--quiet", "--out", str(tmp_path / "found.json"))
    assert code == 0
    assert "proved       μ = 1.41" in out
    assert "Consistent." in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["low"] <= found["mu_measured"] <= found["high"]
    assert found["mu_proved"] == pytest.approx(2**0.5)


def test_a_trainer_of_ones_own_passes_and_its_broken_sibling_ends_with_1(command: Command, trainer: Path) -> None:
    words = "--model logistic --sigma 1 --steps 1 --canaries 16 --trials 48 --seed 1 --quiet"
    code, out, _ = command("verify", "--trainer", "mine:train", *words.split())
    assert (code, "Consistent." in out) == (0, True)
    code, out, _ = command("verify", "--trainer", "mine:broken", *words.split())
    assert code == 1
    assert "Exceeds the promise:\n- μ is at least" in out


def test_a_claim_of_half_of_mu_ends_with_1(command: Command, trainer: Path) -> None:
    words = "--model logistic --mu 0.5 --canaries 16 --trials 48 --seed 1 --quiet"
    assert command("verify", "--trainer", "mine:train", *words.split())[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mu 1", "are promises of a --trainer"),
        ("--trainer mine:train", "Say what the trainer promises"),
        ("--trainer mine:train --mu 1 --epsilon 1", "Give one of them"),
        ("--trainer mine:train --sigma 1", "belong together"),
        ("--trainer mine --mu 1", "give module:function"),
        ("--defense gaussian:scale=1", "this defence gives none"),
        ("--out nowhere/found.json", "Make it first"),
    ],
)
def test_what_makes_no_sense_is_one_line(command: Command, trainer: Path, words: str, said: str) -> None:
    code, _, err = command("verify", *words.split())
    assert code == 2
    assert said in err


def test_time_that_is_over_ends_the_trials(command: Command) -> None:
    words = "--model logistic --canaries 8 --trials 5000 --minutes 0.1 --json --no-grain"
    code, out, _ = command("verify", *words.split())
    assert code == 0
    assert 8 <= json.loads(out)["trials"] < 5000
