from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from defenses.loops import REPRESENTATION, hooks_of, train, weights_of
from gradveil.errors import DefenseError, LayerError
from gradveil.protection.protect import protect
from gradveil.types import Batch


def test_a_model_called_by_its_forward_is_refused_at_once(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(DefenseError, match=r"not model\.forward"), protect(model, REPRESENTATION):
        train(model.forward, model, batch)
    assert hooks_of(model) == 0


def test_a_lenient_guard_counts_what_it_could_not_defend_and_leaving_it_is_no_error(
    model: nn.Module, batch: Batch
) -> None:
    with protect(model, REPRESENTATION, strict=False) as guard:
        train(model.forward, model, batch, steps=1)
    assert guard.report.steps == 0
    assert guard.report.skipped >= 1


class Direct(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.fc.weight, self.fc.bias)


def test_a_weight_that_is_used_without_its_layer_is_refused(batch: Batch) -> None:
    model = Direct()
    with pytest.raises(DefenseError, match="did not run fc as a layer"), protect(model, REPRESENTATION):
        train(model, model, batch)


def test_gradients_from_before_the_guard_are_refused_by_the_optimizer_step(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(batch.inputs), batch.labels).backward()
    before = weights_of(model)
    with pytest.raises(DefenseError, match="no defended pass"), protect(model, REPRESENTATION):
        optimizer.step()
    assert all(torch.equal(before[name], w) for name, w in weights_of(model).items())


def test_training_in_eval_mode_is_refused_by_the_optimizer_step(model: nn.Module, batch: Batch) -> None:
    model.eval()
    with pytest.raises(DefenseError, match="train mode"), protect(model, REPRESENTATION):
        train(model, model, batch)


def test_an_undefended_step_among_defended_ones_is_refused(model: nn.Module, batch: Batch) -> None:
    with protect(model, REPRESENTATION):
        train(model, model, batch)
        model.eval()
        with pytest.raises(DefenseError, match="no defended pass"):
            train(model, model, batch)


def test_weights_changed_by_hand_without_a_defended_step_are_noticed_on_leaving(model: nn.Module, batch: Batch) -> None:
    def by_hand() -> None:
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad

    with pytest.raises(DefenseError, match="No training step was defended by pruning"), protect(model, "pruning"):
        by_hand()


def test_leaving_without_training_is_no_error_but_a_check_is(model: nn.Module) -> None:
    with protect(model, REPRESENTATION) as guard:
        pass
    with pytest.raises(DefenseError, match="No training step"):
        guard.check()


def test_an_error_in_the_loop_is_not_covered_up(model: nn.Module, batch: Batch) -> None:
    def fails(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    guard = protect(model, "gaussian:on=update")
    train(model, model, batch)
    with pytest.raises(ZeroDivisionError), guard:
        train(fails, model, batch)
    assert hooks_of(model) == 0


def test_an_error_in_the_forward_pass_leaves_the_guard_usable(batch: Batch) -> None:
    class Moody(nn.Sequential):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if self.fail:
                raise ZeroDivisionError
            return x

    model = Moody(nn.Flatten(), nn.Linear(64, 5))
    with protect(model, REPRESENTATION) as guard:
        with pytest.raises(ZeroDivisionError):
            model(batch.inputs)
        model.fail = False
        train(model, model, batch, steps=1)
    assert guard.report.steps == 1


@pytest.mark.parametrize(
    "spec",
    [
        "representation:share=0", "random_mask:count=0",
        "representation_authors:share=0", "representation_direction:share=0", "pruning:share=0",
        "pruning:share=0,on=update", "gaussian:scale=0",
        "laplace:scale=0,on=weights", "decoy:floor=0", "representation:share=0+gaussian:scale=0",
        "representation:share=0.4+gaussian:scale=0,on=update",
    ],
)  # fmt: skip
def test_a_defence_that_changes_nothing_is_refused_and_counts_for_nothing(
    spec: str, model: nn.Module, batch: Batch
) -> None:
    with pytest.raises(DefenseError, match="changes nothing"):
        protect(model, spec)
    assert hooks_of(model) == 0
    with protect(model, spec, strict=False) as guard:  # as a control, say
        train(model, model, batch, steps=1)
    assert guard.report.steps == (spec.startswith("representation:share=0.4"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("representation:share=0.001", "leaves all 64 entries that layer '5' gets as they are"),
        ("pruning:share=0.001", "pruning:share=0.001 left the gradient as it was"),
        ("gaussian:scale=1e-30", "gaussian:scale=1e-30 left the gradient as it was"),
        ("gaussian:scale=1e-30,on=update", "left the update as it was"),
    ],
)
def test_settings_too_small_to_change_anything_are_refused(
    spec: str, message: str, model: nn.Module, batch: Batch
) -> None:
    def train_and_send() -> None:
        before = weights_of(model)
        with protect(model, spec) as guard:
            train(model, model, batch)
            guard.update(before, weights_of(model))

    with pytest.raises(DefenseError, match=message):
        train_and_send()


def test_a_rule_that_chose_nothing_in_a_pass_is_refused_on_leaving(batch: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 5))  # dead entries: 0 / 0
    with pytest.raises(DefenseError, match="nothing in 3 training"), protect(model, "representation_authors"):
        train(model, model, batch)


def test_two_guards_on_one_model_are_refused(model: nn.Module) -> None:
    with protect(model, REPRESENTATION), pytest.raises(DefenseError, match="guarded by representation already"):
        protect(model, "gaussian")
    with protect(model, "gaussian"), pytest.raises(DefenseError, match="guarded by gaussian already"):
        protect(model, "laplace")
    with protect(model, REPRESENTATION), pytest.raises(DefenseError, match="already"):
        protect(model[5], "gaussian")  # type: ignore[index]


def test_frozen_shared_and_unknown_layers_are_refused() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    frozen[1].weight.requires_grad_(False)
    with pytest.raises(DefenseError, match="frozen"):
        protect(frozen, REPRESENTATION)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(DefenseError, match=r"shared \(0.weight, 1.weight\)"):
        protect(tied, REPRESENTATION)
    with pytest.raises(LayerError, match="no linear or convolutional layer 'fc'"):
        protect(tied, "representation:layer=fc")
    assert hooks_of(tied) == hooks_of(frozen) == 0


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(LayerError, match="Scaled"):
        protect(nn.Sequential(nn.Flatten(), Scaled(4, 2)), REPRESENTATION)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x.flatten(1)))


def test_a_layer_that_runs_twice_and_one_that_mixes_examples_are_refused(batch: Batch) -> None:
    with pytest.raises(DefenseError, match="twice"), protect(m := Twice(), "random_mask"):
        m(batch.inputs)
    with (
        pytest.raises(DefenseError, match="24 rows for 3 examples"),
        protect(m := nn.Sequential(nn.Flatten(0, 2), nn.Linear(8, 5)), "random_mask"),
    ):
        m(batch.inputs)


def test_token_ids_are_refused_with_a_hint() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))
    with protect(model, REPRESENTATION), pytest.raises(DefenseError, match="embeddings"):
        model(torch.tensor([[1, 2]]))


class FromOpacus(nn.Sequential):
    """Stands in for a class that was defined in the package of that name."""


FromOpacus.__module__ = "opacus.grad_sample.grad_sample_module"


def opacus_hook(module: nn.Module, args: Any, output: Any) -> None: ...


opacus_hook.__module__ = "opacus.grad_sample.functorch"


def test_a_model_in_the_hands_of_opacus_is_refused(model: nn.Module) -> None:
    with pytest.raises(DefenseError, match="Pick one"):
        protect(FromOpacus(model), "representation:layer=0.5")
    model[5].register_forward_hook(opacus_hook)  # type: ignore[index]
    with pytest.raises(DefenseError, match="Opacus is at work on '5'"):
        protect(model, REPRESENTATION)


@pytest.mark.filterwarnings("ignore")
def test_a_model_wrapped_by_opacus_itself_is_refused_inside_and_out(model: nn.Module) -> None:
    wrapped = pytest.importorskip("opacus").GradSampleModule(model)
    for part in (wrapped, wrapped._module):
        with pytest.raises(DefenseError, match="Pick one"):
            protect(part, REPRESENTATION)
