"""Names and numbers in words: for a person who reads the page and does not write specs."""

from statistics import NormalDist

from gradveil.errors import SpecError
from gradveil.modalities import IMAGE, Modality
from gradveil.protection.defense import DEFENSES
from gradveil.registry import parse, split_specs
from gradveil.threats.rows import HALF, RECOVERED, SIGNIFICANT, Floor

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


READING = (
    (
        "Oblivious server",
        "Matches everything that arrives, as if there were no defence. It is what most published tables show.",
    ),
    (
        "Adaptive server",
        "Has read the defence's code, as any server may (Kerckhoffs), and works around it. Only the client's data "
        "and its random draws are secret. This is the figure that counts.",
    ),
    (
        "Informed server",
        "Has every other record of the client, and a list of candidates for the one it does not have.",
    ),
    (
        "Multi-round server",
        "Knows the defence and has the client's updates of many rounds: what is drawn anew in each averages out.",
    ),
    (
        "Malicious server",
        "Chose the weights that it sent so that clients give more away. A client can check them: gradveil check-model.",
    ),
    (
        "Not assessed",
        "A server that knows the defence got nothing, but what is secret in the defence is neither declared nor found, "
        "or its declaration is wrong: there may be a simple way that nobody tried.",
    ),
    (
        "Control",
        "The same attack on the same {many} and weights with no defence: the ceiling. If it fails, the attack's "
        "failure against a defence proves nothing.",
    ),
    (
        "Resists this budget",
        "The attacks of such a server fail without a defence too, or had no time. That is no protection; the text says "
        "what would settle it.",
    ),
    (
        "Void",
        f"An attack whose control recovers fewer than {HALF:.0%} of the {{many}} and identifies fewer than {HALF:.0%}. "
        "A void line is never counted as protection; what it does recover still counts as a leak.",
    ),
    (
        "Blind guess",
        "What somebody who never saw the update would answer: {guesses}. The best of them is the floor: an attack "
        "above it has learned nothing.",
    ),
    (
        "Recovered",
        f"At least {HALF:.0%} of the {{many}} come back with an error under {RECOVERED:.0%} of the blind guess's.",
    ),
    (
        "Identified",
        "The reconstruction is nearer to its original than to every other {one} of the gallery (ties count against "
        "the attack): what privacy means to a person. Recognised: at least "
        f"{HALF:.0%} of the {{many}} are identified, and the exact interval's lower end lies above chance. A server "
        "with a list of candidates identifies by picking the right one as often.",
    ),
    (
        "Traces",
        "Some {one} was recovered, or more were identified than chance explains (binomial test at "
        f"{SIGNIFICANT:.0%}), or the mean error is under {HALF:.0%} of the blind guess's.",
    ),
    (
        "Nothing found",
        "None of the attacks of this panel got anything, and their controls succeeded. That is evidence, not proof: a "
        "defence that recognises the audit, data in bits that no attack reads and a secret kept outside the process "
        "cannot be detected by any audit.",
    ),
    (
        "Proved",
        "A bound that holds for every server over the whole run, under the conditions listed with it. It is worked "
        "out, not attacked; of most defences nothing is proved.",
    ),
    (
        "Error",
        "{error}: a diverged attack cannot look like protection. "
        "Reconstructions are chosen by the attack's own objective, never by the truth.",
    ),
)

PICTURES = (
    "Under each picture: its mean squared error; ✓ and red where it picks its original out of the gallery. "
    "Choose one to see it large beside its original. "
)
CELLS = (
    "Each {one} under its original; bold and red: a {part} that came back. ✓ where it picks its original out of the "
    "gallery. "
)
FIRST = "Shown first: the strongest attack of the oblivious server and of the server that knows each defence."

CARDS = (
    "Typical: the {one} with the median error of the server that knows the defence; worst: the one that came back "
    "best. Brackets are 95 % intervals over {many}. "
)

NO_TRUTH = "What the attacks brought back; there is no truth to compare with."

CAVEAT = "What no attack of this panel got, another may still get."


def reading(modality: Modality) -> list[tuple[str, str]]:
    """Return terms and what they mean."""
    words = {"one": modality.one, "many": modality.many, "guesses": modality.guess_text, "error": modality.error_text}
    return [(term, text.format(**words)) for term, text in READING]


def picture_note(modality: Modality) -> str:
    """Return what stands over the pictures, or rows."""
    return (PICTURES if modality == IMAGE else CELLS.format(one=modality.one, part=modality.part)) + FIRST
