"""What large work takes: the memory and open files of 200 rounds of 100 out of 1,000 devices, on every engine, and the
memory of an audit of an update of 1 GB, as a share of the file's size.

``load.py`` writes ``results/load.json``; ``--small`` tries it out at a twentieth of the size. Each
command runs in a process of its own; what is counted is that process and its workers. Fails where memory or handles
grow, or where an audit takes more than it may.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGINES = ("sequential", "vectorised", "processes:workers=2")
DEVICES, CLIENTS, ROUNDS = 1000, 100, 200
DATA = "made_up_patients:rows=25000"  # 20 to train on for each device
WIDTH, LAYERS = 4096, 16  # of the large model: 264 million weights for images of 3 x 32 x 32
# The most that an audit may take, in sizes of the file: the closed form, and the search that is tried by default, of
# which a step holds the model, the update, a trial gradient and its slopes. More steps take no more memory.
ATTACKS = {"analytic": 4.0, "gs:steps=2": 5.0}
FLAT = 0.02  # that memory may grow by, from the second quarter of the rounds to the last
Row = dict[str, Any]

MAKE = """
import sys
import torch
from gradveil import Batch
from gradveil.threats.trial import observe
from gradveil.auditing.update_files import write_examples, write_update
from gradveil.protection.defense import build as build_defense
from gradveil.models import build

model = build(sys.argv[1], (3, 32, 32), 10, 0)
rng = torch.Generator().manual_seed(0)
batch = Batch(torch.rand(1, 3, 32, 32, generator=rng), torch.tensor([3]))
write_examples("truth.safetensors", batch)
write_update("update.safetensors", observe(model, batch, build_defense("none"), rng, 10).update)
"""


def gradveil(*words: str) -> list[str]:
    return [sys.executable, "-m", "gradveil", *words]


def family(pid: int) -> list[Path]:
    """The folders in /proc of a process and of all that it started."""
    found, new = [], [pid]
    while new:
        place = Path("/proc", str(new.pop()))
        try:
            children = (place / "task" / place.name / "children").read_text()
        except OSError:  # it has ended
            continue
        found.append(place)
        new += map(int, children.split())
    return found


def look(pid: int) -> tuple[float, int, int]:
    """Return the megabytes that a family has to itself, its open files, and how many processes it has."""
    kilobytes = handles = count = 0
    for place in family(pid):
        try:
            said = (place / "smaps_rollup").read_text().splitlines()
            handles += len(list((place / "fd").iterdir()))
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in said if line.startswith(("Private_", "Pss_Shmem")))
        count += 1
    return kilobytes / 1024, handles, count


def train(engine: str, rounds: int, folder: Path) -> Row:
    """Train, and look at the process after every round."""
    words = ("--dataset", DATA, "--model", "mlp", "--partition", f"iid:devices={DEVICES}", "--clients", str(CLIENTS))
    command = gradveil("train", "--rounds", str(rounds), *words, "--engine", engine, "--out", "run")
    seen: dict[int, tuple[float, int, int]] = {}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        while process.poll() is None:
            time.sleep(0.01)
            path = folder / "run" / "rounds.jsonl"
            done = path.read_bytes().count(b"\n") if path.exists() else 0
            if 0 < done < rounds and done not in seen:
                seen[done] = look(process.pid)
    if process.returncode:
        raise SystemExit((folder / "said").read_text())
    quarter = rounds // 4
    early, late = (
        [seen[i] for i in range(first, first + quarter) if i in seen] for first in (quarter, rounds - quarter)
    )
    memory, handles = ([statistics.median(one[k] for one in part) for part in (early, late)] for k in (0, 1))
    return {
        "devices": DEVICES, "clients": CLIENTS, "rounds": rounds, "engine": engine, "looks": len(seen),
        "processes": max(one[2] for one in seen.values()), "megabytes": [round(m, 1) for m in memory],
        "handles": [int(h) for h in handles], "most_handles": max(one[1] for one in seen.values()),
        "flat": memory[1] <= memory[0] * (1 + FLAT) and handles[1] <= handles[0],
    }  # fmt: skip


def measured(command: Sequence[str], folder: Path) -> int:
    """Run a command and return the most memory that it had, in bytes."""
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: {process.returncode}\n{(folder / 'said').read_text()}")
    return 1024 * used.ru_maxrss


def audits(layers: int, folder: Path) -> list[Row]:
    """Make an update of a large model and audit it."""
    model = f"mlp:widths={'/'.join([str(WIDTH)] * layers)}"
    measured([sys.executable, "-c", MAKE, model], folder)
    size = (folder / "update.safetensors").stat().st_size
    idle = measured(gradveil("list"), folder)
    rows = []
    for attack, times in ATTACKS.items():
        words = ("--update", "update.safetensors", "--truth", "truth.safetensors", "--model", model, "--classes", "10")
        out = attack.partition(":")[0]
        most = measured(gradveil("audit", *words, "--attack", attack, "--out", out), folder)
        found = [json.loads(line) for line in (folder / out / "rows.jsonl").read_text().splitlines()]
        (tried,) = [row for row in found if row["kind"] == "attack"]
        row = {"bytes": size, "attack": attack, "most_bytes": most, "times": round(most / size, 2), "mse": tried["mse"]}
        rows.append(row | {"idle_bytes": idle, "within": most <= times * size})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["rounds", "update"], help="of rounds, update")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "load.json")
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.system()}
    if "rounds" in args.parts:
        found["rounds"] = []
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as place:
                found["rounds"].append(train(engine, 40 if args.small else ROUNDS, Path(place)))
                print(json.dumps(found["rounds"][-1]), flush=True)
    if "update" in args.parts:
        with tempfile.TemporaryDirectory() as place:
            found["update"] = audits(2 if args.small else LAYERS, Path(place))
    if not args.small:
        args.out.write_text(json.dumps(kept | found, indent=1) + "\n")
    grown = [row for row in found.get("rounds", []) if not row["flat"]]
    large = [row for row in found.get("update", []) if not row["within"]]
    if grown or large:
        sys.exit(f"too much: {grown + large}")


if __name__ == "__main__":
    main()
