"""What holds and what does not, in ten lines: numbers from the committed rows, and each mark from a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import RESULTS, build, judged, own_rows

from gradveil.threats.rows import group
from gradveil_studies.paper.base import Judgement
from gradveil_studies.paper.rows import GUESS, Case, Measured, Trained, cases, last_round, paired_loss

OURS, RANDOM = "representation:share=0.4", "random_mask:share=0.4"
PANELS = {"dlg-mnist": "DLG, MNIST", "dlg-cifar10": "DLG, CIFAR-10", "gs-cifar10": "GS, CIFAR-10"}
TRAINED = {  # panels of the accuracy item
    "lenet-mnist": "LeNet, MNIST",
    "lenet-mnist-default": "the same with PyTorch's initialisation",
    "lenet-cifar10": "LeNet, CIFAR-10",
    "convnet-cifar10": "ConvNet, CIFAR-10",
}


@dataclass(frozen=True)
class Line:
    """One claim, the verdicts of the pages that it sums up, and their numbers."""

    claim: str
    verdicts: Sequence[Judgement]
    numbers: str

    @property
    def mark(self) -> str:
        """The word in front: it follows from the verdicts alone."""
        found = {v.status for v in self.verdicts} - {"not measured"}
        if not found:
            return "Not measured"
        return "Holds" if found == {"reproduced"} else "Fails" if found == {"not reproduced"} else "Partly"


def _found(folder: Path) -> list[Case]:
    return cases(Measured.read(own_rows("tradeoff", folder)), Trained.read(own_rows("accuracy", folder)))


def _at(found: Sequence[Case], defense: str, knowing: bool = False) -> dict[str, Case]:
    """Return, per panel, the setting of a defence: the oblivious server, or the best of those that know."""
    mine = [s for s in found if s.defense == defense and (s.server != "oblivious") == knowing]
    return {s.panel: s for s in sorted(mine, key=lambda s: -s.mse.mean)}


def _each(values: dict[str, str], verdicts: Sequence[Judgement]) -> str:
    """Return what was measured on each panel, with its verdict where they differ."""
    status = {v.claim.partition(": ")[0]: v.status for v in verdicts}
    said = {p: f": {status.get(p)}" if len(set(status.values())) > 1 else "" for p in values}
    return ", ".join(f"{values[p]} ({name}{said[p]})" for p, name in PANELS.items() if p in values)


def _verdicts(name: str, words: str, folder: Path) -> list[Judgement]:
    return [v for v in judged(build(name, folder), folder) if words in v.claim]


def control(folder: Path) -> Line:
    """The attack works where nothing defends."""
    none, verdicts = _at(_found(folder), "none"), _verdicts("tradeoff", "undefended images", folder)
    text = {p: f"{s.success.mean:.0%} of {s.mse.count} images, MSE {s.mse.mean:.1g}" for p, s in none.items()}
    return Line("undefended, the attacks recover images", verdicts, _each(text, verdicts))


def oblivious_server(folder: Path) -> Line:
    """The paper's own picture."""
    ours, verdicts = _at(_found(folder), OURS), _verdicts("tradeoff", "to a server that does not know it", folder)
    text = {
        p: f"MSE {s.mse.mean:.2f} against {s.blind:.2f} for the {GUESS}, {s.identified.mean:.0%} picked out of 100"
        for p, s in ours.items()
    }
    claim = "some share of the paper's defence makes images unrecognisable to a server that does not know it"
    return Line(claim, verdicts, f"at 40 % {_each(text, verdicts)}")


def knowing_server(folder: Path) -> Line:
    """The same with a server that knows the code."""
    ours = _at(_found(folder), OURS, knowing=True)
    verdicts = _verdicts("tradeoff", "to a server that knows it", folder)
    text = {p: f"MSE {s.mse.mean:.1g}, {s.success.mean:.0%} recovered" for p, s in ours.items()}
    claim = "some share makes them unrecognisable to a server that knows it"
    return Line(claim, verdicts, f"at 40 % {_each(text, verdicts)}")


def random_mask(folder: Path) -> Line:
    """Whether the score is worth anything."""
    ours, random = (_at(_found(folder), defense) for defense in (OURS, RANDOM))
    verdicts = _verdicts("tradeoff", "the score matters", folder)
    text = {
        p: f"ours {ours[p].mse.mean:.2f}, random {s.mse.mean:.2f}, the {GUESS} {s.blind:.2f}" for p, s in random.items()
    }
    claim = "the score matters (ours against a random mask, 40 %, oblivious server)"
    return Line(claim, verdicts, f"MSE {_each(text, verdicts)}")


def accuracy(folder: Path) -> Line:
    """No drop in accuracy."""
    runs = group(Trained.read(own_rows("accuracy", folder)), "panel", "defense")
    final = {key: last_round(mine) for key, mine in runs.items()}
    lost: dict[str, dict[str, float]] = {}
    for panel, name in TRAINED.items():
        for share in ("0.01", "0.05", "0.1", "0.2", "0.4", "0.8"):
            ours = f"representation:share={share}"
            mine = final.get((panel, ours)) or final.get((panel, f"{ours},method=moment"), {})
            loss = paired_loss(final.get((panel, "none"), {}), mine)
            if loss is not None:
                lost.setdefault(name, {})[share] = loss
    text = "; ".join(
        f"{name}: " + ", ".join(f"{loss:+.3f} at {float(share):.0%}" for share, loss in found.items())
        for name, found in lost.items()
    )
    verdicts = _verdicts("accuracy", "no drop in accuracy", folder)
    kept = sum(v.status == "reproduced" for v in verdicts)
    text = f"so in {kept} of {len(verdicts)} settings; lost, {text}"
    return Line("the defence costs no accuracy", verdicts, text)


def times(folder: Path) -> Line:
    """The claim of 160 times the MSE."""
    found = _verdicts("claims", "160 x", folder)
    oblivious = [v for v in found if "does not know" in v.claim]
    text = "; ".join(f"{v.claim.partition(': ')[2].partition(' (')[0]}: {v.ours}" for v in oblivious)
    return Line("160 x the baselines' MSE at no loss of accuracy", oblivious, text)


def table1(folder: Path) -> Line:
    """Representation inference and its control."""
    rows = [r for r in own_rows("table1", folder) if r["setting"] == "E=1, B=32"]

    def means(key: str) -> str:
        layers = ("fc1", "fc2", "fc3")
        values = [[r[key] for r in rows if r["layer"] == layer] for layer in layers]
        return " / ".join(f"{sum(v) / len(v):.2f}" for v in values)

    told = _verdicts("table1", "tells its class", folder)
    text = (
        f"correlation at FC1 / FC2 / FC3 {means('own')}, with the wrong class {means('wrong')}; own class nearest "
        f"{means('nearest')}: {' / '.join(v.status for v in told)}"
    )
    return Line("updates give class-wise representations away", told, text)


def cause(folder: Path) -> Line:
    """WG, CLG, Rep."""
    rows = [r for r in own_rows("figure-wg-clg-rep", folder) if r["part"] in ("CLG", "Rep")]

    def share(network: str, part: str) -> str:
        mine = [r["mse"] < 0.01 for r in rows if (r["network"], r["part"]) == (network, part)]
        return f"{sum(mine) / len(mine):.0%}"

    names = {"probe": "the paper's small network", "lenet": "its LeNet"}
    found = {n: _verdicts("figure-wg-clg-rep", f"{n}:", folder) for n in names}
    text = "; ".join(
        f"{name}: convolutions alone recover {share(n, 'CLG')}, the representation alone {share(n, 'Rep')} "
        f"({' and '.join(dict.fromkeys(v.status for v in found[n]))})"
        for n, name in names.items()
    )
    return Line("the representation is the essential cause", [v for mine in found.values() for v in mine], f"on {text}")


def theorems(folder: Path) -> Line:
    """Both theorems, as printed and sound."""
    one = _verdicts("bounds", "as printed (local), bounds the error of the server", folder)
    (sound,) = _verdicts("bounds", "(global/box), bounds the error", folder)
    says = ", ".join(f"{v.ours} ({'adaptive' if 'that knows' in v.claim else 'oblivious'} server)" for v in one)
    text = (
        f"kept by {says}. A [sound version](../theory/certificates.md) is kept by {sound.ours}, for a server that "
        "inverts r', and is far smaller. Theorem 2 has a [counterexample](../theory/convergence.md)"
    )
    return Line("theorem 1 as printed bounds the error", one, text)


def meter(folder: Path) -> Line:
    """Our own figure."""
    (v,) = _verdicts("meter", "leak meter", folder)
    claim = "the leak meter predicts what the strongest attack reaches"
    return Line(claim, [v], v.ours)


Maker = Callable[[Path], Line]
LINES: dict[Maker, tuple[str, ...]] = {  # with the items whose rows a line is made of
    control: ("tradeoff", "accuracy"),
    oblivious_server: ("tradeoff", "accuracy"),
    knowing_server: ("tradeoff", "accuracy"),
    random_mask: ("tradeoff", "accuracy"),
    accuracy: ("accuracy",),
    times: ("tradeoff", "accuracy"),
    table1: ("table1",),
    cause: ("figure-wg-clg-rep",),
    theorems: ("bounds", "tradeoff", "convergence"),
    meter: ("meter",),
}


def lines(folder: Path = RESULTS) -> list[str]:
    """Return all lines with all their numbers; an item that has not been run is only named."""
    found = []
    for maker, items in LINES.items():
        missing = [name for name in items if not own_rows(name, folder)]
        if missing:
            found.append(f"- Not run at full size yet: {', '.join(missing)}.")
        else:
            line = maker(folder)
            found.append(f"- **{line.mark}**: {line.claim}: {line.numbers}.")
    return list(dict.fromkeys(found))
