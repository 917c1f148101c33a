"""Who attacks what: each update of an attacked client, by the servers of every tier, with each attack."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import prod

import torch
from torch import Generator, nn

from gradveil import pace
from gradveil.attacks.base import ATTACKS, Kind, Malicious, is_made_for
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, Tier, plain
from gradveil.errors import GradveilError, from_defense
from gradveil.files import Row
from gradveil.modalities import Modality
from gradveil.registry import describe
from gradveil.threats.probing.function import Client
from gradveil.threats.rows import OBLIVIOUS
from gradveil.threats.setup import AuditSetup
from gradveil.threats.trial import Public, Trial, observe
from gradveil.tree import Params, parameters, size
from gradveil.types import Batch, Observation

INFORMED = "candidates"  # the attack of informed servers
LAWS = ("whiten", "orthogonal")  # countermeasures that say how likely an update is
CHUNK = 96  # trials that run together
KEPT = 2**30  # bytes of updates that are kept for the next server; beyond that they are made again
OF_LARGE = "candidates:entries=100000,shortlist=6"  # where running a client on all of a list takes long
ROUNDS = 16  # updates of one client that a multi-round server has, at most


def as_it_is(seen: Observation) -> Observation:
    """Return what is seen: the view of a server that does nothing about a defence."""
    return seen


def oblivious() -> Countermeasure:
    """The server that does not know of the defence, or does not care."""
    return replace(plain(), name=OBLIVIOUS, why="Matches everything that arrives.", tier="oblivious")


def informed(knowing: Sequence[Countermeasure]) -> Countermeasure:
    """The server that has all other records of the client, and a list of candidates for this one."""
    view = next((c.view for c in knowing if any(name in c.name for name in LAWS)), as_it_is)
    why = "Has every other record of the client and a list of candidates; picks the likeliest."
    return Countermeasure(INFORMED, why, view, INFORMED, "informed")


def marked(view: Callable[[Observation], Observation] | None) -> list[Countermeasure]:
    """The server with a list that looks at what of an update no draw changes; none where the defence leaves nothing."""
    why = "Has a list of candidates; picks the one that makes what no draw of the client changes."
    return [] if view is None else [Countermeasure("fingerprint", why, view, INFORMED, "informed")]


def patient(knowing: Sequence[Countermeasure]) -> list[Countermeasure]:
    """The servers that know the defence and have updates of many rounds: a view each, of all rounds."""
    mine = [c for c in knowing if c.attack in (None, "newton") and c.name != "undeclared"]
    return [replace(c, why=f"{c.why} Adds up the client's updates of many rounds.", tier="multi-round") for c in mine]


def inverting() -> Countermeasure:
    """The server that learns to undo the defence, from public examples that it sends through it itself."""
    why = "Runs the defence on public examples and learns to undo it."
    return replace(plain(), name="inverter", why=why, attack="inverter")


def servers_of(
    tiers: Collection[Tier],
    knowing: Sequence[Countermeasure],
    fingerprint: Callable[[Observation], Observation] | None = None,
    drawn: bool = True,
) -> list[Countermeasure]:
    """Return the servers of these tiers but malicious ones, which send a model of their own.

    ``knowing``: those that a defence's author declares, and that probing found; ``fingerprint``: what of an update no
    draw changes; ``drawn``: whether something is drawn anew in each round.
    """
    found = [oblivious()] if "oblivious" in tiers else []
    found += [server for server in knowing if server.tier in tiers]
    found += [informed(knowing), *marked(fingerprint)] if "informed" in tiers else []
    return found + (patient(knowing) if "multi-round" in tiers and drawn else [])


def attacks_of(server: Countermeasure, own: Sequence[str], modality: Modality) -> Sequence[str]:
    """Return the attacks of a server: the one it names, else the audit's own.

    Where examples are not such as the attack it names searches for, it has the audit's own as well; none, if it is
    nothing but that attack.
    """
    if server.attack is None:
        return own
    if is_made_for(server.attack, modality):
        return [server.attack]
    return [] if server.name == server.attack.partition(":")[0] else own


def listed(one: Batch, public: Public, rng: Generator) -> Batch:
    """Return a client's example among public ones, in an order that says nothing."""
    others = public.batch[: public.choices - 1].to(one.inputs.device)
    order = torch.randperm(public.choices, generator=rng)
    inputs, labels = torch.cat([one.inputs, others.inputs]), torch.cat([one.labels, others.labels])
    return Batch(inputs[order], labels[order])


@dataclass(frozen=True)
class Snapshot:
    """One federation's model in one round: what the attacked clients received."""

    round: str  # "first" or "last"
    round_number: int
    weights: str  # "start", or the defence it was trained under
    model: nn.Module
    lr: float  # of its clients' local steps
    planted: str = ""  # the attack of a malicious server that made this model
    clients: frozenset[tuple[str, int]] | None = None  # by defence and number, that get this model; None: all


def first_snapshot(scene: AuditSetup) -> Snapshot:
    """Return the model that clients receive in the first round."""
    return Snapshot("first", 1, "start", scene.model, scene.config.lr_of(1))


@dataclass(frozen=True)
class Target:
    """One update to reconstruct, by one server with one attack."""

    look: Snapshot
    defense: str
    server: Countermeasure
    attack: str
    victim: int  # which attacked client

    @property
    def about(self) -> Row:
        """What its rows say of it."""
        where = {"round": self.look.round, "round_number": self.look.round_number, "weights": self.look.weights}
        who = {"defense": self.defense, "server": self.server.name, "tier": self.server.tier, "attack": self.attack}
        return where | who


def panel(scene: AuditSetup, looks: Sequence[Snapshot]) -> dict[str, list[Target]]:
    """Return who attacks what, by attack: for each look the controls, then each defence, by tier.

    In the first round all defences start from the same weights and share one control; later each federation
    has weights of its own, and its own control at those weights.
    """
    targets: dict[str, list[Target]] = {}
    for look in looks:
        for defense, server, attack in _wanted(scene, look):
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


Wanted = tuple[str, Countermeasure, str]  # defence, server, attack


def _wanted(scene: AuditSetup, look: Snapshot) -> list[Wanted]:
    if look.planted:
        why = "Sends weights that make clients give more away."
        server = Countermeasure(look.planted.partition(":")[0], why, as_it_is, tier="malicious")
        return [(defense, server, look.planted) for defense in scene.defenses]
    tried = [d for d in scene.defenses if d != "none" and look.weights in ("start", d)]
    found: dict[tuple[str, str, str, str], Wanted] = {}

    def add(defense: str, server: Countermeasure, attack: str) -> None:
        attack = OF_LARGE if attack == INFORMED and scene.is_dear else attack
        found.setdefault((defense, server.tier, server.name, attack), (defense, server, attack))

    for attack in scene.attacks:
        add("none", oblivious(), attack)
    if "informed" in scene.tiers:
        add("none", informed(()), INFORMED)
    for defense in tried:
        probed, acting = scene.probed(defense), scene.acting(defense, look.model)
        knowing = scene.countermeasures(defense, look.model)
        for server in servers_of(scene.tiers, knowing, acting.fingerprint, probed.drawn):
            for attack in _used(scene, server):
                if server.tier in ("adaptive", "multi-round"):
                    add("none", oblivious(), attack)  # an attack is nothing without its control
                add(defense, server, attack)
    return sorted(found.values(), key=lambda one: one[0] != "none")


def _used(scene: AuditSetup, server: Countermeasure) -> list[str]:
    """Return the attacks that a server uses, with the panel's own settings; a patient one the first of them."""
    own = {spec.partition(":")[0]: spec for spec in reversed(scene.attacks)}
    used = attacks_of(server, list(scene.attacks), scene.dataset.modality)
    mine = [attack if attack in scene.attacks else own.get(attack, attack) for attack in used]
    return mine[: 1 if server.tier == "multi-round" else None]


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
    _clients: dict[tuple[int, str], Callable[..., Params]] = field(default_factory=dict)  # as servers run them
    _devices: dict[tuple[object, ...], Client] = field(default_factory=dict)  # each with a defence of its own
    _bytes: int = 0

    @cached_property
    def _public(self) -> Batch:
        return self.scene.public.batch.to(self.scene.device)

    def trial(self, target: Target) -> Trial:
        """Return the trial of a target."""
        scene, look, victim = self.scene, target.look, target.victim
        rng = scene.seeds("attack", target.attack, look.round, victim)
        attack = scene.attacks.get(target.attack, target.attack)
        first, held = victim * scene.config.examples, scene.held_by(victim)
        if (one := _one_of(target, held)) is not None:
            first, held = first + one, held[one : one + 1]
        server = replace(target.server, view=partial(self._viewed, target.server.view))
        return Trial(self._given(target), server, attack, rng, held, target.about, first)

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

    def _given(self, target: Target) -> Observation | GradveilError:
        """Return the update, and what a server of this tier has beside it."""
        seen, tier, scene = self.seen(target), target.server.tier, self.scene
        if isinstance(seen, GradveilError):
            return seen
        seen = replace(seen, public=self._public)
        if tier == "oblivious":
            return seen
        key = (id(target.look.model), target.defense)
        seen = replace(seen, client=self._clients.setdefault(key, partial(self._sent_by_server, target)))
        if tier == "informed":  # the client's example among public ones, and all that it has beside it
            held = scene.held_by(target.victim)
            several = listed(held[:1], scene.public, scene.seeds("candidates", target.victim)).to(scene.device)
            return replace(seen, candidates=several, others=held[1:].to(scene.device) if len(held) > 1 else None)
        if tier == "multi-round":
            more = [self.seen(target, again) for again in range(1, rounds_seen(scene))]
            return replace(seen, rounds=tuple(one for one in more if isinstance(one, Observation)))
        return seen

    def _sent_by_server(self, target: Target, batch: Batch, rng: Generator) -> Params:
        """Return what a client with other examples would send: the server runs the defence by itself."""
        return self.send(target, batch, rng, by_server=True).update.gradient

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
        known = rng, scene.num_classes, scene.public.prior, look.lr
        with made.running() as defense:
            return observe(look.model, batch, defense, *known, local=scene.config, modality=scene.dataset.modality)


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
                server = Countermeasure(name, "", as_it_is, tier="malicious")
                why = {"why": str(error), "out_of_time": False}
                for defense, victim in clients:
                    about = Target(look, defense, server, name, victim).about
                    rows.append({"kind": "skip", **about, "example": victim * scene.config.examples, **why})
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
