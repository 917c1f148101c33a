import pytest
import torch
from torch import Generator, nn

from gradveil.defenses.compose import Compose
from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.modules import representation
from gradveil.privacy.noise import SecretDraws
from gradveil.protection.defense import (
    DEFENSES,
    Accounted,
    Defense,
    NoDefense,
    PerRound,
    accounted,
    build,
)  # fmt: skip
from gradveil.registry import describe
from gradveil.types import Batch, Observation, Update


def test_parts_act_in_their_places_and_in_order(model: nn.Module, batch: Batch) -> None:
    both = build("representation:share=0.4+pruning:share=0.5")
    first = step_gradient(model, batch, build("representation:share=0.4"), Generator())

    found = step_gradient(model, batch, both, Generator())

    expected = build("pruning:share=0.5").on_gradient(first, Generator())
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    assert both.acts_on == {"representation", "gradient"}


def test_the_order_is_the_one_given(rng: Generator) -> None:
    g = {"a": torch.randn(1000, generator=rng)}
    noise_last = build("pruning:share=0.9+gaussian:scale=0.1").on_gradient(g, Generator().manual_seed(0))
    noise_first = build("gaussian:scale=0.1+pruning:share=0.9").on_gradient(g, Generator().manual_seed(0))
    assert int((noise_last["a"] == 0).sum()) == 0
    assert int((noise_first["a"] == 0).sum()) == 900


def test_each_layer_is_changed_by_the_parts_that_defend_it(model: nn.Module, batch: Batch) -> None:
    both = build("representation:layer=2,share=0.5+random_mask:layer=5,share=0.25")
    assert both.layers(model) == ("2", "5")
    r = representation(model, "2", batch.inputs)
    changed = both.perturb(model, "2", batch.inputs, r, Generator())
    assert torch.equal(changed, both.parts[0].perturb(model, "2", batch.inputs, r, Generator()))  # type: ignore[attr-defined]
    assert both.asked(model, "2", r) == 3 * 32
    assert both.asked(model, "5", r.flatten(1)) == 3 * 16


def test_a_server_undoes_all_parts_at_once(model: nn.Module) -> None:
    both = build("representation+gaussian:scale=0.1")
    names = [c.name for c in both.servers(model)]
    assert names == ["drop+whiten", "mask+whiten"]  # the analytic attack is another than whiten's
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    drop = both.servers(model)[0]
    view = drop.view(Observation(model, Update(gradient), (1, 8, 8), 5))
    assert "5.weight" not in view.visible
    assert view.noise["0.weight"] == 0.1
    assert drop.attack == "newton"


def test_it_is_described_by_its_parts() -> None:
    spec = "representation:share=0.1+gaussian:scale=0.5+pruning"
    assert describe(build(spec)) == spec
    assert build(describe(Compose((build(spec), build("laplace"))))) == build(f"{spec}+laplace")


def test_no_parts_change_nothing(model: nn.Module, rng: Generator) -> None:
    g = {"a": torch.ones(3)}
    assert Compose().on_gradient(g, rng) is g
    assert [c.name for c in Compose().servers(model)] == ["plain"]


# Every member of a defence has a rule in Compose: a new one without a rule fails here, by its name.

PROTOCOLS = (Defense, Accounted, PerRound)
BUILT_BY_REGISTRY = {"spec_name"}


def members() -> set[str]:
    known = {name for protocol in PROTOCOLS for name in {**vars(protocol), **protocol.__annotations__}}
    return {name for name in known if not name.startswith("_")} - BUILT_BY_REGISTRY


def test_each_member_of_a_defence_has_a_rule() -> None:
    assert len(members()) > 25
    assert members() - vars(Compose).keys() == set()


class WithOneMore(Defense):
    """A protocol that has grown."""

    def on_logits(self) -> None: ...


def test_a_new_member_without_a_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROTOCOLS", (*PROTOCOLS, WithOneMore))
    assert members() - vars(Compose).keys() == {"on_logits"}


ALONE = [*DEFENSES.names(), "veil:tier=aggregate,cohort=8", "veil:limit=2", "representation:layer=2/5", "qsgd:norm=max"]


@pytest.mark.parametrize("beside", [lambda d: (d, NoDefense()), lambda d: (NoDefense(), d), lambda d: (d,)])
@pytest.mark.parametrize("spec", [spec for spec in ALONE if spec not in ("compose", "none")])
def test_joined_with_nothing_it_is_what_it_was(spec: str, beside: object, model: nn.Module) -> None:
    def said(defense: Defense) -> dict[str, object]:
        account, mean = accounted(defense), defense.mean_of(4)
        return {
            "class": [getattr(defense, name) for name in ("draws", "draws_on_device", "acts_on", "idle")],
            "keeps_apart": defense.keeps_apart and "batch" in defense.acts_on,
            "noise": [defense.noise_from(Generator()), defense.noise_from(SecretDraws())],
            "layers": defense.layers(model),
            "asked": [defense.asked(model, layer, torch.ones(3, 8)) for layer in defense.layers(model)],
            "servers": [server.name for server in defense.servers(model)],
            "fingerprint": defense.fingerprint is None,
            "mean_of": mean and describe(mean).replace("none+", "").replace("+none", ""),
            "account": [account.cost(2), account.allowance, account.min_clients],
            "single": describe(account.single_client()).replace("none+", "").replace("+none", ""),
            "server": describe(defense.for_server()).replace("none+", "").replace("+none", ""),
            "rounds": isinstance(defense, PerRound) and defense.follows_rounds,
        }

    alone = build(spec)
    joined = Compose(beside(alone))  # type: ignore[operator]
    assert said(joined) == said(alone)
    assert alone.title in joined.title


def test_what_is_joined_is_told_by_all_parts() -> None:
    assert build("pruning+qsgd").title == "Smallest gradients left out (pruning) and Random rounding"
    assert build("gaussian+qsgd").draws_on_device
    assert not build("mixup+qsgd").draws_on_device  # mixup draws on the CPU
    assert build("ats+decoy:floor=0.01").keeps_apart
    assert not build("ats+mixup").keeps_apart
    assert build("pruning+representation").draws is False


def test_the_server_that_reads_the_last_part_repeats_those_before(model: nn.Module) -> None:
    both, gradient = build("pruning:share=0.5+qsgd"), {n: torch.randn_like(p) for n, p in model.named_parameters()}
    assert both.fingerprint is not None
    view = both.fingerprint(Observation(model, Update(both.on_gradient(gradient, Generator())), (1, 8, 8), 5))
    pruned = build("pruning:share=0.5").on_gradient(gradient, Generator())
    for name, size in view.sent(gradient).items():
        torch.testing.assert_close(size, pruned[name].norm().expand_as(size))
    assert build("gaussian+qsgd").fingerprint is None  # it cannot repeat what was drawn
    assert build("qsgd+pruning").fingerprint is None  # what was cut off last hides the levels


def test_the_mean_of_rounds_is_known_where_the_noise_comes_last() -> None:
    calmer = build("pruning+gaussian:scale=0.4").mean_of(16)
    assert calmer is not None
    assert describe(calmer) == "pruning+gaussian:scale=0.1"
    assert build("gaussian+pruning").mean_of(4) is None
    assert build("gaussian+laplace").mean_of(4) is None


def test_a_member_of_a_protocol_asks_for_the_protocol() -> None:
    with pytest.raises(SpecError, match=r"Free\.for_round is of PerRound: derive the defence from that"):

        class Free(NoDefense):
            def for_round(self, *_: object) -> Defense:
                return self
