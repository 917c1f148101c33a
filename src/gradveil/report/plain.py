"""Names and numbers in words: for a person who reads the page and does not write specs."""

from statistics import NormalDist

from gradveil.errors import SpecError
from gradveil.protection.defense import DEFENSES
from gradveil.registry import parse, split_specs
from gradveil.threats.rows import Floor

LAST_DIGIT = 1e-10  # mean squared error: a pixel is off by 1e-5 of the range on the mean, as single precision rounds
SHADE = (0.5 / 255) ** 2  # half a step of a picture with 256 shades
SHARES = ("share", "pruned", "mix")  # settings that are read as percent


def name_of(spec: str) -> str:
    """Return a defence's plain name, with the settings that were given; a user's own keeps its spec."""
    try:
        return " + ".join(_one(part) for part in split_specs(spec)) or spec
    except SpecError:
        return spec


def _one(spec: str) -> str:
    read = parse(spec)
    title = DEFENSES.get(read.name).title or read.name
    said = [_setting(key, value) for key, value in read.settings.items()]
    return f"{title}, {', '.join(said)}" if said else title


def _setting(key: str, value: str) -> str:
    if key not in SHARES:
        return f"{key.replace('_', ' ')} {value}"
    try:
        return f"{key} {100 * float(value):g} %"
    except ValueError:
        return f"{key} {value}"


def error_words(error: float, floor: Floor) -> str:
    """Return how far an answer is off, in words: by itself where it is all but exact, else beside a blind guess."""
    kind = floor.modality
    if kind.is_share:
        return f"every {kind.part} right" if error == 0 else f"{error:.0%} of the {kind.part}s wrong"
    if error <= LAST_DIGIT:
        return "to the last digit"
    if error <= SHADE:
        return "closer than a screen can show"
    times = floor.error.mean / error
    if times >= 2:
        return f"{times:.0f} times closer than a blind guess"
    return "little better than a blind guess" if times > 1 else "worse than a blind guess"


def in_plain_words(mu: float) -> str:
    """Return what μ over a whole run means for one person, as guesses out of 100."""
    law = NormalDist()
    used, picked = law.cdf(mu / 2), law.cdf(law.inv_cdf(0.01) + mu)
    return (
        f"Somebody who must say whether one person's record was used at all is right at most {100 * used:.0f} times in "
        "100, where a coin is right 50 times. Somebody who must pick the record out of 100 candidates is right at most "
        f"{100 * picked:.0f} times in 100, where luck is right once. This holds over the whole run, for a server that "
        "knows all other records and chooses the weights."
    )
