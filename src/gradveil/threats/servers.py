"""Servers that attack the updates of one defence: who they are, tier by tier, and which attacks they use."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator

from gradveil.attacks.base import is_made_for
from gradveil.countermeasures import Countermeasure, Tier, plain
from gradveil.modalities import Modality
from gradveil.threats.probes import Probed
from gradveil.threats.rows import OBLIVIOUS
from gradveil.threats.trial import Public
from gradveil.types import Batch, Observation

INFORMED = "candidates"  # the attack of informed servers
LAWS = ("whiten", "orthogonal")  # countermeasures that say how likely an update is


def as_it_is(seen: Observation) -> Observation:
    """Return what is seen: the view of a server that does nothing about a defence."""
    return seen


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


def oblivious() -> Countermeasure:
    """The server that does not know of the defence, or does not care."""
    return replace(plain(), name=OBLIVIOUS, why="Matches everything that arrives.", tier="oblivious")


def with_found(declared: Sequence[Countermeasure], probed: Probed) -> tuple[Countermeasure, ...]:
    """Return the servers that a defence declares, and those that probing it found, whatever they are called."""
    taken = {c.name for c in declared}
    return (*declared, *(replace(c, name=f"found {c.name}") if c.name in taken else c for c in probed.servers))


@dataclass(frozen=True)
class Servers:
    """Who attacks the updates of one defence."""

    knowing: Sequence[Countermeasure]  # that its author declares, and that probing found
    fingerprint: Callable[[Observation], Observation] | None = None  # what of an update no draw changes
    drawn: bool = True  # whether something is drawn anew in each round

    def of(self, tiers: Collection[Tier]) -> list[Countermeasure]:
        """Return the servers of these tiers but malicious ones, which send a model of their own."""
        found = [oblivious()] if "oblivious" in tiers else []
        found += [server for server in self.knowing if server.tier in tiers]
        found += [informed(self.knowing), *marked(self.fingerprint)] if "informed" in tiers else []
        return found + (patient(self.knowing) if "multi-round" in tiers and self.drawn else [])


def informed(knowing: Sequence[Countermeasure]) -> Countermeasure:
    """The server that has all other records of the client, and a list of candidates for this one."""
    view = next((c.view for c in knowing if any(name in c.name for name in LAWS)), as_it_is)
    why = "Has every other record of the client and a list of candidates; picks the likeliest."
    return Countermeasure(INFORMED, why, view, INFORMED, "informed")


def marked(view: Callable[[Observation], Observation] | None) -> list[Countermeasure]:
    """The server with a list that looks at what of an update no draw changes; none where the defence leaves nothing."""
    if view is None:
        return []
    why = "Has a list of candidates; picks the one that makes what no draw of the client changes."
    return [Countermeasure("fingerprint", why, view, INFORMED, "informed")]


def patient(knowing: Sequence[Countermeasure]) -> list[Countermeasure]:
    """The servers that know the defence and have updates of many rounds: a view each, of all rounds."""
    mine = [c for c in knowing if c.attack in (None, "newton") and c.name != "undeclared"]
    return [replace(c, why=f"{c.why} Adds up the client's updates of many rounds.", tier="multi-round") for c in mine]


def inverting() -> Countermeasure:
    """The server that learns to undo the defence, from public examples that it sends through it itself."""
    why = "Runs the defence on public examples and learns to undo it."
    return replace(plain(), name="inverter", why=why, attack="inverter")


def listed(one: Batch, public: Public, rng: Generator) -> Batch:
    """Return a client's example among public ones, in an order that says nothing."""
    others = public.batch[: public.choices - 1].to(one.inputs.device)
    order = torch.randperm(public.choices, generator=rng)
    inputs, labels = torch.cat([one.inputs, others.inputs]), torch.cat([one.labels, others.labels])
    return Batch(inputs[order], labels[order])
