"""What an audit in limited time did not come to, as rows: a gap is said, never left out."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from gradveil.auditing.run_folder import Row
from gradveil.auditing.shortening import Pace
from gradveil.auditing.work import Work, stand_ins
from gradveil.threats.looks import Look, first_look
from gradveil.threats.panel import Target, panel

Control = tuple[str, ...]


def control_of(target: Target) -> Control:
    """Return what names a target's control: round, weights and attack."""
    return target.look.round, target.look.weights, target.attack


def left_over(
    work: Work, paced: Pace, looks: Sequence[Look], failed: Collection[Control], why_not_trained: str
) -> list[Row]:
    """Return a row for each attack that was not tried, and for what the searches would have taken."""
    rows: list[Row] = list(paced.rows())
    scene, reached = work.scene, {look.weights for look in looks if look.round == "last"}
    everybody = frozenset((d, v) for d in scene.defenses for v in scene.victims)
    planted = {look.planted: replace(look, clients=everybody) for look in looks if look.planted}
    wanted = panel(scene, [first_look(scene), *planted.values(), *(stand_ins(scene) if scene.trains else [])])
    for target in (t for its in wanted.values() for t in its):
        short = replace(target, attack=paced.short.get(target.attack, target.attack))
        if not work.left([target]):
            continue
        trained = target.look.round == "first" or target.look.weights in reached
        more: Row = {}
        if not work.left([short]):
            why, out = f"shortened to {short.attack}: all its steps take too long", False
        elif trained and target.defense != "none" and control_of(short) in failed:
            why, out = "its control failed, so a failure would prove nothing, and no time was left", False
            more = {"control_failed": short.attack}
        else:
            why, out = "out of time" if trained else why_not_trained or "out of time in training", True
            why = f"{why}, stopped before it was done" if work.was_cut(short) else why
        rows.append(work.not_tried(target, why, out) | more)
    return rows
