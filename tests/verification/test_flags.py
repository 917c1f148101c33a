"""What verify must flag, each broken on purpose in a real pipeline, and what it must not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Generator, nn

import gradveil
from gradveil.defenses.veil import Veil
from gradveil.types import Batch
from gradveil.verification.pipelines import Federated, Foreign, Protected
from gradveil.verification.verify import Verified, verify
from verification import trainers

Z = 1.0


@pytest.fixture(autouse=True)
def draws() -> Iterator[None]:
    """What a user's trainer draws from torch is the same in every run of the tests."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Batch]:
    data = gradveil.dataset("digits")
    return gradveil.model("mlp:widths=24", data.input_shape, data.num_classes), data.train.batch(slice(0, 64))


def measure(digits: tuple[nn.Module, Batch], pipeline: Any, **more: Any) -> Verified:
    model, like = digits
    return verify(pipeline, model, like.inputs, like.labels, **{"seed": 1, "trials": 40, **more})


@dataclass(frozen=True)
class HalfTheNoise(Veil):
    """Adds half of the noise that it accounts for."""

    def begin(self, slots: int, rng: Any) -> Any:
        return Veil(z=Z / 2, clip=1.0).begin(slots, rng)


@dataclass(frozen=True)
class NoClip(Veil):
    """The clip never binds: its factor is 1 for every record."""

    def begin(self, slots: int, rng: Any) -> Any:
        return Veil(z=Z * 1e-5, clip=1e5).begin(slots, rng)


@dataclass(frozen=True)
class HalfTheAccount(Veil):
    """Charges for half of μ."""

    def cost(self, epochs: int) -> float:
        return super().cost(epochs) / 4


@dataclass(frozen=True)
class TheSameNoise(Veil):
    """Begins its generator anew in every step."""

    def begin(self, slots: int, rng: Any) -> Any:
        return Veil(z=Z, clip=1.0).begin(slots, Generator().manual_seed(5))


@dataclass(frozen=True)
class Todays(Veil):
    """Its noise is that of torch's generator with a small seed."""

    def begin(self, slots: int, rng: Any) -> Any:
        return Veil(z=Z, clip=1.0).begin(slots, Generator().manual_seed(4321))


@dataclass
class TwiceInABatch(Federated):
    """Every record stands in the client's data twice, and is charged once."""

    def run(self, model: nn.Module, canaries: Any, present: torch.Tensor) -> Any:
        doubled = replace(
            canaries, inputs=canaries.inputs.repeat(2, 1, 1, 1), labels=canaries.labels.repeat(2)
        )  # fmt: skip
        yield from super().run(model, doubled, present.repeat(1, 2))


def engine(kind: type[Veil] = Veil, pipeline: type[Federated] = Federated) -> Federated:
    return pipeline(kind(z=Z, clip=1.0), rounds=2)


def test_a_sound_engine_is_consistent_and_its_interval_holds_the_promise(digits: Any) -> None:
    found = measure(digits, engine())
    assert found.verdict == "consistent"
    assert found.promised == pytest.approx(2**0.5)
    assert found.estimate.low <= 2**0.5 <= found.estimate.high * 1.02
    assert 0 < found.guess_low < found.promised


@pytest.mark.parametrize("kind", [HalfTheNoise, NoClip, HalfTheAccount])
def test_a_mechanism_that_is_not_what_it_accounts_for_is_flagged(digits: Any, kind: type[Veil]) -> None:
    found = measure(digits, engine(kind))
    assert found.verdict == "exceeds the promise"
    assert found.estimate.low > 1.3 * found.promised


def test_a_record_that_is_used_twice_is_flagged(digits: Any) -> None:
    found = measure(digits, engine(pipeline=TwiceInABatch))
    assert found.estimate.low > 1.5 * found.promised


@pytest.mark.parametrize("kind", [HalfTheNoise, NoClip, HalfTheAccount])
def test_a_training_loop_is_measured_as_well(digits: Any, kind: type[Veil]) -> None:
    found = measure(digits, Protected(kind(z=Z, clip=1.0)), trials=24)
    assert found.estimate.low > 1.3 * found.promised


def test_noise_that_is_used_in_two_rounds_is_flagged_by_their_difference(digits: Any) -> None:
    found = measure(digits, engine(TheSameNoise))
    assert found.verdict == "exceeds the promise"
    assert any("share noise" in reason for reason in found.reasons)


def test_the_seed_of_torchs_generator_is_found(digits: Any) -> None:
    found = measure(digits, Protected(Todays(z=Z, clip=1.0), rounds=1), seeds=5000)
    assert found.seed == 4321
    assert any("seed 4321" in reason for reason in found.reasons)
    assert measure(digits, Protected(Todays(z=Z, clip=1.0), rounds=1), seeds=4000).seed is None


def test_the_grain_of_torchs_generator_is_found_and_can_be_left_alone(digits: Any) -> None:
    assert any("grain" in reason for reason in measure(digits, Protected(Todays(z=Z, clip=1.0))).reasons)
    assert measure(digits, engine(), grain=True).grain > 6  # simulated: on demand
    assert measure(digits, engine()).grain is None


def test_an_unsharp_canary_says_little(digits: Any) -> None:
    model, like = digits
    weak = verify(engine_with_clip(50.0), model, like.inputs, like.labels, seed=1, trials=40, own=True)
    assert weak.verdict == "says little"


def engine_with_clip(clip: float) -> Federated:
    return Federated(Veil(z=Z, clip=clip))


BROKEN = {
    "half of the noise": trainers.half_noise,
    "no clip": trainers.no_clip,
    "each record twice": trainers.twice,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_users_own_loop_is_flagged_where_it_is_broken(digits: Any, how: str) -> None:
    found = measure(digits, BROKEN[how], mu=trainers.MU)
    assert found.verdict == "exceeds the promise"


def test_a_users_own_loop_is_consistent_where_it_is_sound(digits: Any) -> None:
    found = measure(digits, trainers.sound, mu=trainers.MU)
    assert found.verdict == "consistent"
    assert found.releases == trainers.STEPS
    assert measure(digits, trainers.sound, mu=trainers.MU, grain=True).grain > 6  # torch's normals


def test_a_users_own_loop_is_flagged_where_half_of_its_mu_is_claimed(digits: Any) -> None:
    assert measure(digits, trainers.sound, mu=trainers.MU / 2).verdict == "exceeds the promise"


def test_a_single_record_that_counts_twice_is_flagged_with_enough_trials(digits: Any) -> None:
    found = measure(digits, trainers.one_twice, mu=trainers.MU, trials=250)
    assert found.estimate.low < 1.1 * trainers.MU
    assert found.estimate.worst_low > 1.5 * trainers.MU


def test_a_users_noise_that_is_used_again_is_flagged_where_it_says_that_it_is_fresh(digits: Any) -> None:
    again = Foreign(trainers.by_hand(reuse=True), mu=trainers.MU, fresh=True)
    assert any("share noise" in reason for reason in measure(digits, again).reasons)


@pytest.mark.filterwarnings("ignore")
def test_opacus_passes_and_with_half_of_its_noise_does_not(digits: Any) -> None:
    pytest.importorskip("opacus")
    found = measure(digits, trainers.opacus, mu=trainers.MU)
    assert found.verdict == "consistent"
    assert found.estimate.low <= trainers.MU <= found.estimate.high
    assert measure(digits, trainers.opacus_half, mu=trainers.MU).verdict == "exceeds the promise"


def test_a_trainer_that_releases_nothing_is_told(digits: Any) -> None:
    with pytest.raises(gradveil.GradveilError, match="returned nothing"):
        measure(digits, trainers.breaks_off, mu=1.0)
