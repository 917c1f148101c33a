import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn
from torch.testing import assert_close

from defenses import slow_reading
from gradveil.defenses.representation import RepresentationDirection, RepresentationPerturbation
from gradveil.errors import LayerError, SpecError
from gradveil.federated.client import step_gradient
from gradveil.modules import representation
from gradveil.protection.defense import build
from gradveil.protection.passes import Report
from gradveil.protection.protect import protect
from gradveil.tree import Params
from gradveil.types import Batch


def guarded_gradient(model: nn.Module, batch: Batch, spec: str) -> Params:
    with protect(model, spec):
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def relu_model(seed: int = 3) -> nn.Sequential:
    """Has dead entries, and a layer after the one that is defended."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 5),
        )  # fmt: skip


@pytest.mark.parametrize("layer", [2, 5, 7])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.9])
def test_gradients_equal_algorithm_2_done_one_example_at_a_time(layer: int, share: float, batch: Batch) -> None:
    model = relu_model()
    expected = slow_reading.algorithm_2(model, layer, batch, share)
    undefended = slow_reading.plain_gradient(model, batch)

    found = guarded_gradient(model, batch, f"representation:share={share},layer={layer},method=loop")

    assert_close(found[f"{layer}.weight"], expected)
    assert not torch.allclose(found[f"{layer}.weight"], undefended[f"{layer}.weight"])
    for name, g in undefended.items():
        assert name == f"{layer}.weight" or torch.equal(found[name], g), name


def test_several_layers_are_each_defended_as_if_alone(batch: Batch) -> None:
    model = relu_model()
    found = guarded_gradient(model, batch, "representation:share=0.4,layer=2/5,method=loop")
    assert_close(found["2.weight"], slow_reading.algorithm_2(model, 2, batch, 0.4))
    assert_close(found["5.weight"], slow_reading.algorithm_2(model, 5, batch, 0.4))


def test_without_a_layer_the_last_linear_one_is_defended(model: nn.Module) -> None:
    assert RepresentationPerturbation().layers(model) == ("5",)
    assert RepresentationPerturbation(layer="0/5").layers(model) == ("0", "5")


def test_an_unknown_layer_is_named_with_those_there_are(model: nn.Module) -> None:
    with pytest.raises(LayerError, match=r"'7'.*It has: 0, 2, 5"):
        RepresentationPerturbation(layer="7").layers(model)


@given(share=st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]), seed=st.integers(0, 5))
def test_counts_are_exact_and_dead_entries_are_left_alone(share: float, seed: int) -> None:
    model = relu_model(seed)
    x = torch.rand(4, 1, 8, 8, generator=Generator().manual_seed(seed))
    r = representation(model, "5", x)

    changed = RepresentationPerturbation(share, layer="5").perturb(model, "5", x, r, Generator())

    taken = ((r != 0) & (changed == 0)).sum(1)
    assert taken.tolist() == [min(round(share * 12), int(row.count_nonzero())) for row in r]
    assert torch.equal(changed[changed != 0], r[changed != 0])


@given(st.permutations(range(4)))
def test_permuting_a_batch_permutes_what_becomes_of_it(order: list[int]) -> None:
    model = relu_model()
    x = torch.rand(4, 1, 8, 8, generator=Generator().manual_seed(0))
    r = representation(model, "5", x)
    defense = build("representation:share=0.3,layer=5")

    straight = defense.perturb(model, "5", x, r, Generator())
    permuted = defense.perturb(model, "5", x[order], r[order], Generator())

    assert torch.equal(permuted == 0, straight[order] == 0)


@pytest.mark.parametrize("spec", [":share=0", ":count=0", "_direction:share=0", "_authors:share=0"])
def test_nothing_asked_is_no_defence(spec: str, model: nn.Module, batch: Batch, rng: Generator) -> None:
    defended = step_gradient(model, batch, build(f"representation{spec}"), rng)
    for name, g in slow_reading.plain_gradient(model, batch).items():
        assert torch.equal(defended[name], g)


def test_a_count_is_taken_in_place_of_the_share(model: nn.Module, batch: Batch, rng: Generator) -> None:
    report = Report()
    step_gradient(model, batch, build("representation:count=5"), rng, report=report)
    assert (report.asked, report.removed, report.live) == (15, 15, 3 * 64)


def test_the_report_tells_what_was_removed_from_what_was_asked(batch: Batch, rng: Generator) -> None:
    model, report = relu_model(), Report()
    step_gradient(model, batch, build("representation:share=1,layer=5"), rng, report=report)
    r = representation(model, "5", batch.inputs)
    assert report.asked == r.numel()
    assert report.removed == report.live == int(r.count_nonzero()) < r.numel()
    assert report.distance == pytest.approx(float(r.norm(dim=1).mean()))


@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU, nn.Tanh])
def test_the_authors_rule_is_the_authors_code_read_plainly(
    activation: type[nn.Module], share: float, offset: float, batch: Batch, rng: Generator
) -> None:
    model = nn.Sequential(*relu_model()[:3], activation(), nn.Flatten(), nn.Linear(12, 5))
    x, f = batch.inputs, nn.Sequential(*model[:5])
    r = f(x).detach()

    found = build(f"representation_authors:share={share},offset={offset}").perturb(model, "5", x, r, rng)

    sums = np.zeros(12, dtype=np.float32)
    for n in range(len(x)):
        one, norms = slow_reading.row_norms(f, x[n : n + 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = sums + norms.numpy() / (one.numpy() + np.float32(offset))
    threshold = np.percentile(sums, 100 * share)
    expected = np.where(np.abs(sums) < threshold, 0.0, r.numpy())
    assert_close(found.numpy(), expected, check_dtype=False)


def test_the_authors_rule_removes_dead_entries_first_and_nothing_up_to_their_share() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.cat([-torch.ones(3, 4), torch.rand(3, 4, generator=Generator().manual_seed(0))]))
    x = torch.ones(1, 1, 2, 2)
    r = representation(model, "3", x)
    assert int((r == 0).sum()) == 3

    kept = build("representation_authors:share=0.3,offset=0.1").perturb(model, "3", x, r, Generator())
    most = build("representation_authors:share=0.8,offset=0.1").perturb(model, "3", x, r, Generator())
    paper = build("representation:share=0.3").perturb(model, "3", x, r, Generator())

    assert torch.equal(kept, r)
    assert int((most != 0).sum()) == 2  # below the threshold: the three dead and one live
    assert int((paper != 0).sum()) == 1  # two of the three live entries


@pytest.mark.parametrize(
    "spec",
    [":p=0", ":share=1.5", ":count=-1", ":method=magic", "_authors:share=2", "_authors:method=magic",
     "_direction:share=2", "_certified:p=3", "_certified:method=magic"],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        build(f"representation{spec}")


def test_a_radius_in_place_of_a_count_is_kept_and_spent(batch: Batch, rng: Generator) -> None:
    model, x = relu_model(), batch.inputs
    r = representation(model, "5", x)

    changed = RepresentationDirection(0.2, layer="5").perturb(model, "5", x, r, rng)

    assert_close((changed - r).norm(dim=1), 0.2 * r.norm(dim=1))
    assert bool((((changed - r) * r).sum(1) <= 1e-6).all())  # of both signs the one that shrinks r


def test_a_representation_that_does_not_depend_on_the_input_is_not_moved(rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    nn.init.zeros_(model[1].weight)
    x = torch.rand(2, 1, 2, 2)
    r = representation(model, "2", x)
    assert torch.equal(build("representation_direction").perturb(model, "2", x, r, rng), r)


def test_a_server_drops_the_weight_reads_its_mask_or_divides_by_the_bias_of_another_layer() -> None:
    model = relu_model()
    found = {c.name: c for c in build("representation:layer=5").servers(model)}
    assert set(found) == {"drop", "mask", "analytic"}
    assert "undefended 7" in found["analytic"].why
    kept = {c.name: c.why for c in build("representation:layer=5/7").servers(model)}
    assert "entries that were kept" in kept["analytic"]


def test_where_the_defended_weight_is_all_there_is_it_cannot_be_dropped() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    assert [c.name for c in build("representation").servers(model)] == ["mask"]
