import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from gradveil.errors import SpecError
from gradveil.imports import is_import_path
from gradveil.registry import Registry, describe, parse, split_specs

THINGS: Registry[object] = Registry("thing", "gradveil.defenses")


@THINGS.register("widget")
@dataclass(frozen=True)
class Widget:
    """A thing."""

    share: float = 0.4
    layer: str | None = None
    names: tuple[str, ...] = ()
    scope: Literal["sample", "batch"] = "sample"
    on: bool = True
    size: int | float | None = None


def test_a_spec_sets_the_fields_and_keeps_their_types() -> None:
    built = THINGS.build("widget:share=0.25,layer=fc,names=a/b,scope=batch,on=no,size=3")
    assert built == Widget(0.25, "fc", ("a", "b"), "batch", False, 3)


def test_describe_gives_back_the_spec() -> None:
    spec = "widget:share=0.25,names=a/b"
    assert describe(THINGS.build(spec)) == spec
    assert describe(Widget()) == "widget"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("widgt", "No thing is called 'widgt'. Did you mean 'widget'?"),
        ("widget:shar=1", "Thing 'widget' has no setting 'shar'. Did you mean 'share'?"),
        ("widget:share=much", "widget:share=much: give a number."),
        ("widget:scope=all", "give one of sample, batch"),
        ("widget:share", "a setting is key=value"),
    ],
)
def test_a_wrong_spec_says_what_to_do(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(").replace("?", r"\?")):
        THINGS.build(spec)


def test_specs_are_told_from_import_paths() -> None:
    assert is_import_path("my.module:make_model")
    assert not is_import_path("lenet:activation=relu")
    assert not is_import_path("lenet")
    assert parse("a:b=c").settings == {"b": "c"}


def test_joined_specs_split_at_names_only() -> None:
    assert split_specs("a:x=1e+3+b:y=2") == ["a:x=1e+3", "b:y=2"]


def test_files_of_a_package_are_scanned_and_folders_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__.py", "method.py", "machinery/__init__.py"):
        file = tmp_path / "scanned" / "package" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    Registry("thing", "scanned.package").names()
    assert {n for n in sys.modules if n.startswith("scanned.")} == {"scanned.package", "scanned.package.method"}
