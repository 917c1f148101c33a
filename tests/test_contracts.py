"""Every registered attack and reproduction item keeps its manners; a new file is tested by being there."""

import copy
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from gradveil import attacks
from gradveil.attacks.base import ATTACKS, KINDS, Attack, Malicious
from gradveil.federated.client import step_gradient
from gradveil.losses import NextToken
from gradveil.modalities.table import Column, Table
from gradveil.modalities.tokens import Tokens
from gradveil.models import build
from gradveil.protection.defense import DEFENSES, NoDefense
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch, Observation, Update
from gradveil_studies.paper.base import ITEMS, Context

SHORT = {"steps": 3, "starts": 2, "restarts": 2, "pairs": 40, "width": 4}


def short(name: str) -> Attack:
    cls = ATTACKS.get(name)
    return cls(**{f.name: SHORT[f.name] for f in fields(cls) if f.name in SHORT})  # type: ignore[arg-type]


@pytest.fixture
def seen(model: nn.Module, batch: Batch, rng: torch.Generator) -> Observation:
    one = Batch(batch.inputs[:1], batch.labels[:1])
    public = Batch(torch.rand(40, 1, 8, 8, generator=rng), torch.arange(40) % 5)
    update = Update(step_gradient(model, one, NoDefense(), rng))

    def client(examples: Batch, draws: torch.Generator) -> Params:
        return step_gradient(model, examples, NoDefense(), draws)

    return Observation(model, update, (1, 8, 8), 5, client=client, public=public, candidates=batch)


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def of_text(name: str) -> bool:
    return ATTACKS.get(name).applies_to[0].modalities == ("tokens",)


def ready(name: str, seen: Observation, one: Batch | None = None) -> Observation:
    """An example of the first case that an attack declares: another model, other examples, or what a server sends."""
    attack = short(name)
    case = attack.applies_to[0]
    if of_text(name):
        like = seen.model[0].weight
        text = build("gpt_tiny:width=32,heads=2", (6,), 20).to(like)
        held = 3 + (1e4 * (one.inputs if one else seen.model[0].weight.detach()).flatten()[:6].abs()).long() % 17
        batch = Batch(held[None].to(like), held.roll(-1)[None])
        gradient = step_gradient(text, batch, NoDefense(), fresh(), loss=NextToken())
        words = Tokens(tuple(f"w{i}" for i in range(17)))
        return replace(
            seen,
            model=text,
            update=Update(gradient),
            input_shape=(6,),
            num_classes=20,
            loss=NextToken(),
            modality=words,
        )
    if case.model == "tokens":
        vit = build("vit_tiny:width=32,heads=2,depth=1", seen.input_shape, 5).to(seen.model[0].weight)
        one = one or Batch(torch.rand(1, *seen.input_shape, generator=fresh()), torch.tensor([2]))
        return replace(seen, model=vit, update=Update(step_gradient(vit, one, NoDefense(), fresh())))
    if case.modalities == ("table",):
        rows = Table(tuple(Column(f"c{i}") for i in range(64)))
        flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 5)).to(seen.model[0].weight)
        row = Batch(torch.rand(1, 64, generator=fresh()).to(flat[1].weight), torch.tensor([2]))
        update = Update(step_gradient(flat, row, NoDefense(), fresh()))
        return replace(seen, model=flat, update=update, input_shape=(64,), modality=rows)
    if isinstance(attack, Malicious) or (case.model or "").startswith("dense"):
        public = Batch(torch.rand(40, *seen.input_shape, generator=fresh()), torch.arange(40) % 5)
        chain = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)).to(seen.model[0].weight)
        planted = isinstance(attack, Malicious)
        model = attack.plant(chain, seen.input_shape, 5, public, fresh()) if planted else chain
        one = one or Batch(public.inputs[:1].to(seen.model[0].weight), public.labels[:1])
        return replace(seen, model=model, update=Update(step_gradient(model, one, NoDefense(), fresh())))
    return seen


@pytest.mark.parametrize("name", ATTACKS.names())
def test_an_attack_declares_its_kind_itself(name: str) -> None:
    """What it takes is known before anything is timed: the order of an audit in limited time rests on it."""
    declared = [
        vars(cls)["kind"] for cls in ATTACKS.get(name).__mro__ if cls not in (Attack, Malicious) and "kind" in vars(cls)
    ]
    assert declared
    assert declared[0] in KINDS


@pytest.mark.parametrize("name", [n for n in ATTACKS.names() if ATTACKS.get(n).__module__.startswith("gradveil.")])
def test_an_attack_declares_what_it_applies_to(name: str) -> None:
    """Default panels are made of these declarations, so that a new attack needs no list of names."""
    cls = ATTACKS.get(name)
    assert cls.applies_to
    assert all((case.tier == "malicious") == issubclass(cls, Malicious) for case in cls.applies_to)
    for case in cls.applies_to:
        if case.default is not None:
            assert case.tier == "oblivious"  # a panel's server knows nothing of the defence
            assert ATTACKS.build(f"{name}:{case.default}".rstrip(":"))
    assert getattr(attacks, cls.__name__) is cls  # and is there by name, with completion
    assert cls.__name__ in attacks.__all__


@pytest.mark.parametrize("name", ATTACKS.names())
def test_an_attack_returns_finite_images_within_the_data_range(name: str, seen: Observation) -> None:
    seen = ready(name, seen)
    found = short(name).reconstruct(seen, fresh())
    assert found.inputs.shape == (1, *seen.input_shape)
    assert found.inputs.isfinite().all()
    assert found.inputs.min() >= 0
    assert found.inputs.max() <= (1 if not of_text(name) else seen.num_classes - 1)
    assert found.labels is None or found.labels.shape == ((1,) if not of_text(name) else (1, *seen.input_shape))


@pytest.mark.parametrize("name", ATTACKS.names())
def test_an_attack_repeats_from_its_generator_and_leaves_the_global_one(name: str, seen: Observation) -> None:
    seen = ready(name, seen)
    state = torch.get_rng_state()
    first, again = (short(name).reconstruct(seen, fresh()) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ATTACKS.names())
def test_an_attack_leaves_the_model_and_the_update_as_they_were(name: str, seen: Observation) -> None:
    seen = ready(name, seen)
    weights = copy.deepcopy(seen.model.state_dict())
    update = copy.deepcopy(seen.update.gradient)
    training = seen.model.training
    short(name).reconstruct(seen, fresh())
    assert all(torch.equal(v, weights[n]) for n, v in seen.model.state_dict().items())
    assert all(torch.equal(v, update[n]) for n, v in seen.update.gradient.items())
    assert seen.model.training == training
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in seen.model.modules())
    assert all(p.requires_grad and p.grad is None for p in seen.model.parameters())


@pytest.mark.parametrize("name", ATTACKS.names())
def test_an_attack_gives_the_same_answer_alone_and_in_company(name: str, seen: Observation, batch: Batch) -> None:
    model = seen.model.double()
    both = []
    for i in range(2):
        one = Batch(batch.inputs[i : i + 1].double(), batch.labels[i : i + 1])
        sent = replace(seen, model=model, update=Update(step_gradient(model, one, NoDefense(), fresh())))
        both.append(ready(name, sent, one))
    alone = short(name).reconstruct(both[1], fresh()).inputs
    together = short(name).reconstruct_many(both, [torch.Generator().manual_seed(9), fresh()])[1].inputs
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("registry", [ATTACKS, DEFENSES, ITEMS], ids=lambda r: r.kind)
def test_every_method_round_trips_through_its_spec(registry: object) -> None:
    for name, cls in registry:  # type: ignore[attr-defined]
        if all(f.default is not f.default_factory for f in fields(cls)):
            built = registry.build(name)  # type: ignore[attr-defined]
            assert registry.build(describe(built)) == built  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ITEMS.names())
def test_an_item_names_its_units_once_and_a_title(name: str) -> None:
    item = ITEMS.build(name)
    for scale in ("quick", "full"):
        units = item.units(Context(scale=scale))  # type: ignore[arg-type]
        assert len(units) == len(set(units))
        assert units or item.needs  # what has no work of its own reads the rows of others
    assert set(item.needs) <= set(ITEMS.names()) - {name}
    assert item.title
