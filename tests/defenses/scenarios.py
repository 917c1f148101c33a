"""Ways to train under a guard: loops as people write them, ways past the defence, and ways that no guard can see."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

from gradveil.countermeasures import Countermeasure
from gradveil.protection.defense import Accounted, Defense, Place, RunningStep, accounted
from gradveil.protection.protect import Guard, guard_of
from gradveil.protection.records import Records
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch, Update

LR = 0.1


class SpyStep(RunningStep):
    """Notes what a step is with each batch that comes into it."""

    def __init__(self, inner: RunningStep, releases: list[Params]) -> None:
        self.inner, self.releases = inner, releases

    def add(self, records: Records) -> Params:
        made = self.inner.add(records)
        self.releases.append({name: g.clone() for name, g in made.items()})
        return made


class Spy(Accounted):
    """Notes what a defence makes, in each of its places."""

    spec_name = "spy"

    def __init__(self, inner: Defense) -> None:
        self.inner = inner
        self.inputs: list[Tensor] = []  # x' of each pass
        self.representations: list[Tensor] = []  # r' of each pass
        self.gradients: list[Params] = []  # as they were left
        self.given: list[Params] = []  # as they came
        self.updates: list[Update] = []
        self.releases: list[Params] = []  # what was made of records

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spy":
        return self

    @property
    def spec(self) -> str:
        return describe(self.inner)

    @property
    def acts_on(self) -> frozenset[Place]:
        return self.inner.acts_on

    @property
    def idle(self) -> bool:
        return self.inner.idle

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return self.inner.layers(model)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        batch = self.inner.on_batch(batch, rng)
        self.inputs.append(batch.inputs.detach().flatten(1))
        return batch

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        changed = self.inner.perturb(model, layer, x, r, rng)
        self.representations.append(changed.detach().flatten(1).clone())
        return changed

    def on_records(self, records: Records, slots: int, rng: Generator) -> Params:
        made = accounted(self.inner).on_records(records, slots, rng)
        self.releases.append({name: g.clone() for name, g in made.items()})
        return made

    def begin(self, slots: int, rng: Generator) -> RunningStep | None:
        step = accounted(self.inner).begin(slots, rng)
        return None if step is None else SpyStep(step, self.releases)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        changed = self.inner.on_gradient(gradient, rng)
        self.given.append({name: g.clone() for name, g in gradient.items()})
        self.gradients.append({name: g.clone() for name, g in changed.items()})
        return changed

    def on_update(self, update: Update, rng: Generator) -> Update:
        self.updates.append(self.inner.on_update(update, rng))
        return self.updates[-1]

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return self.inner.servers(model)


@dataclass
class Arena:
    """A guarded model, two batches, and what a scenario says of itself."""

    model: nn.Sequential
    guard: Guard
    batches: list[Batch]
    old: dict[str, Tensor]  # gradients from before the guard
    before: Params = field(default_factory=dict)  # the weights that a round began with
    sent: Params | None = None  # in place of the model's own weights
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.weights()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    @property
    def head(self) -> nn.Linear:
        head = self.model[3]
        assert isinstance(head, nn.Linear)
        return head

    def weights(self) -> Params:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def loss(self, at: int = 0, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return F.cross_entropy((call or self.model)(self.batches[at].inputs), self.batches[at].labels)

    def backward(self, at: int = 0, call: Callable[[Tensor], Tensor] | None = None) -> None:
        self.loss(at, call).backward()

    def step(self, at: int = 0) -> None:
        self.optimizer.zero_grad()
        self.backward(at)
        self.optimizer.step()

    def bare(self) -> nn.Sequential:
        """A model of the same weights without a guard."""
        other = make_model()
        other.load_state_dict(self.model.state_dict())
        return other

    def plain(self, at: int = 1) -> dict[str, Tensor]:
        """The undefended gradient at the weights as they are, computed elsewhere."""
        other = self.bare()
        self.loss(at, other).backward()
        return {name: p.grad for name, p in other.named_parameters() if p.grad is not None}

    def by_hand(self, gradient: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p -= LR * gradient[name]


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 4))


Outcome = Literal["defended", "refused", "not visible"]
Family = Literal["representation", "batch", "records", "gradient", "update"]
NO_RECORDS: dict[Family, Outcome] = {"records": "refused"}  # no single record's part can be told
REFUSED: dict[Family, Outcome] = NO_RECORDS | {"representation": "refused", "batch": "refused"}
ALSO_WEIGHTS: dict[Family, Outcome] = REFUSED | {"gradient": "refused"}
UNSEEN: dict[Family, Outcome] = dict.fromkeys(("representation", "batch", "records", "gradient"), "not visible")


@dataclass(frozen=True)
class Scenario:
    """One way to train, what becomes of it under each family of defences, and what then tells the truth."""

    name: str
    run: Callable[[Arena], None]
    odd: dict[Family, Outcome]  # families under which it is not simply defended
    look_at: Literal["change", "gradient"] = "change"  # where defended gradients must show
    penalty: bool = False  # weights may also shrink
    tolerance: float = 1e-3

    def outcome(self, acts_on: frozenset[str]) -> Outcome:
        found = [self.odd.get(family, "defended") for family in acts_on]  # type: ignore[call-overload]
        return next((worst for worst in ("refused", "not visible") if worst in found), "defended")


SCENARIOS: list[Scenario] = []


def scenario(
    name: str, odd: dict[Family, Outcome] | None = None, **settings: Any
) -> Callable[[Callable[[Arena], None]], Callable[[Arena], None]]:
    def add(run: Callable[[Arena], None]) -> Callable[[Arena], None]:
        SCENARIOS.append(Scenario(name, run, odd or {}, **settings))
        return run

    return add


# Loops as people write them: all of them are defended.


@scenario("a plain loop")
def _(a: Arena) -> None:
    a.step(0)
    a.step(1)


@scenario("momentum and weight decay in the optimizer", penalty=True)
def _(a: Arena) -> None:
    a.optimizer = torch.optim.SGD(a.model.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
    a.step(0)
    a.step(1)


@scenario("Adam", look_at="gradient")
def _(a: Arena) -> None:
    a.optimizer = torch.optim.Adam(a.model.parameters(), lr=0.01)
    a.step(0)
    a.step(1)


@scenario("gradients made by a closure")
def _(a: Arena) -> None:
    def closure() -> Tensor:
        a.optimizer.zero_grad()
        loss = a.loss()
        loss.backward()
        return loss

    a.optimizer.step(closure)  # type: ignore[arg-type]
    a.optimizer.step(closure=closure)  # type: ignore[arg-type]


@scenario("L-BFGS, which steps and looks again inside one step", look_at="gradient")
def _(a: Arena) -> None:
    a.optimizer = torch.optim.LBFGS(a.model.parameters(), lr=LR, max_iter=2)

    def closure() -> Tensor:
        a.optimizer.zero_grad()
        loss = a.loss()
        loss.backward()
        return loss

    a.optimizer.step(closure)  # type: ignore[arg-type]


@scenario("gradients accumulated over two passes")
def _(a: Arena) -> None:
    for at in (0, 1):
        (a.loss(at) / 2).backward()
    a.optimizer.step()


@scenario("gradients clipped by their norm")
def _(a: Arena) -> None:
    a.backward()
    nn.utils.clip_grad_norm_(a.model.parameters(), 1e-3)
    a.optimizer.step()


@scenario("gradients clipped between two passes", NO_RECORDS)  # of one step, half of whose noise would be gone
def _(a: Arena) -> None:
    a.backward(0)
    nn.utils.clip_grad_norm_(a.model.parameters(), 1e-3)
    a.backward(1)
    a.optimizer.step()


@scenario("gradients clipped entry by entry", look_at="gradient", tolerance=2.0)  # no longer a sum of r', but no more
def _(a: Arena) -> None:
    a.backward()
    nn.utils.clip_grad_value_(a.model.parameters(), 0.01)
    a.optimizer.step()


@scenario("a loss scaled for half precision", NO_RECORDS)
def _(a: Arena) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(a.loss()).backward()
    scaler.step(a.optimizer)
    scaler.update()


@scenario("mixed precision", tolerance=0.05)
def _(a: Arena) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = a.loss()
    loss.backward()
    a.optimizer.step()


@scenario("a proximal term in the loss", NO_RECORDS, penalty=True)
def _(a: Arena) -> None:
    for at in (0, 1):
        a.optimizer.zero_grad()
        near = sum((p - a.before[name]).square().sum() for name, p in a.model.named_parameters())
        (a.loss(at) + 0.3 * near).backward()
        a.optimizer.step()


@scenario("a penalty with a backward pass of its own", penalty=True)
def _(a: Arena) -> None:
    a.backward()
    (0.1 * sum(p.square().sum() for p in a.model.parameters())).backward()  # type: ignore[union-attr]
    a.optimizer.step()


@scenario("weight decay added to gradients by hand", penalty=True)
def _(a: Arena) -> None:
    a.backward()
    for p in a.model.parameters():
        p.grad = p.grad + 0.1 * p.detach() if p.dim() > 1 else p.grad  # type: ignore[operator]
    a.optimizer.step()


@scenario("gradients zeroed in place")
def _(a: Arena) -> None:
    for at in (0, 1):
        a.optimizer.zero_grad(set_to_none=False)
        a.backward(at)
        a.optimizer.step()


@scenario("torch.autograd.grad of a defended pass, put in place by hand", NO_RECORDS)
def _(a: Arena) -> None:
    params = list(a.model.parameters())
    for p, g in zip(params, torch.autograd.grad(a.loss(), params), strict=True):
        p.grad = g
    a.optimizer.step()


@scenario("two optimizers")
def _(a: Arena) -> None:
    both = [torch.optim.SGD(part.parameters(), lr=LR) for part in (a.model[1], a.model[3])]
    a.backward()
    for optimizer in both:
        optimizer.step()


@scenario("an optimizer for each weight, stepping inside the backward pass")
def _(a: Arena) -> None:
    each = {p: torch.optim.SGD([p], lr=LR) for p in a.model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: each[p].step()) for p in each]  # type: ignore[index]
    a.backward(0)
    a.model.zero_grad()
    a.backward(1)
    for handle in handles:
        handle.remove()


@scenario("two steps on one gradient")
def _(a: Arena) -> None:
    a.backward()
    a.optimizer.step()
    a.optimizer.step()


@scenario("two passes in one loss", NO_RECORDS)
def _(a: Arena) -> None:
    (a.loss(0) + 2 * a.loss(1)).backward()
    a.optimizer.step()


@scenario("three passes in one loss", NO_RECORDS)
def _(a: Arena) -> None:
    (a.loss(0) + a.loss(1) + 0.3 * a.loss(0)).backward()
    a.optimizer.step()


@scenario("two backward passes through one pass", NO_RECORDS)
def _(a: Arena) -> None:
    loss = a.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    a.optimizer.step()


@scenario("gradients in eval mode that no step uses")
def _(a: Arena) -> None:
    a.step()
    a.model.eval()
    a.backward(1)
    a.model.train()
    a.step(1)


@scenario("a gradient for the input only")
def _(a: Arena) -> None:
    x = a.batches[0].inputs.clone().requires_grad_()
    torch.autograd.grad(F.cross_entropy(a.model(x), a.batches[0].labels), x)
    a.step(1)


@scenario("weights of the server loaded between rounds")
def _(a: Arena) -> None:
    a.step()
    a.model.load_state_dict(make_model().state_dict())
    a.before = a.weights()
    a.step(1)


@scenario("weights of the server loaded by assignment")
def _(a: Arena) -> None:
    a.step()
    a.model.load_state_dict(make_model().state_dict(), assign=True)
    a.before = a.weights()
    a.optimizer = torch.optim.SGD(a.model.parameters(), lr=LR)
    a.step(1)


@scenario("weights of the server written by hand before the first pass")
def _(a: Arena) -> None:
    for p in a.model.parameters():
        p.data = torch.rand_like(p)
    a.before = a.weights()
    a.step()


@scenario("weights moved along the gradient and back before the step (SAM)", look_at="gradient")
def _(a: Arena) -> None:
    for at in (0, 1):
        a.optimizer.zero_grad()
        a.backward(at)
        kept = a.weights()
        with torch.no_grad():
            for p in a.model.parameters():
                p += 0.05 * p.grad / p.grad.norm()  # type: ignore[operator, union-attr]
        a.optimizer.zero_grad()
        a.backward(at)
        for name, p in a.model.named_parameters():
            p.data = kept[name]
        a.optimizer.step()


@scenario("weights clipped in a hook of the optimizer", look_at="gradient")
def _(a: Arena) -> None:
    def clip(*_: Any) -> None:
        for p in a.model.parameters():
            p.data.clamp_(-0.1, 0.1)

    a.optimizer.register_step_post_hook(clip)
    a.step(0)
    a.step(1)


@scenario("functional_call with the model's own weights")
def _(a: Arena) -> None:
    own = dict(a.model.named_parameters())
    a.backward(call=lambda x: functional_call(a.model, own, (x,)))
    a.optimizer.step()


@scenario("a copy of the guarded model")
def _(a: Arena) -> None:
    a.model = copy.deepcopy(a.model)
    a.guard = guard_of(a.model)  # type: ignore[assignment]
    a.optimizer = torch.optim.SGD(a.model.parameters(), lr=LR)
    a.step(0)
    a.step(1)


@scenario("steps by hand on what defended passes left", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    for at in (0, 1):
        a.model.zero_grad()
        a.backward(at)
        a.by_hand({name: p.grad for name, p in a.model.named_parameters()})  # type: ignore[misc]


# Past the defence, by the gradient: defences of the gradient and of the update act on it nevertheless.


@scenario("gradients replaced after a defended backward pass", REFUSED)
def _(a: Arena) -> None:
    a.backward()
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad = g
    a.optimizer.step()


@scenario("gradients replaced by the undefended ones of the same batch", REFUSED)
def _(a: Arena) -> None:
    a.backward(0)
    for name, g in a.plain(0).items():
        a.model.get_parameter(name).grad = g
    a.optimizer.step()


@scenario("gradients overwritten through .data", REFUSED)
def _(a: Arena) -> None:
    a.backward()
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad.data.copy_(g)  # type: ignore[union-attr]
    a.optimizer.step()


@scenario("a foreign gradient added in place", REFUSED)
def _(a: Arena) -> None:
    a.backward()
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad += g
    a.optimizer.step()


@scenario("one call of the model, then a foreign gradient", REFUSED)
def _(a: Arena) -> None:
    a.model(a.batches[0].inputs)
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad = g
    a.optimizer.step()


@scenario("a defended step, then a foreign gradient", REFUSED)
def _(a: Arena) -> None:
    a.step()
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad = g
    a.optimizer.step()


@scenario("a defended pass, zero_grad, then a pass in eval mode", REFUSED)
def _(a: Arena) -> None:
    a.backward(0)
    a.optimizer.zero_grad()
    a.model.eval()
    a.backward(1)
    a.optimizer.step()


@scenario("a defended pass, zero_grad in place, then a pass in eval mode", REFUSED)
def _(a: Arena) -> None:
    a.backward(0)
    a.optimizer.zero_grad(set_to_none=False)
    a.model.eval()
    a.backward(1)
    a.optimizer.step()


@scenario("a pass in eval mode on top of a defended one", REFUSED)
def _(a: Arena) -> None:
    a.backward(0)
    a.model.eval()
    a.backward(1)
    a.optimizer.step()


@scenario("a pass in eval mode in one loss with a defended one", REFUSED)
def _(a: Arena) -> None:
    loss = a.loss(0)
    a.model.eval()
    (loss + a.loss(1)).backward()
    a.optimizer.step()


@scenario("training in eval mode", REFUSED)
def _(a: Arena) -> None:
    a.model.eval()
    a.step()


@scenario("model.forward in place of model", REFUSED)
def _(a: Arena) -> None:
    a.step()
    a.optimizer.zero_grad()
    a.backward(1, a.model.forward)
    a.optimizer.step()


@scenario("model.forward in one loss with a defended pass", REFUSED)
def _(a: Arena) -> None:
    (a.loss(0) + a.loss(1, a.model.forward)).backward()
    a.optimizer.step()


@scenario("parts of the model called one after the other", REFUSED)
def _(a: Arena) -> None:
    a.backward(call=lambda x: a.model[3](a.model[:3](x)))
    a.optimizer.step()


@scenario("parts called in eval mode in one loss with a defended pass", REFUSED)
def _(a: Arena) -> None:
    loss = a.loss(0)
    a.model.eval()
    (loss + a.loss(1, lambda x: a.model[3](a.model[:3](x)))).backward()
    a.optimizer.step()


def functionally(a: Arena, x: Tensor) -> Tensor:
    body: Any = a.model[1]
    hidden = F.linear(x.flatten(1), body.weight, body.bias).sigmoid()
    return F.linear(hidden, a.head.weight, a.head.bias)


@scenario("weights used by hand, as in F.linear(x, model.fc.weight)", REFUSED)
def _(a: Arena) -> None:
    a.step()
    a.optimizer.zero_grad()
    a.backward(1, lambda x: functionally(a, x))
    a.optimizer.step()


@scenario("gradients from before the guard", REFUSED)
def _(a: Arena) -> None:
    for name, g in a.old.items():
        a.model.get_parameter(name).grad = g
    a.optimizer.step()


@scenario("a defended pass on top of gradients from before the guard", REFUSED)
def _(a: Arena) -> None:
    for name, g in a.old.items():
        a.model.get_parameter(name).grad = g
    a.backward()
    a.optimizer.step()


@scenario("torch.autograd.grad past the model's call", REFUSED)
def _(a: Arena) -> None:
    a.step()
    params = list(a.model.parameters())
    loss = a.loss(1, lambda x: functionally(a, x))
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    a.optimizer.step()


@scenario("a hook of the optimizer that puts a foreign gradient", REFUSED)
def _(a: Arena) -> None:
    def replace(*_: Any) -> None:
        for name, g in a.plain().items():
            a.model.get_parameter(name).grad.copy_(g)  # type: ignore[union-attr]

    a.optimizer.register_step_pre_hook(replace)
    a.step()


@scenario("a closure that puts a foreign gradient", REFUSED)
def _(a: Arena) -> None:
    def closure() -> Tensor:
        loss = a.loss()
        loss.backward()
        for name, g in a.plain().items():
            a.model.get_parameter(name).grad = g
        return loss

    a.optimizer.step(closure)  # type: ignore[arg-type]


@scenario("noise added to gradients by hand", REFUSED)
def _(a: Arena) -> None:
    a.backward()
    for p in a.model.parameters():
        p.grad += 0.1 * torch.randn_like(p)
    a.optimizer.step()


@scenario("a second step on gradients that were overwritten", REFUSED)
def _(a: Arena) -> None:
    a.backward()
    a.optimizer.step()
    for name, g in a.plain().items():
        a.model.get_parameter(name).grad.data.copy_(g)  # type: ignore[union-attr]
    a.optimizer.step()


# Past the defence, by the weights: what acts on the update acts on this as well.


@scenario("one step of the optimizer, then steps by hand on undefended gradients", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    a.by_hand(a.plain())


@scenario("a step by hand, then one of the optimizer", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.model(a.batches[0].inputs)
    a.by_hand(a.plain())
    a.step()


@scenario("p.data -= lr * g after a defended step", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    for name, g in a.plain().items():
        a.model.get_parameter(name).data -= LR * g


@scenario("p.data -= lr * g between backward and step", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.backward()
    for name, g in a.plain().items():
        a.model.get_parameter(name).data -= LR * g
    a.optimizer.step()


@scenario("p.data -= lr * g and nothing else", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.backward()
    for name, g in a.plain().items():
        a.model.get_parameter(name).data -= LR * g


@scenario("p.data replaced after a defended step", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    for name, g in a.plain().items():
        p = a.model.get_parameter(name)
        p.data = p.data - LR * g


@scenario("a weight replaced by another parameter", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    plain: Any = a.plain()
    for at in (1, 3):
        part: Any = a.model[at]
        part.weight = nn.Parameter(part.weight.detach() - LR * plain[f"{at}.weight"])


@scenario("weights frozen, changed by hand, and thawed", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    plain = a.plain()
    a.model.requires_grad_(False)
    a.by_hand(plain)
    a.model.requires_grad_(True)
    a.step()


@scenario("functional_call on a copy of the weights, applied by hand", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    a.model.eval()
    own = {name: p.detach().clone().requires_grad_() for name, p in a.model.named_parameters()}
    loss = a.loss(1, lambda x: functional_call(a.model, own, (x,)))
    grads = torch.autograd.grad(loss, list(own.values()))
    a.by_hand(dict(zip(own, grads, strict=True)))


@scenario("an optimizer that is none of torch's", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    class Own:
        def step(self) -> None:
            a.by_hand(a.plain())

    a.backward()
    Own().step()


@scenario("vector_to_parameters after a defended step", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    g = nn.utils.parameters_to_vector(list(a.plain().values()))
    w = nn.utils.parameters_to_vector(a.model.parameters()).detach()
    nn.utils.vector_to_parameters(w - LR * g, a.model.parameters())


@scenario("steps by hand, hidden by loading weights after them", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    a.by_hand(a.plain())
    a.model.load_state_dict(make_model().state_dict())


@scenario("a little of an undefended gradient, far below the step", ALSO_WEIGHTS)
def _(a: Arena) -> None:
    a.step()
    for name, g in a.plain().items():
        a.model.get_parameter(name).data -= 1e-3 * LR * g


# Not visible: it runs, and what goes out is not defended. The page for users names each.


@scenario("weights of an unguarded copy, loaded by load_state_dict", UNSEEN)
def _(a: Arena) -> None:
    a.step()
    other = a.bare()
    self_trained = torch.optim.SGD(other.parameters(), lr=LR)
    a.loss(1, other).backward()
    self_trained.step()
    a.model.load_state_dict(other.state_dict())


@scenario("an optimizer that computes gradients of its own inside its step", UNSEEN)
def _(a: Arena) -> None:
    class Reads(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            a.by_hand(a.plain())

    a.optimizer = Reads(a.model.parameters(), lr=LR)
    a.step()


@scenario("a hook after the optimizer's step that writes to the weights", UNSEEN)
def _(a: Arena) -> None:
    a.optimizer.register_step_post_hook(lambda *_: a.by_hand(a.plain()))
    a.step()


@scenario("training before the first pass under the guard", UNSEEN)
def _(a: Arena) -> None:
    a.by_hand(a.old)
    a.step()


@scenario(
    "weights used by hand in one loss with a defended pass, under decoy",
    {"representation": "refused", "batch": "not visible", "records": "refused"},
)
def _(a: Arena) -> None:
    (a.loss(0) + a.loss(1, lambda x: functionally(a, x))).backward()
    a.optimizer.step()


@scenario("other weights sent than the guard saw", UNSEEN | {"update": "not visible"})
def _(a: Arena) -> None:
    a.step()
    a.sent = {name: w - LR * a.plain()[name] for name, w in a.before.items()}
