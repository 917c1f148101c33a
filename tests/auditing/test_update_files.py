import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Generator, nn

from gradveil.auditing.update_files import (
    Facts,
    from_state_dicts,
    load_weights,
    read_examples,
    read_update,
    write_examples,
    write_update,
)
from gradveil.errors import UpdateError
from gradveil.federated.client import local_update
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Update


def gradient(model: nn.Module, rng: Generator) -> Params:
    return {name: torch.randn(p.shape, generator=rng) for name, p in parameters(model).items()}


def same(a: Params, b: Params, atol: float = 0.0) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=atol, rtol=0) for n in a)


def test_an_update_survives_the_way_through_a_file(tmp_path: Path, model: nn.Module, rng: Generator) -> None:
    update = Update(gradient(model, rng), num_examples=3, num_steps=2, lr=0.05, batch_size=2)
    write_update(tmp_path / "u.safetensors", update)
    again = read_update(tmp_path / "u.safetensors", model)
    assert same(again.gradient, update.gradient)
    assert (again.num_examples, again.num_steps, again.lr, again.batch_size) == (3, 2, 0.05, 2)


def test_three_ways_to_give_one_update_agree(tmp_path: Path, model: nn.Module, rng: Generator) -> None:
    g, lr = gradient(model, rng), 0.1
    before = {n: p.clone() for n, p in parameters(model).items()}
    after = {n: p - lr * g[n] for n, p in before.items()}
    save_file(g, tmp_path / "gradient.safetensors")
    save_file({n: after[n] - before[n] for n in g}, tmp_path / "difference.safetensors")
    save_file(after, tmp_path / "after.safetensors")

    plain = read_update(tmp_path / "gradient.safetensors", model)
    moved = read_update(tmp_path / "difference.safetensors", model, Facts(kind="difference", lr=lr))
    pair = read_update(tmp_path / "after.safetensors", model, Facts(lr=lr), before=before)
    assert same(plain.gradient, g)
    assert same(moved.gradient, g, atol=1e-5)
    assert same(pair.gradient, g, atol=1e-5)


def test_a_pair_of_state_dicts_leaves_the_buffers_out() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    after = {n: v + 1 for n, v in before.items()}
    update = from_state_dicts(model, before, after, lr=0.5)
    assert update.gradient.keys() == parameters(model).keys()
    assert all(torch.allclose(g, torch.full_like(g, -2.0)) for g in update.gradient.values())


def test_what_the_caller_states_goes_before_the_metadata(tmp_path: Path, model: nn.Module, rng: Generator) -> None:
    write_update(tmp_path / "u.safetensors", Update(gradient(model, rng), num_examples=3))
    assert read_update(tmp_path / "u.safetensors", model, Facts(num_examples=5)).num_examples == 5


def test_half_precision_is_read_as_single(tmp_path: Path, model: nn.Module, rng: Generator) -> None:
    save_file({n: g.half() for n, g in gradient(model, rng).items()}, tmp_path / "u.safetensors")
    assert {g.dtype for g in read_update(tmp_path / "u.safetensors", model).gradient.values()} == {torch.float32}


class Trap:
    """Whoever unpickles this runs it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was executed",)


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path, model: nn.Module) -> None:
    path = tmp_path / "u.pt"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UpdateError, match="safetensors"):
        read_update(path, model)


def bad(model: nn.Module, fault: str) -> Params:
    g = {name: torch.zeros_like(p) for name, p in parameters(model).items()}
    first = next(iter(g))
    if fault == "nan":
        g[first].view(-1)[0] = torch.nan
    elif fault == "shape":
        g[first] = torch.zeros(2, 2)
    elif fault == "name":
        g["other.weight"] = torch.zeros(3)
    elif fault == "dtype":
        g[first] = g[first].int()
    return g


@pytest.mark.parametrize("kind", ["gradient", "difference", "weights"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [("nan", "NaN or infinite"), ("shape", "in the model"), ("name", "other.weight"), ("dtype", "dtype")],
)
def test_a_bad_update_is_refused_in_one_line(
    tmp_path: Path, model: nn.Module, kind: str, fault: str, said: str
) -> None:
    save_file(bad(model, fault), tmp_path / "u.safetensors")
    if (kind, fault) == ("weights", "name"):
        return  # a state dict may hold more than the trained parameters
    with pytest.raises(UpdateError) as error:
        read_update(tmp_path / "u.safetensors", model, Facts(kind=kind, lr=0.1), parameters(model))  # type: ignore[arg-type]
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (Facts(kind="difference"), "learning rate"),
        (Facts(kind="weights", lr=0.1), "--before"),
        (Facts(lr=0.0), "above zero"),
        (Facts(lr=float("nan")), "above zero"),
        (Facts(num_steps=0), "above zero"),
        (Facts(num_examples=-1), "above zero"),
        (Facts(kind="wieghts", lr=0.1), "No kind"),
    ],
)
def test_a_missing_or_wrong_fact_is_asked_for(tmp_path: Path, model: nn.Module, facts: Facts, said: str) -> None:
    save_file(bad(model, "none"), tmp_path / "u.safetensors")
    with pytest.raises(UpdateError, match=r"(?i)" + said):
        read_update(tmp_path / "u.safetensors", model, facts)


def test_metadata_that_is_no_number_and_a_file_that_is_not_there(tmp_path: Path, model: nn.Module) -> None:
    save_file(bad(model, "none"), tmp_path / "u.safetensors", metadata={"lr": "fast"})
    with pytest.raises(UpdateError, match="lr='fast'"):
        read_update(tmp_path / "u.safetensors", model)
    with pytest.raises(UpdateError, match="no file"):
        read_update(tmp_path / "nowhere.safetensors", model)
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UpdateError, match="no tensor"):
        read_update(tmp_path / "empty.safetensors", model)


def test_state_dicts_of_another_model_are_refused(model: nn.Module) -> None:
    other = {"else.weight": torch.zeros(2)}
    with pytest.raises(UpdateError, match="do not both hold"):
        from_state_dicts(model, other, other, lr=0.1)
    with pytest.raises(UpdateError, match="do not both hold"):
        from_state_dicts(model, {}, parameters(model), lr=0.1)


def test_weights_are_loaded_into_the_model_or_refused(tmp_path: Path, model: nn.Module) -> None:
    state = {n: torch.full_like(v, 0.25) for n, v in model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    load_weights(model, tmp_path / "w.safetensors")
    assert all(bool((p == 0.25).all()) for p in parameters(model).values())
    save_file({"0.weight": torch.zeros(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(UpdateError, match="does not fit") as error:
        load_weights(model, tmp_path / "bad.safetensors")
    assert "\n" not in str(error.value)


def test_examples_survive_and_bad_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "truth.safetensors"
    batch = Batch(torch.rand(2, 1, 4, 4), torch.tensor([1, 4]))
    write_examples(path, batch)
    again = read_examples(path, num_classes=5)
    assert torch.equal(again.inputs, batch.inputs)
    assert torch.equal(again.labels, batch.labels)
    with pytest.raises(UpdateError, match=r"0\.\.3"):
        read_examples(path, num_classes=4)
    for broken, said in (
        (Batch(batch.inputs * 3, batch.labels), r"\[0, 1\]"),
        (Batch(batch.inputs * torch.nan, batch.labels), r"\[0, 1\]"),
        (Batch(batch.inputs, batch.labels[:1]), "N of each"),
    ):
        write_examples(path, broken)
        with pytest.raises(UpdateError, match=said):
            read_examples(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UpdateError, match="'inputs' and 'labels'"):
        read_examples(path)


@pytest.mark.parametrize("kind", ["gradient", "difference", "weights"])
def test_running_statistics_and_the_rule_of_the_steps_are_read_back(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)).train()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    batch = Batch(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))
    sent = local_update(model, batch, "none", 0.1, torch.Generator(), 2, 2, momentum=0.5, clip=2.0)
    assert set(sent.buffers) == {"1.running_mean", "1.running_var"}
    path, stated = tmp_path / "update.safetensors", None
    if kind == "gradient":
        write_update(path, sent)
    else:
        after = before | {n: before[n] - 0.1 * g for n, g in sent.gradient.items()} | sent.buffers
        less = before if kind == "difference" else dict.fromkeys(before, torch.tensor(0))
        save_file({n: value - less[n] for n, value in after.items() if value.is_floating_point()}, path)
        stated = Facts(kind=kind, lr=0.1, num_steps=4, num_examples=4, batch_size=2, momentum=0.5, clip=2.0)
    found = read_update(path, model, stated, before if kind == "weights" else None)
    assert (found.rule, found.num_steps, found.batch_size) == (sent.rule, 4, 2)
    for name, value in sent.buffers.items():
        torch.testing.assert_close(found.buffers[name], value)
    for name, g in sent.gradient.items():
        torch.testing.assert_close(found.gradient[name], g, rtol=1e-3, atol=1e-4)
