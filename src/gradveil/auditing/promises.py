"""What a defence with accounted noise promises a record, as rows: the floor for Gaussian images, the guess bound."""

from collections.abc import Sequence

from torch import Tensor

from gradveil.auditing.run_folder import Row
from gradveil.privacy.accountant import AGGREGATE, ASSUMPTIONS, FLOOR, GUESS, THEOREM, Account
from gradveil.privacy.plan import PlannedRun, class_spectra, floor_share
from gradveil.protection.defense import Defense, accounted
from gradveil.types import Batch

DELTA = 1e-5


def promise_rows(
    name: str, defense: Defense, run: PlannedRun, public: Batch, labels: Tensor, choices: int, patient: int = 0
) -> list[Row]:
    """Return a row for floor and guess each, of one update and of the whole run; none where nothing is promised.

    ``labels`` are of the records that are looked at: the floor is that of their classes. ``choices``: candidates that
    a record stands among. ``patient``: how many updates of a client a multi-round server has.
    """
    built = accounted(accounted(defense).for_run(run))
    cost = built.cost(run.epochs)
    if cost is None:
        return []
    spectra = class_spectra(public)
    size = public.inputs[0].numel()
    classes = [0] * len(labels) if labels.is_floating_point() or labels.ndim > 1 else labels.tolist()
    known = all(label in spectra for label in classes)
    blind = sum(float(spectra[label].sum()) for label in classes) / len(classes) / size if known else 0.0
    alone = not built.min_clients  # each update is released by itself: attacks on it are bound
    looks: list[tuple[str, int, Sequence[str]]] = [("the whole run", run.participations, ())]
    if alone and patient:
        looks.insert(0, (f"{patient} updates", patient, ("multi-round",)))
    if alone:
        looks.insert(0, ("one update", 1, ("oblivious", "adaptive", "malicious")))
    rests = [THEOREM, *ASSUMPTIONS, *([] if alone else [AGGREGATE])]
    rows = []
    for what, times, tiers in looks:
        account = Account(what, spent=times * cost)
        head = {"kind": "certificate", "defense": name, "layer": what, "sound": True}
        share = floor_share(account, [spectra[label] for label in classes]) if known and blind else None
        rows.append(head | {
            "certificate": "floor", "mse": None if share is None else share * blind, "tiers": list(tiers),
            "assumptions": [*rests, FLOOR],
            "says": _floor_words(account, share),
        })  # fmt: skip
        guess = account.guess(1 / choices) if choices > 1 else None
        also = ["informed"] if times == 1 and tiers else []
        rows.append(head | {
            "certificate": "guess", "mse": None, "chance": guess, "tiers": [*tiers, *also],
            "assumptions": [*rests, GUESS], "says": _guess_words(account, choices, guess),
        })  # fmt: skip
    return rows


def _floor_words(account: Account, share: float | None) -> str:
    if share is None:
        return "Not computed: too few public examples of these classes."
    least = f"no server's error would be below {share:.2f} of the blind guess's"
    return f"z_run = {account.z_run:.3g}: were images Gaussian, {least} on average."


def _guess_words(account: Account, choices: int, guess: float | None) -> str:
    also = f"ε = {account.epsilon(DELTA):.3g} at δ = {DELTA:g}."
    if guess is None:
        return also
    return f"One of {choices} candidates is picked rightly with a chance of at most {guess:.2g}; {also}"
