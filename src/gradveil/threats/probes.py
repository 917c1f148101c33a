"""What is secret in a defence: found by running it on public examples, whatever its author declares.

A defence is run as a client runs it, with chosen secrets, on gradients of public examples and on made ones. What it
does to them is looked for among known formulas; what is found becomes a server of the audit, and what contradicts the
declaration is said first.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, Tier, drop
from gradveil.defenses.compose import Compose
from gradveil.errors import from_defense
from gradveil.federated.client import step_gradient, train_client
from gradveil.federated.settings import Local
from gradveil.losses import build as build_loss
from gradveil.privacy.noise import Source
from gradveil.protection.defense import Defense, NoDefense, check_servers
from gradveil.seeds import Seeds
from gradveil.threats.probing.batches import find_on_batch, simulate_perturb
from gradveil.threats.probing.findings import DRAWS, KEPT, MOST, WORK, Explorer, Found
from gradveil.threats.probing.function import DefenseFunction, Secret, Tried, as_client, beside, own_numbers, secrets
from gradveil.threats.probing.noise_tests import (
    CHOICES,
    claims,
    contradictions,
    declared_noise,
    distance,
    is_plain,
    looked_at,
    picked_by_moments,
    reproduces,
    told_apart,
    viewed,
)
from gradveil.threats.probing.residuals import draw, sampled
from gradveil.threats.probing.structure import Flaw, flaws_of, hidden_bits
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch, GaussianPrior, Observation, Update

PUBLIC = 48  # clients with public examples, whose gradients an undone update is compared with
CLIENTS = 40  # of every class, whose noise is compared
SEEN = 8  # updates that declarations are tried on
PLAIN = ("plain", "undeclared")  # declarations that name nothing to undo


@dataclass(frozen=True)
class Probed:
    """What probing a defence found."""

    servers: tuple[Countermeasure, ...] = ()  # what a server can do, beside what was declared
    errors: tuple[str, ...] = ()  # what was declared and is not so, one sentence each
    notes: tuple[str, ...] = ()
    assessed: bool = True  # whether all that is secret is declared, or was found
    drawn: bool = True  # whether it sends something else in every round


@dataclass(frozen=True)
class Before(Defense):
    """The part of a defence that acts before there is a gradient."""

    whole: Defense

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        """Change the examples."""
        return self.whole.on_batch(batch, rng)

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        """Return the layers that are defended."""
        return self.whole.layers(model)

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Change a layer's input."""
        return self.whole.perturb(model, layer, x, r, rng)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what is declared of the whole."""
        return self.whole.servers(model)


def probe(
    defense: Defense,
    model: nn.Module,
    public: Batch,
    examples: int,
    local: Local,
    lr: float,
    seeds: Seeds,
    num_classes: int,
) -> Probed:
    """Return what a server finds out about a defence by running it on public examples at these weights.

    ``examples``: that a client has.
    """
    try:
        declared = defense.servers(model)
    except Exception as error:
        return _failed(error)
    check_servers(getattr(defense, "spec_name", type(defense).__name__), declared)
    while len(public) < 2 * examples:  # mirrored ones are others
        public = Batch(
            torch.cat([public.inputs, public.inputs.flip(-1)]), public.labels.repeat(2, *[1] * (public.labels.ndim - 1))
        )
    public = public[: PUBLIC * examples].to(next(model.parameters()).device)
    whole = _Probe(defense, declared, copy.deepcopy(model), public, local, lr, seeds, num_classes, examples)
    try:
        return whole.result()
    except Exception as error:
        return _failed(error)


def _runs_on_trials(view: Observation, gradient: Params) -> bool:
    """Return whether a view simulates the defence by code that gradients can be sent through."""
    if view.simulate is None:
        return False
    try:
        view.simulate({name: g.clone().requires_grad_() for name, g in gradient.items()})
    except Exception:  # whatever its code makes of it
        return False
    return True


def _apart(sent: Sequence[Update]) -> float:
    """Return how far the updates of one client are from the first at most."""
    rows = [flatten({n: g.float() for n, g in update.gradient.items()}) for update in sent]
    return max((float((row - rows[0]).norm()) for row in rows[1:] if len(row) == len(rows[0])), default=0.0)


def _failed(error: Exception) -> Probed:
    """Return what is said of a defence that ends with an error of its own: an error of it, and no assessment."""
    if (told := from_defense(error)) is error:
        raise error
    return Probed(errors=(str(told),), assessed=False)


@dataclass(frozen=True)
class _Probe:
    defense: Defense
    declared: tuple[Countermeasure, ...]
    model: nn.Module
    public: Batch
    local: Local
    lr: float
    seeds: Seeds
    num_classes: int
    examples: int

    @cached_property
    def true(self) -> list[Params]:
        """The gradients of two clients."""
        return [self._gradient(self._client(i)) for i in range(2)]

    @cached_property
    def tried(self) -> Tried:
        """The defence as a function of gradients, secrets of fresh clients, and the gradients of two."""
        like, vectors = Update(self.true[0], self.examples, 1, self.lr), tuple(flatten(g) for g in self.true)
        step = DefenseFunction(like)
        drawn = secrets(self.defense, self.seeds, MOST, lambda secret: step.run(vectors[0], secret))
        alone = DefenseFunction(replace(like, num_steps=2))  # of several steps: what is done to a gradient alone
        outs = [alone.run(vectors[0], s) for s in drawn[:3]]
        still = all(out is not None and torch.equal(out, vectors[0]) for out in outs)
        return Tried(DefenseFunction(like, "update" if still else "gradient"), drawn, vectors)

    @cached_property
    def small(self) -> bool:
        """Whether many runs take little time."""
        return len(self.tried.examples[0]) * DRAWS <= WORK

    @cached_property
    def views(self) -> list[Observation]:
        """What the declared servers make of the first update."""
        known = (viewed(server, self.seen[0]) for server in self.declared) if self.seen else ()
        return [view for view in known if view is not None]

    def result(self) -> Probed:
        """Probe every place."""
        drawn, channel, vectors = self.tried.secrets, self.tried.function, self.tried.examples
        acted = Explorer(self.defense, channel, tuple(drawn), tuple(vectors), cache(self._prior)).find()
        batch = find_on_batch(self._client(0), drawn)
        inside = Found() if batch.what else self._inside()
        flaws = self._flaws(acted)
        hidden = hidden_bits(self.tried) if acted.drawn else None
        flaws = flaws if hidden is None else [hidden, *flaws]
        errors = self._errors(acted, batch, inside, flaws)
        errors += self._clients(acted.drawn or batch.drawn)
        errors += [] if errors or not acted.keyed else [f"{acted.error.capitalize()}."]
        trusted = not errors and any(server.name not in PLAIN for server in self.declared)
        simulated = any(_runs_on_trials(view, self.true[0]) for view in self.views)
        covered = [
            trusted and any(view.model is not self.model for view in self.views),
            trusted and any(self._hides(view, inside) for view in self.views),
            trusted and (simulated or (acted.only_noise and any(view.noise for view in self.views))),
        ]
        found = [one for one in (batch, inside, acted) if one.what]
        left = [one for one, known in zip((batch, inside, acted), covered, strict=True) if one.what and not known]
        servers = _servers(batch, inside, acted) if any(one.view or one.simulate for one in left) else []
        if simulated:
            servers = [server for server in servers if server.name != "simulate"]
        servers += _of_flaws(flaws, batch, inside)
        explained = all(one.explained for one in found) and (not flaws or any(flaw.view for flaw in flaws))
        if acted.drawn and self.small and not (errors or trusted or acted.explained):
            gradients = [flatten(self._gradient(one)) for one in self._varied(4 * CHOICES)]
            errors += list(filter(None, [picked_by_moments(channel.runs, drawn, gradients)]))
        changes = any(one.drawn for one in found)
        notes = [one.what for one in found] + [f"Of its noise {flaw.what}." for flaw in flaws]
        return Probed(tuple(servers), tuple(errors), tuple(notes), trusted or explained, changes)

    def _clients(self, changes: bool) -> list[str]:
        """Return what clients with public examples of every class send beside the agreed numbers, and of which
        there is no noise."""
        drawn, size = self.tried.secrets, len(self.tried.examples[0])
        clients = self._varied(max(2, min(CLIENTS if changes else 2, int(2 * WORK / size))))
        said, away, long = dict[str, None](), list[float](), list[float]()
        for batch in clients:
            plain = self._whole(batch, None)
            pair = [self._whole(batch, secret) for secret in drawn[:2]]
            said |= dict.fromkeys(one for update in pair for one in beside(update, plain))
            away.append(_apart(pair))
            long.append(float(flatten(plain.gradient).norm()))
        errors = [f"Beside the numbers it sends {one}." for one in list(said)[:3]]
        sizes = torch.tensor([away, [a / max(g, 1e-30) for a, g in zip(away, long, strict=True)]])
        bare = (sizes < 0.1 * sizes.quantile(0.75, 1, keepdim=True)).all(0).nonzero().flatten().tolist()
        still = [i for i in bare[:4] if _apart([self._whole(clients[i], s) for s in drawn[:16]]) < 0.2 * max(away)]
        if not changes or not still:
            return errors
        labels = clients[still[0]].labels
        label = "" if labels.is_floating_point() else f" (label {int(labels.flatten()[0])})"
        share = f"{len(bare)} of {len(clients)} clients{label}"
        return [*errors, f"Of {share} it hides hardly anything, unlike of the others."]

    def _varied(self, count: int) -> list[Batch]:
        """Return clients of public examples, first of those of as many classes as there are, then of others."""
        labels = self.public.labels.reshape(len(self.public), -1)[:, 0]
        order = torch.cat([(labels == k).nonzero().flatten()[:2] for k in labels.unique()[:CLIENTS]])
        order = torch.cat([order, torch.arange(len(labels), device=order.device)])[: count * self.examples]
        return [Batch(self.public.inputs[part], self.public.labels[part]) for part in order.split(self.examples)]

    def _whole(self, batch: Batch, secret: Secret | None) -> Update:
        """Return what a client sends after its local training."""
        state, rng = (NoDefense(), Generator()) if secret is None else (copy.deepcopy(secret.state), secret.rng())
        model = copy.deepcopy(self.model)
        if secret is None:
            with own_numbers(0):
                return train_client(model, batch, state, self.lr, rng, self.local).update
        with as_client(secret):
            return train_client(model, batch, state, self.lr, rng, self.local).update

    def _flaws(self, acted: Found) -> list[Flaw]:
        """Return why what is taken to be independent noise on every tensor is none."""
        channel, noise = self.tried.function, declared_noise(self.declared, self.seen)
        taken = acted.only_noise if not noise else all(noise.get(name, 0.0) > 0 for name in channel.parts)
        taken = taken and (acted.view is None or acted.only_noise)
        if isinstance(self.defense, Compose) or not acted.drawn or acted.silent or not taken:
            return []
        if noise and not is_plain(self.declared, self.seen[0], channel):
            return []  # what is declared to be independent are other coordinates
        found = flaws_of(self.tried)
        picked = "" if found or not noise or not self.small else self._picked(noise)
        return [*found, Flaw(picked)] if picked else found

    def _picked(self, noise: Mapping[str, float]) -> str:
        """Return that a learned rule tells clients apart better than the declared noise allows, in words."""
        channel, drawn = self.tried.function, self.tried.secrets
        gradients = [flatten(self._gradient(batch)) for batch in self._varied(2 * CHOICES + 12)]
        if len(gradients) < 4 * CHOICES or len(drawn) < 6 * len(gradients):
            return ""
        rows = [channel.runs(g, drawn[4 * i : 4 * i + 4]) for i, g in enumerate(gradients)]
        sent = [(i, out) for i, row in enumerate(rows) for out in row]
        return told_apart(sent, gradients, channel.parts, noise) if len(sent) == 4 * len(rows) else ""

    def _hides(self, view: Observation, inside: Found) -> bool:
        """Return whether a view leaves out, or weighs, all tensors that changes of the representation reach."""
        return bool(inside.changed) and all(n not in view.visible or n in view.weights for n in inside.changed)

    def _client(self, number: int) -> Batch:
        return self.public[number * self.examples : (number + 1) * self.examples]

    def _gradient(self, batch: Batch, secret: Secret | None = None) -> Params:
        """Return the gradient of one step, before the defence acts on gradients; without a secret, undefended."""
        run = NoDefense() if secret is None else Before(copy.deepcopy(secret.state))
        rng = Generator() if secret is None else secret.rng()
        loss = build_loss(self.local.loss).of(batch.labels)
        with own_numbers(0):  # dropout's are the same in all runs
            gradient = step_gradient(copy.deepcopy(self.model), batch, run, rng, loss=loss)
        return {name: g.detach() for name, g in gradient.items()}

    def _prior(self) -> GaussianPrior:
        """Return what gradients of public examples look like."""
        size = sum(p.numel() for p in parameters(self.model).values())
        count = max(2, min(PUBLIC, int(KEPT / size), len(self.public) // self.examples))
        rows = torch.stack([flatten(self._gradient(self._client(i))) for i in range(count)])
        return GaussianPrior.fit(rows, ridge=0.1 * float(rows.var(0).mean()))

    def _inside(self) -> Found:
        """Return what is done to representations: which weight gradients it changes, and a server that does it too."""
        if not self.defense.layers(self.model):
            return Found()
        true, drawn, clients = self.true[0], self.tried.secrets, [self._client(i) for i in range(2)]
        runs = [self._gradient(clients[0], secret) for secret in drawn[:3]]
        changed = [n for n, g in true.items() if any(not torch.equal(g, run[n]) for run in runs)]
        if not changed:
            return Found()
        secret = any(not torch.equal(runs[0][n], run[n]) for run in runs[1:] for n in changed)
        loss = build_loss(self.local.loss).of(clients[0].labels)
        inner = None if secret else simulate_perturb(self.model, clients, drawn[0], runs[0], loss)
        what = f"It changes the gradients of {', '.join(changed)} and no others."
        view = drop(*changed).view if len(changed) < len(true) else None
        return Found(what, view, inner, view is not None or inner is not None, secret, changed=tuple(changed))

    @cached_property
    def seen(self) -> list[Observation]:
        """What a server sees of clients that take one step on the same examples, with several secrets."""
        batch, channel, drawn = self._client(0), self.tried.function, self.tried.secrets
        shape, loss = tuple(batch.inputs.shape[1:]), build_loss(self.local.loss).of(batch.labels)
        sent = channel.runs(flatten(self._gradient(batch, drawn[0])), drawn[: SEEN if self.small else 3])
        updates = [replace(channel.like, gradient=channel.tree(out)) for out in sent]
        return [Observation(self.model, u, shape, self.num_classes, loss=loss) for u in updates]

    def _errors(self, acted: Found, batch: Found, inside: Found, flaws: Sequence[Flaw]) -> list[str]:
        """Return what is declared and is not so."""
        if isinstance(self.defense, Compose):  # each part has its own declaration
            parts = [replace(self, defense=part, declared=part.servers(self.model)) for part in self.defense.parts]
            return [error for part in parts for error in part.result().errors]
        if not self.seen:
            return []
        true, seen, channel, drawn = self.true[0], self.seen, self.tried.function, self.tried.secrets
        errors = []
        plain = [view for view in self.views if claims(view, seen[0])]
        silent = acted.silent or any(server.name == "undeclared" for server in self.declared)
        if len(plain) == len(self.declared) and not silent:
            away = [distance(view, true) for view in plain]
            if min(away) > 1e-3:
                errors.append(
                    f"By what is declared, nothing is hidden in what is matched; it differs from the gradient by "
                    f"{min(away):.1%} of its length."
                )
        if not acted.drawn and not batch.what and not inside.what:
            for view in self.views:
                if view.simulate is not None and not view.noise and not reproduces(view, true, seen[0]):
                    errors.append("The declared simulation does not give what is sent.")
        noise = declared_noise(self.declared, seen)
        if noise:
            begun = flatten(self._gradient(self._client(0), drawn[0]))
            count = int(max(6, min(DRAWS, WORK / len(begun))))
            shown, expected = looked_at(self.declared, seen[0], channel)
            before = expected(begun)
            draws = draw(channel, drawn[:count], begun, shown, before)
            rounds = [sampled(channel, [shown(out)], before) for out in channel.carried_on(begun, drawn[0])]
            errors += [] if draws is None else contradictions(draws, noise, rounds)
            if acted.error:
                errors.append(f"Independent noise is declared, and {acted.error}.")
            errors += [f"Independent noise is declared, and {flaw.what}." for flaw in flaws[: 0 if errors else 2]]
            errors += [] if errors else self._several_steps(drawn)
        return errors

    def _several_steps(self, drawn: Sequence[Secret]) -> list[str]:
        """Return whether noise that is declared for clients of several steps is there at all."""
        if self.local.steps(self.examples) == 1:
            return []
        batch, shape = self._client(0), tuple(self.public.inputs.shape[1:])
        sent = []
        for secret in drawn[:3]:
            with own_numbers(secret.seed):
                run = (copy.deepcopy(self.model), batch, copy.deepcopy(secret.state), self.lr, secret.rng(), self.local)
                sent.append(train_client(*run).whole)
        seen = [Observation(self.model, update, shape, self.num_classes) for update in sent]
        noise = declared_noise(self.declared, seen)
        measured = {n: float(torch.stack([u.gradient[n] for u in sent]).var(0).mean().sqrt()) for n in noise}
        if not noise or any(measured[n] > 0.1 * std for n, std in noise.items()):
            return []
        name = next(iter(noise))
        return [
            f"After all local steps noise of {noise[name]:.3g} is declared for {name}, and {measured[name]:.3g} is "
            "measured."
        ]


def _together(name: str, why: str, *places: Found) -> Countermeasure:
    def view(seen: Observation) -> Observation:
        for place in places:
            seen = place.view(seen) if place.view is not None else seen
        return seen

    return Countermeasure(name, why, view)


def _of_flaws(flaws: Sequence[Flaw], *before: Found) -> list[Countermeasure]:
    """Return the servers that make use of flaws: the first of each tier that can."""
    names: dict[Tier, str] = {"adaptive": "quiet", "multi-round": "rounds"}
    first = {flaw.tier: flaw for flaw in reversed(flaws) if flaw.view is not None}
    return [
        replace(
            _together(names[tier], f"Of its noise {flaw.what}.", Found(view=flaw.view), *before),
            tier=tier,
            over_rounds=tier == "multi-round",
        )
        for tier, flaw in first.items()
    ]


def _servers(batch: Found, inside: Found, acted: Found) -> list[Countermeasure]:
    """Return what a server does: all that was found, together."""
    why = " ".join(one.what for one in (batch, inside, acted) if one.view is not None)
    servers = [_together("undo", why, acted, inside, batch)] if why else []
    if acted.simulate is not None:
        other = Found(view=acted.simulate.view)
        servers.append(_together("simulate", acted.simulate.why, other, inside, batch))
    if inside.simulate is not None:
        other = Found(view=inside.simulate.view)
        servers.append(_together("replay", inside.simulate.why, acted, other))
    return servers
