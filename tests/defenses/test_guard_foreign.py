"""Models that were not written for a guard: the gradient that they train with, defended, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from gradveil.errors import DefenseError, GradveilError, LayerError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.protect import Guard, protect
from gradveil.representation.scores import leak_scores
from gradveil.types import Batch
from reference.leak_scores import reference_scores

SPEC = "representation:share=0.5,layer=fc"
LABELS = torch.tensor([0, 1, 2, 0])


class Foreign(nn.Module):
    """A representation and a head made by any functions of the model."""

    def __init__(
        self,
        represent: Callable[..., Tensor] = lambda m, x: m.a(x).tanh(),
        head: Callable[..., Any] = lambda m, r: m.fc(r),
        change: Callable[["Foreign"], Any] = lambda m: None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.fc, self.words = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Embedding(9, 6)
            change(self)
        self.represent, self.head = represent, head
        self.double()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.head(self, self.represent(self, *args, **kwargs))


def inputs() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(model: nn.Module, *args: Any, spec: str = SPEC, **kwargs: Any) -> tuple[dict[str, Tensor], Guard]:
    """Return the gradients of one guarded step, and the guard."""
    with protect(model, spec) as guard:
        F.cross_entropy(model(*args, **kwargs), LABELS).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients(model), guard


def expected(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a plain pass, with dW of fc from r without the half that scores highest."""
    scores = reference_scores(model, "fc", x.clone())  # (N, L), by torch's own derivative
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        seen.extend([args[0].detach(), output])

    handle = model.fc.register_forward_hook(keep, prepend=True)
    F.cross_entropy(model(x), LABELS).backward()
    handle.remove()
    r, output = seen
    assert output.grad is not None
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :3]
    return gradients(model) | {"fc.weight": output.grad.t() @ r.scatter(1, best, 0.0)}


def gated_without_gradients(m: Foreign, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        gate = torch.sigmoid(m.b(h))
    return h * gate


def moved(m: Foreign, x: Tensor) -> Tensor:
    m.shift.copy_(m.shift.flip(0))
    return (m.a(x) + m.shift).tanh()


MODELS: dict[str, Callable[[], Foreign]] = {
    "a block without gradients": lambda: Foreign(gated_without_gradients),
    "a hook on the layer's output": lambda: Foreign(
        change=lambda m: m.fc.register_forward_hook(lambda _, args, out: out * 2)
    ),
    "a hook on the layer's input": lambda: Foreign(
        change=lambda m: m.fc.register_forward_pre_hook(lambda _, args: (args[0].exp(),))
    ),
    "a buffer that moves at each pass": lambda: Foreign(
        moved, change=lambda m: m.register_buffer("shift", torch.arange(6.0))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_guarded_step_has_the_gradients_of_a_plain_one_but_for_the_mask(name: str) -> None:
    wanted = expected(MODELS[name](), inputs())
    found, guard = trained(MODELS[name](), inputs())
    assert found.keys() == wanted.keys()
    for key, g in wanted.items():
        assert_close(found[key], g, msg=key)
    assert (guard.report.steps, guard.report.removed) == (1, 12)


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        (Foreign(lambda m, x: m.a(x.mul_(2)).tanh()), Foreign(lambda m, x: m.a(x * 2).tanh())),
        (Foreign(head=lambda m, r: m.fc(input=r)), Foreign()),
    ],
    ids=["writes to its input", "a layer called by keyword"],
)
def test_another_way_of_writing_a_model_changes_nothing(model: Foreign, plain: Foreign) -> None:
    wanted, found = trained(plain, inputs())[0], trained(model, inputs())[0]
    for key, g in wanted.items():
        assert_close(found[key], g, msg=key)


def test_a_look_at_a_parametrized_weight_does_not_move_it_on() -> None:
    def normed() -> Foreign:
        return Foreign(change=lambda m: nn.utils.parametrizations.spectral_norm(m.fc, n_power_iterations=1))

    plain, guarded = normed(), normed()
    with protect(guarded, SPEC):
        assert_close(guarded(inputs()), plain(inputs()), rtol=1e-12, atol=0)


def unused(m: Foreign, r: Tensor) -> Tensor:
    m.fc(r)
    return F.linear(r, m.fc.weight)


ELSEWHERE = {
    "beside it": lambda m, r: m.fc(r) + F.linear(r, m.fc.weight),
    "before it": lambda m, r: m.fc(r + F.linear(torch.ones(4, 3, dtype=r.dtype), m.fc.weight.t())),
    "in place of it": unused,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_defended_weight_that_is_used_beside_its_layer_is_refused(name: str) -> None:
    with pytest.raises(DefenseError, match="used beside its layer"):
        trained(Foreign(head=ELSEWHERE[name]), inputs())
    with pytest.raises(DefenseError, match="used beside its layer"):
        step_gradient(Foreign(head=ELSEWHERE[name]), Batch(inputs(), LABELS), build(SPEC), Generator())
    model = Foreign(head=ELSEWHERE[name])
    with protect(model, SPEC, strict=False) as guard:
        model(inputs())
    assert (guard.report.steps, guard.report.skipped) == (0, 1)


def test_a_weight_that_is_tied_under_the_guard_is_refused() -> None:
    model = Foreign(head=lambda m, r: m.fc(r) + m.other(r), change=lambda m: setattr(m, "other", nn.Linear(6, 3)))
    guard = protect(model, SPEC)
    model.other.weight = model.fc.weight
    with pytest.raises(DefenseError, match="used beside its layer"):
        guard(inputs())


def test_what_the_model_returns_beside_its_logits_is_no_second_use() -> None:
    wanted = expected(Foreign(), inputs())
    model = Foreign(head=lambda m, r: {"logits": m.fc(r), "more": (r, m.b(r))})
    with protect(model, SPEC):
        F.cross_entropy(model(inputs())["logits"], LABELS).backward()
    assert_close(gradients(model)["fc.weight"], wanted["fc.weight"])


def two(m: Foreign, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([m.a(x)[:, :3].tanh(), 2 * m.a(y.to(x).view(-1, 4))[:, 3:]], 1)


def of_dict(m: Foreign, both: dict[str, Tensor], *, scale: Tensor) -> Tensor:
    return two(m, both["x"], both["y"]) * scale


def test_all_inputs_of_a_model_count_in_its_scores() -> None:
    x, y = inputs(), inputs().flip(1).exp()
    joined = torch.cat([x, y], 1)
    wanted, _ = trained(Foreign(lambda m, z: two(m, z[:, :4], z[:, 4:])), joined)
    calls: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
        "by place": (two, (x, y), {}),
        "by name": (two, (x,), {"y": y}),
        "as an image": (two, (x, y.view(4, 2, 2)), {}),
        "in a dictionary, with a number": (of_dict, ({"x": x, "y": y},), {"scale": torch.tensor(1.0).double()}),
    }
    for name, (represent, args, kwargs) in calls.items():
        found, _ = trained(Foreign(represent), *args, **kwargs)
        assert_close(found["fc.weight"], wanted["fc.weight"], msg=name)
    single, _ = trained(Foreign(two), x, y.float())  # of another precision
    assert_close(single["fc.weight"], wanted["fc.weight"], rtol=1e-4, atol=1e-6)


def test_one_input_that_is_given_twice_counts_once() -> None:
    wanted, _ = trained(Foreign(lambda m, x: two(m, x, x)), x := inputs())
    found, _ = trained(Foreign(two), x, x)
    assert_close(found["fc.weight"], wanted["fc.weight"])


def test_inputs_that_have_not_a_row_for_each_example_are_refused() -> None:
    with pytest.raises(DefenseError, match=r"4 examples and a floating point tensor \(2, 8\)"):
        trained(Foreign(lambda m, x, y: m.a(x)), inputs(), torch.rand(2, 8))


def test_a_defence_of_the_batch_refuses_several_inputs() -> None:
    with pytest.raises(DefenseError, match=r"changes one input.*\(4, 4\), \(4, 4\)"):
        trained(Foreign(two), inputs(), inputs() + 1, spec="decoy")


def counting(m: Foreign, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.a(x) * m.calls


SCORED = [SPEC, "representation_authors:share=0.5,layer=fc", "representation_direction:share=0.5,layer=fc"]


@pytest.mark.parametrize("spec", SCORED)
@pytest.mark.parametrize(
    ("represent", "says"),
    [
        (counting, "another representation"),
        (lambda m, x: (m.a(x) - m.a(x).mean(0)).exp(), "mixes the examples"),
        (lambda m, x: m.words(x[:, 0].abs().long()), "does not depend on x in a way"),
    ],
)
def test_a_pass_that_has_no_scores_of_its_own_is_refused(
    represent: Callable[..., Tensor], says: str, spec: str
) -> None:
    with pytest.raises(GradveilError, match=says):
        trained(Foreign(represent), inputs(), spec=spec)


@pytest.mark.parametrize("spec", [SPEC, "random_mask:layer=fc"])
def test_transforms_of_torch_func_are_refused(spec: str) -> None:
    model = Foreign()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    with protect(model, spec):
        for run in (vmap(grad(loss), (None, 0, 0)), lambda w, x, y: grad(loss)(w, x[0], y[0])):
            with pytest.raises(DefenseError, match=r"torch\.func"):
                run(weights, inputs(), LABELS)


def test_a_replaced_forward_and_a_hook_before_the_guard_are_refused() -> None:
    model = Foreign()
    model.fc.forward = lambda r: 3 * F.linear(r, model.fc.weight)
    with pytest.raises(LayerError, match="forward pass of its own"):
        protect(model, SPEC)
    model = Foreign()
    with protect(model, SPEC):
        model.fc.register_forward_hook(lambda _, args, out: out * 2, prepend=True)
        with pytest.raises(DefenseError, match="before the guard's"):
            model(inputs())


def test_a_wrapper_for_several_devices_is_passed() -> None:
    wanted, _ = trained(Foreign(), inputs())
    wrapped = nn.DataParallel(Foreign())
    found, _ = trained(wrapped, inputs(), spec="representation:share=0.5,layer=module.fc")
    assert_close(found["module.fc.weight"], wanted["fc.weight"])


def test_an_empty_batch_has_nothing_to_defend() -> None:
    model = Foreign()
    with protect(model, SPEC):
        model(inputs()[:0]).sum().backward()
    assert not gradients(model)["fc.weight"].any()
    found = step_gradient(model, Batch(inputs()[:0], LABELS[:0]), build(SPEC), Generator(), loss=lambda b, _: b.sum())
    assert not found["fc.weight"].any()


def test_second_derivatives_through_a_defended_layer_are_refused() -> None:
    model = Foreign()
    with protect(model, SPEC):
        loss = F.cross_entropy(model(inputs()), LABELS)
        with pytest.raises(DefenseError, match="create_graph=True"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)


def test_a_layer_that_has_no_weights_yet_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(3))
    with pytest.raises(LayerError, match="has no values yet"):
        protect(model, "representation:layer=1")
    with pytest.raises(LayerError, match="has no values yet"):
        leak_scores(model, "1", inputs().float())
