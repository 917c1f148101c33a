"""What the choices do that the paper leaves open about GS: one at a time, on the scene of the trade-off figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from gradveil.ranges import Count
from gradveil.threats.rows import OBLIVIOUS, group
from gradveil_studies.paper.base import CIFAR10, ITEMS, SUCCESS, Context, Item, Judgement, Row, in_all, judge
from gradveil_studies.paper.figures import PROMISED, REACHED, Dot, dot_panels
from gradveil_studies.paper.panels import FLOORS, GS_STEPS, NORMALISED, AttackPanel, gs_attack
from gradveil_studies.paper.rows import HIDDEN, KNOWING, Case, Measured, cases, control_works, strongest

OURS, GC = "representation:share=0.1", "pruning:share=0.8"
QUICK_NETWORK = "lenet:activation=relu,init=default,strides=2/1/1/1,width=24"
SHOWN = {"none": "none (control)", OURS: "ours, 10 % of r", GC: "GC, 80 %"}


@dataclass(frozen=True)
class Choice:
    """One way to run GS: how it differs from the figures' way."""

    why: str
    settings: str = ""
    times: float = 1.0  # as many iterations
    normalised: bool = True  # inputs
    weights: int = 0  # which draw of the initial weights


CHOICES = {
    "as in the figures": Choice(
        "normalised inputs; step 0.1 and smoothness 1e-4 in pixels; uniform start; 500 iterations"
    ),
    "120 iterations": Choice("the number in the paper's text", times=120 / GS_STEPS),
    "1000 iterations": Choice("twice as many", times=1000 / GS_STEPS),
    "central start": Choice("N(0, 1) of normalised images", ",start=central"),
    "step 0.025": Choice("0.1 of normalised images", ",lr=0.025"),
    "smoothness 4e-4": Choice("1e-4 of normalised images", ",tv=4e-4"),
    "normalised units": Choice(
        "the last three and 1000 iterations: as it is where images are normalised before the attack",
        ",start=central,lr=0.025,tv=4e-4",
        times=1000 / GS_STEPS,
    ),
    "smoothness 0.01": Choice("a server that trusts smoothness more; it need not know of a defence", ",tv=0.01"),
    "raw inputs": Choice("in [0, 1], no normalisation in the network", normalised=False),
    "other weights": Choice("a second draw of the initial weights", weights=1),
    "third weights": Choice("a third draw", weights=2),
}


@ITEMS.register("gs-choices")
@dataclass(frozen=True)
class GSChoices(Item):
    """GS with one open choice changed at a time: none, ours 10 % and pruning 80 %, oblivious and knowing servers."""

    title = "GS: what the choices do that the paper leaves open (ConvNet, CIFAR-10)"
    notes: ClassVar[tuple[str, ...]] = (
        "A check of our own. The same images in every line, and the same weights but for the last two.",
        "Where the oblivious server ends under ours has little to do with the image: with the same weights the objective "  # noqa: E501
        "that it reaches is the same within a few percent under every choice, while the MSE is set by how far a step "
        "goes and by how smooth an image has to be. So an MSE above the mean image's says that the search failed, and "
        "how far above says what settings it failed with.",
        "Another draw of the weights changes nothing for ours; for pruning it moves the oblivious server's MSE by up "
        "to a fifth.",
        "More smoothness than in the figures blurs what could be had exactly (the control, the server that knows).",
        "; ".join(f"*{name}*: {choice.why}" for name, choice in CHOICES.items()) + ".",
    )

    images: Count = 32
    steps: Count = GS_STEPS
    networks: tuple[str, str] = (NORMALISED, "convnet")  # normalised inputs, and not
    dataset: str = "cifar10"
    quick_images: Count = 1
    quick_steps: Count = 200
    quick_networks: tuple[str, str] = (f"{QUICK_NETWORK},{CIFAR10}", QUICK_NETWORK)

    def panel(self, name: str, context: Context) -> AttackPanel:
        """Return what is attacked, and how, under one choice."""
        choice = CHOICES[name]
        networks = self.networks if context.full else self.quick_networks
        steps = round(choice.times * (self.steps if context.full else self.quick_steps))
        images = self.images if context.full else self.quick_images
        attack = gs_attack(steps, context) + choice.settings
        model = networks[not choice.normalised]
        return AttackPanel(name, self.dataset, model, attack, images, tuple(SHOWN), is_gs=True, weights=choice.weights)

    def work(self, context: Context) -> dict[str, AttackPanel]:
        """Return the choices."""
        return {name: self.panel(name, context) for name in CHOICES}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images under one choice: every defence, every server, all at once; and the blind guesses.

        Without the server that drops the tensor: in the figures it is behind or level with the mask.
        """
        rows = self.work(context)[unit].rows((FLOORS, *SHOWN), context, without=("drop",))
        return [row for mine in rows.values() for row in mine]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return per choice, defence and server the MSE, its normalised unit, the objective reached and the success."""
        return [
            {
                "choice": case.panel,
                "defense": case.defense,
                "server": case.server,
                "images": case.mse.count,
                "mse": f"{case.mse:.4f}",
                "normalised, mean": f"{fmean(r.normalised_mse for r in case.rows):.3f}",
                "objective": f"{fmean(r.objective for r in case.rows):.4f}",
                "ssim": f"{case.ssim:.2f}",
                "success": f"{case.success.mean:.0%}",
                "mean image": f"{case.blind:.4f}",
            }
            for case in cases(Measured.read(rows))
        ]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge whether the figures' picture hangs on a choice."""
        found = cases(Measured.read(rows))
        control = {case.panel: case for case in found if case.defense == "none"}
        works = {name: control_works(found, name) is True for name in control}
        oblivious, knowing = (
            {case.panel: case for case in strongest(found, kind) if case.defense == OURS and works.get(case.panel)}
            for kind in (OBLIVIOUS, KNOWING)
        )
        half = f"at least half of the images with clamped MSE < {SUCCESS}"
        return [
            _under("the attack recovers undefended images (control)",
                   f"{half}; else what is below is not judged under it", works, control),
            _under("ours (10 %) makes images unrecognisable to a server that does not know it", HIDDEN,
                   {name: case.hidden for name, case in oblivious.items()}, oblivious),
            _under("a server that knows ours (10 %) recovers the images", f"at least half with clamped MSE < {SUCCESS}",
                   {name: case.success.mean >= 0.5 for name, case in knowing.items()}, knowing),
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the mean clamped MSE under every choice, a panel for each defence."""
        defenses = group(cases(Measured.read(rows)), "defense")
        panels, lines = {}, {}
        for defense, title in SHOWN.items():
            if mine := defenses.get((defense,)):
                panels[title] = [
                    Dot(
                        case.panel + ("" if defense == "none" else f", {case.kind}"),
                        case.mse,
                        PROMISED if case.kind == OBLIVIOUS else REACHED,
                    )
                    for case in mine
                ]
                lines[title] = {"blind guess (mean image)": mine[0].blind}
        dot_panels(path, panels, "clamped MSE, mean over images", log=True, lines=lines)
        return True


def _under(claim: str, rule: str, holds: dict[str, bool], of: dict[str, Case]) -> Judgement:
    """Return the verdict on a claim that was looked at under several choices."""
    ours = ", ".join(f"{name}: MSE {of[name].mse.mean:.4f}" for name in holds)
    return judge(f"GS: {claim}, whatever the choice", in_all(holds, "under:"), rule, "one way to run GS", ours)
