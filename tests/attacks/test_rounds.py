"""The server that waits: a client's updates of several rounds, from the same examples."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import gradveil
from gradveil.attacks.labels import with_labels
from gradveil.attacks.newton import Newton
from gradveil.attacks.rounds import SentRounds, pooled
from gradveil.attacks.search.equations import Equations, Prior, normal_equations, stack
from gradveil.attacks.search.update_equations import Guess, update_rows
from gradveil.errors import AttackError
from gradveil.threats.meter import bayes_mse, equations, information
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation, Update

SHAPE, CLASSES = (1, 4, 4), 4
TRUTH = Batch(torch.rand(1, *SHAPE, generator=Generator().manual_seed(3)), torch.tensor([1]))
PRIOR = GaussianPrior.fit(torch.rand(200, *SHAPE, generator=Generator().manual_seed(4)))


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, CLASSES))


def seen_at(
    model: nn.Module, std: float = 0.0, seed: int = 0, inputs: Tensor = TRUTH.inputs, **more: object
) -> Observation:
    names, weights = zip(*model.named_parameters(), strict=True)
    loss = F.cross_entropy(model(inputs), TRUTH.labels)
    gradient = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
    rng = seeded(seed)
    sent = {n: g + std * torch.randn(g.shape, generator=rng) for n, g in gradient.items()}
    noise = dict.fromkeys(sent, std) if std else {}
    return Observation(model, Update(sent), SHAPE, CLASSES, prior=PRIOR, noise=noise, **more)  # type: ignore[arg-type]


def patient(*rounds: Observation) -> Observation:
    return replace(rounds[0], rounds=rounds[1:])


def error(found: Tensor) -> float:
    return float((found - TRUTH.inputs).square().mean())


def cost(s: Observation, trial: Params) -> float:
    """Return Σ weight (seen - trial)² / noise² of one round."""
    parts = [
        s.weights.get(n, torch.ones_like(g)).double() * (g - trial[n]).double().square() / s.noise[n] ** 2
        for n, g in s.update.gradient.items()
    ]
    return sum(float(part.sum()) for part in parts)


def test_rounds_at_the_same_weights_are_one_and_no_likelihood_is_lost() -> None:
    model, rng = network(), seeded(9)
    rounds = [seen_at(model, std, k) for k, std in enumerate((0.1, 0.1, 0.3))]
    masks = [(torch.rand(24, 16, generator=rng) > 0.4).float() for _ in rounds]
    rounds = [replace(s, weights={"1.weight": mask}) for s, mask in zip(rounds, masks, strict=True)]
    rounds[2] = rounds[2].without("3.bias")
    one = pooled(patient(*rounds))
    assert one.rounds == ()
    trials = [seen_at(model, 0.2, seed).update.gradient for seed in (50, 51)]
    apart = [sum(cost(s, trial) for s in rounds) for trial in trials]
    assert cost(one, trials[0]) - cost(one, trials[1]) == pytest.approx(apart[0] - apart[1], rel=1e-3)
    assert one.noise["3.bias"] == pytest.approx(0.1 / 2**0.5)


def test_a_copy_of_the_model_counts_as_the_same_weights_and_another_does_not() -> None:
    first, copy, other = seen_at(network(0), 0.1), seen_at(network(0), 0.1, 1), seen_at(network(1), 0.1, 2)
    both = pooled(patient(first, other, copy))
    assert [s.model for s in (both, *both.rounds)] == [first.model, other.model]
    assert both.noise["1.weight"] == pytest.approx(0.1 / 2**0.5)
    assert both.rounds[0].noise["1.weight"] == 0.1


def test_an_entry_counts_as_often_as_it_was_seen() -> None:
    model = network()
    masks = [torch.zeros(24, 16), torch.zeros(24, 16)]
    masks[0][:2], masks[1][1:3] = 1, 1
    one = pooled(patient(*(replace(seen_at(model), weights={"1.weight": mask}) for mask in masks)))
    assert one.weights["1.weight"][:, 0].tolist() == [0.5, 1.0, 0.5] + [0.0] * 21
    assert one.noise == {}


def opposed() -> Observation:
    """Two rounds whose noise is large and cancels."""
    one, clean = seen_at(network(), 0.5), seen_at(network())
    other = {n: 2 * g - one.update.gradient[n] for n, g in clean.update.gradient.items()}
    return patient(one, replace(one, update=replace(one.update, gradient=other)))


@pytest.mark.parametrize("spec", ["newton", "analytic", "dlg:steps=20,restarts=1"])
def test_an_attack_takes_the_mean_of_rounds_at_the_same_weights(spec: str) -> None:
    seen = replace(opposed(), noise={})
    attack = gradveil.attack(spec)
    found = attack.reconstruct(replace(seen, rounds=tuple(replace(s, noise={}) for s in seen.rounds)), seeded())
    assert error(found.inputs) < 1e-4
    assert found.labels is not None
    assert found.labels.tolist() == [1]
    assert error(attack.reconstruct(replace(seen, rounds=()), seeded()).inputs) > 1e-2


@pytest.mark.parametrize("spec", ["dlg", "gs", "fedavg", "surrogate", "analytic"])
def test_attacks_on_one_model_refuse_rounds_at_different_weights(spec: str) -> None:
    with pytest.raises(AttackError, match="different weights"):
        gradveil.attack(spec).reconstruct(patient(seen_at(network(0)), seen_at(network(1))), seeded())


def test_labels_are_read_off_all_rounds() -> None:
    rounds = [seen_at(network(k)) for k in range(3)]
    bias = rounds[0].update.gradient["3.bias"].roll(1)  # one round alone would say another class
    wrong = replace(rounds[0], update=replace(rounds[0].update, gradient=rounds[0].update.gradient | {"3.bias": bias}))
    assert with_labels([wrong], [seeded()])[0].labels != TRUTH.labels
    assert with_labels([patient(wrong, *rounds[1:])], [seeded()])[0].labels == TRUTH.labels


def systems() -> tuple[Equations, list[Equations], Tensor]:
    rounds = [seen_at(network(k), 0.1, k, labels=TRUTH.labels) for k in range(2)]
    prior = Prior.of(rounds[0], 2 * CLASSES, torch.device("cpu"))
    alone = replace(prior, extra=CLASSES)
    parts = [update_rows([s], [Guess.of(s, alone, seeded())], alone) for s in rounds]
    rows = stack(parts, prior.pixels, [CLASSES, CLASSES])
    return rows, parts, prior.center()[None] + 0.1 * torch.rand(1, 24, generator=seeded(8)).double()


def test_equations_of_several_rounds_are_those_of_each_below_one_another() -> None:
    rows, parts, z = systems()
    width, places = torch.ones(1).double(), [[*range(16), *range(16, 20)], [*range(16), *range(20, 24)]]
    jacobian = torch.zeros(24, rows.seen.shape[1]).double()
    first = 0
    for part, place in zip(parts, places, strict=True):
        whole = part.jacobian(z[:, place], width)[0]  # (20, rows)
        jacobian[place, first : first + whole.shape[1]] = whole
        first += whole.shape[1]
    residual = torch.cat([part.residual(z[:, place], None) for part, place in zip(parts, places, strict=True)], 1)
    torch.testing.assert_close(rows.residual(z, None), residual)
    v, u = torch.rand(1, 24, generator=seeded()).double(), torch.rand(residual.shape, generator=seeded(1)).double()
    torch.testing.assert_close(rows.pull(z, u, width), u @ jacobian.T)
    torch.testing.assert_close(rows.curvature(z, u, width)(v), ((v @ jacobian) * u) @ jacobian.T)
    normal, slope = normal_equations(rows, z, residual, u, width)
    torch.testing.assert_close(normal[0], (jacobian * u) @ jacobian.T)
    torch.testing.assert_close(slope, (residual * u) @ jacobian.T)


@pytest.mark.parametrize("settings", [{}, {"dense_limit": 1}], ids=["dense", "matrix-free"])
def test_rounds_at_other_weights_add_up(settings: dict[str, int]) -> None:
    rounds = [seen_at(network(k), 0.02, k) for k in range(6)]
    one, six = (Newton(**settings).reconstruct(patient(*some), seeded()) for some in (rounds[:1], rounds))
    assert error(six.inputs) < 0.5 * error(one.inputs)
    assert six.labels is not None
    assert six.labels.tolist() == [1]


def test_what_one_round_hides_another_shows() -> None:
    first, second = seen_at(network(0)).only("3.bias"), seen_at(network(1)).without("3.bias")
    found = Newton().reconstruct(patient(first, second), seeded())
    assert error(found.inputs) < 1e-8


def test_several_clients_with_rounds_of_their_own_go_together() -> None:
    models = [network(k) for k in range(2)]
    clients = [patient(*(seen_at(m, 0.05, 10 * c + k) for k, m in enumerate(models))) for c in range(2)]
    alone = [Newton().reconstruct(s, seeded()).inputs for s in clients]
    together = Newton().reconstruct_many(clients, [seeded(), seeded()])
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b.inputs, rtol=1e-4, atol=1e-5)


def test_no_server_gets_below_the_figure_over_rounds_beyond_chance() -> None:
    figures, errors = [], []
    white = torch.randn(6, 16, generator=seeded(6))
    for k, x in enumerate((PRIOR.mean + white @ PRIOR.factor.T).reshape(6, 1, *SHAPE)):  # as the figure has it
        rounds = [seen_at(network(t % 2), 0.05, 100 * k + t, x, bounds=(-9.0, 9.0)) for t in range(4)]
        found = Newton().reconstruct(patient(*rounds), seeded()).inputs
        errors.append(float((found - x).square().mean()))
        told = [information(equations(seen, Batch(x, TRUTH.labels), 1e-3)) for seen in rounds]
        figures.append(bayes_mse(torch.stack(told).sum(0), PRIOR))  # information adds up
    mean, figure = torch.tensor(errors).mean(), torch.tensor(figures).mean()
    spread = torch.tensor(errors).std() / 6**0.5
    assert mean > figure - 3 * spread
    assert mean < 2 * figure


def test_rounds_of_other_examples_are_refused() -> None:
    one = seen_at(network())
    with pytest.raises(AttackError, match="same examples"):
        pooled(patient(one, replace(one, update=replace(one.update, num_examples=2))))


def test_rounds_together_are_as_likely_as_one_by_one() -> None:
    """With draws that change what is sent; some rounds were seen in part."""
    rng = torch.Generator().manual_seed(0)
    mean, noise = (torch.randn(n, 60, generator=rng, dtype=torch.float64) for n in (5, 12))
    seen = mean[3] + 0.3 * torch.randn(7, 60, generator=rng, dtype=torch.float64)
    weights, runs = torch.ones_like(seen), 0.3 * (noise - noise.mean(0))
    weights[2:4, :9] = 0
    sizes = torch.tensor([40.0, 20.0], dtype=torch.float64)
    sent = SentRounds(("a", "b"), sizes, seen, weights, torch.zeros(7, 1, 2))
    least = sent._least
    together, total = sent.drawn_likelihood(mean, runs), torch.zeros(5, dtype=torch.float64)
    level = (sent.by_tensor(runs.square().mean(0)) + least).repeat_interleave(sizes.long())
    shares = torch.logspace(-8, 4, 100, dtype=torch.float64)
    for y, w in zip(seen, weights, strict=True):
        kept = w > 0
        covariance = (runs[:, kept].T @ runs[:, kept]) / len(runs)
        laws = [
            torch.distributions.MultivariateNormal(mean[:, kept], covariance + t * torch.diag(level[kept]))
            for t in shares
        ]
        total += torch.stack([law.log_prob(y[kept]) for law in laws]).max(0).values
    assert torch.allclose(together, total, rtol=1e-6)
    assert int(together.argmax()) == 3
