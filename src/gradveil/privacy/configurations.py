"""What a privacy configuration of Flower, Opacus or NVFlare really buys, and what in it is off."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, inf, log, sqrt
from pathlib import Path
from typing import Any

from gradveil.errors import CertificateError
from gradveil.files import wrap_parse_errors
from gradveil.privacy.accountant import TUNED, epsilon_of
from gradveil.privacy.bought import Bought, Told, releases_of
from gradveil.privacy.configuration_files import above_zero, filters, flat_settings, number, read
from gradveil.privacy.dp import beside_a_count
from gradveil.privacy.opacus_settings import opacus

__all__ = ["Bought", "Told", "check"]


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
    releases, notes = releases_of(args, known)
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
    (_has("max_grad_norm"), opacus),
    (_has("history"), opacus),
)
