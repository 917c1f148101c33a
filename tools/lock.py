"""Write the versions and hashes of all that `make` installs into `.venv`, for this system and this Python.

`pip` resolves the extras under `constraints.txt` and says which files it would install; a later `pip install
--require-hashes` takes these files and no others. `--path` prints the name of the file and does nothing else.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
TAG = f"{platform.system()}-{platform.machine()}-cp{sys.version_info.major}{sys.version_info.minor}".lower()
PATH = Path("locks") / f"{TAG}.txt"
HEAD = """\
# Every file of {extras}, by its hash, for {tag}. Written by `make lock`; do not edit.
"""


def resolved(extras: str) -> list[dict]:
    """What pip would install into an empty environment; gradveil itself left out."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
            "--only-binary",
            ":all:",
        ]
        wanted = ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{extras}]", "setuptools"]
        subprocess.run([*pip, "--report", str(report), *wanted], check=True)
        return [item for item in json.loads(report.read_text())["install"] if not item.get("is_direct")]


def line(item: dict) -> str:
    """One requirement: its name, its version and the hash of its file."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    return f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}\n"


def main(arguments: list[str]) -> None:
    """`--path`, or the extras to lock."""
    if arguments == ["--path"]:
        print(PATH)
        return
    (extras,) = arguments
    items = sorted(resolved(extras), key=lambda item: item["metadata"]["name"].lower())
    (ROOT / PATH).parent.mkdir(exist_ok=True)
    (ROOT / PATH).write_text(HEAD.format(extras=f"gradveil[{extras}]", tag=TAG) + "".join(map(line, items)))
    print(f"{PATH}: {len(items)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
