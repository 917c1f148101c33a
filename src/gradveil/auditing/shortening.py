"""What attacks take, by the pieces that were done; and how many steps of a search fit into a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gradveil.attacks.base import build as build_attack
from gradveil.auditing.run_folder import Row
from gradveil.auditing.work import Spent
from gradveil.registry import describe
from gradveil.threats.panel import kind_of
from gradveil.threats.setup import Scene

FEWEST = 50  # steps that a search is shortened to
DEAR = 2.0  # a step of a search, in gradients of a client's step, before one was taken
FIRST = {"search": 20.0, "learned": 300.0}  # gradients that a first step takes, where that is not known
MORE = 1.5  # times the steps, at least, where a search is done again


@dataclass
class Pace:
    """What attacks take here."""

    scene: Scene
    gradient: float  # seconds of the gradient of a client's local step
    each: dict[str, float] = field(default_factory=dict)  # seconds of an attack on one update, to its end
    a_step: dict[str, float] = field(default_factory=dict)  # seconds of a step, by attack as it was asked for
    short: dict[str, str] = field(default_factory=dict)  # attack -> what it was shortened to
    least: dict[str, float] = field(default_factory=dict)  # seconds of its first steps, of one that was stopped

    def fit(self, attack: str, seconds: float) -> bool:
        """Shorten a search to what one update can have in this time; return whether that is more than it had."""
        built: Any = self.scene.attacks.get(attack) or build_attack(attack)
        steps, before = getattr(built, "steps", 0), self._steps(self.short.get(attack, ""))
        known = self.knows(attack)
        if built.kind != "search" or steps < 2 * FEWEST or not hasattr(built, "spec_name"):
            return not known
        a_step = self.a_step.get(attack, DEAR * self.gradient * self.scene.config.planned.num_steps)
        wanted = steps if a_step * steps <= seconds else max(FEWEST, int(seconds / a_step) // 10 * 10)
        if known and (attack in self.each or wanted < MORE * before):
            return False
        if wanted < steps:
            self.short[attack] = describe(replace(built, steps=wanted))
        else:
            self.short.pop(attack, None)
        return True

    def _steps(self, spec: str) -> int:
        return getattr(build_attack(spec), "steps", 0) if spec else 0

    def knows(self, attack: str) -> bool:
        """Return whether an attack was begun, shortened or not."""
        return attack in self.short or attack in self.each

    def cost(self, attack: str, most: float) -> float:
        """Return the seconds of an attack on one update in so many steps at most; 0: not known."""
        a_step, each = self.a_step.get(self._asked(attack), math.inf), self.each.get(attack, 0.0)
        return min(each, a_step * most) if math.isfinite(most) else each

    def _asked(self, attack: str) -> str:
        return next((name for name, short in self.short.items() if short == attack), attack)

    def is_worth(self, attack: str, seconds: float) -> bool:
        """Return whether an attack may be begun: whether its first steps do not take longer than that."""
        known = FIRST.get(kind_of(self.scene, attack), 0.0) * self.gradient
        return self.least.get(attack, known) <= seconds

    def learn(self, attack: str, spent: Spent, count: int) -> None:
        """Note what a piece of so many updates took."""
        self.each[attack] = max(spent.whole / count, 1e-9)
        asked = self._asked(attack)
        if spent.late:
            self.least[attack] = spent.seconds / max(1, spent.steps)
        if spent.steps:
            self.a_step[asked] = spent.seconds / count / spent.steps

    def rows(self) -> Iterator[Row]:
        """Yield what the searches that were shortened, or stopped, would take in full."""
        for attack, seconds in self.a_step.items():
            built: Any = self.scene.attacks.get(attack) or build_attack(attack)
            steps = getattr(built, "steps", 0)
            if steps and built.kind == "search":
                yield {"kind": "cost", "attack": attack, "short": self.short.get(attack, attack), "steps": steps,
                       "seconds": seconds * steps}  # fmt: skip
