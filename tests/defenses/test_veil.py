"""veil: DP-SGD where the noise is alike in all directions, what its theorem rests on, and public coordinates."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn

from gradveil.defenses.veil import Veil
from gradveil.errors import DefenseError, GradveilError, SpecError
from gradveil.federated.client import local_update, step_gradient
from gradveil.losses import CROSS_ENTROPY
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.capture import records_of
from gradveil.protection.defense import build
from gradveil.protection.records import SLACK, Held, clip_factors
from gradveil.tree import parameters
from gradveil.types import Batch, Observation, Update


def images(count: int, seed: int = 0) -> Batch:
    rng = Generator().manual_seed(seed)
    return Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randint(5, (count,), generator=rng))


def wide(batch: Batch) -> Batch:
    return Batch(batch.inputs.double(), batch.labels)


def fresh() -> Generator:
    return Generator().manual_seed(7)


def shaped(model: nn.Module, **settings: object) -> Veil:
    public = images(64, 1)
    public = wide(public) if next(model.parameters()).dtype == torch.float64 else public
    return Veil(z=1.0, shape="public", rank=8, **settings).for_round(model, public)  # type: ignore[arg-type]


def test_alike_in_all_directions_it_is_dp_sgd_by_opacus(model: nn.Module) -> None:
    opacus = pytest.importorskip("opacus")
    batch, clip, z = images(6), 0.7, 1.3
    sent = step_gradient(model, batch, build(f"veil:z={z},clip={clip * (1 + SLACK)}"), fresh(), slots=8)

    wrapped = opacus.GradSampleModule(model)
    plain = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    optimizer = opacus.optimizers.DPOptimizer(
        plain, noise_multiplier=z * (1 + SLACK), max_grad_norm=clip, expected_batch_size=8, generator=fresh()
    )
    nn.functional.cross_entropy(wrapped(batch.inputs.clone().requires_grad_()), batch.labels).backward()
    optimizer.pre_step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(sent[name], p.grad, rtol=1e-4, atol=1e-6)


@given(st.integers(0, 5), st.floats(0.05, 3.0), st.integers(0, 10))
def test_a_record_moves_the_sum_by_the_clip_at_most(slot: int, clip: float, seed: int) -> None:
    """In the coordinates of P, whatever the gradients are: also those that are not finite."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    rng = Generator().manual_seed(seed)
    like = parameters(model)
    each = {
        n: 10 ** float(torch.randn((), generator=rng)) * torch.randn(6, *p.shape, generator=rng)
        for n, p in like.items()
    }
    each["1.bias"][(slot + 1) % 6, 0] = float("nan")
    for defense in (Veil(clip=clip), shaped(model, clip=clip)):
        present = torch.ones(6)
        present[slot] = 0
        moved = defense.clipped_sum(Held(each)).double() - defense.clipped_sum(Held(each), present)
        assert float(moved.norm()) <= clip


def test_a_record_that_is_not_finite_counts_as_zero_and_slots_stay(model: nn.Module, batch: Batch) -> None:
    spoilt = Batch(batch.inputs.clone(), batch.labels)
    spoilt.inputs[1] = float("inf")
    others = Batch(batch.inputs[[0, 2]], batch.labels[[0, 2]])
    veil = build("veil:z=0.5")
    with_it, without = (step_gradient(model, b, veil, fresh(), slots=3) for b in (spoilt, others))
    torch.testing.assert_close(with_it, without)


def test_a_shorter_last_batch_is_divided_by_the_same_slots(model: nn.Module) -> None:
    """One record more or less in the last batch changes nothing else: batches are not cut anew."""
    data, quiet = images(7), "veil:z=1e-12,clip=1e3"
    batches = [data[:3], data[3:6], data[6:]]
    sent = local_update(model, batches, quiet, 1e-9, fresh())
    plain = local_update(model, batches, "none", 1e-9, fresh())
    last = step_gradient(model, batches[2], build("none"), fresh())
    expected = {n: g - last[n] * 2 / 3 for n, g in plain.gradient.items()}  # of one record over three slots
    torch.testing.assert_close(sent.gradient, expected, rtol=1e-4, atol=1e-5)


def test_more_records_than_slots_are_refused(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(DefenseError, match="3 records and 2 slots"):
        step_gradient(model, batch, build("veil"), fresh(), slots=2)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("veil:z=0", "z=0: give a number above 0"),
        ("veil:z=-1", "above 0"),
        ("veil:clip=0", "above 0"),
        ("veil:z=1,promise=reconstruction", "Give one of them"),
        ("veil:clip=1,quantile=0.9", "Give one of them"),
        ("veil:quantile=1.5", "quantile=1.5"),
        ("veil:shape=round", "iso, public, FILE"),
        ("veil:tier=aggregate,cohort=1", "fewer than two are left"),
        ("veil:tier=aggregate,cohort=4,lost=0.3,colluding=0.4", "fewer than two are left"),
        ("veil+veil:z=2", "Keep one of them"),
        ("representation+veil", "may mix the records"),
    ],
)
def test_settings_that_promise_nothing_are_refused(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("veil:promise=identification", "gradveil plan"),
        ("veil:quantile=0.9", "public data"),
        ("veil:shape=public", "public data"),
        ("veil:tier=aggregate", "cohort=K"),
    ],
)
def test_what_follows_from_run_or_round_is_refused_without_it(
    spec: str, said: str, model: nn.Module, batch: Batch
) -> None:
    with pytest.raises(DefenseError, match=said):
        step_gradient(model, batch, build(spec), fresh())


@pytest.mark.parametrize("more", [{"batch_size": 2}, {"epochs": 2, "batch_size": None}])
def test_several_local_steps_under_aggregation_are_refused(
    more: dict[str, int], model: nn.Module, batch: Batch
) -> None:
    veil = build("veil:tier=aggregate,cohort=1000,z=10")
    with pytest.raises(DefenseError, match="single release"):
        local_update(model, batch, veil, 0.1, fresh(), **more)  # type: ignore[arg-type]
    local_update(model, batch, veil, 0.1, fresh(), batch_size=None)


def test_a_buffer_that_follows_the_data_is_refused(batch: Batch) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 5)
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x)

    with pytest.raises(DefenseError, match=r"'1.mean' changes with the data"):
        local_update(nn.Sequential(nn.Flatten(), Counting()), batch, "veil", 0.1, fresh())


def test_decoys_and_what_comes_after_may_stand_beside_it(model: nn.Module, batch: Batch) -> None:
    for spec in ("decoy+veil:z=1", "veil:z=1+gaussian:scale=0.1", "veil:z=1+pruning:share=0.5,on=update"):
        defense = build(spec)
        assert defense.cost(4) == 4.0
        step_gradient(model, batch, defense, fresh())


@pytest.mark.parametrize(
    ("spec", "z"), [("promise=reconstruction", 0.5 * 36**0.5), ("promise=identification", 6.0), ("rho=0.5", 6.0)]
)
def test_z_follows_from_a_promise_over_the_planned_run(spec: str, z: float) -> None:
    run = PlannedRun(records=200, batch_size=32, epochs=3, rounds=50, participations=12, cohort=10)
    planned = build(f"veil:{spec}").for_run(run)
    assert planned.cost(3) == pytest.approx(3 / z**2)


def test_a_run_plans_epsilon_and_the_cohort() -> None:
    run = PlannedRun(records=200, batch_size=None, epochs=1, rounds=50, participations=12, cohort=10, lost=0.2)
    planned = Veil(epsilon=8.0, tier="aggregate").for_run(run)
    assert planned.cohort == 10
    assert planned.client_multiplier == pytest.approx(planned.multiplier / 8**0.5)
    with pytest.raises(GradveilError, match="single release"):
        Veil(tier="aggregate").for_run(replace(run, batch_size=32))


def test_a_clip_by_quantile_is_that_of_public_norms(model: nn.Module) -> None:
    public = images(60, 1)
    norms = records_of(model, public, CROSS_ENTROPY).square_norms().sqrt()
    found = Veil(quantile=0.9).for_round(model, public).measured.clip
    assert found == pytest.approx(float(norms.double().quantile(0.9)), rel=1e-5)


@pytest.mark.parametrize("setting", [{"quantile": 0.9}, {"shape": "public"}])
def test_without_public_data_a_round_is_refused(setting: dict[str, object], model: nn.Module) -> None:
    for public in (None, images(3)):
        with pytest.raises(DefenseError, match="needs public examples"):
            Veil(**setting).for_round(model, public)  # type: ignore[arg-type]


def test_public_coordinates_are_what_they_say(model: nn.Module) -> None:
    """||P g|| by records is that of P g written out, P⁻¹ undoes P, and A is 1 beside the directions."""
    model = model.double()  # in float32 the bound of a length is up to a tenth above it, in so small a network
    p = shaped(model, quantile=0.9).measured.coordinates
    assert p is not None
    records = records_of(model, wide(images(5, 2)), CROSS_ENTROPY)
    flat = torch.cat([g.flatten(1) for g in records.each().values()], 1)
    torch.testing.assert_close(p.mapped(records)[1], p.into(flat).square().sum(1), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(p.back(p.into(flat)), flat, rtol=1e-3, atol=1e-4)
    assert (p.values >= 1).all()
    assert p.values.max() > 2
    torch.testing.assert_close(p.directions @ p.directions.T, torch.eye(8).double(), rtol=0, atol=1e-5)


def test_shaped_noise_hurts_less_at_the_same_promise() -> None:
    """tr(A) Q² falls: the energy of the noise z C P⁻¹ n, with the clip at the same quantile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 5))
    public = images(128, 1)
    iso = Veil(quantile=0.9).for_round(model, public).measured
    own = Veil(quantile=0.9, shape="public", rank=32).for_round(model, public).measured
    assert own.coordinates is not None
    rank, size = own.coordinates.directions.shape
    gain = float(own.coordinates.values.sum() + size - rank) / size  # of the noise's energy
    assert own.clip**2 * gain < 0.8 * iso.clip**2


def test_a_server_can_send_the_coordinates(model: nn.Module, batch: Batch, tmp_path: Path) -> None:
    own, path = shaped(model, quantile=0.9), tmp_path / "round.safetensors"
    own.measured.save(model, str(path))
    sent = Veil(z=1.0, shape=str(path)).for_round(model, None)
    assert build(f"veil:z=1.0,shape={path}") == sent
    torch.testing.assert_close(
        step_gradient(model, batch, sent, fresh()), step_gradient(model, batch, own, fresh()), rtol=1e-3, atol=1e-4
    )
    local_update(model, batch, f"veil:z=1.0,shape={path}", 0.1, fresh())  # the file is all that a client needs
    with pytest.raises(DefenseError, match="cannot be read"):
        Veil(shape=str(path)).for_round(nn.Linear(3, 2), None)


def test_coordinates_that_are_none_are_refused(model: nn.Module, tmp_path: Path) -> None:
    own = shaped(model).measured
    assert own.coordinates is not None
    bent = replace(own, coordinates=replace(own.coordinates, directions=2 * own.coordinates.directions))
    bent.save(model, str(tmp_path / "bent.safetensors"))
    with pytest.raises(DefenseError, match="not orthonormal"):
        Veil(shape=str(tmp_path / "bent.safetensors")).for_round(model, None)


def test_a_server_that_knows_it_clips_its_trials_in_the_same_coordinates(model: nn.Module, batch: Batch) -> None:
    """With next to no noise, what it expects of the true record is what it sees."""
    model, one, tiny = model.double(), wide(batch[:1]), {"z": 1e-6, "clip": 0.1}
    plain = step_gradient(model, one, build("none"), fresh())
    for veil in (Veil(**tiny), replace(shaped(model, clip=0.1), z=1e-6)):  # type: ignore[arg-type]
        seen = Observation(model, Update(step_gradient(model, one, veil, fresh())), (1, 8, 8), 5)
        view = veil.servers(model)[0].view(seen)
        torch.testing.assert_close(view.sent(plain), view.update.gradient, rtol=1e-3, atol=1e-5)
        assert set(view.noise.values()) == {1e-6 * veil.measured.clip}


def test_factors_keep_what_is_short_and_drop_what_is_not_finite() -> None:
    found = clip_factors(torch.tensor([0.0, 0.25, 4.0, float("inf"), float("nan")]), 1 + SLACK)
    assert found.tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
