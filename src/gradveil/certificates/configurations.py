"""What a privacy configuration of Flower, Opacus or NVFlare really buys, and what in it is off."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, log, sqrt
from pathlib import Path
from typing import Any, Literal

from gradveil.certificates.accountant import Account, epsilon_of, mu_of
from gradveil.certificates.configuration_files import above_zero, filters, flat_settings, number, read
from gradveil.certificates.privacy import GaussianTraining
from gradveil.errors import CertificateError
from gradveil.files import damage_told

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
    epsilon_round: float | None = None  # where the promise of a round is no μ: pure ε
    epsilon: float | None = None  # over the run, where it does not follow from μ: pure, or with secret sampling
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
    parameters: int | None = None
    delta: float = 1e-5


def check(path: Path, known: Told | None = None) -> list[Bought]:
    """Return what each mechanism in a configuration file buys."""
    with damage_told(path, CertificateError, "It is no configuration of Flower, Opacus or NVFlare."):
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
    return found


def _releases(flat: Mapping[str, Any], known: Told) -> tuple[int | None, tuple[str, ...]]:
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


def _local_dp(flat: Mapping[str, Any], known: Told) -> Bought:
    """Flower's LocalDpMod, and filters with the same settings: the client clips its update and adds the noise."""
    clip, delta = above_zero(flat, "clipping_norm"), above_zero(flat, "delta", "target_delta")
    claimed, sensitivity = above_zero(flat, "epsilon"), number(flat, "sensitivity")
    releases, notes = _releases(flat, known)
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
    releases, notes = _releases(flat, known)
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
    if "initial_clipping_norm" in flat:
        notes += ("Adaptive clipping releases counts of clipped updates too; they are not in these figures.",)
    sigma = None if clients is None else z * clip / clients
    said = {"clip": clip, "noise_multiplier": z} | ({} if clients is None else {"clients": clients})
    return Bought(
        "the server adds Gaussian noise to the mean of clipped updates", "client", "others than the server", sigma,
        1 / z if z else inf, releases, notes=notes, details=said,
    )  # fmt: skip


def _opacus(flat: Mapping[str, Any], known: Told) -> Bought:
    """DP-SGD in each client, by settings or by what an accountant counted."""
    releases, notes = _releases(flat, known)
    history, delta = flat.get("history"), number(flat, "target_delta", "delta") or known.delta
    if history:
        try:
            training = GaussianTraining.of_opacus(_History(history))
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise CertificateError(f"history is not Opacus's list of (noise, rate, steps): {error}.") from error
        z, rate, steps = training.noise, training.sampling_rate, training.steps
        notes = tuple(note for note in notes if "--rounds" not in note)
        notes += (
            "The accountant counts the steps of one PrivacyEngine. A client that makes a new one in every round has "
            "spent this in each: give --rounds.",
        )
    elif number(flat, "noise_multiplier") is None and (target := number(flat, "target_epsilon")) is not None:
        return Bought(
            "DP-SGD with the noise that its own accountant finds", "record", mu=mu_of(target, delta), releases=releases,
            notes=(*notes, "The target is of one PrivacyEngine: a client that makes a new one in every round spends it "
                   "in each. The figures take the whole promise for Gaussian."),
            details={"claimed_epsilon": target, "delta": delta},
        )  # fmt: skip
    else:
        z = above_zero(flat, "noise_multiplier")
        size, records = number(flat, "batch_size"), number(flat, "records", "num_examples", "sample_size")
        found = number(flat, "sample_rate") or (size / records if size and records else None)
        if found is None:
            found = 1.0
            notes += ("Neither sample-rate, nor batch-size with records, is given: every step is taken to use all.",)
        rate = min(found, 1.0)
        steps = int(number(flat, "steps") or ceil((number(flat, "local_epochs", "epochs") or 1) / rate))
    whole = GaussianTraining(z, rate, steps * (releases or 1))
    plain, sampled = sqrt(max(1, round(steps * rate))) / z, rate < 1
    if sampled:
        notes += (
            f"ε counts on secret Poisson batches (rate {rate:.3g}). With batches that are cut in turn, or that the "
            f"server knows, a round is μ = {plain:.3g} by itself and nothing is gained from sampling.",
        )
    notes += ("Batch norm, losses and metrics that are sent beside the update are not covered.",)
    said = {"noise_multiplier": z, "sampling_rate": rate, "steps": float(steps)}
    return Bought(
        "DP-SGD: each record's gradient is clipped, and every step has Gaussian noise", "record", "the server",
        mu=plain, releases=releases, epsilon=whole.epsilon(delta) if sampled else None, notes=notes,
        details=said | {"delta": delta},
    )  # fmt: skip


@dataclass(frozen=True)
class _History:
    history: list[Any]


def _filter(name: str, args: Mapping[str, Any], flat: Mapping[str, Any], known: Told) -> Bought:
    """One filter of an NVFlare job."""
    both = dict(flat) | {key.replace("-", "_").lower(): value for key, value in args.items()}
    if "clipping_norm" in args and "epsilon" in args:
        return _local_dp(both, known)
    if name == "SVTPrivacy":
        return _svt(both, known)
    reasons = {
        "PercentilePrivacy": "It zeroes small entries and cuts off large ones, with no noise: a heuristic, no promise.",
        "ExcludeVars": "It leaves tensors out; what is sent is sent as it is.",
        "HEModelEncryptor": "The server sees the sum alone, and the sum is exact: without noise nothing is promised.",
    }
    note = reasons.get(name, "It is not known here; without a clip and noise on each update nothing is promised.")
    return Bought(f"the filter {name}", notes=(note,))


def _svt(args: Mapping[str, Any], known: Told) -> Bought:
    """NVFlare's sparse vector filter: pure ε of the threshold, the selection and every value that is released."""
    releases, notes = _releases(args, known)
    share, each = number(args, "fraction") or 0.1, number(args, "noise_var") or 0.1
    parts = (number(args, "epsilon_threshold"), number(args, "epsilon_query"))
    chosen = sum(part for part in parts if part) or number(args, "epsilon") or 0.1
    if known.parameters is None:
        return Bought(
            "the filter SVTPrivacy", releases=releases,
            notes=("Its ε grows with the number of values that are sent. Give --parameters.", *notes),
        )  # fmt: skip
    values = ceil(share * known.parameters)
    release = number(args, "epsilon_release") or values * each
    spent = chosen + release
    notes = (
        f"epsilon = {chosen:g} is of choosing the entries alone. {values:,} values are released with ε = "
        f"{release / values:.3g} each: a round spends ε = {spent:,.0f}.",
        *notes,
        "Each entry is cut off at gamma by itself, so ε is of a whole update in which all of them change.",
    )
    total = {"epsilon_run": spent * (releases or 1)}
    return Bought(
        "the filter SVTPrivacy: some entries, each with Laplace noise", releases=releases, epsilon_round=spent,
        epsilon=spent * (releases or 1), notes=notes, details={"values": float(values)} | total,
    )  # fmt: skip


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda flat: all(name in flat for name in names)


KINDS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], Told], Bought]], ...] = (
    (lambda flat: _has("clipping_norm", "epsilon")(flat) and "noise_multiplier" not in flat, _local_dp),
    (_has("clipping_norm", "noise_multiplier"), _central_dp),
    (_has("initial_clipping_norm", "noise_multiplier"), _central_dp),
    (_has("max_grad_norm"), _opacus),
    (_has("history"), _opacus),
)
