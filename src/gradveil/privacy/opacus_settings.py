"""DP-SGD in each client, by Opacus's settings or what its accountant counted: its own rates, steps and clips."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, hypot, inf, sqrt
from typing import Any

from gradveil.errors import CertificateError
from gradveil.privacy.accountant import mu_of
from gradveil.privacy.bought import Bought, Told, releases_of
from gradveil.privacy.configuration_files import above_zero, number
from gradveil.privacy.dp import GaussianTraining, beside_a_count

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
            notes=(*notes, *_planned(flat), f"The target is {ENGINES} The figures take all of it for Gaussian."),
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
        training = GaussianTraining.of_opacus(_History(history))
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise CertificateError(f"history is not Opacus's list of (noise, rate, steps): {error}.") from error
    return training.noise, Sampling(training.sampling_rate, training.steps)


@dataclass(frozen=True)
class _History:
    history: list[Any]


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


def _planned(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Say where Opacus finds the noise for fewer steps than its loader takes: it rounds epochs over rate down."""
    batches, epochs = _epoch(flat), number(flat, "local_epochs", "epochs") or 1
    if batches is None:
        return ()
    taken, found = int(epochs * int(1 / (1 / batches))), int(epochs / (1 / batches))
    if flat.get("poisson_sampling") is False:
        taken = int(epochs * batches)
    if taken <= found:
        return ()
    return (
        f"Opacus finds the noise for {found} steps, and its loader takes {taken}: it rounds epochs over rate down.",
    )


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
