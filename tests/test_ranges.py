"""Every setting of every registered method takes a value and works, or refuses it in one line."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gradveil import ranges
from gradveil.attacks.base import Malicious
from gradveil.attacks.dlg import DLG
from gradveil.auditing.saved_update import UpdateAuditConfig
from gradveil.auditing.train import TrainConfig
from gradveil.cli.list import KINDS
from gradveil.errors import GradveilError, SpecError
from gradveil.federated.client import step_gradient
from gradveil.models import build_working
from gradveil.protection.defense import NoDefense, in_round
from gradveil.ranges import Count, Part, Range
from gradveil.registry import Registry, Setting, settings
from gradveil.threats.setup import AuditConfig
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update
from gradveil_studies.paper.base import Context

REGISTRIES = KINDS | {"item": "gradveil_studies.paper.base:ITEMS"}
HOSTILE = (
    "0",
    "-1",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "1e-320",
    "",
    "no such value",
    "1/2",
    "nan/nan",
    "0/1e-320",
    "\ud800",
    "a\0b",
)
SHORT = {"steps": 2, "restarts": 1, "pairs": 2, "inner": 2, "draws": 2, "rows": 8, "directions": 2}
SMALL = {"attack": SHORT | {"width": 4, "cg_steps": 2}, "defense": {"steps": 2}, "model": {"width": 4}}
SHAPE = (1, 8, 8)


def registry(kind: str) -> Registry[Any]:
    module, _, name = REGISTRIES[kind].partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def edges(setting: Setting) -> list[str]:
    """The ends of the range, but for those of whole numbers above, which are a matter of patience."""
    within = ranges.range_of(setting.type)
    if within is None:
        return []
    if isinstance(within, ranges.Among):
        return [str(one) for one in within]
    is_float = any(ranges.plain(option)[0] is float for option in ranges.options_of(setting.type))
    return [f"{within.least:g}", f"{within.most:g}"] if is_float else [f"{within.least:g}"]


CASES = [
    pytest.param(kind, name, setting, id=f"{kind}-{name}-{setting.name}")
    for kind in REGISTRIES
    for name, cls in registry(kind)
    for setting in settings(cls)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name", "setting"), CASES)
def test_a_setting_takes_a_value_and_works_or_refuses_it(
    kind: str, name: str, setting: Setting, works: "TinyScale"
) -> None:
    known = {s.name for s in settings(registry(kind).get(name))}
    short = {key: value for key, value in SMALL.get(kind, {}).items() if key in known - {setting.name}}
    runs = any(ranges.plain(option)[0] in (int, float, str) for option in ranges.options_of(setting.type))
    for text in dict.fromkeys([*HOSTILE, *edges(setting)]):
        given = ",".join(f"{key}={value}" for key, value in {**short, setting.name: text}.items())
        try:
            built = registry(kind).build(f"{name}:{given}")
            if runs:
                getattr(works, "model_" if kind == "model" else kind)(built)
        except GradveilError:
            continue


def test_every_number_has_a_range() -> None:
    for kind in REGISTRIES:
        for name, cls in registry(kind):
            for setting in settings(cls):
                numbers = [o for o in ranges.options_of(setting.type) if ranges.plain(o)[0] in (int, float)]
                assert not numbers or setting.range, f"{kind} {name}:{setting.name}"


class TinyScale:
    """Lets a method of each kind do its work once."""

    def __init__(self, model: nn.Module, batch: Batch, folder: Path) -> None:
        self.model, self.batch, self.folder = model, batch, folder
        self.public = Batch(torch.rand(20, *SHAPE, generator=fresh()), torch.arange(20) % 5)

    def attack(self, built: Any) -> None:
        one = Batch(self.batch.inputs[:1], self.batch.labels[:1])
        model = self.model
        if isinstance(built, Malicious) or built.spec_name in ("spear", "cocktail"):
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 5))
        if isinstance(built, Malicious):
            model = built.plant(model, SHAPE, 5, self.public, fresh())

        def client(examples: Batch, draws: torch.Generator) -> Params:
            return step_gradient(model, examples, NoDefense(), draws)

        seen = Observation(
            model, Update(client(one, fresh())), SHAPE, 5, client=client, public=self.public, candidates=self.batch
        )
        assert built.reconstruct(seen, fresh()).inputs.isfinite().all()

    def model_(self, built: Any) -> None:
        assert build_working(built, (1, 16, 16), 5).eval()(torch.full((1, 1, 16, 16), 0.5)).isfinite().all()

    def dataset(self, built: Any) -> None:
        for path in (self.folder / label / f"{i}.png" for label in "ab" for i in range(2)):
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
        built.load(self.folder)

    def partition(self, built: Any) -> None:
        held = np.concatenate(built.split(np.arange(400) % 2, np.random.default_rng(0)))
        assert len(held) == len(set(held.tolist())) > 0

    def defense(self, built: Any) -> None:
        sent = step_gradient(self.model, self.batch, in_round(built, self.model, self.public), fresh())
        assert all(value.isfinite().all() for value in sent.values())

    def loss(self, built: Any) -> None:
        assert built(torch.zeros(2, 5), torch.tensor([0, 1])).isfinite()

    def aggregator(self, built: Any) -> None:
        weights, memory = {"w": torch.ones(3)}, {}
        for _ in range(3):
            weights, memory = built.move(weights, {"w": torch.zeros(3)}, memory)
        assert weights["w"].isfinite().all()

    def schedule(self, built: Any) -> None:
        assert all(isfinite(built.lr(0.1, number, 10)) for number in (1, 2, 10))

    def item(self, built: Any) -> None:
        units = built.units(Context(scale="quick"))
        assert len(units) == len(set(units))

    def engine(self, built: Any) -> None:
        """It has done nothing yet that could go wrong."""


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture
def works(model: nn.Module, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyScale:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    return TinyScale(model, batch, tmp_path)


@dataclass(frozen=True)
class Own:
    """Settings that are no method's."""

    count: Count = 1
    parts: tuple[Part, ...] = (0.5,)
    size: Annotated[int, Range(2, 4, below=True)] | None = None
    name: str = ""


def test_a_range_is_said_in_words_and_held_in_python_as_well() -> None:
    ranges.check(Own(3, (1.0, 0.1), None, "a"))
    for wrong, what in (
        (Own(0), "count=0: give a whole number from 1."),
        (Own(parts=(0.5, 0.0)), "parts=0.5/0.0: give a number above 0 to 1; join several by '/'."),
        (Own(size=4), "size=4: give a whole number from 2 to below 4."),
        (Own(count=float("nan")), "count=nan"),  # type: ignore[arg-type]
        (Own(count="many"), "count=many"),  # type: ignore[arg-type]
        (Own(name="a\ud800"), "name='a\\ud800': give text without null bytes and lone surrogates."),
    ):
        with pytest.raises(SpecError, match=re.escape(what)):
            ranges.check(wrong)
    with pytest.raises(SpecError, match="dlg: steps=-1: give a whole number from 1"):
        DLG(steps=-1)


@pytest.mark.parametrize("of", [AuditConfig, TrainConfig, partial(UpdateAuditConfig, "update.safetensors")])
def test_the_settings_of_a_run_have_ranges_too(of: Callable[..., Any]) -> None:
    for name, kind in ranges.hints_of(type(of())).items():
        if ranges.range_of(kind) is not None:
            for value in (-1, 1e308, float("nan"), float("inf")):
                if value != -1 or name != "seed":
                    with pytest.raises(GradveilError, match=f"{name}="):
                        of(**{name: value})
