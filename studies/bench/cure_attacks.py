"""What the strongest servers get of a record behind a frozen backbone over a whole run, at the promises of `cure.json`.

A head's gradient gives the features away: of a record whose client's other records are known it is δ φᵀ, and where the
class is known and the server sends weights of zero in every round, δ is known too. So the server sends zeros R times,
takes the mean, knows all other records, and reads φ off, with the noise of the whole run. Then
- *candidates*: which of 100 (the record and 99 of its class that the client does not hold) fits best, by likelihood,
  also where the server sends large weights in public directions in place of zeros;
- *picture*, or the columns of a table's row: a ridge and a network learn from a thousand pairs and more (features with
  such noise, picture) of other records what it was; which of the two is chosen by their error on such pairs.
`--victims` are attacked through the product's client and its noise; `--written` by the same sums written out. The
undefended update is the control, the class mean the blind guess. No row may lie below its certificate.
"""

import argparse
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cure import WORLDS, Rows, Scene
from scipy.stats import beta
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.federated.client import local_update
from gradveil.modalities import IMAGE
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import class_spectra, floor_share
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.types import Batch

CANDIDATES, LARGE = 100, 30.0
EPOCHS, WIDTH = 3, 512
RIDGES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Channel:
    """What reaches the server of one record over a run: its clipped gradient, and noise in clips per release."""

    weights: Tensor  # (C, D), sent in every round
    clip: float
    std: float  # of the mean of all releases, in clips; 0: no defence

    def signal(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the clipped gradients (N, C, D), in clips; undefended as they are."""
        delta = (features @ self.weights.T).softmax(1) - F.one_hot(labels, len(self.weights))
        if self.std:
            delta = delta * (self.clip / delta.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0) / self.clip
        return delta[:, :, None] * features[:, None]

    def sent(self, features: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return the mean of what is released, less the other records."""
        signal = self.signal(features, labels)
        return signal + self.std * torch.randn(signal.shape, generator=rng)

    def features(self, seen: Tensor, labels: Tensor) -> Tensor:
        """Return what a server with the class reads off; for weights of zero."""
        delta = torch.full((len(seen), len(self.weights)), 1 / len(self.weights)) - F.one_hot(labels, len(self.weights))
        if self.std:
            delta = delta * (self.clip / delta.norm(dim=1, keepdim=True)).clamp_max(1.0) / self.clip
        return torch.einsum("nc,ncd->nd", delta, seen) / delta.square().sum(1, keepdim=True)


def through_product(channel: Channel, defense: str, uses: int, own: Batch, victim: int, seed: int) -> Tensor:
    """Return the same of a client with all its records: the mean of its updates, less the sum of the others."""
    kinds, dims = channel.weights.shape
    model = nn.Sequential(OrderedDict(fc=nn.Linear(dims, kinds, bias=False)))
    model.load_state_dict({"fc.weight": channel.weights})

    def sent(batch: Batch, by: str, number: int) -> Tensor:
        rng = torch.Generator().manual_seed(seed * 100_003 + number)
        update = local_update(model, batch, build_defense(by), 1.0, rng, batch_size=None)
        return update.gradient["fc.weight"] * len(batch.labels)

    mean = sum(sent(own, defense, number) for number in range(uses)) / uses
    rest = torch.arange(len(own.labels)) != victim
    silent = defense if defense == "none" else f"veil:z=1e-9,clip={channel.clip}"
    known = sent(Batch(own.inputs[rest], own.labels[rest]), silent, 0)
    return (mean - known) / (channel.clip if channel.std else 1.0)


class Inverter:
    """From noisy features and the class to a picture: the better of a ridge and a network, on pairs set aside."""

    def __init__(self, read: Tensor, labels: Tensor, pictures: Tensor, kinds: int, seed: int) -> None:
        self.kinds, self.ends = kinds, (float(pictures.min()), float(pictures.max()))
        self.means = torch.stack([pictures[labels == kind].mean(0) for kind in range(kinds)])
        x, y = self._inputs(read, labels), (pictures - self.means[labels]).flatten(1)
        cut = len(x) * 9 // 10
        gram, cross = (x[:cut].T @ x[:cut]).double(), (x[:cut].T @ y[:cut]).double()
        each = gram.trace() / len(gram) * torch.eye(len(gram)).double()
        self.tries: list[Any] = [_Linear(torch.linalg.solve(gram + lam * each, cross).float()) for lam in RIDGES]
        self.tries.append(self._network(x[:cut], y[:cut], seed))
        with torch.no_grad():
            errors = [float((one(x[cut:]) - y[cut:]).square().mean()) for one in self.tries]
        self.best = int(np.argmin(errors))
        self.blind = float(y[cut:].square().mean())
        self.expected = errors[self.best] / self.blind

    def _inputs(self, read: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([read, F.one_hot(labels, self.kinds) * 0.3], 1)

    def _network(self, x: Tensor, y: Tensor, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(x.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, y.shape[1]))
            nn.init.zeros_(net[2].weight)
            x = x * (scale := 1 / float(x.std()))
            optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.05)
            for _ in range(EPOCHS):
                for some in torch.randperm(len(x)).split(200):
                    optimizer.zero_grad()
                    (net(x[some]) - y[some]).square().mean().backward()
                    optimizer.step()
        with torch.no_grad():
            net[0].weight *= scale
        return net.eval()

    @torch.no_grad()
    def __call__(self, read: Tensor, labels: Tensor) -> Tensor:
        found = self.tries[self.best](self._inputs(read, labels)).view(-1, *self.means.shape[1:])
        return (found + self.means[labels]).clamp(*self.ends)


@dataclass(frozen=True)
class _Linear:
    weights: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weights


def share(values: Sequence[bool]) -> dict[str, Any]:
    """Return a share with its 95 % interval (Clopper and Pearson)."""
    n, k = len(values), int(sum(values))
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    return {"of": n, "picked": k, "low": low, "high": float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0}


def ratio(mine: Tensor, blind: Tensor) -> dict[str, Any]:
    """Return the mean error beside the blind guess's, with its 95 % interval over records (bootstrap)."""
    draws = torch.randint(len(mine), (2000, len(mine)), generator=torch.Generator().manual_seed(0))
    each = (mine[draws].mean(1) / blind[draws].mean(1)).sort().values
    return {"ratio": float(mine.mean() / blind.mean()), "low": float(each[50]), "high": float(each[1949])}


def main() -> None:
    """Attack every row of a world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", default="cifar10")
    parser.add_argument("--data")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", type=int, default=16)
    parser.add_argument("--written", type=int, default=1000)
    parser.add_argument("--priced", type=Path, default=Path("studies/bench/results/cure.json"))
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/cure-attacks.json"))
    given = parser.parse_args()
    rows = Rows.make(WORLDS[given.world], given.data, given.first)
    scene = Scene(rows, given.seed)
    priced = [row for row in json.loads(given.priced.read_text())["rows"] if row["world"] == given.world]
    kept = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    kept = [row for row in kept if row["world"] != given.world]
    spectra = list(class_spectra(rows.dataset.test.batch()).values()) if rows.dataset.modality == IMAGE else []
    for row in priced:
        made = attacked(scene, row, given.victims, given.written) | {"world": given.world}
        if row["z_run"]:
            account = Account("run", spent=1 / row["z_run"] ** 2)
            made |= {"bound": account.guess(1 / CANDIDATES), "floor": floor_share(account, spectra) if spectra else 0.0}
            for part in ("product", "written"):
                found = made[part]
                over = found["candidates"]["low"] > made["bound"]
                found["below"] = over or ("picture" in found and found["picture"]["high"] < made["floor"])
        kept.append(made)
        print(json.dumps(made), flush=True)
        given.out.write_text('{"rows": [\n' + ",\n".join(json.dumps(one) for one in kept) + "\n]}\n")


def attacked(scene: Scene, row: dict[str, Any], victims: int, written: int) -> dict[str, Any]:
    """Attack the same records under one promise, through the product's client and written out."""
    rows, world, width = scene.rows, scene.rows.world, row["choice"]["dims"]
    kinds, z_run, clip = rows.dataset.num_classes, row["z_run"], row["choice"].get("clip", inf)
    rng = Seeds(scene.seed)("attacked records")
    x, y = scene.of("train", width)
    dims = x.shape[-1]
    where = torch.stack([torch.randint(n, (max(victims, written),), generator=rng) for n in y.shape], 1)
    truth, labels = x[where[:, 0], where[:, 1]], y[where[:, 0], where[:, 1]]
    numbers = torch.from_numpy(np.stack(scene.clients))[where[:, 0], where[:, 1]]
    pictures = rows.dataset.train.batch(numbers).inputs
    others, seen_labels, seen_pictures = _knows(scene, width)
    zeros = torch.zeros(kinds, dims)
    large = LARGE * F.normalize(torch.randn(kinds, dims, generator=rng), dim=1) * sqrt(dims) / 4
    made: dict[str, Any] = {
        "promise": row["promise"],
        "z_run": z_run,
        "clip": clip if clip < inf else None,
        "dims": dims,
    }
    trial = Channel(zeros, clip, z_run)
    inverter = None
    if not rows.dataset.modality.last:  # words are no numbers to come near to
        seen_read = trial.features(trial.sent(others, seen_labels, rng), seen_labels)
        inverter = Inverter(seen_read, seen_labels, seen_pictures, kinds, 0)
    for part, count in (("product", victims), ("written", written)):
        picks: dict[str, list[bool]] = {"zeros": [], "large": []}
        read = []
        for name, weights in (("zeros", zeros), ("large", large)):
            channel = Channel(weights, clip, z_run)
            for i in range(count):
                if part == "product" and name == "zeros":
                    uses = -(-world.rounds * world.cohort // len(scene.clients)) * world.epochs if z_run else 1
                    spec = f"veil:z={z_run * sqrt(uses)},clip={clip}" if z_run else "none"
                    own = Batch(x[where[i, 0]], y[where[i, 0]])
                    seen = through_product(channel, spec, uses, own, int(where[i, 1]), 17 * scene.seed + i)
                else:
                    seen = channel.sent(truth[i : i + 1], labels[i : i + 1], rng)[0]
                pool = (seen_labels == labels[i]).nonzero()[:, 0]
                pool = pool if len(pool) >= CANDIDATES - 1 else torch.arange(len(others))
                some = pool[torch.randperm(len(pool), generator=rng)[: CANDIDATES - 1]]
                listed = torch.cat([truth[i : i + 1], others[some]])
                far = (channel.signal(listed, labels[i].expand(len(listed))) - seen).flatten(1).square().sum(1)
                picks[name].append(int(far.argmin()) == 0)
                if name == "zeros":
                    read.append(channel.features(seen[None], labels[i : i + 1])[0])
        best = max(picks, key=lambda name: sum(picks[name]))
        made[part] = {"candidates": share(picks[best]) | {"weights": best}}
        if inverter is None:
            continue
        found = inverter(torch.stack(read), labels[:count])
        errors, blind = (
            (p - pictures[:count]).square().flatten(1).mean(1) for p in (found, inverter.means[labels[:count]])
        )
        by = "network" if inverter.best == len(RIDGES) else "ridge"
        made[part]["picture"] = ratio(errors, blind) | {"expected": inverter.expected, "by": by}
    return made


def _knows(scene: Scene, dims: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, classes and pictures of records that no client holds: undealt ones and the test split's."""
    (x, y), (more, labels) = scene.of("held", dims), scene.of("test", dims)
    data = scene.rows.dataset
    pictures = data.train.batch(scene.parts[1]).inputs, data.test.batch(slice(0, len(more))).inputs
    return torch.cat([x, more]), torch.cat([y, labels]), torch.cat(pictures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
