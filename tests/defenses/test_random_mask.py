import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn

from gradveil.defenses.representation import RandomMask
from gradveil.modules import representation


@given(st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 5))
def test_as_many_live_entries_go_as_are_asked_for(share: float, seed: int) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    x = torch.rand(5, 1, 2, 4, generator=Generator().manual_seed(seed)).round()  # about half of the entries dead
    changed = RandomMask(share).perturb(model, "1", x, x.flatten(1), Generator().manual_seed(seed))
    removed = ((x.flatten(1) != 0) & (changed == 0)).sum(1).tolist()
    assert removed == [min(round(share * 8), int(row.sum())) for row in x]


def test_every_live_entry_is_taken_about_as_often(rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    r = torch.arange(1.0, 9.0).repeat(4000, 1)
    taken = (RandomMask(0.25).perturb(model, "1", r, r, rng) == 0).float().mean(0)
    assert bool(((taken - 0.25).abs() < 0.03).all())


def test_the_seed_decides_and_each_example_has_a_mask_of_its_own(model: nn.Module, rng: Generator) -> None:
    x = torch.rand(3, 1, 8, 8)
    r = representation(model, "5", x)
    first, again, other = (RandomMask().perturb(model, "5", x, r, Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0] == 0, first[1] == 0)
