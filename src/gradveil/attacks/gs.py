"""Inverting gradients (Geiping et al. 2020): match the direction of the gradient by smooth images, with Adam.

Against a noisy update smoothness counts as much as makes the search a MAP estimate. Let s = g + n be what is seen, n of
standard deviation σ in each entry, and let neighbouring pixels of images differ by b on average, as if drawn from a
Laplace distribution. The negative logarithm of the posterior is, up to a constant,
‖g(x) - s‖²/(2σ²) + Σ|differences|/b. Where ‖g(x)‖ ≈ ‖g‖, the first term is ‖s‖‖g‖/σ² times 1 - cos(g(x), s). Divided
by that factor, the second is the mean absolute difference times

    σ² (number of differences) / (b ‖s‖ ‖g‖).

‖g‖² is ‖s‖² less the energy of the noise, and no less than what the chance in that energy leaves open. Weighted sums
take the place of plain ones where tensors carry different noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, in_groups
from gradveil.attacks.labels import read_at, with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import SENT, Matching, Penalty, Unknowns, precisions
from gradveil.attacks.search.restarts import TVS, Start, adam_search, image_terms
from gradveil.ranges import Count, Positive, Weight
from gradveil.tree import parameters
from gradveil.types import Observation, Reconstruction


def map_smoothness(seen: Observation, contrast: float) -> float:
    """Return the weight of the total variation beside the cosine distance; 0 where no noise is known."""
    seen = seen.as_one_step()
    noisy = {n: seen.noise[n] for n in seen.visible if seen.noise.get(n, 0.0) > 0}
    if not noisy:
        return 0.0
    weight = precisions(seen, parameters(seen.model))
    least = max(std * sqrt(weight[n]) for n, std in noisy.items())  # the σ that a weight of 1 stands for
    matching = Matching.of([seen])
    energy, noise = float(matching.energy), float(matching.floor)
    chance = noise * sqrt(2 / sum(seen.update.gradient[n].numel() for n in noisy))
    signal = max(energy - noise, chance)
    channels, height, width = seen.input_shape
    differences = seen.num_examples * channels * ((height - 1) * width + height * (width - 1)) / 2
    return least**2 * differences / (contrast * sqrt(energy * signal))


def _numbers(seen: Observation, inputs: Tensor, rng: Generator) -> Tensor | None:
    """Return the numbers of one example: the size of a gradient tells them, its direction does not."""
    return read_at(seen, inputs, rng) if seen.num_examples == seen.update.num_steps == 1 else None


@ATTACKS.register("gs")
@dataclass(frozen=True)
class GS(Attack):
    """Minimise 1 - cos(∇F(x̂, y), g) + tv TV(x̂) over images in the data range (Geiping et al. 2020).

    Labels are those that the server knows, else read off the last layer's gradient, else searched as well.
    Sun et al. report 120 steps, at which even an undefended run is half done; their script runs 24,000.
    Step and smoothness are in pixels: the authors' script, whose images are normalised, has a step of a quarter of
    its number and four times the smoothness, here ``lr=0.025,tv=4e-4,start=central``. A server that knows of noise
    sets ``contrast=0.05``, what neighbouring pixels differ by, and smoothness counts as much as in a MAP estimate.
    Departures: starts are grey but for a fiftieth of the range, one of several weights of smoothness is chosen by the
    update alone, and the best point by the objective is returned.
    """

    kind = "search"
    applies_to = (
        AppliesTo(("image",), "small", steps=(1, 1), default="steps=300", turn=1),  # beside newton and dlg
        AppliesTo(("image",), steps=(1, 1), signs=True, default="", turn=1),
        AppliesTo(signs=True),
    )

    steps: Count = 1000
    restarts: Count = 1
    lr: Positive = 0.03
    tv: Weight | tuple[Weight, ...] = TVS  # images (C, H, W) only; of several, one is chosen
    contrast: Weight = 0.0  # of neighbouring pixels; above 0, known noise sets how much smoothness counts, tv the least
    bn: Weight = SENT  # of batch norm statistics that the client sent
    start: Start = "grey"
    tol: Weight = 1e-4  # cosine distance at which the gradient counts as matched
    tf32: bool = False  # on CUDA, round products to ten bits: twice as fast on large networks

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        labelled = with_labels(at_one_model(seen), rngs)
        found = in_groups(labelled, rngs, self._smoothness_known, self._run)
        return [
            r if s.labels is not None or s.loss.targets != "numbers" else replace(r, labels=_numbers(s, r.inputs, rng))
            for s, r, rng in zip(labelled, found, rngs, strict=True)
        ]

    def _smoothness_known(self, seen: Observation) -> bool:
        return self.contrast > 0 and len(seen.input_shape) == 3 and map_smoothness(seen, self.contrast) > 0

    def _run(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        grid = self.tv if isinstance(self.tv, tuple) else (self.tv,)
        search = adam_search(
            self.steps, self.lr, (min(grid),) if self._smoothness_known(seen[0]) else grid, self._terms, True,
            restarts=self.restarts, tol=self.tol, start=self.start, tf32=self.tf32,
        )  # fmt: skip
        return search.run(seen, rngs)

    def _terms(self, seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor, tv: Tensor) -> tuple[Penalty, ...]:
        if self.contrast > 0 and len(unknowns.images) == 4:
            tv = tv.maximum(torch.tensor([map_smoothness(s, self.contrast) for s in seen])[owner].to(tv))
        return image_terms(self.bn)(seen, unknowns, owner, tv)
