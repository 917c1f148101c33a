"""The page on NVFlare: its specs exist, and the filter takes and refuses what the page says (on a stand-in)."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import gradveil

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "defend-with-nvflare.md").read_text()
SPECS = re.findall(r"^\| `(\S+)` \| (accepted|refused)", PAGE, re.MULTILINE)


class DXO:
    """As much of NVFlare's as the filter reads."""

    def __init__(self, data_kind: str, data: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
        self.data_kind, self.data, self.meta = data_kind, data, meta or {}

    def get_meta_prop(self, name: str, default: Any) -> Any:
        return self.meta.get(name, default)

    def add_filter_history(self, name: str) -> None:
        self.meta["filter"] = name


@pytest.fixture
def nvflare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The integration on top of a stand-in for NVFlare."""
    stand_ins: dict[str, dict[str, Any]] = {
        "nvflare": {},
        "nvflare.apis": {},
        "nvflare.apis.utils": {},
        "nvflare.app_common": {},
        "nvflare.apis.event_type": {"EventType": None},
        "nvflare.app_common.app_constant": {"AppConstants": None},
        "nvflare.apis.dxo": {
            "DXO": DXO,
            "DataKind": type("DataKind", (), {"WEIGHT_DIFF": "WEIGHT_DIFF", "METRICS": "METRICS"}),
            "MetaKey": type("MetaKey", (), {"NUM_STEPS_CURRENT_ROUND": "steps"}),
            "from_shareable": None,
        },
        "nvflare.apis.filter": {"Filter": object, "ContentBlockedException": Exception},
        "nvflare.apis.fl_constant": {"ReturnCode": None, "FilterKey": None, "FLContextKey": None},
        "nvflare.apis.fl_context": {"FLContext": None},
        "nvflare.apis.shareable": {"Shareable": None, "make_reply": None},
        "nvflare.apis.utils.fl_context_utils": {"add_job_audit_event": None},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gradveil.integrations.nvflare", raising=False)
    made = importlib.import_module("gradveil.integrations.nvflare")
    monkeypatch.setitem(sys.modules, "gradveil.integrations.nvflare", made)  # gone again after the test
    return made


def test_the_page_has_specs_of_both_kinds() -> None:
    assert {said for _, said in SPECS} == {"accepted", "refused"}


@pytest.mark.parametrize(("spec", "said"), SPECS)
def test_the_filter_takes_what_the_page_says(spec: str, said: str, nvflare: ModuleType) -> None:
    change = {"fc.weight": torch.arange(1.0, 21.0)}
    update_filter = nvflare.UpdateFilter(spec, lr=0.1)
    if said == "refused":
        with pytest.raises(gradveil.GradveilError, match=r"acts inside the local steps.*on=update"):
            update_filter.defend(DXO("WEIGHT_DIFF", change))
    else:
        sent = update_filter.defend(DXO("WEIGHT_DIFF", change))
        assert not torch.equal(sent.data["fc.weight"], change["fc.weight"])


def test_every_spec_on_the_page_and_in_the_code_can_be_built(nvflare: ModuleType) -> None:
    text = PAGE + Path(str(nvflare.__file__)).read_text()
    specs = set(re.findall(r"\b(?:gaussian|laplace|pruning|representation|random_mask|decoy):[\w=.,]+\w", text))
    assert len(specs) > 4
    for spec in specs:
        gradveil.defense(spec)
