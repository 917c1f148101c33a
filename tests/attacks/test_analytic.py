"""Dividing dW by db: exact where theory says so, and honest where it is an estimate."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import analytic
from gradveil.attacks.analytic import Analytic
from gradveil.errors import AttackError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import NoDefense
from gradveil.types import Batch, GaussianPrior, Observation, Update


def observe(model: nn.Module, batch: Batch) -> Observation:
    rng = torch.Generator().manual_seed(0)
    update = Update(step_gradient(model, batch, NoDefense(), rng), num_examples=len(batch))
    return Observation(model, update, tuple(batch.inputs.shape[1:]), 5)


def one(batch: Batch) -> Batch:
    return Batch(batch.inputs[:1], batch.labels[:1])


def attack(seen: Observation, **settings: int) -> Tensor:
    return Analytic(**settings).reconstruct(seen, torch.Generator().manual_seed(1)).inputs  # type: ignore[arg-type]


@pytest.fixture
def dense() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 5))


def test_the_input_of_a_first_dense_layer_is_exact(dense: nn.Module, batch: Batch) -> None:
    torch.testing.assert_close(attack(observe(dense, one(batch))), batch.inputs[:1], atol=1e-5, rtol=0)


def test_it_needs_no_optimisation_there(dense: nn.Module, batch: Batch) -> None:
    found = Analytic().reconstruct(observe(dense, one(batch)), torch.Generator())
    assert found.converged
    assert found.details["iterations"] == 0


def test_what_lies_before_the_layer_is_inverted(model: nn.Module, batch: Batch) -> None:
    """Four channels of 4x4 determine 8x8 pixels only in part, so the representation is compared."""
    seen = observe(model, one(batch))
    found = attack(seen)
    features = model[:5]  # type: ignore[index]
    gap = (features(found) - features(batch.inputs[:1])).square().sum() / features(batch.inputs[:1]).square().sum()
    assert gap < 1e-4


def test_columns_that_the_view_masks_are_not_matched(model: nn.Module, batch: Batch) -> None:
    seen = observe(model, one(batch))
    gradient = dict(seen.update.gradient)
    gradient["5.weight"] = gradient["5.weight"].clone()
    gradient["5.weight"][:, :32] = 0
    hidden = replace(seen, update=replace(seen.update, gradient=gradient))
    r = model[:5](batch.inputs[:1])  # type: ignore[index]

    def gap(view: Observation) -> float:
        return float((model[:5](attack(view)) - r)[:, 32:].detach().square().mean())  # type: ignore[index]

    assert gap(hidden.masked("5.weight")) < 0.1 * gap(hidden)


def test_two_examples_of_two_classes_are_an_estimate_near_their_own_class(dense: nn.Module, batch: Batch) -> None:
    logits = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    two = Batch(batch.inputs[:2], torch.tensor([0, 3]))
    found = attack(observe(logits, two)).flatten(1)
    truth = two.inputs.flatten(1)
    own, other = (found - truth).square().mean(1), (found - truth.flip(0)).square().mean(1)
    assert (own < other).all()


def test_a_dead_row_gives_no_infinite_pixels(dense: nn.Module, batch: Batch) -> None:
    seen = observe(dense, one(batch))
    zero = {n: torch.zeros_like(g) for n, g in seen.update.gradient.items()}
    found = attack(replace(seen, update=replace(seen.update, gradient=zero)))
    assert found.isfinite().all()


def test_without_a_bias_it_says_what_it_needs(batch: Batch) -> None:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 5, bias=False))
    with pytest.raises(AttackError, match="weight and bias gradients are both seen"):
        attack(observe(bare, one(batch)))


def test_rows_that_one_example_alone_activates_give_a_whole_batch_away(batch: Batch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 5))
        with torch.no_grad():
            wide[1].bias.copy_(-wide[1].weight.sum(1) / 2)  # type: ignore[index, union-attr, operator]
    found, truth = attack(observe(wide, batch)).flatten(1), batch.inputs.flatten(1)
    nearest = torch.cdist(truth, found).min(1).values
    assert float(nearest.max()) < 1e-3


def test_all_rows_together_are_less_noisy_than_the_best_one(dense: nn.Module, batch: Batch) -> None:
    seen = observe(dense, one(batch))
    rng = torch.Generator().manual_seed(4)
    gradient, db = dict(seen.update.gradient), seen.update.gradient["1.bias"]
    noise = 0.01 * float(gradient["1.weight"].abs().max())
    gradient["1.weight"] = gradient["1.weight"] + noise * torch.randn(16, 64, generator=rng)
    noisy = replace(seen, update=replace(seen.update, gradient=gradient))
    best = int(db.abs().argmax())
    single = (gradient["1.weight"][best] / db[best]).reshape(1, 1, 8, 8).clamp(0, 1)
    together = attack(noisy)
    assert (together - batch.inputs[:1]).square().mean() < 0.9 * (single - batch.inputs[:1]).square().mean()


def test_a_normalisation_before_the_layer_is_undone(batch: Batch) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 0.5) / 0.5

    scaled = nn.Sequential(Half(), nn.Flatten(), nn.Linear(64, 5))
    torch.testing.assert_close(attack(observe(scaled, one(batch))), batch.inputs[:1], atol=1e-5, rtol=0)


def test_hidden_entries_are_filled_in_by_the_prior() -> None:
    rng = torch.Generator().manual_seed(7)
    mix = torch.randn(64, 2, generator=rng) / 15
    images = (0.5 + torch.randn(400, 2, generator=rng) @ mix.T).reshape(-1, 1, 8, 8)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    seen = observe(linear, Batch(images[:1], torch.tensor([2])))
    gradient = dict(seen.update.gradient)
    gradient["1.weight"] = gradient["1.weight"] * (torch.arange(64) % 2)  # half of the pixels are hidden
    hidden = replace(seen, update=replace(seen.update, gradient=gradient), prior=GaussianPrior.fit(images[1:], 1e-5))
    oblivious, aware = attack(hidden), attack(hidden.masked("1.weight"))
    assert float((aware - images[:1]).square().mean()) < 1e-4
    assert float((oblivious - images[:1]).square().mean()) > 0.1


def test_rows_of_opposite_sign_are_combined_and_do_not_cancel() -> None:
    r = torch.tensor([0.2, 0.4, 0.8], dtype=torch.float64)
    db = torch.tensor([0.5, -0.5], dtype=torch.float64)
    share = analytic.agreeing_rows(db[:, None] * r, db, 1)
    torch.testing.assert_close((share @ (db[:, None] * r))[0] / (share @ db), r)


def test_rows_too_faint_to_divide_have_no_vote() -> None:
    db = torch.tensor([1.0, 0.5, 1e-12, 1e-12, 1e-12, 0.0], dtype=torch.float64)
    dw = db[:, None] * torch.tensor([[0.2, 0.4]] * 2 + [[9.0, 9.0]] * 4, dtype=torch.float64)
    share = analytic.agreeing_rows(dw, db, 2)
    assert share.isfinite().all()
    assert [row.nonzero().flatten().tolist() for row in share] == [[0, 1], [0, 1]]  # none is left for a second example


def test_where_rows_are_many_the_largest_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analytic, "ROWS", 2)
    db = torch.tensor([0.1, 1.0, 0.2, 0.9], dtype=torch.float64)
    share = analytic.agreeing_rows(db[:, None] * torch.ones(4, 3, dtype=torch.float64), db, 1)
    assert share[0].nonzero().flatten().tolist() == [1, 3]


def test_noise_in_the_bias_counts_with_the_entry_it_divides() -> None:
    dw, db = torch.tensor([[4.0, 1.0]]).double(), torch.tensor([2.0]).double()
    found = analytic._combined(dw, db, torch.ones_like(dw), torch.ones(1, 1).double(), (0.0, 0.1))
    torch.testing.assert_close(found.std, torch.tensor([[0.1, 0.025]]).double())  # |r| std / |db|, for r = 2 and 0.5


def test_the_first_start_is_the_priors_mean_whatever_the_generator(model: nn.Module, batch: Batch) -> None:
    seen = observe(model, one(batch))
    found = [Analytic(steps=3, restarts=1).reconstruct(seen, torch.Generator().manual_seed(s)).inputs for s in (1, 2)]
    assert torch.equal(found[0], found[1])


def test_of_several_starts_the_best_by_the_objective_is_returned(model: nn.Module, batch: Batch) -> None:
    seen = observe(model, one(batch))
    few, many = (
        Analytic(steps=2, restarts=n).reconstruct(seen, torch.Generator().manual_seed(1)).objective for n in (1, 6)
    )
    assert many <= few


def test_what_noise_puts_outside_the_data_range_is_clamped(dense: nn.Module, batch: Batch) -> None:
    seen = observe(dense, one(batch))
    gradient = dict(seen.update.gradient)
    gradient["1.weight"] = gradient["1.weight"] * 100
    found = attack(replace(seen, update=replace(seen.update, gradient=gradient)))
    assert 0.0 <= float(found.min()) <= float(found.max()) == 1.0


def test_the_quotients_of_a_batch_are_not_called_exact(dense: nn.Module, batch: Batch) -> None:
    two = Batch(batch.inputs[:2], torch.tensor([0, 3]))
    assert not Analytic().reconstruct(observe(dense, two), torch.Generator()).converged
