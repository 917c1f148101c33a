"""Training loops made at random, and an oracle that knows of each tensor whether anything in it lacks its noise."""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil.defenses.veil import Veil
from gradveil.errors import GradveilError
from gradveil.privacy.accountant import Account
from gradveil.protection.counted import board, counted
from gradveil.protection.protect import Guard, protect

N, SLOTS, Z = 16, 8, 1e4  # the noise is thousands of times what it hides: where it is not, it is seen
COST = 1 / Z**2
KEPT = ("total", "seen", "flags", "table", "extra")  # what leaves beside the weights


class Net(nn.Module):
    """Two layers, and state of every kind beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 5)
        self.total, self.seen = nn.Buffer(torch.zeros(12)), nn.Buffer(torch.zeros(12, dtype=torch.int64))
        self.flags = nn.Buffer(torch.zeros(12, dtype=torch.bool))
        self.passing = nn.Buffer(torch.zeros(12), persistent=False)
        self.table = nn.Parameter(torch.zeros(12), requires_grad=False)
        self.extra = 0.0

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


class Broken(Exception):
    """The guard let something pass."""


@dataclass
class Loop:
    """One client's training, step by step at random, and the truth about it."""

    seed: int
    numbered: bool = True
    clean: set[str] = field(default_factory=set)  # gradients that hold something without noise
    tainted: set[str] = field(default_factory=set)  # weights and state that do
    begun: bool = False  # weights that are written before the first pass are taken for the server's
    moments: bool = False  # whether the optimizer holds something without noise
    truth: Counter[int] = field(default_factory=Counter)  # uses by releases that are over
    held: Counter[int] = field(default_factory=Counter)  # slots of the release under way
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pick = random.Random(self.seed)
        self.numbers = Generator().manual_seed(self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.model = Net()
            data = TensorDataset(torch.rand(N, 12), torch.randint(0, 5, (N,)), torch.arange(N))
        self.x, self.y, _ = data.tensors
        self.server = copy.deepcopy(self.model.state_dict())
        self.numbered = self.seed % 4 > 0
        self.account = Account("drill")
        self.batches: list[list[Tensor]] = []
        self.fresh = False  # the batch that was drawn last was not used
        self.loader = DataLoader(data, batch_size=self.pick.choice([2, 3, 4]), shuffle=True, generator=self.numbers)
        self.drawing: Iterator[Any] = iter(())
        board.__init__()  # type: ignore[misc]
        self.new_optimizer()
        self.protect()

    # What the guard did, as nobody asks the guard.

    def protect(self) -> None:
        loop = self

        class Watched(Veil):
            def begin(self, *args: Any) -> Any:
                loop.close_release()
                return super().begin(*args)

        self.begun = False
        self.guard: Guard = protect(self.model, Watched(z=Z, clip=1), slots=SLOTS, account=self.account)

    def close_release(self) -> None:
        for i, slots in self.held.items():
            self.truth[i] += slots**2
        self.held.clear()

    def worst(self) -> float:
        now = Counter(self.truth)
        now.update({i: slots**2 for i, slots in self.held.items()})
        return COST * max(now.values(), default=0)

    def check_account(self) -> None:
        if self.guard.account.spent < self.worst() * (1 - 1e-9):
            raise Broken(f"account {self.guard.account.spent / COST}, worst record {self.worst() / COST}")

    def check_noise(self) -> None:
        for name, p in self.weights():
            if name not in self.clean and (p.grad is None or float(p.grad.abs().max()) < 0.01 * Z / SLOTS):
                raise Broken(f"no noise in the gradient of {name}")

    # Things that a loop does.

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def some(self) -> tuple[str, nn.Parameter]:
        return self.pick.choice(self.weights())

    def plain_gradient(self) -> dict[str, Tensor]:
        other = Net()
        for p, own in zip(other.parameters(), self.model.parameters(), strict=True):
            p.data.copy_(own.data)
        F.cross_entropy(other(self.x), self.y).backward()
        return {name: p.grad for name, p in other.named_parameters() if p.grad is not None}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def backward(self, batch: list[Tensor], change: bool = False) -> None:
        x, y, i = batch
        self.begun = True
        self.loss(x + 0.01 if change else x, y).backward()
        self.fresh = False
        self.held.update(i.tolist())
        self.check_noise()
        self.check_account()

    def draw(self) -> list[Tensor]:
        found = next(self.drawing, None)
        if found is None or self.pick.random() < 0.1:  # an epoch is over, or broken off
            self.drawing = iter(counted(self.loader))
            found = next(self.drawing)
        self.batches.append(found)
        self.fresh = True
        return found

    def numbered_pass(self) -> None:
        self.backward(self.draw(), self.pick.random() < 0.3)

    def skip(self) -> None:
        self.draw()

    def again(self) -> None:
        if self.batches:
            self.backward(self.pick.choice(self.batches))

    def again_changed(self) -> None:
        if self.batches and not self.fresh:  # else it is taken for the one that was drawn last
            self.backward(self.pick.choice(self.batches), change=True)

    def own_rows(self) -> None:
        left = [i for i in range(N) if i not in self.held]  # without numbers a record is taken to be once in a step
        i = torch.tensor(self.pick.sample(left, min(len(left), self.pick.choice([1, 2, 4]))))
        if len(i) and not self.fresh:
            self.backward([self.x[i] * 1.01, self.y[i], i])

    def twice_in_a_batch(self) -> None:
        i = torch.tensor([self.pick.randrange(N) for _ in range(4)])
        for numbers in counted([i.tolist()]):
            assert len(numbers) == 4
            self.fresh = True
            self.backward([self.x[i] + 0.5, self.y[i], i])

    def eval_pass(self) -> None:
        self.begun = True
        self.model.eval()
        self.loss(self.x, self.y).backward()
        self.model.train()
        self.clean.update(name for name, _ in self.weights())

    def no_grad_pass(self) -> None:
        with torch.no_grad():
            self.loss(self.x, self.y)

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.pick.random() < 0.5)
        self.clean.clear()

    def zero_data(self) -> None:
        for _, p in self.weights():
            if p.grad is not None:
                p.grad.data.zero_()
        self.clean.clear()

    def zero_one(self) -> None:
        name, p = self.some()
        if p.grad is not None:
            p.grad.data.view(-1)[:] = 0
            self.clean.discard(name)

    def shrink(self) -> None:
        for _, p in self.weights():
            if p.grad is not None:
                p.grad.data.mul_(1e-7)

    def limit(self) -> None:
        nn.utils.clip_grad_norm_([p for _, p in self.weights()], self.pick.choice([1e-3, 1.0]))

    def replace_one(self) -> None:
        (name, p), g = self.some(), self.plain_gradient()
        kind = self.pick.randrange(4)
        if kind == 0 or p.grad is None:
            p.grad = g[name]
        elif kind == 1:
            p.grad.data.copy_(g[name])
        elif kind == 2:
            p.grad.add_(g[name], alpha=1e3)
        else:
            at = self.pick.randrange(p.numel())
            p.grad.data.view(-1)[at] = g[name].view(-1)[at]
        self.clean.add(name)

    def step(self) -> None:
        self.begun = True
        self.optimizer.step()
        self.close_release()
        moved = {name for name, p in self.weights() if p.grad is not None and bool(p.grad.any())}
        self.tainted |= moved & self.clean
        if self.moments:
            self.tainted |= {name for name, p in self.weights() if p.grad is not None}

    def write_weight(self) -> None:
        name, p = self.some()
        p.data.add_(self.plain_gradient()[name], alpha=-0.1)
        self.tainted.update({name} if self.begun else ())

    def write_state(self) -> None:
        name = self.pick.choice([*KEPT, "passing"])
        row = self.x[self.pick.randrange(N)]
        if name == "extra":
            self.model.extra += float(row.sum())
        elif name == "flags":
            self.model.flags.logical_or_(row > 0.1)
        elif name == "table":
            self.model.table.data.add_(row)
        elif self.pick.random() < 0.5:
            getattr(self.model, name).add_((row * 1000).to(getattr(self.model, name).dtype) + 1)
        else:
            setattr(self.model, name, (row * 1000).to(getattr(self.model, name).dtype) + 1)
        self.tainted.update({name} & {*KEPT})

    def reset_state(self) -> None:
        for name in KEPT:
            if name == "extra":
                self.model.extra = 0.0
            else:
                getattr(self.model, name).data.zero_()
        self.tainted -= {*KEPT}

    def new_optimizer(self) -> None:
        weights = [p for _, p in self.weights()]
        kind = self.pick.randrange(3)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(weights, lr=1e-9) if kind == 0 else torch.optim.SGD(weights, 1e-9, 0.9 * (kind == 1))
        )
        self.moments = False

    def spoil_moments(self) -> None:
        if isinstance(self.optimizer, torch.optim.SGD) and self.optimizer.defaults["momentum"]:
            name, p = self.some()
            self.optimizer.state[p]["momentum_buffer"] = self.plain_gradient()[name]
            self.moments = True

    def clear_moments(self) -> None:
        self.optimizer.state.clear()
        self.moments = False

    def unguarded_step(self) -> None:
        """A step past every guard, whose weights are then taken back; the optimizer's moments are not."""
        self.guard.verify()
        self.check_sent()
        self.guard.remove()
        self.account = self.guard.account
        before = copy.deepcopy(self.model.state_dict())
        self.optimizer.zero_grad()
        self.loss(self.x, self.y).backward()
        self.optimizer.step()
        self.moments = bool(self.optimizer.state)
        self.model.load_state_dict(before)
        if self.pick.random() < 0.5:
            self.optimizer.zero_grad()
            self.clean.clear()
        else:
            self.clean = {name for name, _ in self.weights()}
        self.close_release()
        self.protect()

    def load(self) -> None:
        self.model.load_state_dict(self.server)
        self.tainted.clear()

    def send(self) -> None:
        self.model.state_dict()
        if self.tainted:
            raise Broken(f"{sorted(self.tainted)} in state_dict()")
        self.guard.verify()
        self.check_sent()

    def check_sent(self) -> None:
        bare = {name for name, p in self.weights() if p.grad is not None and bool(p.grad.any())} & self.clean
        if self.tainted or (bare and not self._before_the_guard(bare)):
            raise Broken(f"{sorted(self.tainted)} {sorted(bare)} are sent")

    def _before_the_guard(self, bare: set[str]) -> bool:
        """Whether gradients without noise are those that lay there when the guard came, which sends nothing of them."""
        return bare <= self.guard._attachment.stale.keys()

    def run(self, steps: int) -> str:
        """Go on at random; return how it ended."""
        usual = [self.numbered_pass, self.zero, self.step] if self.numbered else [self.own_rows, self.zero, self.step]
        seldom: list[Callable[[], None]] = [
            self.again, self.again_changed, self.skip, self.twice_in_a_batch, self.own_rows, self.no_grad_pass,
        ] if self.numbered else [self.own_rows, self.no_grad_pass]  # fmt: skip
        odd: list[Callable[[], None]] = [
            self.eval_pass, self.zero_data, self.zero_one, self.shrink, self.limit, self.replace_one, self.write_weight,
            self.write_state, self.reset_state, self.new_optimizer, self.spoil_moments, self.clear_moments,
            self.unguarded_step, self.load,
        ]  # fmt: skip
        share = self.pick.choice([0.02, 0.1, 0.3])
        try:
            for _ in range(steps):
                luck = self.pick.random()
                act = self.pick.choice(odd if luck < share else seldom if luck < share + 0.2 else usual)
                act = self.send if self.pick.random() < 0.1 else act
                self.done.append(act.__name__)
                act()
            self.done.append("send")
            self.send()
        except GradveilError:
            return "refused"
        finally:
            self.guard.remove()
        return "sent"
