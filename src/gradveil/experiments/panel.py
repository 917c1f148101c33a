"""Who attacks what: each update of an attacked client, by each server, with each attack."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gradveil.countermeasures import Countermeasure
from gradveil.errors import UpdateError
from gradveil.experiments.looks import Look
from gradveil.experiments.rows import NAIVE
from gradveil.experiments.run_folder import Row
from gradveil.experiments.scene import Scene
from gradveil.experiments.trial import Trial, naive, observe
from gradveil.tree import size
from gradveil.types import Observation

CHUNK = 96  # trials that run together
KEPT = 2**30  # bytes of updates that are kept for the next server; beyond that they are made again


@dataclass(frozen=True)
class Target:
    """One update to reconstruct, by one server with one attack."""

    look: Look
    defense: str
    server: Countermeasure
    attack: str
    victim: int  # which attacked client


def panel(scene: Scene, looks: Sequence[Look]) -> dict[str, list[Target]]:
    """Return who attacks what, by attack: for each look the control, then each defence, naive and adaptive.

    In the first round all defences start from the same weights and share one control; later each federation
    has weights of its own, and its own control at those weights.
    """
    targets: dict[str, list[Target]] = {}
    for look in looks:
        tried = [d for d in scene.defenses if d != "none" and look.weights in ("start", d)]
        wanted: dict[tuple[str, str, str], Countermeasure] = {("none", NAIVE, a): naive() for a in scene.attacks}
        for defense in tried:
            wanted |= {(defense, NAIVE, a): naive() for a in scene.attacks}
            for server in scene.countermeasures(defense, look.model):
                used = [_own_name(scene, server.attack)] if server.attack else list(scene.attacks)
                wanted |= {("none", NAIVE, a): naive() for a in used}  # an attack is nothing without its control
                wanted |= {(defense, server.name, a): server for a in used}
        for (defense, _, attack), server in wanted.items():
            mine = [Target(look, defense, server, attack, victim) for victim in scene.victims]
            targets.setdefault(attack, []).extend(mine)
    return targets


def _own_name(scene: Scene, attack: str) -> str:
    """Return the panel's own settings of an attack that a countermeasure names without any."""
    return next((spec for spec in scene.attacks if spec.partition(":")[0] == attack), attack)


def chunks(targets: Sequence[Target]) -> list[Sequence[Target]]:
    """Cut targets into parts of nearly equal size that run together; a part is the unit of work."""
    count = -(-len(targets) // CHUNK)
    edges = [round(i * len(targets) / count) for i in range(count + 1)]
    return [targets[a:b] for a, b in pairwise(edges)]


@dataclass
class Observed:
    """What the attacked clients sent: each update is made once, however many servers and attacks look at it."""

    scene: Scene
    _kept: dict[tuple[str, str, str, int], Observation | UpdateError] = field(default_factory=dict)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._num_classes = self.scene.num_classes

    def trial(self, target: Target) -> Trial:
        """Return the trial of a target."""
        scene, look, victim = self.scene, target.look, target.victim
        rng = scene.seeds("attack", target.attack, look.round, victim)
        attack = scene.attacks.get(target.attack, target.attack)
        first = victim * scene.config.examples
        return Trial(self.seen(target), target.server, attack, rng, scene.held_by(victim), self.about(target), first)

    def about(self, target: Target) -> Row:
        """Return what the rows of a target say of it."""
        return {
            "round": target.look.round,
            "round_number": target.look.round_number,
            "weights": target.look.weights,
            "defense": target.defense,
            "server": target.server.name,
            "attack": target.attack,
        }

    def seen(self, target: Target) -> Observation | UpdateError:
        """Return what arrived from the client after its local training, or why nothing did."""
        key = (target.look.round, target.look.weights, target.defense, target.victim)
        if key in self._kept:
            return self._kept[key]
        seen = self._observe(target)
        self._bytes += 0 if isinstance(seen, UpdateError) else 4 * size(seen.update.gradient)
        if self._bytes <= KEPT:
            self._kept[key] = seen
        return seen

    def _observe(self, target: Target) -> Observation | UpdateError:
        scene, look, defense = self.scene, target.look, self.scene.defenses[target.defense]
        rng = scene.seeds("defense", target.defense, look.round, target.victim)
        batch, prior = scene.held_by(target.victim).to(scene.device), scene.public.prior
        lr = scene.config.lr_of(look.round_number)
        try:
            return observe(look.model, batch, defense, rng, self._num_classes, prior, lr, local=scene.config)
        except UpdateError as error:
            return error
