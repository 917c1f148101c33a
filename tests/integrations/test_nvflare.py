import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from gradveil.integrations.nvflare import RecordsFilter, UpdateFilter

EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare"


def result(kind: str = DataKind.WEIGHT_DIFF, **meta: Any) -> Shareable:
    change = {"fc.weight": np.arange(1, 11, dtype=np.float32), "bn.running_var": np.ones(3, np.float32)}
    return DXO(kind, change, dict(meta)).to_shareable()


def test_the_filter_defends_the_weight_difference_and_leaves_statistics() -> None:
    sent = from_shareable(UpdateFilter("pruning:share=0.8,on=update", lr=0.1).process(result(), FLContext()))
    np.testing.assert_allclose(sent.data["fc.weight"], [0, 0, 0, 0, 0, 0, 0, 0, 9, 10], rtol=1e-6)
    np.testing.assert_array_equal(sent.data["bn.running_var"], np.ones(3))
    assert sent.get_filter_history() == ["UpdateFilter"]


def test_noise_is_in_units_of_the_gradient() -> None:
    dxo = DXO(DataKind.WEIGHT_DIFF, {"w": np.zeros(20000, np.float32)})
    sent = UpdateFilter("gaussian:scale=2,on=update", lr=0.1).defend(dxo)
    assert float(np.std(sent.data["w"])) == pytest.approx(0.2, rel=0.05)


def test_tensors_stay_tensors() -> None:
    sent = UpdateFilter("none").defend(DXO(DataKind.WEIGHT_DIFF, {"w": torch.ones(2)}))
    assert torch.equal(sent.data["w"], torch.ones(2))


@pytest.mark.parametrize(
    "spoiled",
    [
        Shareable(),
        result(DataKind.WEIGHTS),
        DXO(DataKind.WEIGHT_DIFF, {"w": np.array([np.nan], np.float32)}).to_shareable(),
        DXO(DataKind.WEIGHT_DIFF, {"steps": np.array([3])}).to_shareable(),
    ],
    ids=["no DXO", "whole weights", "nan", "nothing trained"],
)
def test_what_the_filter_cannot_defend_is_blocked(spoiled: Shareable) -> None:
    with pytest.raises(ContentBlockedException, match="withheld"):
        UpdateFilter("none").process(spoiled, FLContext())


def test_an_update_whose_steps_were_not_defended_is_blocked_when_asked_for() -> None:
    strict = UpdateFilter("none", require_steps=True)
    with pytest.raises(ContentBlockedException, match="defended-steps"):
        strict.process(result(), FLContext())
    strict.process(result(**{"defended-steps": 4}), FLContext())


def test_rounds_of_a_defence_of_records_are_paid_for_and_nothing_else_is_sent(tmp_path: Path) -> None:
    paid = RecordsFilter("veil:z=2", str(tmp_path / "account.json"), limit=0.5)
    said = {"defended-steps": 4, "spent": 0.25, MetaKey.INITIAL_METRICS: {"loss": 0.3}}
    for _ in range(2):
        sent = from_shareable(paid.process(result(**said), FLContext()))
        assert MetaKey.INITIAL_METRICS not in sent.meta
        assert sent.get_meta_prop("defended-steps") == 4
    with pytest.raises(ContentBlockedException, match="has spent"):
        paid.process(result(**said), FLContext())
    for odd in ({"defended-steps": 4, "spent": 0.1}, {"spent": 0.25}, {}):
        with pytest.raises(ContentBlockedException, match="one epoch"):
            RecordsFilter("veil:z=2", str(tmp_path / "other.json")).process(result(**odd), FLContext())
    with pytest.raises(ContentBlockedException, match="METRICS"):
        paid.process(DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable(), FLContext())


def test_a_defence_of_the_steps_is_refused_by_the_filter() -> None:
    with pytest.raises(ContentBlockedException, match="protect"):
        UpdateFilter("representation").process(result(), FLContext())


def test_error_reports_and_metrics_pass() -> None:
    error = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    metrics = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    assert UpdateFilter("none").process(error, FLContext()) is error
    assert UpdateFilter("none").process(metrics, FLContext()) is metrics


@pytest.mark.deploy
@pytest.mark.slow
def test_the_example_runs_on_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "job.py"), "--workspace", str(tmp_path), "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    assert "Finished FedAvg" in log
    assert "withheld" not in log
    assert list(tmp_path.rglob("FL_global_model.pt"))


@pytest.mark.deploy
@pytest.mark.slow
def test_a_site_that_sends_an_undefended_update_is_stopped_by_the_filter(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "job.py"), "--workspace", str(tmp_path), "--defense", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "Update withheld: No local step was defended" in done.stdout + done.stderr
