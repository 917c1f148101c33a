"""What the strongest servers get of the clients whose promises `promises.py` prices, over the whole run.

The settings are those of `promises.json`, clip and all; the model is that of the first round. A server
has every other record of the client and the updates of the whole run. *informed*: it also knows the record's class, or
has a list of 100 of which one is the record; *patient*: neither. Both solve for the image (newton), and both learn to
undo the defence from the mean of as many updates (inverter). The undefended update under the same attacks is the
control. Floors and certificates are those of `gradveil leaderboard`. Stages that are there already are not done again.
"""

import argparse
import copy
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.auditing.run_folder import Row
from gradveil.threats.trial import Trial
from gradveil_studies.leaderboard.attacked import Place
from gradveil_studies.leaderboard.attacks import AttackedEntry, floor_rows
from gradveil_studies.leaderboard.entries import NONE, Entry, Panel
from gradveil_studies.leaderboard.standings import standings, table
from gradveil_studies.paper.base import Context

OUT = Path("studies/bench/results/promise-attacks.json")
LENET = "lenet:activation=relu,init=kaiming"
NEWTON = "newton:steps=5,cg_steps=6,dense_limit=0"  # few, for time; what noise leaves is reached in as many
VICTIMS = {"mnist": 16, "cifar10": 8}
PAIRS = 1750  # of updates and images that the learning server learns from: all public examples but those held out


def panel(dataset: str, devices: int, rounds: int, model: str) -> Panel:
    """Return who is attacked: the clients of the promises, with 200 records each, or 50 where there are 1,000."""
    per_class = 100 if devices == 100 else 25
    return Panel(dataset, devices, devices // 10, per_class, rounds, 1.0, 1, VICTIMS[dataset], PAIRS, NEWTON, model)


class Remembered(nn.Module):
    """The fixed first layers of a chain: what they make of an example is worked out once."""

    def __init__(self, fixed: nn.Module) -> None:
        super().__init__()
        parts = fixed.eval(), copy.deepcopy(fixed).double().eval()
        self.__dict__["parts"] = parts  # no part of the model: a client would send their buffers, 10 MB in each round
        self.kept = dict[bytes, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of examples; those that are solved for, in float64, are not looked up."""
        single, double = self.__dict__["parts"]
        if x.requires_grad or x.dtype != torch.float32:
            return (single if x.dtype == torch.float32 else double)(x)  # type: ignore[no-any-return]
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise NotImplementedError("Many at once cannot be looked up: they come one by one.")
        found = []
        for one in x:
            key = one.numpy().tobytes()
            if key not in self.kept:
                with torch.no_grad():
                    self.kept[key] = single(one[None])[0]
            found.append(self.kept[key])
        return torch.stack(found)

    def __deepcopy__(self, memo: Any) -> "Remembered":
        return self  # nothing in it changes


def remembering(model: nn.Module) -> nn.Module:
    """Return a chain with its fixed first layers as one that remembers; others as they are."""
    layers = dict(model.named_children())
    fixed = [name for name, layer in layers.items() if not list(layer.parameters())]
    if not fixed or fixed != list(layers)[: len(fixed)]:
        return model
    first = nn.Sequential(*(layers.pop(name) for name in fixed))
    return nn.Sequential(OrderedDict({"fixed": Remembered(first), **layers})).train()


def stages(case: AttackedEntry) -> dict[str, Callable[[], list[Trial]]]:
    """Return what is tried on a defence, the cheapest first."""
    if case.entry == NONE:
        return {"listed": case.listed, "learned": case.learned, "told": case.told, "oblivious": case.oblivious}
    whole = ("multi-round", "informed")

    def learned() -> list[Trial]:
        return [trial for trial in case.learned() if trial.about["tier"] in whole]

    return {"listed": case.listed, "learned": learned, "told": case.told, "multi-round": case.patient}


def main() -> None:
    """Attack what has no rows yet, and keep each stage's as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="mnist", choices=list(VICTIMS))
    parser.add_argument("--devices", type=int, default=100, choices=[100, 1000])
    parser.add_argument("--model", help=f"in place of the one that was priced, e.g. {LENET}")
    parser.add_argument("--only", nargs="*", default=["listed", "learned", "told", "oblivious", "multi-round"])
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    priced = json.loads(Path("studies/bench/results/promises.json").read_text())["rows"]
    priced = [row for row in priced if row["dataset"] == given.dataset and row["devices"] == given.devices]
    where = {"dataset": given.dataset, "devices": given.devices, "model": given.model or priced[0]["model"]}
    kept: list[Row] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    mine = [row for row in kept if where.items() <= row.items()]
    kept = [row for row in kept if not where.items() <= row.items()]
    place = Place(panel(given.dataset, given.devices, priced[0]["rounds"], where["model"]), Context())
    vars(place)["model"] = remembering(place.model)
    mine = mine or [row | where for row in floor_rows(place)]
    cases = [AttackedEntry(Entry(row["defense"]), place) for row in priced]
    for stage, case in product(given.only, cases):
        about = where | {"stage": stage, "defense": case.entry.name}
        if stage not in stages(case) or any(about.items() <= row.items() for row in mine):
            continue
        began = time.process_time()
        first = [] if any(row.get("defense") == case.entry.name for row in mine) else [case.about()]
        mine += [row | about for row in (*first, *case.tried(stages(case)[stage]()))]
        lines = ",\n".join(json.dumps(row) for row in kept + mine)
        given.out.write_text(f'{{"rows": [\n{lines}\n]}}\n')
        print(f"{case.entry.name}, {stage}: {time.process_time() - began:.0f} s of processor time", flush=True)
    for one in table(standings(mine)):
        print(one)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
