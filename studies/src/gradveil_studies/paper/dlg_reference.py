"""The control behind every DLG figure: does the attack win where nothing defends, and does it lose where it should?"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gradveil.countermeasures import drop, mask
from gradveil.metrics import interval, rate
from gradveil.ranges import Share
from gradveil.threats.panel import oblivious
from gradveil.threats.rows import group
from gradveil_studies.paper.base import BLIND, ITEMS, SUCCESS, Context, Item, Judgement, Row, judge
from gradveil_studies.paper.figures import Dot, dot_panels
from gradveil_studies.paper.panels import AttackPoints, Point
from gradveil_studies.paper.rows import Measured, family


@ITEMS.register("dlg-reference")
@dataclass(frozen=True)
class DLGReference(Item):
    """DLG on an untrained LeNet: none, ours 40 % with an oblivious and two knowing servers, a random mask."""

    title = "DLG reference (untrained LeNet, CIFAR-10, batch 1)"
    source = "tradeoff"
    notes = (
        "No code but gradveil's is run: the attack is its own `dlg` on the authors' network, initialisation and number "
        "of iterations. It departs from theirs in a line search, in starts within the data range (theirs: N(0, 1)) and "
        "in ending a run that has matched or stalled.",
        "The paper does not say how LeNet is set up: padding 2, strides 2, 2, 1, 1, sigmoid, weights uniform(±0.5), "
        "as in the authors' code. With PyTorch's initialisation or with ReLU DLG fails where nothing defends.",
        "300 iterations are read as 300 outer steps of L-BFGS of up to 20 inner iterations, as the authors' code runs.",
        "Four starts, the best by the attack's own objective; the authors report the best of a run by the truth, a "
        "choice that no attacker has.",
        "MSE on pixels in [0, 1], clamped; the authors do not clamp, so a search that ran away is privacy there.",
        "The servers that know the defence and the random mask are controls that the paper does not have.",
    )

    attack: str = "dlg:steps=300,restarts=4"
    model: str = "lenet"
    dataset: str = "cifar10"
    share: Share = 0.4

    def work(self, context: Context) -> dict[str, tuple[str, str]]:
        """Return the blind guesses, and the settings: a defence and a server."""
        ours = f"representation:share={self.share}"
        return {
            "floors": (BLIND, ""),
            "none": ("none", "oblivious"),
            "ours oblivious": (ours, "oblivious"),
            "ours mask": (ours, "mask"),
            "ours drop": (ours, "drop"),
            "random mask oblivious": (f"random_mask:share={self.share}", "oblivious"),
        }

    def run(self, unit: str, context: Context) -> list[Row]:
        points = AttackPoints.of(self.dataset, self.model, self.attack, 32 if context.full else 4, context)
        defense, server = self.work(context)[unit]
        if defense == BLIND:
            return points.floors()
        known = {"oblivious": oblivious(), "mask": mask("fc.weight"), "drop": drop("fc.weight")}
        return points.rows([Point(defense, known[server])], normalised=False)

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return clamped MSE and success rate per setting, with intervals."""
        return [
            {
                "defense": defense,
                "server": server,
                "images": len(mine),
                "mse": f"{interval([r.mse for r in mine]):.4f}",
                "success": f"{rate([r.recovered for r in mine]):.0%}",
                "identified": f"{fmean(r.identified for r in mine):.0%}",
            }
            for (defense, server), mine in group(Measured.read(rows), "defense", "server").items()
        ]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the control, the paper's oblivious picture, and the server that knows the defence."""
        settings = group(Measured.read(rows), "defense", "server")
        share = {key: fmean(r.recovered for r in mine) for key, mine in settings.items()}
        ours = f"representation:share={self.share}"
        wanted = [
            ("The attack recovers undefended images (control)", ("none", "oblivious"), True),
            ("The defence stops a server that does not know it", (ours, "oblivious"), False),
            ("A server that reads the mask off the update recovers the images", (ours, "mask"), True),
            ("A server that drops the defended tensor recovers the images", (ours, "drop"), True),
        ]
        return [
            judge(
                claim,
                share[key] >= 0.9 if wins else share[key] == 0,
                f"share of images with clamped MSE < {SUCCESS} {'≥ 0.9' if wins else '= 0'}",
                "the paper shows the first two; it has no server that knows the defence",
                f"{share[key]:.2f}",
            )
            for claim, key, wins in wanted
            if key in share
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the mean clamped MSE of every server with its interval, over the blind guesses."""
        dots, lines = [], {}
        for (defense, server), mine in group(Measured.read(rows), "defense", "server").items():
            mse = interval([r.mse for r in mine])
            if defense == BLIND:
                lines[f"blind guess ({server})"] = mse.mean
            else:
                dots.append(Dot(f"{defense}, {server}", mse, family(defense)))
        name = "DLG, CIFAR-10"
        dot_panels(path, {name: dots}, "clamped MSE, mean over images", log=True, lines={name: lines})
        return True
