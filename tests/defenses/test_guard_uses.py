"""The account of a defence of records counts what each record was used for, and never less than the truth."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from gradveil.errors import BudgetError, DefenseError
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.counted import Board, board, counted
from gradveil.protection.protect import Guard, protect

SPEC = "veil:z=1,clip=1"  # a use costs 1
N = 24
Data = TensorDataset
Loop = Callable[["Bench"], None]


class Bench:
    """A guarded model in training, which keeps a count of its own: m slots of a step are m² uses."""

    def __init__(self, **settings: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inputs, self.labels = torch.rand(N, 8), torch.randint(0, 3, (N,))
            self.model = nn.Sequential(nn.Linear(8, 3))
        self.data = TensorDataset(self.inputs, self.labels, torch.arange(N))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard: Guard = protect(self.model, SPEC, **settings)
        self.truth: Counter[int] = Counter()
        self.held: Counter[int] = Counter()  # of the step under way

    def loader(self, **settings: Any) -> DataLoader[Any]:
        return DataLoader(self.data, **({"batch_size": 4, "shuffle": True} | settings))

    def backward(self, x: Tensor, y: Tensor, i: Tensor) -> None:
        F.cross_entropy(self.model(x), y).backward()
        self.held.update(i.tolist())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for i, slots in self.held.items():
            self.truth[i] += slots**2
        self.held.clear()

    def train(self, x: Tensor, y: Tensor, i: Tensor) -> None:
        self.backward(x, y, i)
        self.step()

    @property
    def worst(self) -> int:
        return max(self.truth.values())


@pytest.fixture(autouse=True)
def _own_board() -> None:
    """Each test begins with nothing drawn."""
    board.__init__()  # type: ignore[misc]


def run(loop: Loop, **settings: Any) -> tuple[float, int]:
    """Return what the account says, and the truth."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        bench = Bench(**({"slots": 5} | settings))
        loop(bench)
        bench.guard.close()
        return bench.guard.account.spent, bench.worst


def epochs(b: Bench) -> None:
    for _ in range(3):
        for batch in counted(b.loader()):
            b.train(*batch)


def in_workers(b: Bench) -> None:
    for _ in range(2):
        for batch in counted(b.loader(num_workers=2, persistent_workers=True)):
            b.train(*batch)


def augmented(b: Bench) -> None:
    for _ in range(3):
        for x, y, i in counted(b.loader()):
            b.train(x + torch.randn_like(x), y, i)


def of_another_kind(b: Bench) -> None:
    b.model.double()
    for x, y, i in counted(b.loader()):
        b.train(x.double(), y, i)


def broken_off(b: Bench) -> None:
    for _ in range(5):
        for n, batch in enumerate(counted(b.loader(shuffle=False))):
            if n == 1:
                break
            b.train(*batch)


def accumulated(b: Bench) -> None:
    for n, (x, y, i) in enumerate(counted(b.loader(batch_size=2))):
        b.backward(x, y, i)
        if n % 2:
            b.step()


def in_two_halves(b: Bench) -> None:
    for x, y, i in counted(b.loader(batch_size=4)):
        b.backward(x[:2], y[:2], i[:2])
        b.backward(x[2:], y[2:], i[2:])
        b.step()


def kept(b: Bench) -> None:
    batches = list(counted(b.loader()))
    for _ in range(2):
        for batch in batches:
            b.train(*batch)


def ahead(b: Bench) -> None:
    batches = iter(counted(b.loader()))
    now = next(batches)
    for following in batches:
        b.train(*now)
        now = following
    b.train(*now)


def with_replacement(b: Bench) -> None:
    sampler = WeightedRandomSampler(torch.ones(N), 10 * N, replacement=True)
    for batch in counted(b.loader(sampler=sampler, shuffle=False)):
        b.train(*batch)


def numbers(b: Bench) -> None:
    for _ in range(2):
        for i in counted(torch.randperm(N).split(4)):
            b.train(b.inputs[i], b.labels[i], i)


def parts(b: Bench) -> None:
    for chosen in ([0, 1, 2, 3], [7, 6, 5, 0], [0, 9, 10, 11]):
        for batch in counted(DataLoader(Subset(Subset(b.data, list(range(N))[::-1]), chosen), batch_size=4)):
            b.train(*batch)


def views(b: Bench) -> None:
    """Two rows of each record in one step."""
    for i in counted([[0, 0, 1, 1], [2, 2, 3, 3]]):
        chosen = torch.tensor(i)
        b.train(b.inputs[chosen] + torch.rand(4, 8), b.labels[chosen], chosen)


def across_epochs(b: Bench) -> None:
    """A step that holds the end of one epoch and the beginning of the next."""
    for _ in range(3):
        for x, y, i in counted(b.loader(batch_size=2, shuffle=False, sampler=range(2))):
            b.backward(x, y, i)
            if sum(b.held.values()) == 4:
                b.step()
    if b.held:
        b.step()


EXACT = [
    epochs, in_workers, augmented, of_another_kind, broken_off, accumulated, in_two_halves, kept, ahead,
    with_replacement, numbers, parts, views, across_epochs,
]  # fmt: skip


@pytest.mark.parametrize("loop", EXACT)
def test_the_account_is_what_the_worst_record_was_used(loop: Loop) -> None:
    spent, truth = run(loop)
    assert spent == truth


def again_and_again(b: Bench) -> None:
    for x, y, i in counted(b.loader()):
        for _ in range(3):
            b.train(x + torch.randn_like(x), y, i)


def skipped(b: Bench) -> None:
    for _ in range(3):
        for x, y, i in counted(b.loader(batch_size=5)):
            if len(x) == 5:
                b.train(x + 1, y, i)


def replayed(b: Bench) -> None:
    first = None
    for batch in counted(b.loader()):
        first = first or batch
        b.train(*first)


def ahead_and_augmented(b: Bench) -> None:
    batches = iter(counted(b.loader()))
    now = next(batches)
    for following in batches:
        b.train(now[0] + 1, *now[1:])
        now = following
    b.train(now[0] + 1, *now[1:])


def past_the_loader(b: Bench) -> None:
    for batch in counted(b.loader()):
        b.train(*batch)
    for _ in range(4):
        b.train(b.inputs[:4] * 2, b.labels[:4], torch.arange(4))


def in_another_thread(b: Bench) -> None:
    drawn: list[Any] = []
    thread = threading.Thread(target=lambda: drawn.extend(counted(b.loader())))
    thread.start()
    thread.join()
    for batch in drawn:
        b.train(*batch)


def alike(b: Bench) -> None:
    b.inputs[:] = 0.5  # rows that cannot be told apart
    for _ in range(2):
        for batch in counted(b.loader()):
            b.train(*batch)


def by_a_copy(b: Bench) -> None:
    own = b.model, b.optimizer
    clone = copy.deepcopy(b.model)
    other = clone, torch.optim.SGD(clone.parameters(), lr=0.1)
    for x, y, i in counted(b.loader()):
        for b.model, b.optimizer in (own, other):  # type: ignore[assignment]
            b.train(x + 1, y, i)


def parts_that_nobody_can_tell(b: Bench) -> None:
    """Four rows of one record in the second part of a step, when two batches were drawn for it."""
    batches = iter(counted([[5], [6], [7], [0, 0, 0, 0]]))
    for count, rows in ((2, [5]), (2, [0, 0, 0, 0])):
        for _ in range(count):
            next(batches)
        i = torch.tensor(rows)
        b.backward(b.inputs[i] + 1, b.labels[i], i)
    b.step()


def halves_of_what_was_changed(b: Bench) -> None:
    for x, y, i in counted(b.loader()):
        b.backward(x[:2] + 1, y[:2], i[:2])
        b.backward(x[2:] + 1, y[2:], i[2:])
        b.step()


def plain_epochs(b: Bench) -> None:
    for _ in range(2):
        for batch in b.loader():
            b.train(*batch)


def plain_with_replacement(b: Bench) -> None:
    sampler = WeightedRandomSampler(torch.ones(N), 10 * N, replacement=True)
    for batch in b.loader(sampler=sampler, shuffle=False):
        b.train(*batch)


def plain_broken_off(b: Bench) -> None:
    for _ in range(5):
        b.train(*next(iter(b.loader(shuffle=False))))


NOT_LESS = [
    again_and_again, skipped, replayed, ahead_and_augmented, past_the_loader, in_another_thread, alike, by_a_copy,
    halves_of_what_was_changed, parts_that_nobody_can_tell, plain_epochs, plain_with_replacement, plain_broken_off,
]  # fmt: skip


@pytest.mark.parametrize("loop", NOT_LESS)
def test_where_it_is_not_known_who_was_used_everybody_pays(loop: Loop) -> None:
    spent, truth = run(loop)
    assert spent >= truth


@pytest.mark.parametrize("loop", [plain_epochs, plain_broken_off])
def test_the_number_of_records_makes_no_epoch_cheaper(loop: Loop) -> None:
    """Epochs that are broken off were counted as one: account 1, worst record 5."""
    assert run(loop, records=N)[0] == run(loop)[0] == (12 if loop is plain_epochs else 5)


def test_drawing_with_replacement_is_never_undercounted_by_the_number_of_records() -> None:
    spent, truth = run(plain_with_replacement, records=N)
    assert spent >= truth > 10


def test_a_promise_over_a_run_is_kept_where_the_loop_uses_records_more_often_than_was_planned() -> None:
    run = PlannedRun(N, 4, epochs=2, rounds=1, participations=1, cohort=1)
    bench = Bench(run=run)
    bench.guard.remove()
    bench.guard = guard = protect(bench.model, "veil:promise=identification,clip=1", run=run)
    for _ in range(2):
        for batch in counted(bench.loader()):
            bench.train(*batch)
    assert guard.account.spent == pytest.approx(1.0)
    before = copy.deepcopy(bench.model.state_dict())
    x, y, _ = next(iter(counted(bench.loader())))
    loss = F.cross_entropy(bench.model(x), y)
    with pytest.raises(BudgetError, match="nothing is sent"):
        loss.backward()
    assert all(p.grad is None for p in bench.model.parameters())
    assert all(torch.equal(w, before[n]) for n, w in bench.model.state_dict().items())
    guard.close()


def test_without_numbers_the_refusal_says_how_to_count() -> None:
    bench = Bench(run=PlannedRun(N, 4, epochs=1, rounds=1, participations=1, cohort=1))
    with pytest.raises(BudgetError, match="counted"):
        plain_epochs(bench)
    bench.guard.remove()


def test_rows_that_are_more_than_the_records_of_their_batch_are_refused() -> None:
    bench = Bench(slots=8)
    x = next(iter(counted(bench.loader())))[0]
    with pytest.raises(DefenseError, match="8 rows"):
        bench.model(torch.cat([x, x]) + torch.rand(8, 8))
    bench.guard.remove()


def other_data_before(b: Bench) -> None:
    """A pass of rows that nobody knows, and then of the same records by number."""
    b.train(b.inputs[4:8] + 1, b.labels[4:8], torch.arange(4, 8))
    for x, y, i in counted(b.loader(sampler=range(4, 8), shuffle=False)):
        b.train(x, y, i)


def test_a_batch_that_was_drawn_before_the_guard_is_not_taken_for_that_of_its_first_pass() -> None:
    next(iter(counted([[0, 1, 2, 3]])))
    assert run(other_data_before) == (2, 2)


def test_a_record_in_two_slots_of_a_step_pays_four_times() -> None:
    bench = Bench(slots=4)
    bench.train(*next(iter(counted(DataLoader(bench.data, batch_sampler=[[0, 0, 1, 2]])))))
    assert bench.guard.account.spent == bench.worst == 4
    bench.guard.close()


class Pairs(nn.Module):
    """Two records in, as a siamese network takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.fc(x - other)
        return out


@pytest.mark.parametrize(("other", "uses"), [(lambda x: x.roll(1, 0), 4), (lambda x: x.flip(1), 1), (lambda x: x, 1)])
def test_a_record_in_both_places_of_a_pair_is_in_two_slots(other: Callable[[Tensor], Tensor], uses: int) -> None:
    bench, model = Bench(), Pairs()
    with protect(model, SPEC) as guard:
        for x, y, _ in counted(bench.loader(sampler=range(4), shuffle=False)):
            F.cross_entropy(model(x, other(x)), y).backward()
        assert guard.account.spent == uses
    bench.guard.remove()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_counted_loader_gives_the_batches_of_the_loader(workers: int) -> None:
    def batches(wrap: Callable[[Any], Any]) -> list[list[int]]:
        data = TensorDataset(torch.arange(10))
        loader = DataLoader(
            data, batch_size=3, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5)
        )
        found = wrap(loader)
        return [x.tolist() for _ in range(2) for (x,) in found] + [[len(found)]]

    assert batches(counted) == batches(lambda loader: loader)
    drawn = [list(d.records) for d in board.drawn]
    assert drawn == batches(lambda loader: loader)[:-1]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.rand(8, 8))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (lambda data: DataLoader(Stream(), batch_size=4), "no numbers"),
        (lambda data: DataLoader(data, batch_size=None), "no numbers"),
        (lambda data: Own(data, batch_size=4), "order of its own"),
        (lambda data: DataLoader(data, batch_size=4, num_workers=1, in_order=False), "order of its own"),
        (lambda data: DataLoader(ConcatDataset([Subset(data, [0]), Subset(data, [0])]), batch_size=4), "joined again"),
    ],
)
def test_loaders_whose_records_cannot_be_told_are_refused(loader: Any, says: str) -> None:
    with pytest.raises(DefenseError, match=says):
        next(iter(counted(loader(TensorDataset(torch.rand(8, 8))))))


def test_rows_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.protection.counted._KEPT", 20)
    own = Board()
    for n in range(50):
        own.draw([n], [torch.rand(1, 8)])
    assert len(own.rows) <= 21
    assert len(own.drawn) <= 64


def test_threads_that_train_copies_pay_for_each_of_their_steps() -> None:
    bench = Bench(slots=4)
    clones = [copy.deepcopy(bench.model) for _ in range(4)]

    def train(model: nn.Module) -> None:
        for _ in range(25):
            model.zero_grad()
            F.cross_entropy(model(bench.inputs[:4]), bench.labels[:4]).backward()

    threads = [threading.Thread(target=train, args=(model,)) for model in clones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bench.guard.account.spent == 100
