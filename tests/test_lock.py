"""The lists of files by hash that `make` installs: nothing that is needed is missing, and no version has drifted."""

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from shutil import which

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
_spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
assert _spec is not None
assert _spec.loader is not None
install = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install)


def versions(path: Path) -> dict[str, str]:
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (words[0].split("==") for words in lines)}


def wanted() -> list[Requirement]:
    """What gradveil with the locked extras asks for, and what builds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = re.search(r"^LOCKED := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert extras is not None
    optional = project["project"]["optional-dependencies"]
    extra = [need for name in [*extras[1].split(","), "report"] for need in optional[name]]
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"], *extra]
    return [need for need in map(Requirement, asked) if need.name != "gradveil"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_all_that_is_asked_for_in_the_versions_of_the_constraints(path: Path) -> None:
    locked, pinned = versions(path), versions(ROOT / "constraints.txt")
    missing = [str(need) for need in wanted() if canonicalize_name(need.name) not in locked]
    assert not missing, "run make lock"
    refused = [
        str(n) for n in wanted() if not n.specifier.contains(locked[canonicalize_name(n.name)], prereleases=True)
    ]
    assert not refused, "run make lock"
    drifted = [n for n, v in locked.items() if n not in pinned or not SpecifierSet(f"=={pinned[n]}").contains(v)]
    assert not drifted, "run make lock"


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_line_of_a_lock_has_a_hash(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)


def fake_pip(monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, str]]) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        code, said = answers.pop(0)
        return subprocess.CompletedProcess(command, code, stderr=said)

    monkeypatch.setattr(install.subprocess, "run", run)
    return calls


def test_files_that_are_not_to_be_had_are_taken_by_version_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_pip(monkeypatch, [(1, "No matching distribution found for torch==2.13.0+cpu"), (0, "")])
    assert install.main(["dev", "locks/x.txt"]) == 0
    assert "--require-hashes" in calls[0]
    assert "constraints.txt" in calls[1]
    assert "--require-hashes" not in calls[1]
    assert "Installing the versions of constraints.txt" in capsys.readouterr().err


def test_another_file_under_a_locked_name_ends_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, [(1, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")])
    assert install.main(["dev", "locks/x.txt"]) == 1
    assert len(calls) == 1


def test_without_the_constrained_versions_the_newest_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, [(1, "No matching distribution found for torch==2.13.0"), (0, "")])
    assert install.main(["dev"]) == 0
    assert "-c" not in calls[-1]


def elsewhere(folder: Path) -> dict[str, str]:
    """An environment in which pip knows nothing of this machine: its default index, no local wheels."""
    (folder / "pip.conf").write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}
    return env | {"PIP_CONFIG_FILE": str(folder / "pip.conf"), "PIP_FIND_LINKS": "", "HOME": str(folder)}


def test_a_dry_run_resolves_and_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, [(0, "")])
    assert install.main(["--dry-run", "dev"]) == 0
    assert {"--dry-run", "--ignore-installed"} <= set(calls[0])
    assert ".[dev]" in calls[0]


@pytest.mark.slow
@pytest.mark.parametrize("python", [pytest.param("3.12", marks=pytest.mark.deploy), "3.13"])
def test_pip_resolves_on_other_pythons_without_local_wheels(python: str, tmp_path: Path) -> None:
    homes = Path.home() / ".pyenv" / "versions"
    found = [
        *sorted(homes.glob(f"{python}.*/bin/python3")),
        *([Path(exe)] if (exe := which(f"python{python}")) else []),
    ]
    if not found:
        pytest.skip(f"Python {python} is not here")
    env = elsewhere(tmp_path)
    asked = [found[0], "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "typing_extensions==4.12.2"]
    if subprocess.run(asked, env=env, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("no package index can be reached")
    command = [found[0], "tools/install.py", "--dry-run", ""]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "Not to be had" not in done.stderr  # the versions of constraints.txt are there for this Python
