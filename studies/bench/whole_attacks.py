"""Attacks at real sizes: dlg and newton on 32 images (LeNet), gs on 16 images (ResNet-18) beside breaching.

gs runs both as 16 problems of one image and as one problem of 16; batch norm is in train mode. With ``--breaching`` the
attack of that checkout (github.com/JonasGeiping/breaching, its ``invertinggradients`` settings) runs in the same
process, in turns with ours; without it, the row is left out. ``--images`` is a file of images (N, 3, 32, 32) under "x"
and labels under "y", written by ``torch.save``; without it, smooth random ones.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from foreign import breaching_attacker
from kept import keep, machine, show
from torch import Tensor, nn

import attacks
from attacks import CLASSES, CLOCKS, HISTORY, SHAPE, Row, seconds, sequential
from gradveil.attacks.dlg import DLG
from gradveil.attacks.newton import Newton
from gradveil.attacks.search.equations import Prior
from gradveil.attacks.search.matching import Matching, MatchingObjective, TotalVariation, Unknowns, cosine_distance
from gradveil.attacks.search.minimise import LBFGS, Adam, Stepper
from gradveil.attacks.search.restarts import full_precision
from gradveil.attacks.search.update_equations import update_rows
from gradveil.defenses.pruning import Pruning
from gradveil.gradients.functional import Form
from gradveil.models import build
from gradveil.types import Observation, Update

Images = tuple[Tensor, Tensor]


def images(path: Path | None, device: str) -> Images:
    if path is not None:
        held = torch.load(path, weights_only=True)  # noqa: TID251
        return held["x"].to(device), held["y"].to(device)
    rng = torch.Generator().manual_seed(0)
    coarse = torch.rand(64, 3, 8, 8, generator=rng)
    x = nn.functional.interpolate(coarse, SHAPE[1:], mode="bilinear")
    return x.to(device), torch.randint(CLASSES, (64,), generator=rng).to(device)


def observe(model: nn.Module, data: Images, first: int, count: int = 1, known: bool = True) -> Observation:
    x, y = (part[first : first + count] for part in data)
    found = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
    labels = y.cpu() if known else None
    return Observation(model, Update(gradient, num_examples=count), SHAPE, CLASSES, labels=labels)


def whole(run: Callable[[], list[Any]], x: Tensor, device: str) -> Row:
    """Time an attack on the first images, the second time it runs, and say how near it came."""
    for again in (False, True) if device == "cuda" else (True,):
        start = attacks.clock()
        out = run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken = attacks.clock() - start
        if again:
            errors = [float((found.inputs.to(x) - x[i]).square().mean()) for i, found in enumerate(out)]
    return {"seconds": taken, "an_image": taken / len(out), "median_mse": statistics.median(errors)}


def dlg(device: str, data: Images, count: int, repeats: int) -> list[Row]:
    """Time a step of all problems with a full history, torch's own for one of them, and an attack of 800 steps."""
    model = build("lenet", SHAPE, CLASSES).to(device)
    evaluate, free = sequential(model)
    theirs = torch.optim.LBFGS(
        free, max_iter=40, max_eval=80, history_size=HISTORY, tolerance_grad=0, tolerance_change=0
    )
    for _ in range(3):
        theirs.step(evaluate)
    before = theirs.state[free[0]]["func_evals"]
    times = seconds(lambda: theirs.step(evaluate), repeats, device)
    each = (theirs.state[free[0]]["func_evals"] - before) / (repeats + 1)
    rows = [show({"what": "dlg step", "form": "torch.optim.LBFGS", "images": 1, "ms": 1e3 * times["min"] / each})]
    stacked, point = attacks.objective(model, count, "auto")
    optimiser = LBFGS(HISTORY)
    stepper = Stepper(stacked, optimiser, optimiser.start(point))
    for k in range(HISTORY + 5):
        stepper.step(k)
    times = seconds(lambda: stepper.step(HISTORY), repeats, device, 20 if device == "cuda" else 1)
    row: Row = {"what": "dlg step", "form": "all at once", "images": count, "graph": stepper.graph is not None}
    row |= {"ms": 1e3 * times["min"], "speedup": count * rows[0]["ms"] / (1e3 * times["min"])}
    rows.append(show(row))
    if device == "cuda":
        seen = [observe(model, data, i, known=False) for i in range(count)]
        rngs = [torch.Generator().manual_seed(i) for i in range(count)]
        row = whole(lambda: DLG(steps=40, restarts=1).reconstruct_many(seen, rngs), data[0], device)
        rows.append(show({"what": "dlg, 800 steps", "images": count} | row | {"ms": row["seconds"] / 0.8}))
    return rows


def newton(device: str, data: Images, count: int, repeats: int) -> list[Row]:
    """Time the attack, and one product with JᵀWJ."""
    model = build("lenet", SHAPE, CLASSES).to(device)
    seen = [observe(model, data, i) for i in range(count)]
    out = []
    for what, simulate in (("newton product", None), ("newton product, pruning simulated", Pruning(0.99).prune)):
        some = [replace(s, simulate=simulate) for s in seen]
        prior = Prior.of(some[0], CLASSES, torch.device(device))
        rows = update_rows(some, prior.mean.new_zeros(count, 1, CLASSES), prior)
        z = prior.center().expand(count, -1).clone()
        width, weights = z.new_full((count,), 0.1), 1 / (0.1 * rows.rms).square()
        product = rows.curvature(z, weights, width)
        ms = 1e3 * seconds(lambda p=product, z=z: p(z), repeats, device)["min"]  # type: ignore[misc]
        out.append(show({"what": what, "images": count, "ms": ms}))
    rngs = [torch.Generator().manual_seed(i) for i in range(count)]
    row = whole(lambda: Newton().reconstruct_many(seen, rngs), data[0], device)
    return [*out, show({"what": "newton", "images": count} | row)]


def gs_step(model: nn.Module, data: Images, problems: int, count: int, form: Form) -> Stepper:
    """Return what gs does at each step, with its default settings."""
    seen = [observe(model, data, i * count, count) for i in range(problems)]
    unknowns = Unknowns.of(seen[0])
    known = torch.stack([nn.functional.one_hot(s.labels, CLASSES) for s in seen if s.labels is not None]).to(data[0])
    matching = Matching.of(seen, form)
    target = MatchingObjective(matching, unknowns, known, cosine_distance, (TotalVariation(1e-4),))
    adam = Adam(1000, signed=True, boxed=unknowns.pixels)
    return Stepper(target, adam, adam.start(torch.rand(problems, unknowns.size, device=data[0].device)))


def gs(device: str, data: Images, count: int, repeats: int, checkout: Path | None, width: int) -> list[Row]:
    """Time an iteration on all images: ours both ways, and breaching's, in turns."""
    model = build(f"resnet18:width={width}", SHAPE, CLASSES).to(device).train()
    rows = []
    for tf32 in (False, True) if device == "cuda" else (False,):
        with full_precision(not tf32, tuned=True):
            rows += _gs(device, model, data, count, repeats, checkout, "TF32" if tf32 else "fp32")
    return rows


def _gs(
    device: str, model: nn.Module, data: Images, count: int, repeats: int, checkout: Path | None, precision: str
) -> list[Row]:
    at_once = count if device == "cuda" else 1  # on a CPU gs takes one problem after the other
    steppers = {"problems": gs_step(model, data, at_once, 1, "auto"), "batch": gs_step(model, data, 1, count, "auto")}
    runs: dict[str, Callable[[], float]] = {}
    for name, stepper in steppers.items():
        for k in range(6 if device == "cuda" else 1):
            stepper.step(k)
        runs[name] = lambda s=stepper: seconds(lambda: s.step(9), 1, device, 10 if device == "cuda" else 1)["min"]  # type: ignore[misc]
    if checkout is not None:
        for name, n in (("one image, breaching", 1), ("batch, breaching", count)):
            runs[name] = breaching(checkout, observe(model, data, 0, n), device)
    turns = [{name: run() for name, run in runs.items()} for _ in range(repeats)]
    times = {name: min(turn[name] for turn in turns) for name in runs}
    times["problems"] *= count / at_once
    fixed = {"what": "gs iteration", "model": "resnet18", "precision": precision}
    rows = []
    for name, label in (("problems", f"{count} problems of 1 image"), ("batch", f"1 problem of {count} images")):
        theirs = times.get("batch, breaching") if name == "batch" else count * times.get("one image, breaching", 0.0)
        row = {"form": label, "graph": steppers[name].graph is not None, "ms": 1e3 * times[name]}
        rows.append(
            show(fixed | row | ({"breaching_ms": 1e3 * theirs, "speedup": theirs / times[name]} if theirs else {}))
        )
    return rows


def breaching(checkout: Path, seen: Observation, device: str) -> Callable[[], float]:
    """Return the seconds of an iteration of its ``invertinggradients`` attack, with the settings of its configuration.

    cuDNN may try its algorithms, as its default has it.
    """
    model, labels, channels = seen.model, seen.labels, SHAPE[0]
    assert labels is not None
    # Neither public nor sent statistics: it then runs batch norm in train mode, as the client does.
    about = SimpleNamespace(shape=SHAPE, modality="vision", mean=(0.5,) * channels, std=(0.25,) * channels)
    payload = [{"parameters": [p.detach() for p in model.parameters()], "buffers": None, "metadata": about}]
    metadata = {"num_data_points": len(labels), "labels": labels.to(device), "local_hyperparams": None}
    attacker = breaching_attacker(checkout, model, 24_000, 0.2, device)

    def run(iterations: int) -> float:
        attacker.cfg.optim["max_iterations"] = iterations
        shared = [{"gradients": list(seen.update.gradient.values()), "buffers": None, "metadata": metadata}]
        start = attacks.clock()
        attacker.reconstruct(payload, shared, server_secrets={})
        if device == "cuda":
            torch.cuda.synchronize()
        return attacks.clock() - start

    def iteration() -> float:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        few, many = (2, 22) if device == "cuda" else (1, 3)
        run(few)
        taken = (run(many) - run(few)) / (many - few)
        torch.backends.cudnn.benchmark = before
        return taken

    return iteration


GS = "gs iteration, resnet18"
TARGETS = {  # name, what, form, precision, key, and the most or the least wanted
    "cuda": (
        ("dlg step, 32 problems, lenet: ms", "dlg step", "all at once", None, "ms", 1.0),
        ("newton, 32 images at once, lenet: seconds an image", "newton", None, None, "an_image", 0.5),
        *(
            (f"{GS}, {form}, {precision}: times breaching's rate", "gs iteration", form, precision, "speedup", 4.0)
            for precision in ("fp32", "TF32")
            for form in ("16 problems of 1 image", "1 problem of 16 images")
        ),
    ),
    "cpu": (
        ("newton, 8 images at once, lenet: seconds an image", "newton", None, None, "an_image", 3.0),
        *(
            (f"{GS}, {form}: times breaching's rate", "gs iteration", form, "fp32", "speedup", 1.0)
            for form in ("16 problems of 1 image", "1 problem of 16 images")
        ),
    ),
}


def against_targets(rows: list[Row], device: str) -> list[Row]:
    """Set the rows beside the targets."""
    out = []
    for name, what, form, precision, key, wanted in TARGETS[device]:
        for r in rows:
            if (r["what"], r.get("form"), r.get("precision")) == (what, form, precision) and key in r:
                met = r[key] >= wanted if key == "speedup" else r[key] <= wanted
                out.append(show({"target": name, "wanted": wanted, "got": r[key], "met": met}))
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--breaching", type=Path, help="a checkout of github.com/JonasGeiping/breaching")
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))
    parser.add_argument("--only", default="dlg,newton,gs")
    parser.add_argument("--count", type=int, help="images of newton; 32, or 8 on a CPU")
    parser.add_argument("--width", type=int, default=64, help="of resnet18")
    args = parser.parse_args(argv)
    attacks.clock = CLOCKS[args.clock]
    data = images(args.images, args.device)
    rows: list[Row] = []
    with full_precision():
        if "dlg" in args.only:
            rows += dlg(args.device, data, 32, args.repeats)
        if "newton" in args.only:
            rows += newton(args.device, data, args.count or (32 if args.device == "cuda" else 8), args.repeats)
    if "gs" in args.only:
        rows += gs(args.device, data, 16, args.repeats, args.breaching, args.width)
    result = machine(args.device) | {
        "clock": args.clock, "rows": rows, "targets": against_targets(rows, args.device),
    }  # fmt: skip
    keep(args.out, result)


if __name__ == "__main__":
    main()
