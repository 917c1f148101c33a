"""Install gradveil with its extras into the environment of this Python: `install.py [--dry-run] EXTRAS [LOCK]`.

By the hashes of a lock where all its files are to be had; else by the versions of `constraints.txt`; else the newest
that `pyproject.toml` allows. A file that is there with another hash is refused, and nothing else is tried. `--dry-run`
resolves without installing, into an environment that is taken for empty.
"""

import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-compile"]
OTHER_FILE = "DO NOT MATCH THE HASHES"
PACKAGE = ["--no-deps", "--no-build-isolation", "-e", ".", "-e", "./studies"]


def ways(extras: str, lock: str | None) -> list[tuple[str, list[list[str]]]]:
    """What is tried, one after the other: in words, and the calls of pip."""
    own = ["-e", f".[{extras}]" if extras else ".", "-e", "./studies"]
    locked = [["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(lock)], PACKAGE]
    named = [
        (
            "the versions of constraints.txt, hashes unchecked",
            [["-c", "constraints.txt", *own]],
        ),
        ("the newest versions that pyproject.toml allows", [[*own]]),
    ]
    return [("the files of the lock", locked), *named] if lock else named


def main(arguments: list[str]) -> int:
    """Return 0 as soon as one way went through."""
    dry = ["--dry-run", "--ignore-installed"] if "--dry-run" in arguments else []
    extras, *lock = [word for word in arguments if word != "--dry-run"]
    tried = ways(extras, lock[0] if lock else None)
    for (what, calls), (then, _) in zip(tried, [*tried[1:], ("", [])], strict=True):
        for call in calls:
            done = subprocess.run([*PIP, *dry, *call], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                break
        else:
            return 0
        print(done.stderr, file=sys.stderr, end="")
        if OTHER_FILE in done.stderr:
            print("A file is not the one that the lock names: nothing is installed.", file=sys.stderr)
            return 1
        if then:
            print(f"Not to be had here: {what}. Installing {then}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
