"""Defences that hide nothing, each with a false declaration: probing finds out, and sound ones are not accused."""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain, simulate, undeclared, whiten
from gradveil.defenses.veil import Veil
from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.federated.settings import Local
from gradveil.protection.defense import DEFENSES, Defense, build, in_round
from gradveil.protection.records import Records
from gradveil.seeds import Seeds
from gradveil.threats.probes import Probed, probe
from gradveil.threats.probing.function import DefenseFunction, Secret
from gradveil.threats.probing.residuals import left_of
from gradveil.threats.trial import observe
from gradveil.tree import Params, flatten
from gradveil.types import Batch, GaussianPrior, Observation, Update

STD = 5.0
LOCAL = Local(batch_size=None)
Change = Callable[[Tensor, Generator], Tensor]


def images(count: int, seed: int) -> Batch:
    """Return smooth made images of two shades, with labels."""
    rng = Generator().manual_seed(seed)
    coarse = torch.rand(count, 1, 4, 4, generator=rng)
    inputs = torch.nn.functional.interpolate(coarse, (8, 8), mode="bilinear")
    return Batch(inputs, torch.randint(5, (count,), generator=rng))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(54, 24), nn.Sigmoid(), nn.Linear(24, 5)
    network = nn.Sequential(*layers)
    with torch.no_grad():
        for p in network.parameters():
            p.uniform_(-0.5, 0.5)
    return network


def probed(defense: Defense, model: nn.Module, seed: int = 0, local: Local = LOCAL, examples: int = 1) -> Probed:
    return probe(defense, model, images(96, 1), examples, local, 0.3, Seeds(seed), 5)


def noise(g: Tensor, rng: Generator) -> Tensor:
    return STD * torch.randn(g.shape, generator=rng)


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def drawn(rng: Generator, most: int) -> int:
    return int(torch.randint(most, (), generator=rng))


@dataclass(frozen=True)
class Each(Defense):
    """Change each tensor of a gradient, and declare something."""

    change: Change
    declares: Countermeasure = field(default_factory=undeclared)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {name: self.change(g, rng) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (self.declares,)


@dataclass(frozen=True)
class OnUpdate(Each):
    """The same, on the update, with a seed that the update names."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient

    def on_update(self, update: Update, rng: Generator) -> Update:
        own = seeded(round(update.lr * 1e6) + update.num_examples)
        return replace(update, gradient={name: self.change(g, own) for name, g in update.gradient.items()})


@dataclass(frozen=True)
class Counting(Each):
    """The same, with a seed that counts the runs."""

    runs: list[int] = field(default_factory=lambda: [0], init=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        self.runs[0] += 1
        return super().on_gradient(gradient, seeded(self.runs[0]))


@dataclass(frozen=True)
class Once(Each):
    """Draw noise once and keep it, or take it off again in the next run."""

    sign: float = 1.0
    kept: Params = field(default_factory=dict, init=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        sign = self.sign if self.kept else 1.0
        for name, g in gradient.items():
            self.kept.setdefault(name, noise(g, rng))
        return {name: g + sign * self.kept[name] for name, g in gradient.items()}


def rotated(g: Tensor, rng: Generator) -> Tensor:
    normal = torch.randn(g.numel(), generator=seeded(3)).to(g)
    return (g.flatten() - 2 * normal * (normal @ g.flatten()) / (normal @ normal)).view_as(g)


def shuffled(g: Tensor, rng: Generator) -> Tensor:
    return g.flatten()[torch.randperm(g.numel(), generator=seeded(3))].view_as(g)


def in_numpy(g: Tensor, rng: Generator) -> Tensor:
    """Put every other entry in a fixed order, by code that torch cannot differentiate."""
    order = torch.randperm(g.numel(), generator=seeded(3)).numpy()
    return torch.from_numpy(g.detach().numpy().ravel()[order]).view_as(g) * (torch.arange(g.numel()) % 2).view_as(g)


def global_numbers(g: Tensor, rng: Generator) -> Tensor:
    torch.manual_seed(7)
    return g + STD * torch.randn(g.shape)


def tiled(g: Tensor, rng: Generator) -> Tensor:
    return g + noise(g.flatten()[:10], rng).repeat(-(-g.numel() // 10))[: g.numel()].view_as(g)


BROKEN: dict[str, Defense] = {
    "a seed in the code": Each(lambda g, rng: g + noise(g, seeded(1))),
    "torch's own numbers, seeded": Each(global_numbers),
    "the seed is the learning rate": OnUpdate(lambda g, rng: g + noise(g, rng)),
    "a fixed order": Each(shuffled),
    "a fixed order of half of the entries, in numpy": Each(in_numpy),
    "a fixed rotation": Each(rotated),
    "a scale": Each(lambda g, rng: 1e-3 * g),
    "signs by a key of three bits": Each(
        lambda g, rng: g * torch.randn(g.shape, generator=seeded(drawn(rng, 8))).sign()
    ),
    "noise by a key of five bits": Each(lambda g, rng: g + noise(g, seeded(drawn(rng, 32)))),
    "one number for all entries": Each(lambda g, rng: g + STD * torch.randn((), generator=rng)),
    "one number for each row": Each(
        lambda g, rng: g + noise(g.reshape(len(g), -1)[:, 0], rng).view(-1, *[1] * (g.ndim - 1))
    ),
    "ten numbers over and over": Each(tiled),
    "a random factor": Each(lambda g, rng: g * (0.01 + torch.rand((), generator=rng))),
    "a random sign": Each(lambda g, rng: g if torch.rand((), generator=rng) < 0.5 else -g),
    "entries left out at random": Each(lambda g, rng: g * (torch.rand(g.shape, generator=rng) > 0.3)),
    "the largest entries": Each(lambda g, rng: g * (g.abs() >= g.abs().quantile(0.6))),
    "whole multiples": Each(lambda g, rng: g + 16 * noise(g, rng).round()),
    "clipping": Each(lambda g, rng: g * (0.01 / g.norm()).clamp(max=1.0)),
    "noise on half of the entries": Each(lambda g, rng: g + noise(g, rng) * (torch.arange(g.numel()) % 2).view_as(g)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_server_is_found_that_matches_what_the_truth_gives(name: str, model: nn.Module) -> None:
    defense = BROKEN[name]
    found = probed(defense, model)
    (undo,) = (server for server in found.servers if server.name == "undo")
    assert found.assessed
    assert undo.tier == "adaptive"
    batch = images(1, 5)
    true = step_gradient(model, batch, build("none"), Generator())
    for i in range(3):  # other clients than those that were probed
        seen = observe(model, batch, defense, Seeds(9)("client", i), 5, lr=0.3)
        view = undo.view(seen)
        made = view.sent(true)
        away = {n: (view.update.gradient[n] - made[n]) * view.weights.get(n, torch.ones(())) for n in view.visible}
        assert flatten(away).norm() < 5e-3 * flatten({n: made[n] for n in away}).norm()
        assert sum(float(view.weights[n].sum()) if n in view.weights else made[n].numel() for n in away) > 500


def test_noise_whose_seed_is_known_is_taken_off_and_the_image_is_rebuilt(model: nn.Module) -> None:
    defense, truth = BROKEN["a seed in the code"], images(1, 5)
    prior = GaussianPrior.fit(images(96, 1).inputs)
    (undo,) = (server for server in probed(defense, model).servers if server.name == "undo")
    seen = observe(model, truth, defense, Generator(), 5, prior, 0.3)
    rebuilt = [build_attack("newton").reconstruct(view, Generator()).inputs for view in (seen, undo.view(seen))]
    oblivious, knowing = ((x - truth.inputs).square().mean() for x in rebuilt)
    assert knowing < 1e-4 < 1e-2 < oblivious


def test_what_draws_nothing_secret_is_always_simulated(model: nn.Module) -> None:
    quiet = [name for name in BROKEN if name.startswith(("a ", "the largest", "clipping")) and "random" not in name]
    for name in quiet:
        assert "simulate" in [server.name for server in probed(BROKEN[name], model).servers], name
    declared = replace(BROKEN["a scale"], declares=simulate(lambda tree: {n: 1e-3 * g for n, g in tree.items()}, ""))
    assert probed(declared, model).servers == ()  # it is declared, and so it is


def stated(std: float = STD) -> Countermeasure:
    return whiten(lambda seen: dict.fromkeys(seen.update.gradient, std))


class HalfVeil(Veil):
    """Adds half the noise that it declares."""

    def on_records(self, records: Records, slots: int, rng: Generator) -> Params:
        return Veil(z=0.5, clip=self.clip).on_records(records, slots, rng)


LIES: dict[str, tuple[Defense, str]] = {
    "nothing hidden": (Each(shuffled, plain()), "differs from the gradient"),
    "no noise": (Each(lambda g, rng: g + noise(g, seeded(1)), stated()), "none is drawn"),
    "too much": (Each(lambda g, rng: g + noise(g, rng), stated(2 * STD)), "5.06 is measured"),
    "too little": (Each(lambda g, rng: g + noise(g, rng), stated(STD / 2)), "5.06 is measured"),
    "a mean": (Each(lambda g, rng: g + noise(g, rng) + noise(g, seeded(1)), stated()), "the same in every draw"),
    "few numbers": (Each(tiled, stated()), "independent, and only about"),
    "few keys": (
        Each(lambda g, rng: g + noise(g, seeded(rng.initial_seed() % 32)), stated()),
        "different ones ever occur",
    ),
    "at times": (Each(lambda g, rng: g + noise(g, rng) * (drawn(rng, 3) > 0), stated(STD * 0.8)), "are sent without"),
    "each round alike": (Once(noise, stated()), "correlation 1."),
    "the next round takes it off": (Once(noise, stated(), -1.0), "correlation -"),
    "veiled with less": (HalfVeil(z=1.0, clip=0.2), "0.101 is measured"),
    "another simulation": (Each(shuffled, simulate(lambda tree: tree, "")), "does not give what is sent"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_false_declaration_is_an_error(name: str, model: nn.Module) -> None:
    defense, said = LIES[name]
    errors = probed(defense, model).errors
    assert said in " ".join(errors)


SOUND = (
    "none", "gaussian:scale=0.1", "gaussian:scale=3,on=update", "laplace:scale=1",
    "gaussian:scale=0.5,relative=true", "gaussian:scale=2,relative=true,per=tensor", 
    "representation:share=0.4", "random_mask:share=0.4", "pruning:share=0.8", 
    "decoy:floor=0.02", "representation:share=0.4+gaussian:scale=0.1", "gaussian:scale=0.1+pruning:share=0.8",
    "veil:z=0.01", "veil:z=1,clip=0.2", "veil:z=0.5,shape=public,quantile=0.9,rank=16",
    "outpost", "outpost:scale=0.1", "sign", "quantise:bits=4", "qsgd:levels=1,norm=max", "ats", "dp_sgd:noise=0.3",
)  # fmt: skip


@pytest.mark.parametrize("spec", SOUND)
def test_what_is_declared_as_it_is_is_not_accused_and_gets_no_more_servers(spec: str, model: nn.Module) -> None:
    several = Local(epochs=2, batch_size=2)
    defense = in_round(build(spec), model, images(64, 2))
    found = probed(defense, model, 1, several if "+" in spec else LOCAL, 3 if "+" in spec else 1)
    assert found.errors == ()
    assert found.assessed
    assert [server.name for server in found.servers] == []


def test_a_secret_that_is_neither_declared_nor_found_is_not_assessed(model: nn.Module) -> None:
    def hashed(g: Tensor, rng: Generator) -> Tensor:
        return g + noise(g, seeded(zlib.crc32(g.detach().numpy().tobytes())))

    assert not probed(Each(hashed), model).assessed


@pytest.mark.parametrize("change", [lambda x: 1 - x.flip(-1), lambda x: x / 3 + 0.5, lambda x: x.square()])
def test_a_known_change_of_the_input_is_undone(change: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    @dataclass(frozen=True)
    class Input(Defense):
        def on_batch(self, batch: Batch, rng: Generator) -> Batch:
            return replace(batch, inputs=change(batch.inputs))

        def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
            return (undeclared(),)

    (undo,) = probed(Input(), model).servers
    batch = images(1, 5)
    seen = observe(model, batch, Input(), Generator(), 5, lr=0.3)
    rebuilt = step_gradient(undo.view(seen).model, batch, build("none"), Generator())
    assert torch.allclose(flatten(rebuilt), flatten(seen.update.gradient), atol=1e-5)


@dataclass(frozen=True)
class OnBatch(Defense):
    change: Callable[[Batch, Generator], Batch]

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return self.change(batch, rng)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


def _twice(batch: Batch, rng: Generator) -> Batch:
    return Batch(torch.cat([batch.inputs] * 2), torch.cat([batch.labels] * 2))


def _any_label(batch: Batch, rng: Generator) -> Batch:
    return replace(batch, labels=torch.randint(5, batch.labels.shape, generator=rng))


@pytest.mark.parametrize(("change", "drawn"), [(None, True), (_twice, False), (_any_label, True)])
def test_examples_and_labels_that_are_drawn_make_every_round_another(
    change: Callable[[Batch, Generator], Batch] | None, drawn: bool, model: nn.Module
) -> None:
    concealed = build("concealed:steps=1").for_round(model, images(64, 2))
    assert probed(concealed if change is None else OnBatch(change), model, 3).drawn is drawn


def test_a_layer_that_draws_nothing_secret_is_dropped_or_replayed(model: nn.Module) -> None:
    @dataclass(frozen=True)
    class Layer(Defense):
        def layers(self, model: nn.Module) -> tuple[str, ...]:
            return ("3",)

        def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
            return r + torch.randn(r.shape[1:], generator=seeded(zlib.crc32(layer.encode())))

        def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
            return (plain(),)

    found = probed(Layer(), model)
    undo, replay = found.servers
    batch = images(1, 5)
    seen = observe(model, batch, Layer(), Generator(), 5, lr=0.3)
    assert set(seen.update.gradient) - set(undo.view(seen).update.gradient) == {"3.weight"}
    rebuilt = step_gradient(replay.view(seen).model, batch, build("none"), Generator())
    assert torch.allclose(flatten(rebuilt), flatten(seen.update.gradient), atol=1e-5)
    assert len(found.errors) == 1


def test_a_defence_that_declares_nothing_is_refused_when_it_is_registered(model: nn.Module) -> None:
    class Silent(Each):
        change: Change = staticmethod(shuffled)

        def __init__(self) -> None:
            pass

        def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
            return ()

    with pytest.raises(SpecError, match="returns nothing"):
        DEFENSES.register("silent")(Silent)
    assert "silent" not in DEFENSES.names()
    with pytest.raises(SpecError, match="returns nothing"):
        probed(Silent(), model)


def test_probing_leaves_no_trace(model: nn.Module) -> None:
    counting, before = Counting(lambda g, rng: g + noise(g, rng)), torch.random.get_rng_state()
    weights = [p.clone() for p in model.parameters()]
    probed(counting, model)
    probed(BROKEN["torch's own numbers, seeded"], model)
    assert counting.runs == [0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_run_leaves_its_secret_as_it_was() -> None:
    channel = DefenseFunction(Update({"weight": torch.ones(3, 2)}))
    secret = Secret(Counting(lambda g, rng: g + noise(g, rng)), seed=1)
    first, again = (channel.sent({"weight": torch.ones(3, 2)}, secret) for _ in range(2))
    assert torch.equal(first["weight"], again["weight"])
    later = channel.sent({"weight": torch.ones(3, 2)}, channel.after(secret))
    assert not torch.equal(first["weight"], later["weight"])  # as it would be, had the first run been counted


def test_the_found_server_is_of_use_after_other_rounds(model: nn.Module) -> None:
    """A view that tries what it can list goes on listing while clients go on."""
    defense = Counting(lambda g, rng: g + noise(g, rng))
    (undo,) = probed(defense, model).servers
    seen: list[Observation] = [observe(model, images(1, i), defense, Generator(), 5, lr=0.3) for i in range(20)]
    for i in (0, 19):
        true = step_gradient(model, images(1, i), build("none"), Generator())
        assert torch.allclose(flatten(undo.view(seen[i]).update.gradient), flatten(true), atol=1e-4)


def test_of_a_tensor_of_zeros_no_entry_is_left_as_it_is(rng: Generator) -> None:
    runs = [
        (torch.zeros(4, 6), torch.randn(4, 6, generator=rng)) for _ in range(3)
    ]  # low-rank factors at first: dA = 0
    assert left_of("a", runs, []).lost


def test_noise_on_a_tensor_whose_gradient_is_zero_is_not_accused(model: nn.Module) -> None:
    """As of low-rank factors, one of which is zero at first."""
    dead = copy.deepcopy(model)
    with torch.no_grad():
        dead.get_submodule("5").weight.zero_()  # so that nothing reaches the layers before
    assert not probed(build("gaussian:scale=0.1"), dead).errors


def test_a_network_with_dropout_is_probed_under_the_same_dropout(model: nn.Module) -> None:
    noisy = nn.Sequential(*model[:5], nn.Dropout(0.5), model[5])  # type: ignore[index]
    found = probed(build("representation:share=0.4"), noisy)
    assert found.errors == ()
    assert found.assessed
