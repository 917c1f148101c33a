"""Build what is released into `dist` and check it: changelog, archive, wheel, its tags, an install, advisories.

Nothing is uploaded. A step that cannot be run says "not checked"; one that fails ends with a line that says why.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
GLIBC = (2, 17)  # the oldest C library that the wheel may ask for, and what its name says
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"


def run(*command: str | Path) -> None:
    """Run a command; end where it fails."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"release: {' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def section(version: str, draft: bool) -> None:
    """The changelog must have a section of this version; a draft may do without."""
    found = re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    if not found and not draft:
        raise SystemExit(f"release: CHANGELOG.md has no section ## [{version}]: give Unreleased this name and a date.")
    print(f"changelog: {'has a' if found else 'no'} section of {version}")


def newest_glibc(wheel: Path) -> tuple[int, int]:
    """Return the newest version of the C library that a compiled file of a wheel asks for."""
    with zipfile.ZipFile(wheel) as files:
        asked = [re.findall(rb"GLIBC_(\d+)\.(\d+)", files.read(n)) for n in files.namelist() if n.endswith(".so")]
    return max(((int(a), int(b)) for found in asked for a, b in found), default=(0, 0))


def build() -> Path:
    """Build the archive and the wheel; the wheel from the archive, so that nothing is missing in it."""
    shutil.rmtree(DIST, ignore_errors=True)
    call = "import setuptools.build_meta as b; b.build_sdist('dist')"
    DIST.mkdir()
    run(sys.executable, "-c", call)
    (archive,) = DIST.glob("*.tar.gz")
    settings = [f"--config-settings=--build-option=--plat-name={PLATFORM}", "--no-build-isolation", "--no-deps"]
    run(sys.executable, "-m", "pip", "wheel", "-q", *settings, "-w", DIST, archive)
    (wheel,) = DIST.glob("*.whl")
    if newest_glibc(wheel) > GLIBC:
        raise SystemExit(f"release: {wheel.name} asks for glibc {newest_glibc(wheel)}; {PLATFORM} allows {GLIBC}.")
    print(f"built: {archive.name}, {wheel.name}")
    return wheel


def try_out(wheel: Path) -> None:
    """The wheel must start in an environment that has nothing of this folder, and bring its compiled kernel."""
    with TemporaryDirectory() as folder:
        venv.create(folder, system_site_packages=False, with_pip=True)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
        site = f"import site; site.addsitedir({sys.path[-1]!r})"
        run(
            python, "-c", f"{site}; import gradveil; assert gradveil.__file__.startswith({folder!r}), gradveil.__file__"
        )
    print("wheel: installs alone and starts")


def tool(name: str, *arguments: str | Path) -> None:
    """Run a tool where it is installed."""
    program = Path(sys.executable).parent / name
    if not program.exists():
        print(f"{name}: not checked (not installed here)")
        return
    run(program, *arguments)
    print(f"{name}: passed")


def advisories() -> None:
    """Known vulnerabilities of the locked versions, where the database can be reached."""
    program = Path(sys.executable).parent / "pip-audit"
    locks = sorted((ROOT / "locks").glob("*.txt"))
    if not program.exists():
        print("known vulnerabilities: not checked (pip-audit is not installed here)")
        return
    for lock in locks:
        words = [program, "-f", "json", "--no-deps", "--disable-pip", "-r", lock]
        done = subprocess.run(words, capture_output=True, text=True)
        print(f"known vulnerabilities: {judged(lock.name, done.stdout, done.stderr)}")


def judged(name: str, answer: str, error: str) -> str:
    """Say what pip-audit found; a package that it could not look up was not checked. Ends where one is vulnerable."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        return f"not checked ({(error.strip().splitlines() or ['no answer'])[-1][:200]})"
    if known := [f"{one['name']} {one['version']}" for one in packages if one.get("vulns")]:
        raise SystemExit(f"release: {name} has known vulnerabilities: {', '.join(known)}")
    if passed_over := sum("skip_reason" in one for one in packages):
        return f"not checked for {passed_over} of the {len(packages)} packages of {name}, which the database has not"
    return f"none in the {len(packages)} packages of {name}"


def main() -> None:
    """All of it, in order."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    section(version, draft=sys.argv[1:] == ["--draft"])
    wheel = build()
    try_out(wheel)
    tool("twine", "check", "--strict", *DIST.glob("*.whl"), *DIST.glob("*.tar.gz"))
    advisories()


if __name__ == "__main__":
    main()
