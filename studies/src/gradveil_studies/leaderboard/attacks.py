"""Every tier of servers on one defence: a row for each record that was sought."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from gradveil.attacks.base import ATTACKS, Malicious
from gradveil.auditing.certificates import figures
from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import GradveilError
from gradveil.federated.client import step_gradient
from gradveil.federated.settings import Local
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import floor_share
from gradveil.protection.defense import NoDefense, accounted, noise_row
from gradveil.threats.panel import INFORMED, inverting, marked, oblivious
from gradveil.threats.panel import patient as patient_servers
from gradveil.threats.probes import Probed, probe
from gradveil.threats.rows import lines
from gradveil.threats.setup import with_found
from gradveil.threats.trial import Trial, attack_rows, attempt, floors
from gradveil.types import Observation
from gradveil_studies.leaderboard.attacked import Client, Place, planted
from gradveil_studies.leaderboard.entries import NONE, Entry

KEPT = ("kind", "scene", "dataset", "defense", "server", "tier", "attack", "round", "round_number", "weights", "rounds",
        "example", "guess", "mse", "identified", "gallery", "converged", "why")  # fmt: skip
ONE, PLANTED = "one record", "planted"  # scenes
GOT = {"recovered", "recognised"}  # grades of lines that show images
TIMED = 9  # steps of each kind that the time is taken of


@lru_cache(maxsize=2)
def floor_rows(place: Place) -> list[Row]:
    """Return what blind guesses come to on the records of both scenes."""
    rows: list[Row] = []
    for scene, truth in ((ONE, place.truth), (PLANTED, place.others.to(place.truth.inputs.device)[:8])):
        found, _ = floors(truth, place.public)
        rows += [row | {"scene": scene} for row in found]
    return _short(rows, place)


def attacked(entries: Sequence[Entry], place: Place) -> dict[Entry, list[Row]]:
    """Return what the servers of all tiers get of each defence, and why others cannot try.

    Attacks of one kind run together. Where no server got images, those that learn to undo the defence try as well.
    """
    cases = [AttackedEntry(entry, place) for entry in entries]
    rows = _run([case.jobs() for case in cases], place)
    for case, found in zip(cases, rows, strict=True):
        found += case.skipped
    holding = [case for case, found in zip(cases, rows, strict=True) if case.holds(found)]
    for case, found in zip(holding, _run([case.learned() for case in holding], place), strict=True):
        rows[cases.index(case)] += found
    return {case.entry: [case.about(), *_short(found, place)] for case, found in zip(cases, rows, strict=True)}


def _run(jobs: Sequence[Sequence[Trial]], place: Place) -> list[list[Row]]:
    every = [trial for some in jobs for trial in some]
    results = iter(attempt(every))
    return [attack_rows(some, [next(results) for _ in some], place.public)[0] for some in jobs]


def _short(rows: Sequence[Row], place: Place) -> list[Row]:
    kept = [{key: row[key] for key in KEPT if key in row} for row in rows]
    for row in kept:
        row |= {"dataset": place.panel.dataset}
        row |= {key: float(f"{row[key]:.4g}") for key in ("mse", "identified") if key in row}
    return kept


class AttackedEntry:
    """One defence under attack."""

    def __init__(self, entry: Entry, place: Place) -> None:
        self.bare, place = place, place.of(entry)  # bare: where controls are run
        self.entry, self.place, self.defense = entry, place, place.ready(entry)
        self.skipped: list[Row] = []
        self.probed = Probed(drawn=False)
        self.knowing: tuple[Countermeasure, ...] = ()
        if entry.model:  # what makes its updates random comes after the layers that this reads
            self.knowing = (Countermeasure("analytic", "Reads the layers before it.", lambda seen: seen, "analytic"),)
        elif (
            accounted(self.defense).cost(1) is not None
        ):  # its law is what its certificate stands on: taken as declared
            self.probed = Probed()
            self.knowing = self.defense.servers(place.model)
        elif entry.spec != "none":
            local, classes, lr = Local(batch_size=None), place.dataset.num_classes, place.panel.lr
            self.probed = probe(
                self.defense, place.model, place.public.batch, 1, local, lr, place.context.seeds, classes
            )
            self.knowing = with_found(self.defense.servers(place.model), self.probed)
        self.run = place.planned(entry)
        self.rounds = self.run.participations if self.probed.drawn else 1
        self.client = Client(place, self.defense, self.rounds, entry.alone)

    def about(self) -> Row:
        """Return the row of the client that was attacked: and what its defence promises over the whole run.

        ``spent``: μ² of Gaussian DP; ``floor``: the least error that it leaves
        on Gaussian images, as a share of the blind guess's; the same number as ``gradveil plan`` says.
        """
        about: Row = {"kind": "client", "dataset": self.place.panel.dataset, "defense": self.entry.name}
        about |= {"records": self.client.size, "participations": self.run.participations}
        about |= {"errors": list(self.probed.errors)} | noise_row(self.defense)
        if (cost := accounted(self.defense).cost(self.run.epochs)) is None:
            return about
        account = Account(self.entry.name, cost * self.run.participations)
        return about | {"spent": account.spent, "floor": floor_share(account, self.place.spectra)} | self._measured()

    def _measured(self) -> Row:
        """Return the μ of one release as it was measured, as a share of the proved one."""
        place = self.place
        local, seed = place.panel.lr, place.context.seeds.seed
        found = figures(self.defense, place.model, place.public.batch, place.public.batch, "cross_entropy", local, seed)
        if "mu_measured" not in found:
            return {}
        return {"measured": {end: found[end] / found["mu_proved"] for end in ("mu_measured", "low", "high")}}

    def jobs(self) -> list[Trial]:
        """Return the attacks of every tier but what is learned."""
        found = self.oblivious()
        for server in self.knowing:
            attack = self._own(server.attack)
            if attack != self.place.panel.newton:
                found += AttackedEntry(NONE, self.bare)._each(oblivious(), attack)  # its control
            found += self._each(server, attack)
        return [*found, *self.listed(), *self.told(), *self.patient(), *self._malicious()]

    def oblivious(self) -> list[Trial]:
        """One update, as it is: of the undefended one, the control."""
        return self._each(oblivious(), self.place.panel.newton)

    def patient(self) -> list[Trial]:
        if self.probed.drawn:
            servers = patient_servers(self.knowing)
            return [trial for s in servers for trial in self._each(s, self._own(s.attack), self.rounds)]
        if self.entry.spec != "none":
            self._skip("multi-round", self.place.panel.newton, "nothing adds up: every round sends the same")
        return []

    def listed(self) -> list[Trial]:
        """Pick the record from a list: by the whole run, and by what no draw changes."""
        found = self._each(replace(plain(), name=INFORMED, tier="informed"), INFORMED, self.rounds, listed=True)
        for server in marked(self.defense.fingerprint):
            found += self._each(server, INFORMED, listed=True)
        return found

    def told(self) -> list[Trial]:
        """Seek it with its class known, by the whole run."""
        view = next(iter(patient_servers(self.knowing)), plain())
        server = replace(view, name=f"{view.name}, class known", tier="informed")
        return self._each(server, self._own(view.attack), self.rounds, told=True)

    def _malicious(self) -> list[Trial]:
        """Weights that make a client of a few records give more away."""
        found: list[Trial] = []
        for name, cls in ATTACKS:
            if not isinstance(attack := cls(), Malicious):
                continue
            rng = self.place.context.seeds("plant", name)
            server = Countermeasure(name, "Sends planted weights.", lambda seen: seen, tier="malicious")
            try:
                seen, truth = planted(self.place, self.entry, attack, rng)
            except GradveilError as error:
                self._skip("malicious", name, str(error))
                continue
            about = self._about(server, name) | {"scene": PLANTED}
            found.append(Trial(seen, server, name, rng, truth.to(self.place.truth.inputs.device), about))
        return found

    def holds(self, rows: Sequence[Row]) -> bool:
        """Return whether no server got images but from a list; the control is always tried on."""
        floor = [row for row in floor_rows(self.place) if row["scene"] == ONE]
        mine = [row | {"unit": ""} for row in rows if row["scene"] == ONE and row["attack"] != INFORMED]
        return self.entry == NONE or not {line.grade for line in lines([*floor, *mine])} & GOT

    def learned(self) -> list[Trial]:
        """Learn to undo the defence: from one round, from the mean of the whole run, and of that with the class known.

        The control is the first of these on the undefended update.
        """
        server, attack = inverting(), f"inverter:pairs={self.place.panel.pairs}"
        told = replace(server, name=f"{server.name}, class known", tier="informed")
        found = self._each(server, attack)
        found += (
            self._each(replace(server, tier="multi-round"), attack, self.rounds, mean=True) if self.rounds > 1 else []
        )
        return [*found, *self._each(told, attack, self.rounds, told=True, mean=True)]

    def tried(self, trials: Sequence[Trial]) -> list[Row]:
        return _short(_run([trials], self.place)[0], self.place)

    def _own(self, attack: str | None) -> str:
        """Return the attack that a server names, or the panel's; with the panel's settings."""
        return self.place.panel.newton if attack in (None, "newton") else attack

    def _each(
        self,
        server: Countermeasure,
        attack: str,
        rounds: int = 1,
        *,
        told: bool = False,
        listed: bool = False,
        mean: bool = False,
    ) -> list[Trial]:
        """Return one attack by one server on each record that is sought; ``mean``: on the rounds' mean."""
        trials = []
        seen: Observation | GradveilError
        after = replace(server, view=lambda seen: seen)  # the view was taken before the others were taken off
        for number in range(len(self.place.truth)):
            try:
                seen = self.client.mean_seen(number, told) if mean else self.client.seen(number, server, rounds, told)
                seen = replace(seen, candidates=self.client.candidates(number)) if listed else seen
            except GradveilError as error:
                seen = error
            rng = self.place.context.seeds("attack", attack, number)
            truth, about = self.place.truth[number : number + 1], self._about(server, attack, rounds)
            trials.append(Trial(seen, after, attack, rng, truth, about, number))
        return trials

    def _about(self, server: Countermeasure, attack: str, rounds: int = 1) -> Row:
        about = {"defense": self.entry.name, "server": server.name, "tier": server.tier, "attack": attack}
        return about | {"scene": ONE, "round": "first", "round_number": 1, "weights": "start", "rounds": rounds}

    def _skip(self, tier: str, attack: str, why: str) -> None:
        server = Countermeasure(attack, "", lambda seen: seen, tier=tier)  # type: ignore[arg-type]
        self.skipped.append({"kind": "skip"} | self._about(server, attack) | {"why": why})


def timed(entry: Entry, place: Place) -> list[Row]:
    """Return what a local step on all of a client's records takes under a defence, as a multiple of a plain one.

    The steps take turns, so that a machine that does other things at times slows both.
    """
    batch, rng = place.others, place.context.seeds("timed")
    taken: dict[str, list[float]] = {"plain": [], "defended": []}
    own = place.of(entry)
    both = (("plain", place.model, NoDefense()), ("defended", own.model, own.ready(entry)))
    for _ in range(TIMED):
        for name, model, defense in both:
            began = time.perf_counter()
            step_gradient(model, batch, defense, rng)
            if place.context.device.type == "cuda":
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - began)
    about = {"kind": "time", "dataset": place.panel.dataset, "defense": entry.name, "device": place.context.device.type}
    return [about | {"ratio": round(min(taken["defended"]) / min(taken["plain"]), 3)}]
