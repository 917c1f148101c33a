import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn

from gradveil.defenses import pruning
from gradveil.defenses.pruning import Pruning
from gradveil.protection.defense import build
from gradveil.types import Observation, Update


def gradient() -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([[1.0, -4.0], [3.0, 0.5]]), "b": torch.tensor([0.1, -0.2])}


def test_the_smallest_entries_of_each_tensor_go(rng: Generator) -> None:
    found = Pruning(0.5).on_gradient(gradient(), rng)
    assert found["a"].tolist() == [[0.0, -4.0], [3.0, 0.0]]
    assert torch.equal(found["b"], torch.tensor([0.0, -0.2]))


@given(st.floats(0, 1), st.integers(0, 9))
def test_counts_are_exact_also_among_equal_entries(share: float, seed: int) -> None:
    rng = Generator().manual_seed(seed)
    g = {"a": torch.randint(1, 4, (3, 4), generator=rng).float(), "b": torch.randint(1, 4, (5,), generator=rng).float()}
    found = build(f"pruning:share={share}").on_gradient(g, rng)
    zeros = {name: int((value == 0).sum()) for name, value in found.items()}
    assert zeros == {"a": round(share * 12), "b": round(share * 5)}


def test_it_acts_where_it_is_told_to(rng: Generator) -> None:
    on_update = Pruning(0.5, on="update")
    assert torch.equal(on_update.on_gradient(gradient(), rng)["a"], gradient()["a"])
    assert on_update.on_update(Update(gradient()), rng).gradient["a"].tolist() == [[0.0, -4.0], [3.0, 0.0]]
    assert torch.equal(Pruning(0.5).on_update(Update(gradient()), rng).gradient["a"], gradient()["a"])


def test_a_server_can_prune_its_trial_gradients_and_differentiate_through_it(model: nn.Module) -> None:
    defense = build("pruning:share=0.5")
    masked, simulated = defense.servers(model)
    seen = Observation(model, Update(defense.on_gradient(gradient(), Generator())), (1, 8, 8), 5)

    view = simulated.view(seen)
    assert view.simulate is not None
    trial = {name: g.requires_grad_() for name, g in gradient().items()}
    pruned = view.simulate(trial)
    sum(g.sum() for g in pruned.values()).backward()  # type: ignore[union-attr]
    assert torch.equal(trial["a"].grad, (seen.update.gradient["a"] != 0).float())
    many = {name: torch.stack([g.detach(), 2 * g.detach()]) for name, g in trial.items()}
    batched = torch.func.vmap(view.simulate)(many)
    assert torch.equal(batched["a"][1], 2 * pruned["a"].detach())
    assert torch.equal(masked.view(seen).weights["a"], (seen.update.gradient["a"] != 0).float())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_all_ways_of_pruning_take_the_same_entries(share: float, rng: Generator) -> None:
    """By numpy on a CPU, by few calls for all tensors on CUDA, and differentiably; with ties and zeros."""
    sizes = (7, 30, 30, 1, 200, 9)
    tied = [torch.randint(-3, 4, (n,), generator=rng) / 2 for n in sizes]
    for tensors in (tied, [torch.randn(n, generator=rng) for n in sizes]):
        gradient = {str(i): t for i, t in enumerate(tensors)}
        counts = [round(share * n) for n in sizes]
        found = build(f"pruning:share={share}").on_gradient(gradient, rng)
        trial = {name: t.clone().requires_grad_() for name, t in gradient.items()}
        slow = Pruning(share=share).prune(trial)
        assert all(torch.equal(found[name], slow[name]) for name in gradient)
        assert torch.equal(torch.cat([*found.values()]), pruning._pruned_together(tensors, counts))
