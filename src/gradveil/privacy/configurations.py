"""What a privacy configuration of Flower, Opacus or NVFlare really buys, and what in it is off."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, hypot, inf, log, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from gradveil.errors import CertificateError
from gradveil.files import read_whole, wrap_parse_errors
from gradveil.privacy.accountant import TUNED, Account
from gradveil.privacy.bounds import GaussianTraining, beside_a_count, epsilon_of, mu_of

_LARGEST = 2**26  # bytes of a file of text


def read(path: Path) -> Any:
    """Return what a file holds, as it is nested."""
    try:
        text = read_whole(path, _LARGEST).decode()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except Exception as error:
        raise CertificateError(
            f"{path} cannot be read as TOML (.toml) or JSON: {' '.join(str(error).split())[:150]}. Of an Opacus "
            f"checkpoint give its accountant's state_dict() as JSON."
        ) from error


def flat_settings(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of all levels by their last name, in one spelling."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from flat_settings(value)
            else:
                yield str(key).replace("-", "_").lower(), value
                yield from flat_settings(value)
    elif isinstance(values, list):
        for value in values:
            yield from flat_settings(value)


def filters(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the class and the settings of each filter of an NVFlare configuration."""
    if isinstance(values, Mapping):
        for kind in ("task_result_filters", "task_data_filters"):
            for entry in values.get(kind) or ():
                for one in entry.get("filters", ()):
                    yield str(one.get("path") or one.get("name")).rpartition(".")[2], dict(one.get("args") or {})
        for key, value in values.items():
            if key not in ("task_result_filters", "task_data_filters"):
                yield from filters(value)
    elif isinstance(values, list):
        for value in values:
            yield from filters(value)


def number(flat: Mapping[str, Any], *names: str) -> float | None:
    """Return the first of these settings that there is."""
    for name in names:
        value = flat.get(name)
        if value is None or isinstance(value, bool):
            continue
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise CertificateError(f"{name} = {value!r} is not a number.") from None
    return None


def above_zero(flat: Mapping[str, Any], *names: str) -> float:
    """Return a setting that must be there and above 0."""
    found, name = number(flat, *names), names[0].replace("_", "-")
    if found is None:
        raise CertificateError(f"{name} is not in the file; it may be set in the code. Add it to say what is bought.")
    if not 0 < found < inf:
        raise CertificateError(f"{name} = {found:g}: it must be above 0.")
    return found


Level = Literal["record", "client"]


@dataclass(frozen=True)
class Bought:
    """What a configuration gives one record, or one client, over a run."""

    what: str  # the mechanism, in words
    level: Level = "client"
    against: str = "the server"  # whom it protects from
    sigma: float | None = None  # of the noise in what is released
    mu: float | None = None  # of a release; None: no such promise
    releases: int | None = None  # over the run; None: the file does not say
    epsilon: float | None = None  # over the run, where it does not follow from μ: with secret sampling
    notes: tuple[str, ...] = ()  # what is off, or easily misread
    details: dict[str, float] = field(default_factory=dict)

    @property
    def account(self) -> Account | None:
        """What the run costs by Gaussian DP; None where there is no such promise."""
        if self.mu is None or self.mu == inf:
            return None
        return Account("configuration", spent=(self.releases or 1) * self.mu**2)


@dataclass(frozen=True)
class Told:
    """What was said beside the file."""

    rounds: int | None = None
    participations: int | None = None
    delta: float = 1e-5


def releases_of(flat: Mapping[str, Any], known: Told) -> tuple[int | None, tuple[str, ...]]:
    """Return how many rounds a client takes part in, and how that was found."""
    if known.participations is not None:
        return known.participations, ()
    rounds = known.rounds or number(flat, "num_server_rounds", "num_rounds", "rounds")
    if rounds is None:
        return None, ("The file does not say how many rounds there are: the figures are of one. Give --rounds.",)
    share = number(flat, "fraction_train", "fraction_fit")
    chosen, devices = number(flat, "num_sampled_clients"), number(flat, "population_size", "num_supernodes")
    if share is None and chosen and devices:
        share = chosen / devices
    note = () if share is None or share >= 1 else (
        f"A client takes part in {ceil(rounds * share):g} of {rounds:g} rounds on average, and may be drawn in all: "
        "all are counted. Give --participations where somebody keeps to fewer.",
    )  # fmt: skip
    return int(rounds), note


ROUNDED = 1e-9  # of a count: 3 / (1 / 93) is just under 279
NOT_COVERED = "Batch norm, losses and metrics that are sent beside the update are not covered."
GUESSABLE = (
    "Without secure_mode = true the noise is of torch's generator, which keeps 32 bits of its seed on a CPU: a server "
    "can try them all on one step. The figures are of noise that is secret."
)
ENGINES = "of one PrivacyEngine. A client that makes a new one in every round spends this in each: give --rounds."


@dataclass(frozen=True)
class Sampling:
    """How a client's records come into batches."""

    rate: float
    steps: int  # of a round
    poisson: bool = True

    @property
    def uses(self) -> int:
        """How often a record is in a batch, where each epoch goes through all records in turn: at most."""
        return max(1, ceil(self.steps * self.rate - ROUNDED))


def opacus(flat: Mapping[str, Any], known: Told) -> Bought:
    """Return what the settings of a PrivacyEngine buy, or the history of its accountant."""
    releases, notes = releases_of(flat, known)
    delta = number(flat, "target_delta", "delta") or known.delta
    clip, about = _clip(flat)
    notes += about
    if history := flat.get("history"):
        z, sampling = _counted(history)
        notes = (*(note for note in notes if "--rounds" not in note), f"The accountant counts the steps {ENGINES}")
    elif number(flat, "noise_multiplier") is None and (target := number(flat, "target_epsilon")) is not None:
        return Bought(
            "DP-SGD with the noise that its own accountant finds", "record", mu=mu_of(target, delta), releases=releases,
            notes=(*notes, f"The target is {ENGINES} The figures take all of it for Gaussian."),
            details={"claimed_epsilon": target, "delta": delta},
        )  # fmt: skip
    else:
        z = above_zero(flat, "noise_multiplier")
        sampling, about = _sampling(flat)
        notes += about
    own, about = _of_gradients(flat, z)
    return _bought(z, own, clip, sampling, releases, (*notes, *about), delta, flat)


def _bought(
    z: float, own: float, clip: float | None, sampling: Sampling, releases: int | None, notes: tuple[str, ...],
    delta: float, flat: Mapping[str, Any],
) -> Bought:  # fmt: skip
    whole = GaussianTraining(z, sampling.rate, sampling.steps * (releases or 1))
    said = {"noise_multiplier": z, "sampling_rate": sampling.rate, "steps": float(sampling.steps), "delta": delta}
    mu, epsilon = sqrt(sampling.uses) / z, None
    if sampling.rate < 1 and sampling.poisson:
        epsilon, seen = whole.epsilon(delta), whole.epsilon_seen(delta)
        said |= {"epsilon_known_batches": seen}
        notes += (
            f"ε counts on secret Poisson batches (rate {sampling.rate:.3g}). Of a server that knows the batches, ε is "
            f"{seen:.3g}: a record is in {whole.steps * sampling.rate:.3g} of them on average, and may be in more. "
            f"Where they are cut in turn, a round is μ = {mu:.3g} by itself and nothing is gained from sampling.",
        )
    elif sampling.rate < 1:
        notes += (
            "poisson-sampling = false: batches are cut in turn and nothing is gained from sampling, though Opacus's "
            "accountant counts a gain all the same.",
        )
    if flat.get("secure_mode") is not True:
        notes += (GUESSABLE,)
    size = number(flat, "records", "num_examples", "sample_size")
    sigma = None if clip is None or size is None else own * clip / max(1, int(size * sampling.rate))
    said |= ({"clip": clip} if clip is not None else {}) | ({"effective_noise_multiplier": own} if own != z else {})
    return Bought(
        "DP-SGD: each record's gradient is clipped, and every step has Gaussian noise", "record", "the server",
        sigma, mu=mu, releases=releases, epsilon=epsilon, notes=(*notes, NOT_COVERED), details=said,
    )  # fmt: skip


def _counted(history: Any) -> tuple[float, Sampling]:
    try:
        training = GaussianTraining.of_opacus(SimpleNamespace(history=history))
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise CertificateError(f"history is not Opacus's list of (noise, rate, steps): {error}.") from error
    return training.noise, Sampling(training.sampling_rate, training.steps)


def _epoch(flat: Mapping[str, Any]) -> int | None:
    """Return how many batches the loader of an epoch has: Opacus's rate is one over it, not batch size over records."""
    size, records = number(flat, "batch_size"), number(flat, "records", "num_examples", "sample_size")
    if not size or not records:
        return None
    return max(1, int(records // size if flat.get("drop_last") is True else ceil(records / size)))


def _sampling(flat: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    poisson, given, batches = flat.get("poisson_sampling") is not False, number(flat, "sample_rate"), _epoch(flat)
    epochs, notes = number(flat, "local_epochs", "epochs") or 1, tuple[str, ...]()
    if given is None and batches is None:
        notes = ("Neither sample-rate, nor batch-size with records, is given: every step is taken to use all.",)
    rate = min(1.0, given or 1 / (batches or 1))
    steps = number(flat, "steps") or ceil(epochs / rate * (1 - ROUNDED))
    return Sampling(rate, max(1, int(steps)), poisson), notes


def _clip(flat: Mapping[str, Any]) -> tuple[float | None, tuple[str, ...]]:
    """Return the most that one record adds to a sum: of clips for layers, the root of the sum of their squares."""
    given, layered = flat.get("max_grad_norm"), str(flat.get("clipping", "flat")) == "per_layer"
    if isinstance(given, list):
        clips = [above_zero({"max_grad_norm": clip}, "max_grad_norm") for clip in given]
        whole = hypot(*clips) if clips else inf
        return whole, (
            f"{len(clips)} layers are clipped one by one: a record moves the sum by up to {whole:.4g}, the root of the "
            "sum of squares. Opacus scales its noise to that; a loop that scales it to each layer's own clip has "
            f"{sqrt(len(clips)):.3g} times less than it needs where the clips are equal.",
        )
    clip = number(flat, "max_grad_norm")
    if not layered or clip is None:
        return clip, ()
    return clip, (
        f"clipping = per_layer with one clip: {clip:g} is taken for that of all layers together. Where each of L "
        "layers has it, a record moves the sum by √L times as much, and noise for one clip promises √L times the μ.",
    )


def _of_gradients(flat: Mapping[str, Any], z: float) -> tuple[float, tuple[str, ...]]:
    """Return the multiplier of the gradients' own noise: adaptive clipping spends a part on a count."""
    deviation = number(flat, "unclipped_num_std")
    if deviation is None:
        return z, ()
    own = beside_a_count(z, deviation)
    return own, (
        f"Adaptive clipping: noise-multiplier = {z:g} is of gradients and count together; the gradients alone have "
        f"{own:.4g}. The count is divided by the number of records in the batch, which is not noised: the figures take "
        "it for public, and a record that is missing to count as a half (Andrew et al. 2021).",
    )


def check(path: Path, known: Told | None = None) -> list[Bought]:
    """Return what each mechanism in a configuration file buys."""
    with wrap_parse_errors(path, CertificateError, "It is no configuration of Flower, Opacus or NVFlare."):
        return _check(path, known or Told())


def _check(path: Path, known: Told) -> list[Bought]:
    values = read(path)
    settings = dict(flat_settings(values))
    found = [_filter(name, args, settings, known) for name, args in filters(values)]
    found = found or [make(settings, known) for fits, make in KINDS if fits(settings)]
    if not found:
        raise CertificateError(
            f"{path} names no clip and noise that are known here. Looked for: clipping-norm with noise-multiplier, or "
            "with sensitivity, epsilon and delta (Flower), max-grad-norm with noise-multiplier, or an accountant's "
            "history (Opacus), privacy filters (NVFlare)."
        )
    return [one if one.mu is None else replace(one, notes=(*one.notes, TUNED)) for one in found]


def _local_dp(flat: Mapping[str, Any], known: Told) -> Bought:
    """Flower's LocalDpMod, and filters with the same settings: the client clips its update and adds the noise."""
    clip, delta = above_zero(flat, "clipping_norm"), above_zero(flat, "delta", "target_delta")
    claimed, sensitivity = above_zero(flat, "epsilon"), number(flat, "sensitivity")
    releases, notes = releases_of(flat, known)
    sensitivity = clip if sensitivity is None else sensitivity
    if not 0 <= sensitivity < inf:
        raise CertificateError(f"sensitivity = {sensitivity}: it must not be below 0.")
    sigma = sensitivity * sqrt(2 * log(1.25 / delta)) / claimed
    mu = clip / sigma if sigma else inf
    if sensitivity < clip:
        times = f"{clip / sensitivity:.3g} times too small" if sensitivity else "none at all"
        notes = (
            f"sensitivity = {sensitivity:g} beside clipping-norm = {clip:g}: an update may move by {clip:g}, and the "
            f"noise is {times}. Set sensitivity to the clip.",
            *notes,
        )
    elif sensitivity > clip:
        notes = (f"sensitivity = {sensitivity:g} is more than the clip of {clip:g}: more noise than asked for.", *notes)
    real = epsilon_of(mu, delta) if mu < inf else inf
    if real > 1.01 * claimed:
        notes = (f"epsilon = {claimed:g} is not what a round gives: it is {real:.3g} at δ = {delta:g}.", *notes)
    if claimed > 1:
        notes += (
            "Its rule for the noise, √(2 ln(1.25/δ))/ε, is proved for ε below 1 only; the figures here are exact.",
        )
    notes += (
        "Nothing counts the rounds: each spends its ε anew.",
        "The clip is of a client's whole update, so the noise does not shrink with its number of records; record-level "
        "noise (veil, DP-SGD) of the same promise is that many times smaller in the mean.",
        "Against a client whose update is exchanged for another one, not left out, twice the μ holds.",
    )
    said = {"clip": clip, "sensitivity": sensitivity, "claimed_epsilon": claimed, "delta": delta}
    return Bought(
        "each client clips its update and adds Gaussian noise", "client", "the server", sigma, mu, releases,
        notes=notes, details=said,
    )  # fmt: skip


def _central_dp(flat: Mapping[str, Any], known: Told) -> Bought:
    """Flower's DP strategies: the server adds noise to the mean of clipped updates."""
    clip, z = above_zero(flat, "clipping_norm", "initial_clipping_norm"), number(flat, "noise_multiplier")
    clients = number(flat, "num_sampled_clients")
    if z is None or not 0 <= z < inf:
        raise CertificateError(f"noise-multiplier = {z}: it must not be below 0.")
    releases, notes = releases_of(flat, known)
    notes = (
        "The server adds the noise after it has seen every update (with SecAgg+: their exact sum): nothing is promised "
        "against the server, only against those who see the model afterwards.",
        *notes,
    )
    if z == 0:
        notes = ("noise-multiplier = 0: there is no noise and no promise.", *notes)
    if number(flat, "max_epsilon") is None and "target_delta" not in flat:
        notes += ("Nothing counts the rounds: give the strategy an accountant (RdpAccountant, max_epsilon).",)
    notes += (
        "The noise is for a mean in which every client counts alike. Flower's FedAvg weighs by examples: a client with "
        "more of them counts more, and the promise does not hold for it.",
    )
    said = {"clip": clip, "noise_multiplier": z} | ({} if clients is None else {"clients": clients})
    own = z
    if "initial_clipping_norm" in flat and z:
        own, about = _adaptive(flat, z, clients)
        notes += about
        said |= {"effective_noise_multiplier": own}
    sigma = None if clients is None else own * clip / clients
    return Bought(
        "the server adds Gaussian noise to the mean of clipped updates", "client", "others than the server", sigma,
        1 / z if z else inf, releases, notes=notes, details=said,
    )  # fmt: skip


def _adaptive(flat: Mapping[str, Any], z: float, clients: float | None) -> tuple[float, tuple[str, ...]]:
    """Return the multiplier of the updates' own noise where the clip follows a noisy count of clipped ones."""
    deviation = number(flat, "clipped_count_stddev")
    if deviation is None and clients is not None:
        deviation = clients / 20  # as Flower does
    if deviation is None:
        return z, ("Adaptive clipping: give num-sampled-clients or clipped-count-stddev for the noise on updates.",)
    own = beside_a_count(z, deviation)
    zeroed = sqrt(own**-2 + deviation**-2)
    return own, (
        f"Adaptive clipping: noise-multiplier = {z:g} is of updates and count together (noise of {deviation:g} on the "
        f"count); the updates alone have {own:.4g}. That takes a client that is missing to count as a half (Andrew et "
        f"al. 2021): where its update is zeroed, the count moves by one, and a round is μ = {zeroed:.3g}.",
    )


def _filter(name: str, args: Mapping[str, Any], flat: Mapping[str, Any], known: Told) -> Bought:
    both = dict(flat) | {key.replace("-", "_").lower(): value for key, value in args.items()}
    if "clipping_norm" in args and "epsilon" in args:
        return _local_dp(both, known)
    reasons = {
        "SVTPrivacy": "Its epsilon is of choosing the entries alone. Each value that is sent spends its own beside it, "
        "and they add up over the values: thousands for a network.",
        "PercentilePrivacy": "It zeroes small entries and cuts off large ones, with no noise: a heuristic, no promise.",
        "ExcludeVars": "It leaves tensors out; what is sent is sent as it is.",
        "HEModelEncryptor": "The server sees the sum alone, and the sum is exact: without noise nothing is promised.",
    }
    note = reasons.get(name, "It is not known here; without a clip and noise on each update nothing is promised.")
    return Bought(f"the filter {name}", notes=(note,))


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda flat: all(name in flat for name in names)


KINDS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], Told], Bought]], ...] = (
    (lambda flat: _has("clipping_norm", "epsilon")(flat) and "noise_multiplier" not in flat, _local_dp),
    (_has("clipping_norm", "noise_multiplier"), _central_dp),
    (_has("initial_clipping_norm", "noise_multiplier"), _central_dp),
    (_has("max_grad_norm"), opacus),
    (_has("history"), opacus),
)
