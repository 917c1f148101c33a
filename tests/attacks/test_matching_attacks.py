"""DLG, iDLG and GS end to end: controls, defended updates, other kinds of data, and manners."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.base import build
from gradveil.attacks.search import restarts
from gradveil.attacks.search.matching import Unknowns
from gradveil.errors import AttackError
from gradveil.tree import Params
from gradveil.types import Observation, Reconstruction, Update

QUICK = {
    "dlg": "dlg:steps=30,restarts=2",
    "idlg": "idlg:steps=30,restarts=2",
    "gs": "gs:steps=300,tv=1e-6",
}


class Text(nn.Module):
    """A small transformer that takes token embeddings (N, T, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(4, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 24, dropout=0.1, batch_first=True, activation="gelu")
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x + self.place).flatten(1))


def seeded(make: type[nn.Module] | object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()  # type: ignore[operator, no-any-return]


def observe(model: nn.Module, x: Tensor, y: Tensor, classes: int = 5, **settings: object) -> Observation:
    """What a client without a defence sends for one step on (x, y), dropout off."""
    mode = model.training
    loss = cross_entropy(model.eval()(x), y)
    found = torch.autograd.grad(loss, list(model.parameters()))
    model.train(mode)
    gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
    update = Update(gradient, num_examples=len(x))
    return Observation(model, update, tuple(x.shape[1:]), classes, **settings)  # type: ignore[arg-type]


def images(count: int, seed: int = 0, size: int = 1) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.rand(size, 1, 8, 8, generator=rng), torch.randint(5, (size,), generator=rng)) for _ in range(count)]


def attack(spec: str, seen: Sequence[Observation]) -> list[Reconstruction]:
    return build(spec).reconstruct_many(seen, [torch.Generator().manual_seed(i) for i in range(len(seen))])


def error(found: Tensor, truth: Tensor) -> float:
    """Mean over the true images of the squared distance to the nearest found one."""
    apart = (found[:, None] - truth[None]).flatten(2).square().mean(2)
    return float(apart.min(0).values.mean())


@pytest.mark.parametrize("name", QUICK)
def test_the_control_an_undefended_update_gives_the_image_and_label_away(name: str, network: nn.Module) -> None:
    data = images(3)
    found = attack(QUICK[name], [observe(network, x, y) for x, y in data])
    for (x, y), f in zip(data, found, strict=True):
        assert f.converged
        assert error(f.inputs, x) < 1e-3
        assert f.labels.tolist() == y.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["dlg", "gs"])
def test_a_batch_of_images_is_one_problem(name: str, network: nn.Module) -> None:
    x, y = images(1, seed=7, size=2)[0]
    spec = {"dlg": "dlg:steps=60,restarts=2", "gs": "gs:steps=500,tv=1e-6"}[name]
    (found,) = attack(spec, [observe(network, x, y)])
    assert error(found.inputs, x) < 5e-3
    assert sorted(found.labels.tolist()) == sorted(y.tolist())  # type: ignore[union-attr]


def zeroed(seen: Observation, share: float) -> Observation:
    """The paper's change as the server sees it: columns of the last layer's gradient set to zero."""
    gradient = {n: g.clone() for n, g in seen.update.gradient.items()}
    gone = torch.randperm(128, generator=torch.Generator().manual_seed(5))[: int(share * 128)]
    gradient["5.weight"][:, gone] = 0
    return replace(seen, update=replace(seen.update, gradient=gradient))


def test_zeroed_columns_stop_a_naive_server_and_not_one_that_looks(network: nn.Module) -> None:
    x, y = images(1)[0]
    seen = zeroed(observe(network, x, y), 0.4)
    oblivious, masked, dropped = attack(QUICK["dlg"], [seen, seen.masked("5.weight"), seen.without("5.weight")])
    assert error(oblivious.inputs, x) > 0.03
    assert not oblivious.converged
    assert (float(oblivious.inputs.min()), float(oblivious.inputs.max())) == (0.0, 1.0)  # it ran away and was clamped
    assert error(masked.inputs, x) < 1e-4
    assert error(dropped.inputs, x) < 1e-4
    assert masked.converged
    assert dropped.converged


def test_a_server_can_simulate_what_the_defence_did(network: nn.Module) -> None:
    x, y = images(1)[0]
    seen = observe(network, x, y)

    def bent(gradient: Params) -> Params:
        return {n: torch.tanh(50 * g) for n, g in gradient.items()}

    seen = replace(seen, update=replace(seen.update, gradient=bent(seen.update.gradient)))
    oblivious, knowing = attack(QUICK["dlg"], [seen, replace(seen, simulate=bent)])
    assert error(knowing.inputs, x) < 1e-4
    assert error(oblivious.inputs, x) > 1e-2


def test_known_noise_is_not_matched_away_and_counts_as_converged(network: nn.Module) -> None:
    x, y = images(1)[0]
    seen = observe(network, x, y)
    rng = torch.Generator().manual_seed(0)
    noisy = {n: g + 1e-3 * torch.randn(g.shape, generator=rng) for n, g in seen.update.gradient.items()}
    seen = replace(seen, update=replace(seen.update, gradient=noisy))
    told = replace(seen, noise=dict.fromkeys(noisy, 1e-3))
    untold, known = attack("dlg:steps=30,restarts=1", [seen, told])
    assert not untold.converged
    assert known.converged
    assert error(known.inputs, x) < 0.02


def test_tabular_vectors_are_found(rng: Generator) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4)))
    x, y = torch.rand(1, 12, generator=rng), torch.tensor([2])
    for name in ("dlg", "gs"):
        (found,) = attack(QUICK[name], [observe(model, x, y, 4)])
        assert error(found.inputs, x) < 1e-4, name


def test_token_embeddings_of_a_transformer_are_found(rng: Generator) -> None:
    model = seeded(Text).train()
    x, y = torch.randn(1, 4, 8, generator=rng), torch.tensor([1])
    (found,) = attack("dlg:steps=30,restarts=3,tol=1e-10,start=normal", [observe(model, x, y, 3, bounds=(-5.0, 5.0))])
    assert error(found.inputs, x) < 1e-2
    assert found.labels.tolist() == [1]  # type: ignore[union-attr]
    assert model.training


@pytest.mark.parametrize("name", QUICK)
def test_a_problem_gives_the_same_answer_alone_and_in_company(name: str, network: nn.Module) -> None:
    network = network.double()
    data = [(x.double(), y) for x, y in images(3, seed=2)]
    seen = [observe(network, x, y) for x, y in data]
    seen[2] = seen[2].without("5.weight").only("*")
    spec = QUICK[name].replace("steps=300", "steps=60")
    together = attack(spec, seen)
    alone = build(spec).reconstruct(seen[1], torch.Generator().manual_seed(1))
    torch.testing.assert_close(alone.inputs, together[1].inputs, rtol=0, atol=1e-8)
    assert alone.details == pytest.approx(together[1].details, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", QUICK)
def test_manners(name: str, network: nn.Module) -> None:
    x, y = images(1, seed=3)[0]
    seen = observe(network, x, y)
    before = {n: g.clone() for n, g in seen.update.gradient.items()}
    weights = {n: w.clone() for n, w in network.state_dict().items()}
    state = torch.random.get_rng_state()
    spec = QUICK[name].replace("300", "20").replace("30", "2")
    first, second = attack(spec, [seen])[0], attack(spec, [seen])[0]
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.inputs.shape == x.shape
    assert float(first.inputs.min()) >= 0
    assert float(first.inputs.max()) <= 1
    assert all(torch.equal(g, before[n]) for n, g in seen.update.gradient.items())
    assert all(torch.equal(w, weights[n]) for n, w in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert {"iterations", "evaluations", "starts", "relative_residual", "stalled"} <= set(first.details)


def test_bounds_other_than_the_unit_range_are_kept(network: nn.Module) -> None:
    x, y = images(1)[0]
    seen = observe(network, 6 * x - 3, y, bounds=(-3.0, 3.0))
    for name in ("dlg", "gs"):
        (found,) = attack(QUICK[name], [seen])
        assert error(found.inputs, 6 * x - 3) < 1e-2
        assert float(found.inputs.abs().max()) <= 3


def test_the_start_with_the_lowest_objective_is_chosen(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    plain = restarts.minimise

    def spy(*args: object, **kwargs: object) -> object:
        solution = plain(*args, **kwargs)  # type: ignore[arg-type]
        kept.append(solution.values)
        return solution

    monkeypatch.setattr(restarts, "minimise", spy)
    seen = [observe(network, x, y) for x, y in images(2, seed=4)]
    found = attack("dlg:steps=1,restarts=3", seen)
    for i, f in enumerate(found):
        mine = kept[0][3 * i : 3 * i + 3]
        assert f.objective == pytest.approx(float(mine.min()))
        assert not torch.equal(mine.min(), mine.max())


class Brittle(nn.Module):
    """Has no finite output for most inputs: only where the first pixel is small."""

    def __init__(self, edge: float) -> None:
        super().__init__()
        self.edge, self.last = edge, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x) + (self.edge - x[:, :1]).clamp_max(0.0).sqrt())


def test_starts_without_a_finite_value_are_drawn_anew_until_one_has(rng: Generator) -> None:
    model = seeded(lambda: Brittle(0.3))
    x, y = torch.full((1, 6), 0.2), torch.tensor([1])
    (found,) = attack("dlg:steps=40,restarts=3", [observe(model, x, y, 3)])
    assert found.details["starts"] > 3
    assert found.objective < torch.inf


def test_where_no_start_is_finite_the_answer_is_grey_and_says_so() -> None:
    model = seeded(lambda: Brittle(-1.0))
    seen = observe(seeded(lambda: Brittle(9.0)), torch.full((1, 6), 0.2), torch.tensor([1]), 3)
    (found,) = attack("dlg:steps=10,restarts=2", [replace(seen, model=model)])
    assert found.inputs.unique().tolist() == [0.5]
    assert found.objective == torch.inf
    assert not found.converged


def test_idlg_refuses_a_batch(network: nn.Module) -> None:
    x, y = images(1, size=2)[0]
    with pytest.raises(AttackError, match="one example"):
        attack("idlg", [observe(network, x, y)])


@pytest.mark.parametrize("labels", [[1, 2], [7], [-1]])
def test_labels_that_do_not_fit_are_refused(network: nn.Module, labels: list[int]) -> None:
    x, y = images(1)[0]
    with pytest.raises(AttackError, match="do not fit"):
        attack("dlg", [observe(network, x, y, labels=torch.tensor(labels))])


def test_problems_of_several_models_and_shapes_come_back_in_order(network: nn.Module, rng: Generator) -> None:
    tabular = seeded(lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4)))
    vector = torch.rand(1, 12, generator=rng)
    (x, y), (x2, y2) = images(2)
    seen = [observe(network, x, y), observe(tabular, vector, torch.tensor([0]), 4), observe(network, x2, y2)]
    found = attack(QUICK["dlg"], seen)
    for f, truth in zip(found, (x, vector, x2), strict=True):
        assert error(f.inputs, truth) < 1e-4


def test_a_network_with_batch_norm_is_read(rng: Generator) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 5),
        )  # fmt: skip

    model = seeded(make)
    x, y = torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([3])
    model.train()(torch.rand(64, 1, 8, 8, generator=rng))
    seen = observe(model.eval(), x, y)
    (found,) = attack("gs:steps=300", [seen])
    assert error(found.inputs, x) < 0.02
    assert found.labels.tolist() == [3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("start", "mean", "std"), [("uniform", 1.0, 4 / 12**0.5), ("central", 1.0, 1.0), ("normal", 0.0, 1.0)]
)
def test_starts_are_drawn_as_they_are_called(start: str, mean: float, std: float, rng: Generator) -> None:
    how = restarts.Search(lambda *_: None, lambda _: None, 1, start=start)  # type: ignore[arg-type, return-value]
    z = how._start(Unknowns((2, 3, 40, 40), 5, (-1.0, 3.0), True), rng)
    pixels, logits = z[:9600], z[9600:]
    assert float(pixels.mean()) == pytest.approx(mean, abs=0.05)
    assert float(pixels.std()) == pytest.approx(std, rel=0.05)
    assert logits.shape == (10,)
    if start == "uniform":
        assert -1 <= float(pixels.min()) < -0.9 < 2.9 < float(pixels.max()) <= 3


def test_gs_starts_where_it_is_told_to(network: nn.Module) -> None:
    ((x, y),) = images(1, seed=2)
    found = [
        attack(f"gs:steps=1,lr=1e-9,start={start}", [observe(network, x, y)])[0] for start in ("uniform", "central")
    ]
    low, high = found[0].inputs.quantile(torch.tensor([0.1, 0.9]))
    inner_low, inner_high = found[1].inputs.quantile(torch.tensor([0.1, 0.9]))
    assert inner_high - inner_low < high - low
