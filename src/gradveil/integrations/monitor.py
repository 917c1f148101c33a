"""Monitor of a federated run of one's own: per round and node what leaked, what was refused, what was spent.

Whatever engine runs the training tells it of each node; it writes a run folder that ``gradveil report`` draws, one line
a round for the terminal, ``metrics.json`` for other tools, and event files for TensorBoard where they are wanted.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradveil.auditing.run_folder import ROUNDS, RunFolder, read_rows
from gradveil.auditing.train import board
from gradveil.errors import SpecError
from gradveil.files import append_line, write_atomically
from gradveil.privacy.bounds import epsilon_of

NODES, METRICS = "nodes.jsonl", "metrics.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class MonitorSettings:
    """What a monitored run is held to."""

    engine: str
    defense: str = ""  # of the run
    required: str = ""  # that every reply must state
    max_psnr: float = 0.0  # of a reconstruction: above it an update leaks too much; 0: no bound
    budget: float = 0.0  # μ that a record may lose over all rounds; 0: no bound here, nodes have their own
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if min(self.max_psnr, self.budget) < 0 or not 0 < self.delta < 1:
            raise SpecError("max_psnr and budget must not be negative, and delta lies between 0 and 1.")


@dataclass(frozen=True)
class NodeReport:
    """What is known of one node after its reply of one round; None: nothing was said."""

    node: str
    kept: bool
    reason: str = ""  # why it was not
    examples: int | None = None
    defense: str | None = None  # as the node states it
    noise: str | None = None
    leak_psnr: float | None = None  # of the example that came out best, in dB
    leak_floor: float | None = None  # what a blind guess gets
    leak_checked: int | None = None  # how many examples the two are about
    spent: float | None = None  # μ² of its records, over all rounds
    limit: float | None = None  # of it


class RunMonitor:
    """Writes what nodes did, round by round; ``halted`` says why no further round may begin."""

    def __init__(
        self,
        out: str | Path,
        settings: MonitorSettings,
        *,
        resume: bool = False,
        tensorboard: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self.say = settings, say
        self.folder = RunFolder.start(out, settings, resume)
        rows = self.folder.rounds
        self.last = max((int(row["round"]) for row in rows), default=0)
        kept = [row for row in read_rows(self.folder.path / NODES, {"round": int}) if row["round"] <= self.last]
        write_atomically(self.folder.path / NODES, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._spent: dict[str, float] = {}  # node -> μ² so far
        self._dearest = 0.0  # what a round has cost a node at most
        for row in kept:
            self._charge(str(row["node"]), row.get("spent"))
        self._board = board(self.folder.path) if tensorboard else lambda row: None
        self._now: list[NodeReport] = []

    def _charge(self, node: str, spent: float | None) -> None:
        if spent is not None:
            self._dearest = max(self._dearest, spent - self._spent.get(node, 0.0))
            self._spent[node] = max(spent, self._spent.get(node, 0.0))

    def spent_of(self, node: str) -> float:
        """Return the μ² that a node has said to have spent."""
        return self._spent.get(node, 0.0)

    @property
    def mu(self) -> float:
        """What the record that lost most has lost, in Gaussian DP."""
        return math.sqrt(max(self._spent.values(), default=0.0))

    def can_pay(self, node: str) -> bool:
        """Whether a round that costs as much as the dearest so far is within what is left of a node's budget."""
        budget = self.settings.budget
        return not budget or self.spent_of(node) + self._dearest <= budget**2 * (1 + 1e-9)

    @property
    def halted(self) -> str | None:
        """Why no further round may begin: no node that has taken part can pay for one."""
        if not self._spent or any(self.can_pay(node) for node in self._spent):
            return None
        return (
            f"μ = {self.mu:.4g} of {self.settings.budget:g} is spent, and a round costs up to μ² = {self._dearest:.4g}:"
            " no further round is begun. Plan all rounds from the start, with the noise that they need (gradveil plan)."
        )

    def add(self, number: int, seen: NodeReport) -> None:
        """Take note of a node's part in a round."""
        about = {name: value for name, value in asdict(seen).items() if value is not None}
        self._charge(seen.node, seen.spent)
        append_line(self.folder.path / NODES, json.dumps({"round": number} | _finite(about)))
        self._now.append(seen)

    def end(self, number: int, **figures: float) -> Row:
        """Close a round: write its row and the metrics, and say it."""
        seen, self._now = self._now, []
        refused = Counter(one.reason for one in seen if not one.kept)
        row: Row = {"round": number, "accepted": sum(one.kept for one in seen), "rejected": dict(refused)}
        leaks = [one for one in seen if one.leak_psnr is not None]
        if leaks:
            worst = max(leaks, key=lambda one: one.leak_psnr or -math.inf)
            row |= {"leak-psnr": worst.leak_psnr, "leak-floor": worst.leak_floor, "leak-node": worst.node}
        if self._spent:
            row |= {"mu": self.mu, "epsilon": epsilon_of(self.mu, self.settings.delta), "delta": self.settings.delta}
        row |= figures | ({"halted": self.halted} if self.halted else {})
        row = _finite(row)
        self.folder.add_round(row)
        metrics = {"rounds": self.folder.rounds, "settings": asdict(self.settings)}
        write_atomically(self.folder.path / METRICS, json.dumps(metrics, indent=1).encode())
        self._board(row)
        self.last = number
        self.say(line_of(row))
        return row

    def close(self) -> None:
        self.folder.close()


def add_figures(folder: str | Path, number: int, **figures: float) -> None:
    """Add figures to a round that is closed: accuracy, where the model is evaluated after the replies are in."""
    path = Path(folder) / ROUNDS
    rows = [r | (_finite(figures) if r["round"] == number else {}) for r in read_rows(path, {"round": int})]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def line_of(row: Row) -> str:
    """Return a round in one line."""
    parts = [f"round {row['round']}: {row['accepted']} accepted"]
    parts += [f"{count} refused ({why})" for why, count in row["rejected"].items()]
    if row.get("leak-psnr") is not None:
        floor = f", blind guess {row['leak-floor']:.1f}" if row.get("leak-floor") is not None else ""
        parts.append(f"worst leak {row['leak-psnr']:.1f} dB{floor} (node {row['leak-node']})")
    if row.get("mu") is not None:
        parts.append(f"spent μ = {row['mu']:.3g}, ε = {row['epsilon']:.3g} at δ = {row['delta']:g}")
    return "; ".join(parts) + (f". Halted: {row['halted']}" if row.get("halted") else "")


def _finite(row: Row) -> Row:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
