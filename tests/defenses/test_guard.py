import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing import assert_close

from defenses.loops import REPRESENTATION, by_step_gradient, hooks_of, train, weights_of
from gradveil.defenses.representation import RandomMask
from gradveil.errors import DefenseError, UpdateError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.protect import guard_of, protect
from gradveil.types import Batch


@pytest.mark.parametrize(
    "spec",
    [REPRESENTATION, "random_mask", "pruning", "gaussian", "decoy", "decoy+random_mask:layer=2/5+laplace", "none"],
)
def test_a_guarded_loop_takes_the_steps_of_the_defended_gradient(spec: str, model: nn.Module, batch: Batch) -> None:
    other = copy.deepcopy(model)

    with protect(model, spec, simulated=Generator().manual_seed(3)) as guard:
        train(guard, model, batch)
    by_step_gradient(other, batch, spec, Generator().manual_seed(3))

    for name, w in weights_of(other).items():
        assert_close(weights_of(model)[name], w)
    assert guard.report.steps == (0 if spec == "none" else 3)


def test_leaving_takes_every_hook_off_and_changes_neither_keys_nor_class(model: nn.Module, batch: Batch) -> None:
    keys, kind = list(model.state_dict()), type(model)
    with protect(model, REPRESENTATION + "+gaussian"):
        assert hooks_of(model) > 0
        assert list(model.state_dict()) == keys
        assert type(model) is kind
        train(model, model, batch)
    assert hooks_of(model) == 0
    assert not _global_optimizer_pre_hooks


def test_it_is_called_in_place_of_the_model_and_gives_the_same_values(model: nn.Module, batch: Batch) -> None:
    plain = model(batch.inputs)
    guard = protect(model, REPRESENTATION)
    assert torch.equal(guard(batch.inputs), plain)
    guard.remove()
    guard.remove()
    assert hooks_of(model) == 0


def test_hooks_that_compiled_code_kept_do_nothing_after_removal(model: nn.Module, batch: Batch) -> None:
    guard = protect(model, REPRESENTATION)
    alone, enter = model._forward_pre_hooks.values()
    (substitute,) = model[5]._forward_hooks.values()  # type: ignore[index]
    guard.remove()
    alone(model, (batch.inputs,))
    assert not alone.is_mine  # type: ignore[union-attr]
    assert enter(model, (batch.inputs,), {}) is None
    assert substitute(model[5], (torch.rand(3, 64),), {}, torch.rand(3, 5)) is None  # type: ignore[index]
    assert guard.report.steps == 0


def test_nothing_happens_in_eval_mode_or_without_gradients(model: nn.Module, batch: Batch) -> None:
    with protect(model, "decoy+" + REPRESENTATION) as guard:
        plain = copy.deepcopy(model)
        guard_of(plain).remove()  # type: ignore[union-attr]
        with torch.no_grad():
            assert torch.equal(model(batch.inputs), plain(batch.inputs))
        model.eval()
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        F.cross_entropy(plain(batch.inputs), batch.labels).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert guard.report.steps == 0


@pytest.mark.parametrize("spec", [REPRESENTATION, "pruning:share=0.5", REPRESENTATION + "+pruning"])
def test_gradients_accumulated_over_two_halves_are_those_of_the_whole(spec: str, model: nn.Module) -> None:
    x, y = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    expected = step_gradient(model, Batch(x, y), build(spec), Generator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with protect(model, spec):
        for half in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            assert_close(p.grad, expected[name])


def test_masking_the_summed_gradient_would_not_be_the_same(model: nn.Module, batch: Batch) -> None:
    per_example = step_gradient(model, batch, build(REPRESENTATION), Generator())["5.weight"]
    together = step_gradient(model, batch, build("representation_authors:share=0.4,method=exact"), Generator())[
        "5.weight"
    ]
    assert float((per_example - together).norm() / per_example.norm()) > 0.05


def test_an_update_is_defended_by_passing_it_through(model: nn.Module, batch: Batch) -> None:
    before = copy.deepcopy(model.state_dict())
    with protect(model, "pruning:share=0.9,on=update") as guard:
        train(model, model, batch)
        sent = guard.update(before, model.state_dict(), lr=0.1)
    changed = {name: int((sent[name] != before[name]).sum()) for name in before}
    assert all(changed[name] <= before[name].numel() - round(0.9 * before[name].numel()) for name in before)
    assert list(sent) == list(before)


def test_an_update_without_noise_is_sent_as_it_is_by_a_lenient_guard_and_not_counted(
    model: nn.Module, batch: Batch
) -> None:
    before = copy.deepcopy(model.state_dict())
    with protect(model, "gaussian:scale=0,on=update", strict=False) as guard:
        train(model, model, batch)
        sent = guard.update(before, model.state_dict(), lr=0.1)
    assert_close(sent, dict(model.state_dict()))
    assert (guard.report.updates, guard.report.skipped) == (0, 1)


def test_noise_on_an_update_is_counted_in_the_unit_of_the_gradient(model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    guard = protect(model, "gaussian:scale=2,on=update", simulated=Generator().manual_seed(0))
    sent = guard.update(before, before, lr=0.1)
    guard.remove()
    noise = torch.cat([(sent[name] - before[name]).flatten() for name in before])
    assert float(noise.std()) == pytest.approx(0.2, rel=0.1)


def test_a_defence_of_the_update_that_never_saw_one_is_an_error(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(DefenseError, match=r"guard\.update\(before, after\)"), protect(model, "gaussian:on=update"):
        train(model, model, batch)


def test_other_defences_let_the_update_pass_and_missing_weights_are_named(model: nn.Module) -> None:
    state = model.state_dict()
    with protect(model, REPRESENTATION) as guard:
        assert all(torch.equal(value, state[name]) for name, value in guard.update(state, state).items())
    with protect(model, "gaussian:on=update") as guard, pytest.raises(UpdateError, match=r"5\.bias is missing"):
        guard.update(state, {name: value for name, value in state.items() if name != "5.bias"})


class WithDropout(nn.Module):
    """Dropout before and after the layer, batch norm, and arguments by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.drop, self.fc2 = (
            nn.BatchNorm2d(1),
            nn.Linear(64, 20),
            nn.Dropout(0.5),
            nn.Linear(20, 5),
        )

    def forward(self, scale: float, *, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.norm(scale * pixels)).flatten(1)
        return F.cross_entropy(self.fc2(self.drop(torch.tanh(self.fc1(x)))), labels)


def test_dropout_draws_the_same_masks_for_the_scores_as_for_the_pass(batch: Batch) -> None:
    torch.manual_seed(0)
    model = WithDropout()
    state = torch.get_rng_state()
    plain = model(2.0, pixels=batch.inputs, labels=batch.labels)
    after = torch.get_rng_state()
    kept: list[Tensor] = []
    model.fc2.register_forward_hook(lambda m, args, out: kept.append(args[0].detach()))

    torch.set_rng_state(state)
    with protect(model, "representation:share=0.5,layer=fc2") as guard:
        loss = model(2.0, pixels=batch.inputs, labels=batch.labels)
        assert torch.equal(torch.get_rng_state(), after)  # the global state is where the plain pass leaves it
    loss.backward()

    assert torch.equal(loss, plain)
    live, passes = kept[0], kept[1:]
    assert len(passes) == 0 or all(torch.equal(r, live) for r in passes)
    # with 0.5 of the entries dropped, fewer than 10 of 20 are live for some example: all of these are taken
    assert guard.report.removed == sum(min(10, int(row.count_nonzero())) for row in live)
    assert guard.report.steps == 1


@pytest.mark.parametrize("seed", range(4))
def test_with_dropout_the_entries_that_give_most_away_of_the_live_ones_go(seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(30, 20, bias=False), nn.Dropout(0.5), nn.Linear(20, 5))
        x, y = torch.rand(1, 30), torch.tensor([2])
        kept: list[Tensor] = []
        model[0].register_forward_hook(lambda m, args, out: kept.append(out.detach()[0]))
        model[2].register_forward_hook(lambda m, args, out: kept.append(out.detach()[0]))
        torch.manual_seed(seed + 10)
        by_function = step_gradient(model, Batch(x, y), build("representation:count=4"), Generator())["3.weight"]
        torch.manual_seed(seed + 10)
        kept.clear()
        with protect(model, "representation:count=4"):
            F.cross_entropy(model(x), y).backward()
    inputs, r = kept[:2]  # of the pass itself, which comes before those for the scores
    rows = 2 * 2 * model[1].weight.detach() * (inputs != 0)  # the gradient of a live entry: both dropouts double it
    scores = (r.abs() / rows.norm(dim=1)).masked_fill(r == 0, -1)
    expected = (r == 0).index_fill(0, scores.topk(4).indices, True)
    assert torch.equal((model[3].weight.grad == 0).all(0), expected)
    assert torch.equal((by_function == 0).all(0), expected)


def test_a_bare_linear_layer_can_be_guarded(rng: Generator) -> None:
    model, x, y = nn.Linear(4, 3), torch.rand(2, 4, generator=rng), torch.tensor([0, 2])
    expected = step_gradient(model, Batch(x, y), build("representation:share=0.5"), rng)
    with protect(model, "representation:share=0.5") as guard:
        F.cross_entropy(model(x), y).backward()
    assert_close(model.weight.grad, expected["weight"])
    assert guard.report.removed == 4


def test_a_defence_that_changes_the_shape_of_r_is_named(model: nn.Module, batch: Batch) -> None:
    class Cut(RandomMask):
        def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
            return r[:, 1:]

    with pytest.raises(DefenseError, match=r"returned \(3, 63\)"), protect(model, Cut()):
        model(batch.inputs)
