"""Rows that must not change when only the code's form does: record them, replay them, compare them.

    python tools/goldens.py record [CASE ...]     # write tests/goldens from the code as it is
    python tools/goldens.py check [CASE ...]      # run again and compare; every difference is printed

One thread, fixed seeds. Everything is compared exactly except the fields of ``LOOSE``, each with its reason.
"""

import argparse
import gzip
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "tests" / "goldens"
INPUTS = "inputs"  # a copy of tests/goldens/inputs, in the folder that a case runs in
TRAIN = "gradveil train --rounds 5 --clients 4 --defense representation:share=0.4 --out run"
MODEL = "--model lenet:strides=2/1 --dataset digits"
UNHURRIED = "--meter-seconds 3600"  # a busy machine must not cut the meter short
CASES = {
    "audit": [f"gradveil audit --out run {UNHURRIED}"],
    "audit-examples-8": [f"gradveil audit --out run --examples 8 {UNHURRIED}"],
    "audit-update": [
        f"gradveil audit --update {INPUTS}/update.safetensors --truth {INPUTS}/truth.safetensors {MODEL} "
        "--defense representation:share=0.4 --out run"
    ],
    "audit-update-unknown": [f"gradveil audit --update {INPUTS}/steps.safetensors {MODEL} --attack fedavg --out run"],
    "audit-table": [
        "gradveil audit --dataset breast_cancer --images 2 --rounds 2 --no-meter --attack tableak --attack analytic "
        "--defense gaussian:scale=0.01 --out run"
    ],
    "audit-text": [
        "gradveil audit --dataset manual:length=8,vocabulary=64 --images 1 --rounds 1 --no-meter --minutes 60 "
        "--attack span --attack words --defense pruning:share=0.5 --model gpt_tiny --clients 1 "
        "--batch-size 256 --lr 0.01 --out run"
    ],
    "train-veil": [
        "gradveil train --rounds 3 --clients 4 --batch-size 0 --defense veil:z=1,clip=1,tier=aggregate --seed 3 "
        "--out run"
    ],
    "train-sequential": [f"{TRAIN} --engine sequential"],
    "train-vectorised": [f"{TRAIN} --engine vectorised"],
    "train-processes": [f"{TRAIN} --engine processes:workers=2"],
    "train-flower": [f"{TRAIN} --engine flower"],
    "certify": [f"gradveil certify {MODEL} --kind local --kind global --kind box --kind reach --kind empirical --json"],
    "certify-relu": [
        "gradveil certify --model lenet:activation=relu,init=default --images 2 --kind local --kind global --json"
    ],
    "infer": [f"gradveil infer --update {INPUTS}/update.safetensors --truth {INPUTS}/truth.safetensors {MODEL} --json"],
    "reproduce": ["gradveil reproduce all --scale quick --jobs 1 --out run"],
}
FILM = "film"  # rows of an attack that was run again to be looked at; one that takes long is left out
VOLATILE = {"seconds", "folder", "date", "per_second", "bench"}
# Relative tolerance by kind of row and field. Two runs of one program differ that much, since the order of a sum in a
# convolution or a factorisation hangs on where memory lies.
LOOSE = {("", "loss"): 1e-6, ("meter", "mse"): 1e-9}


def run(case: str) -> list[dict[str, Any]]:
    """Return the rows that a case writes and prints."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(HOME / INPUTS, Path(place, INPUTS))
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        for command in CASES[case]:
            done = subprocess.run(command.split(), cwd=place, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(
                    f"{case}: {command}\nexit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                )
            if command.endswith("--json"):
                rows.append({"file": "stdout", **json.loads(done.stdout)})
        for path in sorted(Path(place).rglob("*.jsonl")):
            name = str(path.relative_to(place))
            rows += [{"file": name, **json.loads(line)} for line in path.read_text().splitlines()]
    return [_steady(row) for row in rows if row.get("kind") != FILM]


def by_unit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by file and unit of work: which unit of a run is done first says nothing of its rows."""
    return sorted(rows, key=lambda row: (row["file"], row.get("unit", "")))


def _steady(value: Any) -> Any:
    """Return the value without what changes from run to run."""
    if isinstance(value, dict):
        return {key: _steady(v) for key, v in value.items() if key not in VOLATILE}
    return [_steady(v) for v in value] if isinstance(value, list) else value


def differences(old: Any, new: Any, where: str = "", field: str = "", kind: str = "") -> Iterator[str]:
    """Yield every place where two values differ by more than the field's tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            if key not in old or key not in new:
                yield f"{where}.{key}: only in the {'old' if key in old else 'new'}"
            else:
                yield from differences(old[key], new[key], f"{where}.{key}", key, old.get("kind", ""))
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where}: {len(old)} entries, now {len(new)}"
        for i, (a, b) in enumerate(zip(old, new, strict=False)):
            yield from differences(a, b, f"{where}[{i}]", field, kind)
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=LOOSE.get((kind, field), 0.0)) and not (old != old and new != new):
            yield f"{where}: {old!r}, now {new!r}"
    elif old != new:
        yield f"{where}: {str(old)[:80]!r}, now {str(new)[:80]!r}"


def main() -> int:
    """Record or check the cases that are named; all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    wrong = 0
    for case in given.cases:
        started = time.perf_counter()
        rows, path = run(case), HOME / f"{case}.jsonl.gz"
        took = f"{time.perf_counter() - started:.0f} s"
        if given.what == "record":
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{case}: {len(rows)} rows, {took}", flush=True)
            continue
        old = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
        found = list(differences(by_unit(old), by_unit(rows)))
        wrong += bool(found)
        print(f"{case}: {len(rows)} rows, {len(found)} differences, {took}", *found[:10], sep="\n  ", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
