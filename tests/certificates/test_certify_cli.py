"""``gradveil certify`` from the command line: the table, the words, the JSON, the refusals."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradveil.models import build

Run = Callable[..., tuple[int, str, str]]
SMALL = ("certify", "--images", "2", "--model", "lenet:width=3", "--dataset", "digits")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    return command


def test_the_table_the_context_and_the_assumptions_in_words(run: Run) -> None:
    code, out, err = run(*SMALL)
    assert code == 0, err
    words = " ".join(out.split())
    for kind in ("local", "global", "box", "reach", "empirical"):
        assert kind in words
    assert "not a certificate" in words
    assert "does not need f(X′) = r′" in words
    assert "the mean image has an MSE of" in words
    assert "no image in the data range can have more than" in words
    assert "drop" in words
    assert "linearisation at the true input" in words


def test_json_holds_every_figure_with_its_assumptions(run: Run) -> None:
    code, out, err = run(*SMALL, "--json", "--kind", "global", "--kind", "reach", "--norm", "inf")
    assert code == 0, err
    found = json.loads(out)
    assert [c["kind"] for c in found["certificates"]] == ["global", "reach"]
    assert all(len(c["mse"]) == 2 and c["sound"] and c["assumptions"] for c in found["certificates"])
    assert found["certificates"][1]["bound"] == [None, None]  # no image at all
    assert found["certificates"][1]["details"]["unreachable"] == [1.0, 1.0]
    assert found["p"] == "inf"
    assert len(found["meter"]) == 2
    assert len(found["largest_mse"]) == len(found["mean_image_mse"]) == 2
    again = run(*SMALL, "--json", "--kind", "global", "--kind", "reach", "--norm", "inf")[1]
    assert again == out


def test_a_defence_on_no_representation_is_only_metered(run: Run) -> None:
    code, out, err = run(*SMALL, "--defense", "gaussian:scale=0.1,relative=true")
    assert code == 0, err
    assert "perturbs no representation" in out
    assert "whiten" in out


def test_accounted_noise_is_certified_over_the_run(run: Run) -> None:
    code, out, err = run(*SMALL, "--no-meter", "--defense", "veil:promise=reconstruction", "--participations", "9")
    assert code == 0, err
    words = " ".join(out.split())
    assert "√(E R)/z Gaussian-DP for zeroing one record" in words
    assert "z_run = 1.5: were images Gaussian, no server's error would be below" in words  # one update of nine
    assert "picked rightly with a chance of at most 0.37" in words
    code, _, err = run(*SMALL, "--no-meter", "--defense", "veil:z=1,tier=aggregate")
    assert (code, err.count("\n")) == (2, 1)


def test_trained_weights_change_the_figures(run: Run, tmp_path: Path) -> None:
    model = build("lenet:width=3", (1, 8, 8), 10, seed=5)
    save_file({n: p.contiguous() for n, p in model.state_dict().items()}, str(tmp_path / "w.safetensors"))
    plain = json.loads(run(*SMALL, "--json", "--no-meter", "--kind", "global")[1])
    other = json.loads(run(*SMALL, "--json", "--no-meter", "--kind", "global", "--weights", "w.safetensors")[1])
    assert plain["certificates"][0]["mse"] != other["certificates"][0]["mse"]
    assert plain["meter"] == []


def test_bad_input_is_one_line_and_exit_code_two(run: Run, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, str(tmp_path / "bad.safetensors"))
    (tmp_path / "text.safetensors").write_text("no")
    for arguments, says in [
        (("--kind", "globl"), "Did you mean 'global'"),
        (("--kind", "residual"), "cannot be shown here"),
        (("--norm", "3"), "certificates know p = 1, 2 and inf"),
        (("--defense", "representatio"), "Did you mean 'representation'"),
        (("--weights", "none.safetensors"), "There is no file"),
        (("--weights", "bad.safetensors"), "does not fit the model"),
        (("--weights", "text.safetensors"), "is not a safetensors file"),
    ]:
        code, _, err = run(*SMALL, *arguments)
        assert code == 2
        assert says in err
        assert err.count("\n") == 1
