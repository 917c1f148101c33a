"""The Gauss-Newton attack: it must win undefended, whatever lies between the pixels and the update."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.attacks.newton import Newton
from gradveil.attacks.search.equations import Prior, Smoothing, kink_scales
from gradveil.attacks.search.gauss_newton import DenseStep, Descent, MatrixFree, Solver, State, conjugate_gradients
from gradveil.attacks.search.update_equations import STIFF, _read, delta_of, known_bias, update_rows
from gradveil.errors import AttackError
from gradveil.types import Batch, GaussianPrior, Observation, Update

SHAPE = (1, 8, 8)


def network(activation: type[nn.Module], sharpness: float = 1.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), activation(), nn.Conv2d(6, 6, 3, padding=1, stride=2), activation(),
            nn.Flatten(), nn.Linear(96, 5),
        )  # fmt: skip
        for p in model.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
        with torch.no_grad():
            model[5].weight *= sharpness
    return model


def gradient_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def observe(model: nn.Module, batch: Batch, **more: object) -> Observation:
    update = Update(gradient_of(model, batch), num_examples=len(batch))
    return Observation(model, update, tuple(batch.inputs.shape[1:]), 5, labels=batch.labels, **more)  # type: ignore[arg-type]


def one(batch: Batch, i: int) -> Batch:
    return Batch(batch.inputs[i : i + 1], batch.labels[i : i + 1])


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).square().mean())


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh])
def test_a_smooth_network_gives_the_image_away_to_float_precision(activation: type[nn.Module], batch: Batch) -> None:
    single = one(batch, 0)
    found = Newton(steps=25).reconstruct(observe(network(activation), single), seeded())
    assert error(found.inputs, single.inputs) < 1e-8
    assert found.converged
    assert found.details["steps"] <= 25


def test_relu_gives_the_image_away_once_its_kinks_are_smoothed(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [observe(network(nn.ReLU), one(batch, i)) for i in range(3)]
    found = Newton().reconstruct_many(seen, [seeded(i) for i in range(3)])
    smoothed = [error(f.inputs, batch.inputs[i : i + 1]) for i, f in enumerate(found)]
    assert max(smoothed) < 1e-3
    monkeypatch.setattr("gradveil.attacks.search.gauss_newton.WIDEST", 1e-6)
    kinked = Newton().reconstruct_many(seen, [seeded(i) for i in range(3)])
    stalled = [error(f.inputs, batch.inputs[i : i + 1]) for i, f in enumerate(kinked)]
    assert sum(stalled) > 10 * sum(smoothed)


def sure_of(model: nn.Module, inputs: Tensor) -> tuple[Batch, float]:
    with torch.no_grad():
        p, label = model(inputs).softmax(1).max(1)
    return Batch(inputs, label), float(p)


def test_a_confident_network_gives_the_image_away_with_and_without_the_last_layer(batch: Batch) -> None:
    model = network(nn.Tanh, sharpness=10.0)
    single, p = sure_of(model, batch.inputs[1:2])
    assert p > 0.99
    seen = observe(model, single)
    for view in (seen, seen.without("5.*")):
        assert error(Newton().reconstruct(view, seeded()).inputs, single.inputs) < 1e-9


def test_even_a_prediction_that_rounds_to_certainty_gives_the_image_away(batch: Batch) -> None:
    model = network(nn.Tanh, sharpness=20.0)
    single, p = sure_of(model, batch.inputs[:1])
    assert p == 1.0
    assert error(Newton().reconstruct(observe(model, single), seeded()).inputs, single.inputs) < 1e-4


def test_dropping_or_masking_the_defended_layer_changes_nothing_for_the_attacker(batch: Batch) -> None:
    single = one(batch, 1)
    seen = observe(network(nn.Sigmoid), single)
    hidden = dict(seen.update.gradient)
    hidden["5.weight"] = hidden["5.weight"] * (torch.arange(96) % 5 < 3)  # 40 % of the columns zeroed
    defended = replace(seen, update=replace(seen.update, gradient=hidden))
    aware = Newton().reconstruct_many([defended.masked("5.weight"), defended.without("5.weight")], [seeded(), seeded()])
    assert max(error(f.inputs, single.inputs) for f in aware) < 1e-7
    oblivious = Newton().reconstruct(defended, seeded())
    assert error(oblivious.inputs, single.inputs) > 1e-3
    assert oblivious.objective > 100 * aware[0].objective


def test_known_noise_weighs_the_equations_and_costs_what_it_must(batch: Batch) -> None:
    single = one(batch, 0)
    seen = observe(network(nn.Sigmoid), single)
    rng = seeded(3)
    rms = float(torch.cat([g.flatten() for g in seen.update.gradient.values()]).square().mean().sqrt())
    errors = []
    for level in (0.01, 0.1, 1.0):
        noisy = {n: g + level * rms * torch.randn(g.shape, generator=rng) for n, g in seen.update.gradient.items()}
        known = replace(seen, update=replace(seen.update, gradient=noisy), noise=dict.fromkeys(noisy, level * rms))
        errors.append(error(Newton().reconstruct(known, seeded()).inputs, single.inputs))
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] < 1 / 12  # never worse than the prior's own variance


def test_ignoring_the_noise_is_worse_than_knowing_it(batch: Batch) -> None:
    single = one(batch, 0)
    seen = observe(network(nn.Sigmoid), single)
    rng = seeded(3)
    noisy = dict(seen.update.gradient)
    noisy["0.weight"] = noisy["0.weight"] + 10 * noisy["0.weight"].std() * torch.randn(6, 1, 3, 3, generator=rng)
    unaware = replace(seen, update=replace(seen.update, gradient=noisy))
    aware = replace(unaware, noise={"0.weight": 10 * float(seen.update.gradient["0.weight"].std())})
    found = Newton().reconstruct_many([unaware, aware], [seeded(), seeded()])
    assert error(found[1].inputs, single.inputs) < 0.1 * error(found[0].inputs, single.inputs)


def test_a_prior_from_public_data_beats_no_prior_under_noise() -> None:
    rng = seeded(7)
    mix = torch.randn(64, 4, generator=rng) / 12
    public = 0.5 + torch.randn(500, 4, generator=rng) @ mix.T
    truth = (0.5 + torch.randn(1, 4, generator=rng) @ mix.T).reshape(1, *SHAPE)
    seen = observe(network(nn.Sigmoid), Batch(truth, torch.tensor([2])))
    rms = float(torch.cat([g.flatten() for g in seen.update.gradient.values()]).square().mean().sqrt())
    noisy = {n: g + 0.1 * rms * torch.randn(g.shape, generator=rng) for n, g in seen.update.gradient.items()}
    blind = replace(seen, update=replace(seen.update, gradient=noisy), noise=dict.fromkeys(noisy, 0.1 * rms))
    informed = replace(blind, prior=GaussianPrior.fit(public, ridge=1e-4))
    found = Newton().reconstruct_many([blind, informed], [seeded(), seeded()])
    assert error(found[1].inputs, truth) < 0.2 * error(found[0].inputs, truth)


def test_a_batch_of_one_class_comes_apart(batch: Batch) -> None:
    two = Batch(batch.inputs[:2], torch.tensor([1, 1]))
    found = Newton().reconstruct(observe(network(nn.Sigmoid), two), seeded())
    straight, crossed = error(found.inputs, two.inputs), error(found.inputs.flip(0), two.inputs)
    assert min(straight, crossed) < 1e-6


def test_several_local_steps_are_unrolled(batch: Batch) -> None:
    single, lr = one(batch, 0), 0.5
    start = network(nn.Sigmoid)
    model = network(nn.Sigmoid)
    for _ in range(3):
        gradient = gradient_of(model, single)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= lr * gradient[name]
    before, after = ({n: p.detach() for n, p in m.named_parameters()} for m in (start, model))
    update = Update.from_weights(before, after, lr, num_examples=1, num_steps=3)
    seen = Observation(start, update, SHAPE, 5, labels=single.labels)
    assert error(Newton().reconstruct(seen, seeded()).inputs, single.inputs) < 1e-5


def test_products_alone_give_the_step_that_the_written_out_jacobian_gives(batch: Batch) -> None:
    seen = [observe(network(nn.Tanh), one(batch, i)) for i in range(2)]
    prior = Prior.of(seen[0], 5, torch.device("cpu"))
    rows = update_rows(seen, batch.labels[:2, None], prior)
    z = prior.center() + 0.1 * prior.draw(2, seeded())
    width, damping = torch.tensor([0.3, 0.1], dtype=z.dtype), torch.tensor([1.0, 10.0], dtype=z.dtype)
    residual = rows.residual(z, width)
    weights = 1 / (0.1 * rows.rms).square()
    dense = DenseStep(prior)(rows, z, residual, weights, width)(damping)
    free = MatrixFree(prior, iterations=400, tolerance=1e-12)(rows, z, residual, weights, width)(damping)
    torch.testing.assert_close(free, dense, rtol=1e-5, atol=1e-7)


def test_products_with_the_jacobian_agree_with_differences(batch: Batch) -> None:
    seen = [observe(network(nn.ReLU), one(batch, 0))]
    prior = Prior.of(seen[0], 5, torch.device("cpu"))
    rows = update_rows(seen, batch.labels[:1, None], prior)
    z, v = prior.center()[None], prior.draw(1, seeded(4))
    width, h = torch.tensor([0.3], dtype=z.dtype), 1e-5
    whole = rows.jacobian(z, width)[0]
    pushed = v @ whole
    differences = (rows.residual(z + h * v, width) - rows.residual(z - h * v, width)) / (2 * h)
    torch.testing.assert_close(pushed, differences, rtol=1e-4, atol=1e-7)
    u = torch.randn(pushed.shape, generator=seeded(5), dtype=z.dtype)
    torch.testing.assert_close((rows.pull(z, u, width) * v).sum(), (u * pushed).sum())
    torch.testing.assert_close(rows.curvature(z, u, width)(v), rows.pull(z, u * pushed, width))
    twice = rows.take(torch.tensor([0, 0]))
    torch.testing.assert_close(twice.jacobian(z.repeat(2, 1), width.repeat(2))[1], whole)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Hardtanh, nn.GELU])
def test_products_alone_are_those_with_the_written_out_jacobian(activation: type[nn.Module], batch: Batch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, stride=2), activation(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, bias=False),
            activation(), nn.AvgPool2d(1), nn.Flatten(), nn.Linear(4, 6), activation(), nn.Dropout(), nn.Linear(6, 5),
        )  # fmt: skip
    pairs = [Batch(batch.inputs[i : i + 2], batch.labels[i : i + 2]) for i in range(2)]
    whole = [observe(model, p) for p in pairs]
    few = [s.without("10.*", "0.*") for s in whole]
    for seen in (whole, few, [replace(s, simulate=_bent) for s in few], [replace(s, simulate=_bent) for s in whole]):
        prior = Prior.of(seen[0], 10, torch.device("cpu"))
        rows = update_rows(seen, torch.stack([p.labels for p in pairs]), prior)
        z = prior.center() + 0.1 * prior.draw(2, seeded())
        z[:, prior.pixels :] += 0.3
        width = torch.tensor([0.3, 0.1], dtype=z.dtype)
        jacobian = rows.jacobian(z, width)  # (B, n, R)
        v, u = prior.draw(2, seeded(4)), torch.randn(rows.seen.shape, generator=seeded(5), dtype=z.dtype)
        torch.testing.assert_close(rows.pull(z, u, width), torch.einsum("bnr,br->bn", jacobian, u))
        pushed = torch.einsum("bnr,bn->br", jacobian, v)
        curved = torch.einsum("bnr,br->bn", jacobian, u * pushed)
        torch.testing.assert_close(rows.curvature(z, u, width)(v), curved)


def _bent(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """A defence in which every number hangs on every tensor, and random numbers too."""
    size = torch.cat([g.flatten() for g in gradient.values()]).norm()
    return {name: torch.tanh(g / size) * (1 + torch.rand(g.shape)) for name, g in gradient.items()}


def test_a_model_that_is_no_chain_is_attacked_alike(batch: Batch) -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc((x + self.conv(x).tanh()).flatten(1))  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen = observe(Skip(), one(batch, 0))
    assert error(Newton().reconstruct(seen, seeded()).inputs, batch.inputs[:1]) < 1e-8


def test_large_inputs_are_solved_without_a_jacobian(batch: Batch) -> None:
    single = one(batch, 0)
    found = Newton(dense_limit=1).reconstruct(observe(network(nn.Sigmoid), single), seeded())
    assert error(found.inputs, single.inputs) < 1e-5


def test_a_problem_gives_the_same_answer_alone_and_in_company(batch: Batch) -> None:
    seen = [observe(network(nn.Tanh), one(batch, i)) for i in range(3)]
    shared = [replace(s, model=seen[0].model) for s in seen]
    together = Newton(steps=8).reconstruct_many(shared, [seeded(i) for i in range(3)])
    for i, s in enumerate(shared):
        alone = Newton(steps=8).reconstruct(s, seeded(i))
        torch.testing.assert_close(alone.inputs, together[i].inputs, rtol=1e-5, atol=1e-6)


def test_labels_are_read_off_the_update_when_the_server_does_not_know_them(batch: Batch) -> None:
    single = one(batch, 1)
    found = Newton().reconstruct(replace(observe(network(nn.Sigmoid), single), labels=None), seeded())
    assert found.labels is not None
    assert found.labels.tolist() == single.labels.tolist()
    assert error(found.inputs, single.inputs) < 1e-7


def test_the_bias_is_read_as_confidence_only_where_it_is_one_examples(batch: Batch) -> None:
    model = network(nn.Sigmoid)
    assert known_bias([observe(model, one(batch, 0))]) == "5.bias"
    assert known_bias([observe(model, batch)]) is None
    assert known_bias([observe(model, one(batch, 0)).without("5.bias")]) is None


@pytest.mark.parametrize(
    ("call", "exact"),
    [
        (F.relu, F.relu), (lambda z: z.relu(), F.relu), (lambda z: nn.ReLU(inplace=True)(z.clone()), F.relu),
        (lambda z: F.leaky_relu(z, 0.2), lambda z: F.leaky_relu(z, 0.2)), (F.relu6, F.relu6), (F.hardtanh, F.hardtanh),
        (lambda z: nn.Hardtanh(-2.0, 3.0)(z), lambda z: z.clamp(-2, 3)),
    ],
)  # fmt: skip
def test_smoothing_rounds_every_kink_and_vanishes_with_its_width(call, exact) -> None:  # type: ignore[no-untyped-def]
    z = torch.linspace(-8, 8, 201, dtype=torch.float64)
    wide, narrow = torch.tensor(1.0, dtype=z.dtype), torch.tensor(1e-3, dtype=z.dtype)
    with Smoothing([wide]):
        rounded = call(z)
    with Smoothing([narrow]):
        sharp = call(z)
    assert float((rounded - exact(z)).abs().max()) > 0.05
    torch.testing.assert_close(sharp, exact(z), atol=1e-3, rtol=0)


def test_the_scales_of_kinks_are_the_spreads_of_their_inputs() -> None:
    z = torch.randn(50, generator=seeded())
    assert kink_scales(lambda: (z.relu(), F.relu(3 * z), z.sigmoid())) == pytest.approx(
        [float(z.std(correction=0)), 3 * float(z.std(correction=0))]
    )


def test_conjugate_gradients_solve_every_system_of_the_batch() -> None:
    a = torch.randn(3, 6, 6, generator=seeded(), dtype=torch.float64)
    a = a @ a.mT + torch.eye(6, dtype=torch.float64)
    right = torch.randn(3, 6, generator=seeded(1), dtype=torch.float64)
    found = conjugate_gradients(lambda v: (a @ v[..., None])[..., 0], right, lambda v: 2 * v, 30, 1e-12)
    torch.testing.assert_close(found, torch.linalg.solve(a, right))


def test_the_priors_inverse_and_square_root_belong_to_its_covariance(batch: Batch) -> None:
    rng = seeded(2)
    for factor in (torch.randn(64, 3, generator=rng), torch.linalg.qr(torch.randn(64, 3, generator=rng))[0]):
        gaussian = GaussianPrior(torch.full((64,), 0.5), factor, 0.1)
        prior = Prior.of(observe(network(nn.Sigmoid), batch, prior=gaussian), 2, torch.device("cpu"))
        covariance = torch.block_diag(*[gaussian.covariance().double()] * 3, torch.eye(2).double())
        torch.testing.assert_close(prior.precision() @ covariance, torch.eye(194).double(), atol=1e-5, rtol=0)
        z = torch.randn(2, 194, generator=rng).double()
        torch.testing.assert_close(prior.covary(z), z @ covariance, atol=1e-5, rtol=1e-5)
        draws = prior.draw(4000, rng)[:, :64]
        torch.testing.assert_close(draws.T.cov(), covariance[:64, :64], atol=0.5, rtol=0.2)


def test_a_prior_of_another_size_is_refused_in_words(batch: Batch) -> None:
    small = GaussianPrior.white(torch.zeros(9), 1.0)
    with pytest.raises(AttackError, match="9 numbers"):
        Newton().reconstruct(observe(network(nn.Sigmoid), one(batch, 0), prior=small), seeded())


def test_an_update_with_nothing_to_match_is_refused(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    blank = replace(seen, weights={n: torch.zeros_like(g) for n, g in seen.update.gradient.items()})
    with pytest.raises(AttackError, match="nothing to match"):
        Newton().reconstruct(blank, seeded())


def test_the_objective_is_the_map_estimates(batch: Batch) -> None:
    """Half of Σ w r² / (σ² + (floor rms)²) plus the prior's (z - μ)ᵀ Σ⁻¹ (z - μ), per row."""
    gaussian = GaussianPrior(torch.full((64,), 0.4), torch.randn(64, 3, generator=seeded(1)) / 10, 0.05)
    seen = observe(network(nn.Tanh), one(batch, 0), prior=gaussian, noise={"0.weight": 0.01})
    prior = Prior.of(seen, 5, torch.device("cpu"))
    rows = update_rows([seen], batch.labels[:1, None], prior)
    solver = Solver(prior, Descent(10, 5, 3.0, 10.0), DenseStep(prior), slice(10))
    z = prior.center()[None] + 0.1 * torch.randn(1, 69, generator=seeded(2)).double()
    covariance = torch.block_diag(gaussian.covariance().double(), torch.eye(5).double())
    away = (z - prior.center())[0]
    sigma = rows.noise[0].square() + (10.0 * rows.rms[0]).square()
    misfit = (rows.weights[0] * rows.residual(z, None)[0].square() / sigma).sum()
    expected = (misfit + away @ torch.linalg.solve(covariance, away)) / 2 / rows.seen.shape[1]
    assert float(solver.objective(rows, z)) == pytest.approx(float(expected), rel=1e-5)
    assert float(away @ torch.linalg.solve(covariance, away)) > 1e-4 * float(misfit)  # the prior's part can be seen


def test_token_embeddings_of_a_transformer_are_given_away() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.randn(3, 4))
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.fc = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.layer(x + self.place).flatten(1))  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Encoder().eval()
    tokens = torch.rand(1, 3, 4, generator=seeded(3))
    seen = observe(model, Batch(tokens, torch.tensor([1])))
    found = Newton(restarts=2).reconstruct(replace(seen, num_classes=3), seeded())
    assert error(found.inputs, tokens) < 1e-4


def test_directions_of_the_prior_without_length_are_left_out(batch: Batch) -> None:
    factor = torch.zeros(64, 2)
    factor[3, 0] = 0.5
    prior = Prior.of(
        observe(network(nn.Tanh), one(batch, 0), prior=GaussianPrior(torch.zeros(64), factor, 0.25)),
        0,
        torch.device("cpu"),
    )
    wanted = torch.full((64,), 4.0, dtype=torch.float64)
    wanted[3] = 1 / (0.25 + 0.25)
    torch.testing.assert_close(prior.precision(), wanted.diag())


def test_the_floor_stops_falling_once_the_known_noise_drowns_it(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    loud = dict.fromkeys(seen.update.gradient, 10 * max(float(g.abs().max()) for g in seen.update.gradient.values()))
    found = Newton().reconstruct_many([seen, replace(seen, noise=loud)], [seeded(), seeded()])
    assert found[1].converged
    assert found[0].details["floor"] <= 1e-5
    assert found[1].details["floor"] > 0.01
    assert found[1].details["steps"] < found[0].details["steps"]


def test_a_stage_that_ends_worse_does_not_replace_the_best_point(batch: Batch) -> None:
    seen = observe(network(nn.Tanh), one(batch, 0))
    prior = Prior.of(seen, 5, torch.device("cpu"))
    rows = update_rows([seen], batch.labels[:1, None], prior)
    solver = Solver(prior, Descent(10, 5, 3.0, 1e-5), DenseStep(prior), slice(-5))
    x, best = prior.center()[None], prior.center()[None] + 1.0
    zero, one_floor = torch.zeros(1, dtype=x.dtype), torch.ones(1, dtype=x.dtype)
    state = State(x, one_floor, zero.clone(), zero.clone(), best.clone(), zero.clone(), zero.bool())
    solver._end_stage(rows, state, torch.tensor([0]), torch.tensor([True]))
    assert torch.equal(state.best, best)
    assert float(state.objective) == 0.0
    assert float(state.floor) < 1.0


def test_the_number_of_steps_is_kept_to_and_running_out_of_them_is_said(batch: Batch) -> None:
    found = Newton(steps=3).reconstruct(observe(network(nn.Tanh), one(batch, 0)), seeded())
    assert found.details["steps"] == 3
    assert not found.converged


def test_a_kink_whose_input_does_not_vary_still_has_a_scale() -> None:
    assert kink_scales(lambda: torch.full((2, 3), 0.5).relu()) == [1.0]


def test_a_batch_norm_has_weights_of_its_own_and_goes_by_torch_func(batch: Batch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 5)
        ).eval()  # fmt: skip
    seen = observe(model, one(batch, 0))
    assert error(Newton().reconstruct(seen, seeded()).inputs, batch.inputs[:1]) < 1e-6


def test_a_simulated_defence_is_applied_to_every_gradient_of_the_trial(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    asked: list[set[str]] = []

    def scaled(update: dict[str, Tensor]) -> dict[str, Tensor]:
        asked.append(set(update))
        size = sum((g.square().sum() for g in update.values()), torch.tensor(0.0)).sqrt()
        return {n: g / size for n, g in update.items()}

    sent = replace(seen, update=replace(seen.update, gradient=scaled(dict(seen.update.gradient))), simulate=scaled)
    assert error(Newton().reconstruct(sent.without("0.*"), seeded()).inputs, batch.inputs[:1]) < 1e-6
    assert all(names == set(seen.update.gradient) for names in asked)


def test_the_loss_gradient_of_a_sure_prediction_is_not_rounded_away() -> None:
    log_p = torch.tensor([-50.0, 0.0, -60.0], dtype=torch.float64)
    found = delta_of(log_p, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    others = log_p[[0, 2]].exp()
    torch.testing.assert_close(found, torch.stack([others[0], -others.sum(), others[1]]), rtol=1e-12, atol=0)


def test_a_bias_that_the_guess_fits_has_a_lower_floor_than_other_tensors(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    rows = update_rows([seen], batch.labels[:1, None], Prior.of(seen, 5, torch.device("cpu")))
    sizes = [g.numel() for g in seen.update.gradient.values()]
    for g, level in zip(seen.update.gradient.values(), rows.rms[0, :-5].split(sizes), strict=True):
        stiff = STIFF if g.numel() == 5 and g.ndim == 1 else 1.0
        torch.testing.assert_close(level, torch.full_like(level, stiff * float(g.double().square().mean().sqrt())))


def test_the_clients_rounding_is_taken_over_from_a_bias_without_noise_only(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    gradient = dict(seen.update.gradient)
    gradient["5.bias"] = gradient["5.bias"] + 1e-3
    quiet = replace(seen, update=replace(seen.update, gradient=gradient))
    loud = replace(quiet, noise={"5.bias": 1e-3})
    rows = update_rows([quiet, loud], batch.labels[[0, 0], None], Prior.of(seen, 5, torch.device("cpu")))
    y, guess, rest = rows.given
    torch.testing.assert_close(delta_of(guess, y)[0, 0] + rest[0, 0], gradient["5.bias"].double())
    assert not rest[1].any()


def test_of_several_starts_the_best_by_the_objective_is_returned(batch: Batch) -> None:
    seen = observe(network(nn.ReLU), one(batch, 0))
    few, many = (Newton(steps=2, restarts=n).reconstruct(seen, seeded()).objective for n in (1, 5))
    assert many <= few * (1 + 1e-9)  # one of the five is the one; run beside others its last digits may differ


def test_what_is_found_lies_within_the_data_range(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    noisy = {n: g + 0.3 * g.std() * torch.randn(g.shape, generator=seeded(1)) for n, g in seen.update.gradient.items()}
    found = Newton(steps=20).reconstruct(replace(seen, update=replace(seen.update, gradient=noisy)), seeded()).inputs
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)


def test_updates_seen_in_part_or_with_another_prior_are_not_mixed_up(batch: Batch) -> None:
    seen = observe(network(nn.Tanh), one(batch, 0))
    views = [seen, seen.without("5.*"), replace(seen, prior=GaussianPrior.white(torch.full((64,), 0.1), 0.05))]
    together = Newton(steps=4).reconstruct_many(views, [seeded() for _ in views])
    for view, found in zip(views, together, strict=True):
        torch.testing.assert_close(Newton(steps=4).reconstruct(view, seeded()).inputs, found.inputs)


def test_a_tensor_of_almost_no_gradient_does_not_get_an_endless_weight(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    gradient = seen.update.gradient | {"0.bias": torch.full((6,), 1e-15)}
    faint = replace(seen, update=replace(seen.update, gradient=gradient))
    rows = update_rows([faint], batch.labels[:1, None], Prior.of(seen, 5, torch.device("cpu")))
    first = gradient["0.weight"].numel()
    whole = torch.cat([g.flatten() for g in gradient.values()]).double().square().mean().sqrt()
    torch.testing.assert_close(rows.rms[0, first : first + 6], (1e-3 * whole).expand(6))


@pytest.mark.parametrize(("noisy_share", "excess"), [(0.0, 4.0), (0.5, 4 / 0.5**0.5)])
def test_the_first_guess_is_as_sure_as_the_size_of_the_update_says(noisy_share: float, excess: float) -> None:
    """The update of mid-grey, a quarter as large as it would be: the wrong classes have a quarter of their share."""
    model, grey, label = network(nn.Sigmoid), torch.full((1, *SHAPE), 0.5), torch.tensor([2])
    gradient = {n: g / 4 for n, g in gradient_of(model, Batch(grey, label)).items() if n != "5.bias"}
    size = sum(float(g.square().sum()) for g in gradient.values()) / sum(g.numel() for g in gradient.values())
    noise = dict.fromkeys(gradient, (noisy_share * size) ** 0.5) if noisy_share else {}
    seen = Observation(model, Update(gradient), SHAPE, 5, labels=label, noise=noise)
    rows = update_rows([seen], label[:, None], Prior.of(seen, 5, torch.device("cpu")))
    others, p = rows.given[1][0, 0].exp(), model(grey).softmax(-1)[0].double().detach()
    torch.testing.assert_close(others[[0, 1, 3, 4]], p[[0, 1, 3, 4]] / excess, rtol=1e-4, atol=0)
    torch.testing.assert_close(others.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_bias_in_part_or_through_a_defence_is_not_read_as_confidence(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0))
    assert known_bias([seen]) == "5.bias"
    assert known_bias([replace(seen, weights={"5.bias": torch.tensor([1.0, 0, 1, 1, 1])})]) is None
    assert known_bias([replace(seen, simulate=lambda update: update)]) is None


def test_confidence_below_the_noise_of_the_bias_is_not_read(batch: Batch) -> None:
    seen = observe(network(nn.Sigmoid), one(batch, 0), noise={"5.bias": 0.05})
    gradient = seen.update.gradient | {"5.bias": torch.tensor([0.2, -0.5, 0.01, -0.02, 0.29])}
    y = torch.tensor([[0.0, 1, 0, 0, 0]], dtype=torch.float64)
    found = _read(replace(seen, update=replace(seen.update, gradient=gradient)), "5.bias", y).exp()[0]
    shares = torch.tensor([0.2, 0.0, 0.05, 0.05, 0.29], dtype=torch.float64)
    wanted = 0.5 * shares / shares.sum()
    wanted[1] = 0.5
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_one_example_starts_at_the_priors_mean_and_several_never_start_alike(batch: Batch) -> None:
    model = network(nn.Sigmoid)
    for n in (1, 2):
        seen = observe(model, Batch(batch.inputs[:n], batch.labels[:n]))
        prior = Prior.of(seen, 0, torch.device("cpu"))
        first = Newton(restarts=2)._starts(prior, seeded())[0].reshape(n, -1)
        assert torch.equal(first, prior.center().reshape(n, -1)) == (n == 1)
    assert not torch.equal(first[0], first[1])
