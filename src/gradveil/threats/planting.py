"""What malicious servers send in place of a model, and to which clients."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from gradveil import pace
from gradveil.attacks.base import ATTACKS, Malicious
from gradveil.auditing.run_folder import Row
from gradveil.errors import GradveilError
from gradveil.registry import describe
from gradveil.threats.looks import Look
from gradveil.threats.panel import Observed, Target
from gradveil.threats.setup import Scene
from gradveil.threats.trial import oblivious

LARGEST, FEWEST = 2 * 10**7, 64  # weights that are planted in limited time, at most; and rows, at least


def plant(observed: Observed, look: Look, victims: Sequence[int] | None = None) -> tuple[list[Look], list[Row]]:
    """Return what malicious servers would send these clients (default: all) in place of a model; why others cannot."""
    scene, looks, rows = observed.scene, list[Look](), list[Row]()
    victims = scene.victims if victims is None else victims
    if "malicious" not in scene.tiers:
        return looks, rows
    for _, cls in ATTACKS:
        if not issubclass(cls, Malicious):
            continue
        whole = _of_size(cls(), scene)
        name = describe(whole)
        if pace.left() <= 0:
            break
        for attack, clients in _aimed(observed, look, whole, victims).items():
            where = (scene.dataset.input_shape, scene.num_classes, scene.public.batch.to(scene.device))
            try:
                made = attack.plant(look.model, *where, scene.seeds("plant", name))
                looks.append(replace(look, model=made, planted=name, clients=frozenset(clients)))
            except GradveilError as error:
                about = {"round": look.round, "round_number": look.round_number, "weights": look.weights}
                about |= {"attack": name, "server": name, "tier": "malicious", "why": str(error), "out_of_time": False}
                firsts = [(defense, victim * scene.config.examples) for defense, victim in clients]
                rows += [{"kind": "skip", **about, "defense": d, "example": first} for d, first in firsts]
    return looks, rows


def _of_size(attack: Malicious, scene: Scene) -> Malicious:
    """Return an attack with fewer rows where, in limited time, those on large inputs would be more than the model."""
    few = max(FEWEST, LARGEST // prod(scene.dataset.input_shape))
    rows = getattr(attack, "rows", 0)
    return replace(attack, rows=few) if scene.config.minutes is not None and rows > few else attack  # type: ignore[type-var]


def _aimed(
    observed: Observed, look: Look, attack: Malicious, victims: Sequence[int]
) -> dict[Malicious, list[tuple[str, int]]]:
    """Return which attack goes to which clients, by defence and number: it may hang on what they sent before."""
    everybody = [(defense, victim) for defense in observed.scene.defenses for victim in victims]
    if type(attack).for_client is Malicious.for_client:
        return {attack: everybody}
    aimed: dict[Malicious, list[tuple[str, int]]] = {}
    for defense, victim in everybody:
        seen = observed.seen(Target(look, defense, oblivious(), attack.spec_name, victim))
        rng = observed.scene.seeds("plant", attack.spec_name, victim)
        mine = attack if isinstance(seen, GradveilError) else attack.for_client(seen, rng)
        aimed.setdefault(mine, []).append((defense, victim))
    return aimed
