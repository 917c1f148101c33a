"""What `make release` and `make sbom` would say, without building anything."""

import json
import re
import runpy
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

TOOLS = Path(__file__).parents[1] / "tools"


def test_a_wheel_that_asks_for_a_newer_c_library_is_noticed(tmp_path: Path) -> None:
    newest = runpy.run_path(str(TOOLS / "release.py"))["newest_glibc"]
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr("a/kernel.so", b"\0GLIBC_2.2.5\0GLIBC_2.14\0")
        wheel.writestr("a/page.txt", b"GLIBC_2.38")
    assert newest(tmp_path / "one.whl") == (2, 14)
    with zipfile.ZipFile(tmp_path / "two.whl", "w") as wheel:
        wheel.writestr("a/kernel.so", b"\0GLIBC_2.34\0GLIBC_2.9\0")
    assert newest(tmp_path / "two.whl") > (2, 17)


def test_a_version_without_a_section_is_no_release() -> None:
    section = runpy.run_path(str(TOOLS / "release.py"))["section"]
    section("99.0", draft=True)
    with pytest.raises(SystemExit, match=r"no section ## \[99\.0\]"):
        section("99.0", draft=False)


def test_packages_that_no_advisory_was_looked_up_for_are_no_all_clear() -> None:
    judged = runpy.run_path(str(TOOLS / "release.py"))["judged"]
    good, bad = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "version": "2", "vulns": [{"id": "X"}]}
    unknown = {"name": "c", "skip_reason": "could not be audited"}
    assert judged("lock", json.dumps({"dependencies": [good]}), "") == "none in the 1 packages of lock"
    said = judged("lock", json.dumps({"dependencies": [good, unknown]}), "No known vulnerabilities found")
    assert said.startswith("not checked for 1 of the 2 packages")
    assert judged("lock", "", "vulnerability service\nno route") == "not checked (no route)"
    with pytest.raises(SystemExit, match="lock has known vulnerabilities: b 2"):
        judged("lock", json.dumps({"dependencies": [good, bad, unknown]}), "")


def test_the_list_of_parts_has_every_package_with_version_licence_and_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TOOLS.parent)
    runpy.run_path(str(TOOLS / "sbom.py"))["main"](tmp_path)
    found = json.loads((tmp_path / "sbom.json").read_text())
    parts = {part["name"]: part for part in found["components"]}
    assert {"torch", "numpy", "safetensors", "flwr", "sympy"} <= parts.keys()  # sympy: torch's
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{parts['numpy']['version']}"
    assert found["metadata"]["component"]["name"] == "gradveil"
    table = (tmp_path / "licences.md").read_text()
    assert len(table.splitlines()) == len(parts) + 2
    assert "| safetensors |" in table
    assert "Apache" in next(line for line in table.splitlines() if line.startswith("| safetensors |"))


def test_the_librarys_wheel_holds_nothing_of_the_studies() -> None:
    root = TOOLS.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    packages = find_packages(str(root / "src"))
    assert project["tool"]["setuptools"]["packages"]["find"]["where"] == ["src"]
    assert packages[:1] == ["gradveil"]
    assert all(name.split(".")[0] == "gradveil" for name in packages)
    assert not [name for name in packages if {"paper", "leaderboard", "play", "bench"} & set(name.split("."))]
    own = tomllib.loads((root / "studies" / "pyproject.toml").read_text())
    assert "gradveil-studies" not in " ".join(project["project"]["dependencies"])
    assert any(need.startswith("gradveil") for need in own["project"]["dependencies"])
    assert own["project"]["version"] == project["project"]["version"]
    library = "\n".join(path.read_text() for path in (root / "src").rglob("*.py"))
    assert not re.search(r"^\s*(from|import) gradveil_studies", library, re.MULTILINE)
