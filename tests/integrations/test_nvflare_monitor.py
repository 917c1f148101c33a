"""NVFlare: a site attacks what it is about to send, and the server checks and writes down what arrives."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants

from gradveil.auditing.run_folder import ROUNDS
from gradveil.integrations.nvflare import LeakFilter, MonitorFilter, RecordsFilter
from gradveil.report.page import write_report
from integrations.nvflare_parts import make_model, many_examples, one_example

PARTS = "integrations.nvflare_parts"
LR = 0.1


def at(direction: str, **props: Any) -> FLContext:
    found = FLContext()
    props = {FLContextKey.TASK_NAME: "train", FLContextKey.FILTER_DIRECTION: direction, **props}
    for name, value in props.items():
        found.set_prop(name, value, private=True, sticky=False)
    return found


def gradient(examples: Any) -> dict[str, np.ndarray]:
    model, (inputs, labels) = make_model(), examples()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return {name: (-LR * g).numpy() for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


def sent_by(own: LeakFilter, data: dict[str, np.ndarray], kind: str = DataKind.WEIGHT_DIFF, **meta: Any) -> Shareable:
    context = at(FilterKey.IN)
    state = {name: value.numpy() for name, value in make_model().state_dict().items()}
    own.process(DXO(DataKind.WEIGHTS, state).to_shareable(), context)
    context.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT, private=True, sticky=False)
    if kind == DataKind.WEIGHTS:
        data = {name: state[name] + value for name, value in data.items()}
    found: Shareable = own.process(DXO(kind, data, meta).to_shareable(), context)
    return found


def leak_filter(examples: str, **settings: Any) -> LeakFilter:
    own = {"model": f"{PARTS}:make_model", "examples": f"{PARTS}:{examples}", "attack": "analytic"}
    return LeakFilter(**own, lr=LR, seed=0, **settings)


@pytest.mark.parametrize("kind", [DataKind.WEIGHT_DIFF, DataKind.WEIGHTS])
def test_an_update_that_gives_an_example_away_is_withheld(kind: str) -> None:
    with pytest.raises(ContentBlockedException, match=r"rebuilt a training example at \d+"):
        sent_by(leak_filter("one_example"), gradient(one_example), kind)
    figures = from_shareable(sent_by(leak_filter("one_example", max_psnr=1000), gradient(one_example), kind)).meta
    assert figures["leak-psnr"] > 60 > figures["leak-floor"]
    assert figures["leak-checked"] == 1
    rng = np.random.default_rng(0)
    noisy = {
        name: value + 3 * rng.normal(size=value.shape).astype(np.float32)
        for name, value in gradient(one_example).items()
    }
    assert from_shareable(sent_by(leak_filter("one_example"), noisy, kind)).meta["leak-psnr"] < 20


def test_of_many_examples_a_sample_is_checked_with_the_others_known() -> None:
    with pytest.raises(ContentBlockedException, match="by knowing all others"):
        sent_by(leak_filter("many_examples"), gradient(many_examples))
    with pytest.raises(ContentBlockedException, match="which examples a step took is not known"):
        sent_by(leak_filter("many_examples"), gradient(many_examples), NUM_STEPS_CURRENT_ROUND=3)


def test_what_cannot_be_checked_does_not_leave() -> None:
    own = leak_filter("one_example")
    with pytest.raises(ContentBlockedException, match="needs the weights that came"):
        own.process(DXO(DataKind.WEIGHT_DIFF, gradient(one_example)).to_shareable(), at(FilterKey.OUT))
    with pytest.raises(ContentBlockedException, match="has no 'missing'"):
        sent_by(LeakFilter(model=f"{PARTS}:make_model", examples=f"{PARTS}:missing"), gradient(one_example))
    with pytest.raises(ContentBlockedException, match="Leave LeakFilter out"):
        sent_by(own, gradient(one_example), spent=0.25)


def arriving(
    own: MonitorFilter, node: str, number: int, data: dict[str, Any] | None = None, **meta: Any
) -> Shareable | None:
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, node, private=False, sticky=False)
    context = at(FilterKey.IN)
    context.set_peer_context(peer)
    given = gradient(one_example) if data is None else data
    result = DXO(DataKind.WEIGHT_DIFF, given, {k.replace("_", "-"): v for k, v in meta.items()}).to_shareable()
    result.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
    try:
        out: Shareable = own.process(result, context)
    except ContentBlockedException:
        return None
    return out


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]


def test_the_server_refuses_what_is_unsound_and_writes_it_down(tmp_path: Path) -> None:
    own = MonitorFilter(str(tmp_path / "run"), f"{PARTS}:make_model", max_psnr=30.0, require_steps=True)
    good = {"defended_steps": 2}
    assert arriving(own, "site-1", 0, leak_psnr=12.0, leak_floor=11.0, leak_checked=1, **good)
    assert arriving(own, "site-2", 0, {n: v * math.nan for n, v in gradient(one_example).items()}, **good) is None
    assert arriving(own, "site-3", 0) is None
    assert arriving(own, "site-4", 0, leak_psnr=45.0, leak_floor=11.0, **good) is None
    assert arriving(own, "site-5", 0, {"picture": np.ones((8, 8))}, **good) is None
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    with pytest.raises(ContentBlockedException):
        own.process(failed, at(FilterKey.IN))
    assert arriving(own, "site-1", 1, **good)
    own.handle_event(EventType.END_RUN, FLContext())
    first, second = rows(tmp_path / "run")
    assert first["accepted"] == 1
    assert first["rejected"] == {"not finite": 1, "no defence stated": 1, "leak": 1, "malformed": 1, "failed": 1}
    assert (first["leak-node"], first["leak-psnr"]) == ("site-4", 45.0)
    assert (second["round"], second["accepted"]) == (2, 1)
    page = write_report(tmp_path / "run").read_text()
    assert "2 rounds: 2 updates were averaged and 5 refused" in page
    assert "site-4" in page


def test_accounts_of_sites_add_up_and_the_budget_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path / "accounts"))
    site, server = RecordsFilter("veil:z=2"), MonitorFilter(str(tmp_path / "run"), budget=0.75)
    for number in range(4):
        meta = {"defended-steps": 4, "spent": 0.25}
        left = site.process(DXO(DataKind.WEIGHT_DIFF, gradient(one_example), meta).to_shareable(), at(FilterKey.OUT))
        passed = arriving(server, "site-1", number, gradient(one_example), **from_shareable(left).meta)
        assert (passed is not None) == (number < 2)  # 0.25 + 0.25 of 0.5625, and no third round fits
    server.handle_event(EventType.END_RUN, FLContext())
    found = rows(tmp_path / "run")
    assert [row["mu"] for row in found][:2] == pytest.approx([0.5, math.sqrt(0.5)])
    assert found[2]["rejected"] == {"budget spent": 1}
    assert "is spent" in found[2]["halted"]
