"""Draw the README's picture: what a server gets back, by defence and by what it knows.

python tools/readme_picture.py --data FOLDER [--dataset cifar10] [--out docs/img/reconstructions.png]
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch

from gradveil.data import load
from gradveil.metrics import measure
from gradveil.models import build
from gradveil.protection.defense import build as defense
from gradveil.threats.trial import Trial, oblivious, solved
from gradveil_studies.paper.base import Context
from gradveil_studies.paper.panels import Shared

mpl.use("Agg")
from matplotlib import pyplot as plt

DLG = "dlg:steps=120,restarts=3"
# title -> defence, which countermeasure (None: the oblivious server), and the attack where that names none
COLUMNS: dict[str, tuple[str, str | None, str]] = {
    "no defence": ("none", None, DLG),
    "ours 40 %\nnaive server": ("representation:share=0.4", None, DLG),
    "ours 40 %\nserver that knows": ("representation:share=0.4", "drop", DLG),
    "pruning 90 %\nnaive server": ("pruning:share=0.9", None, DLG),
    "pruning 90 %\nserver that knows": ("pruning:share=0.9", "mask", "newton"),
    "noise 1 x rms\nnaive server": ("gaussian:scale=1,relative=true", None, DLG),
    "noise 1 x rms\nserver that knows": ("gaussian:scale=1,relative=true", "whiten", DLG),
}


def column(scene: Shared, spec: str, counter: str | None, by: str) -> torch.Tensor:
    """Return the reconstructions (N, C, H, W) that one server gets."""
    known = {c.name: c for c in defense(spec).servers(scene.model)}
    server = oblivious() if counter is None else known[counter]
    seen = enumerate(scene.observe(spec))
    trials = [Trial(s, server, server.attack or by, scene.seeds("picture", i)) for i, s in seen]
    return torch.cat([found.inputs for found in solved(trials)])


def main() -> None:
    """Attack a few images under each setting and draw them side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs/img/reconstructions.png"))
    args = parser.parse_args()
    dataset = load(args.dataset, args.data)
    context = Context(args.data)
    model = build("lenet", dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
    scene = Shared.draw(model, dataset, args.images, context)
    shown = [("original", scene.truth.inputs)]
    shown += [(title, column(scene, *how)) for title, how in COLUMNS.items()]
    shown.append(("blind guess\nmean image", scene.public.batch.inputs.mean(0).expand_as(scene.truth.inputs)))
    figure, axes = plt.subplots(args.images, len(shown), figsize=(1.45 * len(shown), 1.55 * args.images + 0.5))
    for j, (title, images) in enumerate(shown):
        for i, axis in enumerate(axes[:, j]):
            axis.imshow(images[i].permute(1, 2, 0).squeeze().clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            values, _ = measure(images[i : i + 1], None, scene.truth[i : i + 1])
            axis.set_xlabel("" if j == 0 else f"MSE {float(values['mse']):.2g}", fontsize=8)
        axes[0, j].set_title(title, fontsize=9)
    figure.tight_layout(pad=0.4)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
