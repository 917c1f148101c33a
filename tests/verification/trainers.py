"""Trainers as a user would hand them over: a loop of DP-SGD by hand, sound or broken on purpose, and Opacus."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

SIGMA, CLIP, STEPS = 1.0, 1.0, 3
MU = STEPS**0.5 / SIGMA


def by_hand(
    noise: float = SIGMA, clip: float = CLIP, times: float = 1.0, reuse: bool = False, one: int | None = None
) -> Any:
    """Noisy sums at the same weights: every record, or ``one`` alone, counts ``times``; ``reuse``: one noise."""

    def train(model: nn.Module, inputs: Tensor, labels: Tensor, present: Tensor) -> Sequence[Any]:
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        counts = present.float() * (times if one is None else 1.0)
        if one is not None:
            counts[one] *= times
        released, first = [], {}
        for _ in range(STEPS):

            def loss(w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                return nn.functional.cross_entropy(functional_call(model, w, (x[None],)), y[None])

            g = vmap(grad(loss), (None, 0, 0))(weights, inputs, labels)
            norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
            factors = (clip / norms).clamp_max(1.0) * counts
            fresh = {n: noise * CLIP * torch.randn_like(w) for n, w in weights.items()}
            first = first or fresh
            used = first if reuse else fresh
            update = {n: (torch.tensordot(factors, g[n], 1) + used[n]) / len(inputs) for n in weights}
            released.append(torch.cat([v.flatten() for v in update.values()]))
        return released

    return train


sound, half_noise, no_clip, twice = by_hand(), by_hand(noise=SIGMA / 2), by_hand(clip=1e6), by_hand(times=2.0)
one_twice = by_hand(times=2.0, one=3)


def breaks_off(model: nn.Module, inputs: Tensor, labels: Tensor, present: Tensor) -> Sequence[Any]:
    """Releases nothing."""
    return []


def with_opacus(noise_multiplier: float = SIGMA) -> Any:
    """Opacus' own engine over a plain loop, all records in every step; the weights after each step go out."""

    def train(model: nn.Module, inputs: Tensor, labels: Tensor, present: Tensor) -> Sequence[Any]:
        from opacus import PrivacyEngine

        chosen = torch.utils.data.TensorDataset(inputs[present], labels[present])
        loader = torch.utils.data.DataLoader(chosen, batch_size=len(chosen))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        released = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, loader = PrivacyEngine().make_private(
                module=model.train(), optimizer=optimizer, data_loader=loader, noise_multiplier=noise_multiplier,
                max_grad_norm=CLIP, poisson_sampling=False,
            )  # fmt: skip
            optimizer.expected_batch_size = len(inputs)  # public: the slots, not the records that are there
            for _ in range(STEPS):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(private(x), y).backward()
                    optimizer.step()
                    released.append({n: v.detach().clone() for n, v in private.state_dict().items()})
        return released

    return train


opacus, opacus_half = with_opacus(), with_opacus(SIGMA / 2)
