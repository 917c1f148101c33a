"""Labels from the last layer: the sign for one example, counts for batches, with and without a bias."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.labels import _dummies, class_counts, label_signal, recover_labels, with_labels
from gradveil.errors import AttackError
from gradveil.types import GaussianPrior, Observation, Update


def net(classes: int = 6, bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(10, 16), activation(), nn.Linear(16, classes, bias=bias))


def observe(model: nn.Module, labels: Tensor, rng: Generator) -> Observation:
    loss = cross_entropy(model(torch.rand(len(labels), 10, generator=rng)), labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
    return Observation(model, Update(gradient, num_examples=len(labels)), (10,), int(model[-1].out_features))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_one_example_gives_its_label_away(bias: bool, activation: type[nn.Module], rng: Generator) -> None:
    model = net(bias=bias, activation=activation)
    for label in range(6):
        seen = observe(model, torch.tensor([label]), rng)
        assert recover_labels(seen, rng).tolist() == [label]  # type: ignore[union-attr]


def test_the_bias_gradient_of_one_example_is_negative_for_its_label_alone(rng: Generator) -> None:
    signal = label_signal(observe(net(), torch.tensor([3]), rng), rng)
    assert (signal < 0).tolist() == [False, False, False, True, False, False]  # type: ignore[operator]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [2, 2, 2, 5, 5, 1, 0, 0]])
def test_counts_of_a_batch_are_exact_on_an_untrained_network(bias: bool, labels: list[int], rng: Generator) -> None:
    found = recover_labels(observe(net(bias=bias), torch.tensor(labels), rng), rng)
    assert found.tolist() == sorted(labels)  # type: ignore[union-attr]


def test_rows_tell_what_the_bias_would_have_told(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([2, 2, 5]), rng)
    torch.testing.assert_close(label_signal(seen.without("2.bias"), rng), label_signal(seen, rng), rtol=0.2, atol=0.02)


def test_counts_sum_to_the_number_of_examples_whatever_the_signal(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([0, 1, 2]), rng)
    for _ in range(20):
        counts = class_counts(seen, torch.randn(6, generator=rng), rng)
        assert int(counts.sum()) == 3
        assert int(counts.min()) >= 0


def test_several_local_steps_are_averaged(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([2, 2, 4]), rng)
    tripled = {n: 3 * g for n, g in seen.update.gradient.items()}
    several = replace(seen, update=replace(seen.update, gradient=tripled, num_steps=3))
    assert recover_labels(several, rng).tolist() == [2, 2, 4]  # type: ignore[union-attr]
    torch.testing.assert_close(label_signal(several, rng), label_signal(seen, rng))


def test_zeroed_columns_do_not_hide_the_label(rng: Generator) -> None:
    seen = observe(net(bias=False), torch.tensor([4]), rng)
    whole = label_signal(seen, rng)
    seen.update.gradient["2.weight"][:, ::3] = 0
    assert recover_labels(seen, rng).tolist() == [4]  # type: ignore[union-attr]
    torch.testing.assert_close(label_signal(seen, rng), whole, rtol=0.5, atol=0)


def test_known_labels_stay_and_unreadable_ones_are_refused_where_needed(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([4]), rng)
    known = replace(seen, labels=torch.tensor([1]))
    assert with_labels([known], [rng])[0].labels.tolist() == [1]  # type: ignore[union-attr]
    hidden = seen.only("0.*")
    assert with_labels([hidden], [rng])[0].labels is None
    with pytest.raises(AttackError, match="cannot be read"):
        with_labels([hidden], [rng], required=True)


def test_a_last_layer_of_another_size_is_not_taken_for_the_classifier(rng: Generator) -> None:
    assert recover_labels(replace(observe(net(), torch.tensor([4]), rng), num_classes=5), rng) is None


def test_several_local_steps_are_averaged_without_a_bias_too(rng: Generator) -> None:
    seen = observe(net(bias=False), torch.tensor([2, 2, 4]), rng)
    tripled = {n: 3 * g for n, g in seen.update.gradient.items()}
    several = replace(seen, update=replace(seen.update, gradient=tripled, num_steps=3))
    one, other = (label_signal(s, torch.Generator().manual_seed(1)) for s in (seen, several))
    torch.testing.assert_close(other, one)


def test_a_class_with_a_negative_signal_is_there_however_faint(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([0, 1]), rng)
    counts = class_counts(seen, torch.tensor([-0.9, -0.01, 0.2, 0.2, 0.2, 0.3]), rng)
    assert counts.tolist() == [1, 1, 0, 0, 0, 0]


def test_of_more_negative_signals_than_examples_the_strongest_count(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([0, 1]), rng)
    counts = class_counts(seen, torch.tensor([-0.1, -0.9, -0.5, -0.01, 0.5, 0.5]), rng)
    assert counts.tolist() == [0, 1, 1, 0, 0, 0]


def test_counts_allow_for_a_network_that_leans_to_a_class(rng: Generator) -> None:
    model = net()
    with torch.no_grad():
        model[-1].bias[0] = 3.0  # type: ignore[index, union-attr, operator]
    seen = observe(model, torch.tensor([0, 0, 0, 1]), rng)
    assert recover_labels(seen, rng).tolist() == [0, 0, 0, 1]  # type: ignore[union-attr]


def test_a_bias_gradient_that_was_zeroed_is_passed_over(rng: Generator) -> None:
    seen = observe(net(), torch.tensor([4]), rng)
    seen.update.gradient["2.bias"].zero_()
    assert recover_labels(seen, rng).tolist() == [4]  # type: ignore[union-attr]


def test_made_inputs_are_those_of_the_prior_within_the_bounds(rng: Generator) -> None:
    prior = GaussianPrior(torch.linspace(0.5, 1.4, 10), 0.01 * torch.eye(10), 1e-6)
    x = _dummies(replace(observe(net(), torch.tensor([0]), rng), prior=prior), rng)
    torch.testing.assert_close(x.mean(0), prior.mean.clamp_max(1.0), rtol=0, atol=0.02)
    assert float(x.max()) == 1.0
    assert float(x[:, 0].std()) > 0
