"""Audit every defence of the zoo (tests/zoo), whose truth is known, and say where the audit was wrong: `make zoo`.

    python tools/zoo.py [NAME ...] [--full] [--device cuda] [--workers 2] [--out FOLDER] [--page]

Each is attacked with newton first; what that does not expose, and what is sound, by the whole panel. A broken defence
is exposed where images are recovered or recognised in the tier that its truth names, or where its
declaration is found to be false and "nothing found" is not said. A sound one is accused where images are recovered or
recognised by a server that is oblivious or knows, or where its declaration is called false. The exit code is 1 where a
broken one is not exposed, or a sound one is accused. ``--page`` writes the table of docs/theory/probes.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pages import sections

from gradveil.auditing.audit import audit
from gradveil.countermeasures import TIERS
from gradveil.threats.rows import Line
from gradveil.threats.setup import AuditConfig
from gradveil.threats.verdict import Verdict
from zoo.keeper import BROKEN, FIRST, HALVES, SCENE, Kept, is_right, names, opened

PAGE = Path(__file__).resolve().parents[1] / "docs" / "theory" / "zoo.json"
GROUP = 6  # defences that are audited together
FULL = (
    replace(SCENE, images=16),
    replace(SCENE, dataset="mnist", model="lenet"),
    replace(SCENE, dataset="cifar10", model="lenet"),
)


@dataclass(frozen=True)
class Result:
    """What the audit says about one defence of the zoo."""

    name: str
    scene: str
    family: str
    declares: str
    sound: bool
    outcomes: dict[str, str]  # by tier
    by: str  # the strongest server and its attack
    errors: tuple[str, ...]  # declarations that were found to be false
    probe: str  # what running it found, first of all
    reason: str  # why it cannot be exposed, where that is so
    wrong: bool  # whether this is not the truth
    seconds: float  # its share of the audit of its group


def judge(group: Sequence[str], config: AuditConfig, out: Path) -> list[Result]:
    """Audit some defences of the zoo together: they share the control."""
    begun = time.monotonic()
    scene = f"{config.dataset}, {config.images} images, {config.examples} a client"
    with opened(*group) as kept:
        run = audit(defenses=group, config=config, out=out / f"{config.dataset}-{config.examples}-{group[0]}")
        found = {verdict.defense: verdict for verdict in run.verdicts}
    seconds = (time.monotonic() - begun) / len(group)
    notes = {row["defense"]: tuple(row["notes"]) for row in run.rows if row["kind"] == "probe"}
    return [_result(kept[name], scene, found[name], notes.get(name, ()), seconds) for name in group]


def _result(kept: Kept, scene: str, verdict: Verdict, notes: tuple[str, ...], seconds: float) -> Result:
    truth, tiers = kept.truth, {judged.tier: judged for judged in verdict.tiers}
    best = tiers["adaptive" if tiers["adaptive"].outcome in BROKEN else truth.tier]
    return Result(
        kept.name,
        scene,
        truth.family,
        truth.declares,
        kept.sound,
        {tier: judged.outcome for tier, judged in tiers.items()},
        _by(best.line),
        verdict.errors,
        (verdict.errors or notes or ("-",))[0],
        truth.undetectable,
        not is_right(kept, verdict),
        seconds,
    )


def _by(line: Line | None) -> str:
    if line is None or line.grade == "nothing":
        return "-"
    return f"{line.server} + {line.attack.partition(':')[0]} ({line.tier}), MSE {line.mse.mean:.2g}"


def results(wanted: Sequence[str], scenes: Iterable[AuditConfig], workers: int, out: Path) -> Iterator[Result]:
    """Audit these defences in each scene, some groups at a time; yield what was found as it comes."""
    groups: list[list[str]] = []
    for folder in HALVES:  # what holds is attacked for longer, and shares the control of that
        mine = [name for name in wanted if name in names(folder)]
        count = -(-len(mine) // GROUP)
        groups += [mine[i::count] for i in range(count)]
    again: dict[str, list[str]] = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:

        def judged(work: Sequence[tuple[Sequence[str], AuditConfig]]) -> Iterator[Result]:
            done = [pool.submit(judge, group, scene, out / f"{i}") for i, (group, scene) in enumerate(work)]
            for one in as_completed(done):
                yield from one.result()

        quick = [(group, scene) for scene in scenes for group in groups if group[0] not in names("sound")]
        for result in judged(
            [(group, replace(scene, tiers=FIRST.tiers, attacks=FIRST.attacks)) for group, scene in quick]
        ):
            if result.wrong and not result.reason:
                again.setdefault(result.name, []).append(result.scene)
            else:
                yield result
        left = [name for name in wanted if name in again]
        rest = [left[i : i + GROUP] for i in range(0, len(left), GROUP)]
        rest += [group for group in groups if group[0] in names("sound")]
        yield from judged([(group, scene) for scene in scenes for group in rest])


def table(found: Iterable[Result]) -> str:
    """Return what was found as a table, the wrong ones marked, and below it what is said of declarations."""
    head = ["", "defence", "family", "declares", "truth", *TIERS, "by", "errors", "probe", "s"]
    rows, said = [head], []
    for r in found:
        truth = "sound" if r.sound else "broken"
        mark = "WRONG" if r.wrong else ""
        outcomes = [r.outcomes.get(tier, "") for tier in TIERS]
        rows.append(
            [
                mark,
                r.name,
                r.family,
                r.declares,
                truth,
                *outcomes,
                r.by,
                str(len(r.errors)),
                r.probe[:100],
                f"{r.seconds:.0f}",
            ]
        )
        said += [f"{r.name}: {text}" for text in r.errors]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *said])


def summary(found: Sequence[Result]) -> str:
    """Return the last line: whether every broken defence was exposed, and whether a sound one was accused."""
    broken, sound = ([r for r in found if r.sound is kind] for kind in (False, True))
    accused = [r.name for r in sound if r.wrong]
    beyond = [f"{r.name}: {r.reason}" for r in broken if r.wrong and r.reason]
    missed = [r.name for r in broken if r.wrong and not r.reason]
    count = len(broken) - len(beyond)
    said = f"{count - len(missed)} of {count} broken defences that can be found are exposed"
    said += f" (missed: {', '.join(missed)})" if missed else ""
    said += f"; {len(beyond)} stay unfound, as they must ({' '.join(beyond)})" if beyond else ""
    said += f"; {len(accused)} of {len(sound)} sound ones accused"
    return said + (f" ({', '.join(accused)})." if accused else ".")


def page(found: Iterable[Result]) -> str:
    """Return what was found as data of a page."""
    rows = []
    for r in found:
        outcomes = {tier: r.outcomes.get(tier, "not_run").replace("_", " ") for tier in FIRST.tiers}
        truth = "sound" if r.sound else "broken, cannot be found" if r.reason else "broken"
        row: dict[str, Any] = {"defence": f"`{r.name}`", "family": r.family, "declares": r.declares, "truth": truth}
        said = r.reason or ("-" if r.sound else r.probe)
        rows.append(row | outcomes | {"by": r.by, "what gave it away": said})
    return sections({"Every defence of the zoo": [rows]})


def main() -> int:
    """Audit the zoo and return the exit code."""
    parser = argparse.ArgumentParser(description="Audit every defence of the zoo.")
    parser.add_argument("names", nargs="*", help="defences of the zoo; none: all")
    parser.add_argument("--full", action="store_true", help="more images, MNIST and CIFAR-10: for a GPU")
    parser.add_argument("--dataset", help="of the full scenes, that of this data set alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", action="store_true", help="write docs/theory/zoo.json")
    parser.add_argument("--out", type=Path, help="where the runs are kept, and results.json")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        scenes = [
            replace(scene, device=options.device)
            for scene in (FULL if options.full else (SCENE,))
            if options.dataset in (None, scene.dataset)
        ]
        wanted = options.names or names()
        found = []
        for result in results(wanted, scenes, options.workers, out):
            found.append(result)
            if options.out:
                (out / "results.json").write_text(json.dumps([asdict(r) for r in found], indent=1))
            said = f"{result.outcomes['adaptive']}{', WRONG' if result.wrong else ''} ({result.seconds:.0f} s)"
            print(f"{len(found)} of {len(wanted) * len(scenes)}: {result.name} {said}", file=sys.stderr, flush=True)
    found.sort(key=lambda r: (r.scene, r.sound, r.family, r.name))
    if options.page:
        PAGE.write_text(page(found))
    print(table(found))
    print(f"{summary(found)} {time.monotonic() - begun:.0f} seconds.")
    return int(any(r.wrong and not r.reason for r in found))


if __name__ == "__main__":
    sys.exit(main())
