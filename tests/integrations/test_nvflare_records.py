"""What leaves an NVFlare site under a defence of records: on a stand-in for NVFlare."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.privacy.accountant import Account

OK, FAILED = "OK", "EXECUTION_EXCEPTION"
DIFF, WHOLE, METRICS = "WEIGHT_DIFF", "WEIGHTS", "METRICS"
GOOD = {"defended-steps": 4, "spent": 0.25}


class DXO:
    def __init__(self, data_kind: str, data: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
        self.data_kind, self.data, self.meta = data_kind, data, dict(meta or {})

    def get_meta_prop(self, name: str, default: Any = None) -> Any:
        return self.meta.get(name, default)

    def add_filter_history(self, name: str) -> None:
        self.meta["filter"] = name

    def to_shareable(self) -> "Shareable":
        return Shareable({"DXO": self})


class Shareable(dict[str, Any]):
    code = OK

    def get_return_code(self) -> str:
        return self.code


class Blocked(Exception):
    pass


class FLContext:
    def __init__(self, **props: Any) -> None:
        self.props = props

    def get_prop(self, name: str) -> Any:
        return self.props.get(name)

    def set_prop(self, name: str, value: Any, private: bool, sticky: bool) -> None:
        self.props[name] = value

    def get_identity_name(self) -> str:
        return "site-1"


def make_reply(code: str) -> Shareable:
    reply = Shareable()
    reply.code = code
    return reply


def constants(**values: str) -> type:
    return type("Constants", (), values)


@pytest.fixture
def nvflare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The integration on top of the stand-in."""
    stand_ins: dict[str, dict[str, Any]] = {
        "nvflare": {}, "nvflare.apis": {}, "nvflare.apis.utils": {}, "nvflare.app_common": {},
        "nvflare.apis.event_type": {"EventType": constants(END_RUN="end")},
        "nvflare.app_common.app_constant": {"AppConstants": constants(CONTRIBUTION_ROUND="of", CURRENT_ROUND="round")},
        "nvflare.apis.dxo": {
            "DXO": DXO, "DataKind": constants(WEIGHT_DIFF=DIFF, WEIGHTS=WHOLE, METRICS=METRICS),
            "MetaKey": constants(NUM_STEPS_CURRENT_ROUND="steps"), "from_shareable": lambda shareable: shareable["DXO"],
        },
        "nvflare.apis.filter": {"Filter": object, "ContentBlockedException": Blocked},
        "nvflare.apis.fl_constant": {
            "ReturnCode": constants(OK=OK, ERROR="ERROR", EXECUTION_EXCEPTION=FAILED),
            "FilterKey": constants(IN="in", OUT="out"),
            "FLContextKey": constants(FILTER_DIRECTION="direction", TASK_NAME="task"),
        },
        "nvflare.apis.fl_context": {"FLContext": FLContext},
        "nvflare.apis.shareable": {"Shareable": Shareable, "make_reply": make_reply},
        "nvflare.apis.utils.fl_context_utils": {"add_job_audit_event": lambda fl_ctx, msg: None},
    }  # fmt: skip
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gradveil.integrations.nvflare", raising=False)
    made = importlib.import_module("gradveil.integrations.nvflare")
    monkeypatch.setitem(sys.modules, "gradveil.integrations.nvflare", made)  # gone again after the test
    return made


def weights() -> dict[str, Any]:
    return {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "fc.bias": torch.ones(2)}


def result(kind: str = DIFF, data: dict[str, Any] | None = None, **meta: Any) -> Shareable:
    return DXO(kind, weights() if data is None else data, GOOD | {k.replace("_", "-"): v for k, v in meta.items()}
               ).to_shareable()  # fmt: skip


def spent(accounts: Path) -> float:
    return Account.read(accounts / "site-1.json", "site-1").spent if accounts.exists() else 0.0


def test_a_result_is_made_anew_of_weights_and_steps_and_is_paid_for(nvflare: ModuleType, accounts: Path) -> None:
    given = result(loss=0.3, picture=[0.1] * 64, noise="secret")
    given["picture"] = [0.1] * 64
    sent = nvflare.RecordsFilter("veil:z=2").process(given, FLContext(task="train"))
    assert {*sent} == {"DXO"}
    kept = {"defended-steps": 4, "steps": 4, "gradveil-spent": 0.25, "noise": "secret", "filter": "RecordsFilter"}
    assert sent["DXO"].meta == kept
    assert np.array_equal(sent["DXO"].data["fc.weight"], weights()["fc.weight"])
    assert torch.equal(sent["DXO"].data["fc.bias"], torch.ones(2))
    assert Account.read(accounts / "site-1.json", "site-1") == Account("site-1", 0.25, noise="secret")


@pytest.mark.parametrize("task", ["validate", "submit_model", "anything"])
def test_results_of_other_tasks_stay_unless_the_site_allows_them(
    task: str, nvflare: ModuleType, accounts: Path
) -> None:
    """On main metrics and models of other tasks passed wherever a filter was set for train alone."""
    for given in (result(), result(METRICS, {"loss": 0.3}), result(WHOLE)):
        with pytest.raises(Blocked, match="results of training alone"):
            nvflare.RecordsFilter("veil:z=2").process(given, FLContext(task=task))
        allowed = nvflare.RecordsFilter("veil:z=2", allow=[task])
        assert allowed.process(given, FLContext(task=task)) is given
    assert spent(accounts) == 0


def test_an_error_report_says_its_code_and_nothing_else(nvflare: ModuleType) -> None:
    for code, told in ((FAILED, FAILED), ("the first pixel is 0.49", "ERROR")):
        report = make_reply(code)
        report["trace"] = "the first pixel is 0.49"
        sent = nvflare.RecordsFilter("veil:z=2").process(report, FLContext(task="train"))
        assert (dict(sent), sent.code) == ({}, told)


@pytest.mark.parametrize(
    "meta",
    [
        {"spent": 0.1}, {"spent": float("nan")}, {"spent": float("inf")}, {"spent": "0.25"}, {"spent": True},
        {"spent": [0.25]}, {"defended_steps": 0}, {"defended_steps": 496256769}, {"defended_steps": 1.5},
        {"defended_steps": "4"}, {"defended_steps": [0.1] * 64}, {"noise": "simulated"}, {"noise": "loud"},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_the_meta_are_checked(meta: dict[str, Any], nvflare: ModuleType, accounts: Path) -> None:
    with pytest.raises(Blocked, match="Update withheld"):
        nvflare.RecordsFilter("veil:z=2").process(result(**meta), FLContext(task="train"))
    assert spent(accounts) == 0


def test_simulated_noise_leaves_where_the_site_says_so(nvflare: ModuleType, accounts: Path) -> None:
    simulated = nvflare.RecordsFilter("veil:z=2", noise="simulated")
    simulated.process(result(noise="simulated"), FLContext(task="train"))
    assert Account.read(accounts / "site-1.json", "site-1").noise == "simulated"


@pytest.mark.parametrize(
    "data",
    [
        {"fc.weight": np.full((2, 3), np.nan, np.float32)}, {"fc.weight": np.ones((2, 3), np.int64)},
        {"fc.weight": "picture"}, {"fc.weight": np.array([{}], object)}, {"fc.weight": np.ones((2, 4), np.float32)},
        {"picture": np.ones((2, 3), np.float32)}, {"fc.weight": np.ones((2, 3), np.complex64)},
    ],
)  # fmt: skip
def test_arrays_that_were_not_sent_or_are_no_weights_do_not_leave(
    data: dict[str, Any], nvflare: ModuleType, accounts: Path
) -> None:
    own, at = nvflare.RecordsFilter("veil:z=2"), FLContext(task="train", direction="in")
    came = result(WHOLE)
    assert own.process(came, at) is came
    at.props["direction"] = "out"
    with pytest.raises(Blocked, match="Update withheld: the result"):
        own.process(result(data=data), at)
    assert spent(accounts) == 0.25
    wide = {"fc.weight": np.ones((2, 3)), "fc.bias": torch.ones(2, dtype=torch.float64)}
    sent = own.process(result(data=wide), at)["DXO"].data
    assert (sent["fc.weight"].dtype, sent["fc.bias"].dtype) == (np.float32, torch.float32)


def test_the_budget_of_a_site_ends_its_part(nvflare: ModuleType, tmp_path: Path) -> None:
    own = nvflare.RecordsFilter("veil:z=2", str(tmp_path / "account.json"), limit=0.5)
    for _ in range(2):
        own.process(result(), FLContext(task="train"))
    with pytest.raises(Blocked, match="has spent"):
        own.process(result(), FLContext(task="train"))
