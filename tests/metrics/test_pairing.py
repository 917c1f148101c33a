from itertools import permutations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from gradveil.modalities.base import pair
from gradveil.modalities.image import mse


@given(st.integers(0, 1000), st.integers(1, 5))
def test_the_pairing_is_the_best_of_all_permutations(seed: int, n: int) -> None:
    rng = Generator().manual_seed(seed)
    found, truth = torch.rand(n, 1, 3, 3, generator=rng), torch.rand(n, 1, 3, 3, generator=rng)
    best = min(float(mse(found[list(p)], truth).sum()) for p in permutations(range(n)))
    assert abs(float(mse(found[pair(found, truth)], truth).sum()) - best) < 1e-5


def test_a_greedy_pairing_would_be_worse() -> None:
    """The first original is nearest to found 1, but taking it leaves a far worse pair for the second."""
    truth = torch.tensor([[0.0], [1.0]])
    found = torch.tensor([[-1.1], [0.1]])
    assert pair(found, truth).tolist() == [0, 1]
