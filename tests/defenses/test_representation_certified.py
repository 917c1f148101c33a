"""As few entries as a certificate needs, example by example, wherever a defence is taken."""

from collections.abc import Callable
from math import inf

import pytest
import torch
from torch import Generator, nn

import gradveil
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.defenses.representation import RepresentationCertified
from gradveil.errors import DefenseError, SpecError
from gradveil.federated.client import step_gradient
from gradveil.federated.simulate import Training, simulate
from gradveil.federated.vectorised import why_no_masks
from gradveil.models import build as build_model
from gradveil.modules import representation
from gradveil.protection.defense import build
from gradveil.registry import describe
from gradveil.representation.certify import certify, needed_counts
from gradveil.representation.scores import leak_scores
from gradveil.representation.selection import zeroing_order
from gradveil.types import Batch


def reachable(model: nn.Module, x: torch.Tensor, kind: str, p: float) -> float:
    """What zeroing all of the representation certifies for the hardest example."""
    return float(certify(model, "5", x, torch.zeros(len(x), 64), p, kind).to_mse().min())  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [1, 2, inf])
@pytest.mark.parametrize("kind", ["local", "global", "box"])
def test_each_example_reaches_the_target_and_with_one_entry_less_it_does_not(
    kind: str, p: float, model: nn.Module, batch: Batch, rng: Generator
) -> None:
    x = batch.inputs
    target = reachable(model, x, kind, p) * 0.5
    defense = build(f"representation_certified:target_mse={target!r},kind={kind},p={p}")
    r = representation(model, "5", x)
    changed = defense.perturb(model, "5", x, r, rng)
    assert (certify(model, "5", x, changed, p, kind).to_mse() >= target).all()  # type: ignore[arg-type]
    scores = leak_scores(model, "5", x, p=float(p))
    gone = changed == 0
    last = torch.where(gone, scores, torch.inf).argmin(1)  # the one that was zeroed last
    fewer = changed.clone()
    fewer[torch.arange(3), last] = r[torch.arange(3), last]
    assert (certify(model, "5", x, fewer, p, kind).to_mse() < target).all()  # type: ignore[arg-type]
    assert all(s[g].min() >= s[~g].max() for s, g in zip(scores, gone, strict=True))  # by falling score


def test_every_example_has_its_own_number(rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    x = torch.tensor([[1.0] * 8, [0.5] * 8, [1.0] + [0.5] * 7]).reshape(3, 1, 2, 4)
    # f is the identity: k zeroed pixels of 1 are an MSE of k/8, of 0.5 they are k/32.
    changed = RepresentationCertified(target_mse=0.12).perturb(model, "1", x, x.flatten(1), rng)
    assert (changed == 0).sum(1).tolist() == [1, 4, 1]


def test_every_example_loses_the_fewest_entries_that_its_certificate_needs(
    model: nn.Module, batch: Batch, rng: Generator
) -> None:  # fmt: skip
    target = reachable(model, batch.inputs, "global", 2) * 0.3
    defense = RepresentationCertified(target_mse=target)
    r = representation(model, "5", batch.inputs)
    changed = defense.perturb(model, "5", batch.inputs, r, rng)
    order = zeroing_order(r.flatten(1), leak_scores(model, "5", batch.inputs))
    needed = needed_counts(model, "5", batch.inputs, r.flatten(1), order, target)
    assert (changed == 0).sum(1).tolist() == needed.counts.tolist()


def test_where_no_share_reaches_it_one_line_says_so_and_how_much_is_possible(
    model: nn.Module, batch: Batch, rng: Generator
) -> None:
    possible = reachable(model, batch.inputs, "global", 2)
    defense = build(f"representation_certified:target_mse={possible * 1.01!r},kind=global")
    with pytest.raises(DefenseError, match=f"No share reaches .*{possible:.3g} is certified") as raised:
        step_gradient(model, batch, defense, rng)
    assert "\n" not in str(raised.value)
    build(f"representation_certified:target_mse={possible * 0.999!r}").perturb(
        model, "5", batch.inputs, representation(model, "5", batch.inputs), rng
    )


def test_a_guarded_loop_and_a_step_by_function_send_the_same(model: nn.Module, batch: Batch, rng: Generator) -> None:
    target = reachable(model, batch.inputs, "local", 2) * 0.4
    spec = f"representation_certified:target_mse={target!r},kind=local"
    by_function = step_gradient(model, batch, build(spec), rng)
    with gradveil.protect(model, spec) as guard:
        torch.nn.functional.cross_entropy(guard(batch.inputs), batch.labels).backward()
    plain = step_gradient(model, batch, build("none"), rng)
    assert guard.report.removed > 0
    assert guard.report.asked == 0  # no number was asked for
    assert "asked" not in str(guard.report)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, by_function[name])
        assert torch.equal(by_function[name], plain[name]) == (name != "5.weight")


def test_federated_clients_choose_for_the_weights_they_were_sent() -> None:
    data = load("digits")
    model = build_model("lenet:width=3", data.input_shape, data.num_classes)
    clients = partition(data.train.labels, "classes:devices=3,classes=2,per_class=3", 0)
    training = Training(rounds=1, clients=2, epochs=1, batch_size=6, lr=0.1)
    spec = "representation_certified:target_mse=1e-4,kind=global"
    assert why_no_masks(model, build(spec), data.train.batch(range(6)).inputs) is not None  # no shortcut by share
    ours, plain, share = (
        next(iter(simulate(model, data, clients, training, d, 0))).model.state_dict()
        for d in (spec, "none", "representation:share=0.4")
    )
    for other in (plain, share):
        assert not torch.equal(ours["fc.weight"], other["fc.weight"])
        assert torch.equal(ours["conv1.weight"], other["conv1.weight"])


@pytest.mark.parametrize("name", ["certify", "train"])
def test_the_spec_works_from_the_command_line(name: str, command: Callable[..., tuple[int, str, str]]) -> None:
    size = (
        ["--images", "2"]
        if name == "certify"
        else ["--rounds", "1", "--clients", "1", "--partition", "iid:devices=100"]
    )
    where = ["--model", "lenet:width=3", "--dataset", "digits", "--defense"]
    for spec, works in (
        ("representation_certified:target_mse=1e-4,kind=global", True),
        ("representation_certified:target_mse=1,p=inf", False),
    ):
        folder = ["--out", spec.replace(":", "-")] if name == "train" else []
        code, _, err = command(name, *size, *where, spec, *folder)
        assert (code == 0) == works, err
        if not works:
            assert "No share reaches target_mse=1" in " ".join(err.split())


def test_layers_that_differ_in_training_are_refused(batch: Batch, rng: Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 5))
    defense = RepresentationCertified(target_mse=1e-6)
    with pytest.raises(DefenseError, match="dropout and batch norm"):
        step_gradient(model, batch, defense, rng)
    assert step_gradient(model.eval(), batch, defense, rng)["4.weight"].isfinite().all()


def test_inputs_outside_the_range_of_pixels_are_refused(model: nn.Module, batch: Batch, rng: Generator) -> None:
    shifted = Batch(batch.inputs * 3 - 1, batch.labels)
    with pytest.raises(DefenseError, match=r"pixels in \[0, 1\]"):
        step_gradient(model, shifted, RepresentationCertified(target_mse=1e-6), rng)


@pytest.mark.parametrize("rest", ["share=0.2", "count=3", "q=2", "mode=authors", "score=greedy", "kind=empirical"])
def test_settings_that_a_target_leaves_no_room_for_are_refused(rest: str) -> None:
    with pytest.raises(SpecError):
        build(f"representation_certified:target_mse=0.01,{rest}")


def test_a_spec_comes_back_from_the_defence_it_built() -> None:
    spec = "representation_certified:target_mse=0.05,kind=local"
    assert build(describe(build(spec))) == build(spec)
    for target in (-1, 0):
        with pytest.raises(SpecError, match=r"target_mse=.*above 0"):
            build(f"representation_certified:target_mse={target}")
