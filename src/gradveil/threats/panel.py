"""Who attacks what: each update of an attacked client, by the servers of every tier, with each attack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod

from torch import Generator

from gradveil import pace
from gradveil.attacks.base import ATTACKS, Kind, Malicious
from gradveil.attacks.base import build as build_attack
from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Countermeasure
from gradveil.errors import GradveilError, from_defense
from gradveil.registry import describe
from gradveil.threats.probing.function import Client
from gradveil.threats.servers import INFORMED, Servers, as_it_is, attacks_of, informed, inverting, listed, oblivious
from gradveil.threats.setup import AuditSetup
from gradveil.threats.snapshots import Snapshot
from gradveil.threats.trial import Trial, observe
from gradveil.tree import Params, parameters, size
from gradveil.types import Batch, Observation

CHUNK = 96  # trials that run together
KEPT = 2**30  # bytes of updates that are kept for the next server; beyond that they are made again
OF_LARGE = "candidates:entries=100000,shortlist=6"  # where running a client on all of a list takes long
ROUNDS = 16  # updates of one client that a multi-round server has, at most


@dataclass(frozen=True)
class Target:
    """One update to reconstruct, by one server with one attack."""

    look: Snapshot
    defense: str
    server: Countermeasure
    attack: str
    victim: int  # which attacked client


def panel(scene: AuditSetup, looks: Sequence[Snapshot]) -> dict[str, list[Target]]:
    """Return who attacks what, by attack: for each look the controls, then each defence, by tier.

    In the first round all defences start from the same weights and share one control; later each federation
    has weights of its own, and its own control at those weights.
    """
    targets: dict[str, list[Target]] = {}
    for look in looks:
        wanted = _planted(scene, look) if look.planted else _wanted(scene, look)
        for defense, server, attack in wanted:
            clients = [v for v in scene.victims if look.clients is None or (defense, v) in look.clients]
            mine = [Target(look, defense, server, attack, victim) for victim in clients]
            targets.setdefault(attack, []).extend(mine)
    return targets


def last_resort(scene: AuditSetup, look: Snapshot, holding: Sequence[str]) -> dict[str, list[Target]]:
    """Return the attack that learns to undo any defence, on the defences that hold so far: it takes long.

    In the first round only. Where attacks were named, and so the tiers beyond ``knows`` are left out, it is as well.
    """
    server = inverting()
    if not holding or "adaptive" not in scene.tiers or set(scene.tiers) <= {"oblivious", "adaptive"}:
        return {}
    mine = [
        Target(look, defense, server, server.name, victim) for defense in ("none", *holding) for victim in scene.victims
    ]
    return {server.name: mine}


Wanted = list[tuple[str, Countermeasure, str]]  # defence, server, attack


def _wanted(scene: AuditSetup, look: Snapshot) -> Wanted:
    tried = [d for d in scene.defenses if d != "none" and look.weights in ("start", d)]
    found: dict[tuple[str, str, str, str], tuple[str, Countermeasure, str]] = {}

    def add(defense: str, server: Countermeasure, attack: str) -> None:
        attack = OF_LARGE if attack == INFORMED and scene.is_dear else attack
        found.setdefault((defense, server.tier, server.name, attack), (defense, server, attack))

    for attack in scene.attacks:
        add("none", oblivious(), attack)
    if "informed" in scene.tiers:
        add("none", informed(()), INFORMED)
    for defense in tried:
        probed, acting = scene.probed(defense), scene.acting(defense, look.model)
        servers = Servers(scene.countermeasures(defense, look.model), acting.fingerprint, probed.drawn)
        for server in servers.of(scene.tiers):
            for attack in _used(scene, server):
                if server.tier in ("adaptive", "multi-round"):
                    add("none", oblivious(), attack)  # an attack is nothing without its control
                add(defense, server, attack)
    return sorted(found.values(), key=lambda one: one[0] != "none")


def _planted(scene: AuditSetup, look: Snapshot) -> Wanted:
    server = Countermeasure(
        look.planted.partition(":")[0], "Sends weights that make clients give more away.", as_it_is, tier="malicious"
    )
    return [(defense, server, look.planted) for defense in scene.defenses]


def _used(scene: AuditSetup, server: Countermeasure) -> list[str]:
    """Return the attacks that a server uses; a patient one the first of the audit's own."""
    used = attacks_of(server, list(scene.attacks), scene.dataset.modality)
    return [_own_name(scene, attack) for attack in used][: 1 if server.tier == "multi-round" else None]


def _own_name(scene: AuditSetup, attack: str) -> str:
    """Return the panel's own settings of an attack that a countermeasure names without any."""
    named = (spec for spec in scene.attacks if spec.partition(":")[0] == attack)
    return attack if attack in scene.attacks else next(named, attack)


def kind_of(scene: AuditSetup, attack: str) -> Kind:
    """Return what an attack of the audit, or of a server, is known to take."""
    return build_attack(scene.attacks.get(attack, attack)).kind


def rounds_seen(scene: AuditSetup) -> int:
    """Return how many updates of a client a multi-round server has: as many as memory allows."""
    update = 4 * size(parameters(scene.model)) * len(scene.victims)
    return max(2, min(ROUNDS, KEPT // update))


def _one_of(target: Target, held: Batch) -> int | None:
    """Return which example of a client's a server is after, None: all of them. The informed one misses the first."""
    if target.server.tier == "informed":
        return 0
    built = build_attack(target.attack) if target.look.planted else None
    return built.after(target.look.model, held) if isinstance(built, Malicious) else None


def chunks(targets: Sequence[Target]) -> list[Sequence[Target]]:
    """Cut targets into parts of nearly equal size that run together; a part is the unit of work."""
    count = -(-len(targets) // CHUNK)
    edges = [round(i * len(targets) / count) for i in range(count + 1)]
    return [targets[a:b] for a, b in pairwise(edges)]


@dataclass
class ClientUpdates:
    """What the attacked clients sent: each update is made once, however many servers and attacks look at it."""

    scene: AuditSetup
    _kept: dict[tuple[str | int, ...], Observation | GradveilError] = field(default_factory=dict)
    _views: dict[tuple[object, ...], tuple[Observation, Observation]] = field(default_factory=dict)
    _clients: dict[tuple[int, str], "_Client"] = field(default_factory=dict)
    _devices: dict[tuple[object, ...], Client] = field(default_factory=dict)  # each with a defence of its own
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._num_classes = self.scene.num_classes
        self._public = self.scene.public.batch.to(self.scene.device)

    def trial(self, target: Target) -> Trial:
        """Return the trial of a target."""
        scene, look, victim = self.scene, target.look, target.victim
        rng = scene.seeds("attack", target.attack, look.round, victim)
        attack = scene.attacks.get(target.attack, target.attack)
        first, held = victim * scene.config.examples, scene.held_by(victim)
        if (one := _one_of(target, held)) is not None:
            first, held = first + one, held[one : one + 1]
        server = replace(target.server, view=partial(self._viewed, target.server.view))
        return Trial(self._given(target), server, attack, rng, held, self.about(target), first)

    def _viewed(self, view: Callable[[Observation], Observation], seen: Observation) -> Observation:
        """Return a view of one update; worked out once, whichever attacks and tiers it is for."""
        key = (view, id(seen.update), seen.candidates is None, seen.labels is None)
        if key not in self._views:
            found = view(seen)
            self._bytes += 0 if found is seen else 4 * size(found.update.gradient)
            if found is seen or self._bytes > KEPT:
                return found
            self._views[key] = (seen, found)  # what was seen is held as well, so that no other update gets its id
        return self._views[key][1]

    def about(self, target: Target) -> Row:
        """Return what the rows of a target say of it."""
        return {
            "round": target.look.round,
            "round_number": target.look.round_number,
            "weights": target.look.weights,
            "defense": target.defense,
            "server": target.server.name,
            "tier": target.server.tier,
            "attack": target.attack,
        }

    def _given(self, target: Target) -> Observation | GradveilError:
        """Return the update, and what a server of this tier has beside it."""
        seen, tier = self.seen(target), target.server.tier
        if isinstance(seen, GradveilError) or tier == "oblivious":
            return seen if isinstance(seen, GradveilError) else replace(seen, public=self._public)
        client = self._clients.setdefault((id(target.look.model), target.defense), _Client(self, target))
        seen = replace(seen, client=client, public=self._public)
        if tier == "informed":
            return replace(seen, candidates=self._candidates(target.victim), others=self._others(target.victim))
        if tier == "multi-round":
            more = [self.seen(target, again) for again in range(1, rounds_seen(self.scene))]
            return replace(seen, rounds=tuple(one for one in more if isinstance(one, Observation)))
        return seen

    def _candidates(self, victim: int) -> Batch:
        """Return the client's example among public ones."""
        rng = self.scene.seeds("candidates", victim)
        return listed(self.scene.held_by(victim)[:1], self.scene.public, rng).to(self.scene.device)

    def _others(self, victim: int) -> Batch | None:
        held = self.scene.held_by(victim)
        return held[1:].to(self.scene.device) if len(held) > 1 else None

    def seen(self, target: Target, again: int = 0) -> Observation | GradveilError:
        """Return what arrived from the client after its local training, or why nothing did; ``again``: once more."""
        look = target.look
        key = (look.round, look.weights, look.planted, target.defense, target.victim, again)
        if key in self._kept:
            return self._kept[key]
        seen = self._observe(target, again)
        self._bytes += 0 if isinstance(seen, GradveilError) else 4 * size(seen.update.gradient)
        if self._bytes <= KEPT:
            self._kept[key] = seen
        return seen

    def _observe(self, target: Target, again: int) -> Observation | GradveilError:
        repeat = ("again", again) if again else ()
        rng = self.scene.seeds("defense", target.defense, target.look.round, target.victim, *repeat)
        batch = self.scene.held_by(target.victim).to(self.scene.device)
        try:
            return self.send(target, batch, rng)
        except Exception as error:
            if not isinstance(told := from_defense(error), GradveilError):
                raise
            return told

    def send(self, target: Target, batch: Batch, rng: Generator, by_server: bool = False) -> Observation:
        """Return what the server sees of a client with these examples; or makes by itself, without its secrets."""
        scene, look = self.scene, target.look
        acting = scene.acting(target.defense, look.model)
        key = (look.round, look.weights, look.planted, target.defense, target.victim)
        made = Client(acting.for_server()) if by_server else self._devices.setdefault(key, Client(acting))
        lr, prior = scene.config.lr_of(look.round_number), scene.public.prior
        rest = (lr, False, (0.0, 1.0), scene.config, scene.dataset.modality)
        with made.running() as defense:
            return observe(look.model, batch, defense, rng, self._num_classes, prior, *rest)


@dataclass(frozen=True, eq=False)
class _Client:
    """What a client with other examples would send: the server runs the defence by itself."""

    observed: ClientUpdates
    target: Target

    def __call__(self, batch: Batch, rng: Generator) -> Params:
        return self.observed.send(self.target, batch, rng, by_server=True).update.gradient


LARGEST, FEWEST = 2 * 10**7, 64  # weights that are planted in limited time, at most; and rows, at least


def plant(
    observed: ClientUpdates, look: Snapshot, victims: Sequence[int] | None = None
) -> tuple[list[Snapshot], list[Row]]:
    """Return what malicious servers would send these clients (default: all) in place of a model; why others cannot."""
    scene, looks, rows = observed.scene, list[Snapshot](), list[Row]()
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


def _of_size(attack: Malicious, scene: AuditSetup) -> Malicious:
    """Return an attack with fewer rows where, in limited time, those on large inputs would be more than the model."""
    few = max(FEWEST, LARGEST // prod(scene.dataset.input_shape))
    rows = getattr(attack, "rows", 0)
    return replace(attack, rows=few) if scene.config.minutes is not None and rows > few else attack  # type: ignore[type-var]


def _aimed(
    observed: ClientUpdates, look: Snapshot, attack: Malicious, victims: Sequence[int]
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
