"""How much smoothness counts against a noisy update: the weight that makes the search a MAP estimate.

Let s = g + n be what is seen, n of standard deviation σ in each entry, and let neighbouring pixels of images differ by
b on average, as if drawn from a Laplace distribution. The negative logarithm of the posterior is, up to a constant,
‖g(x) - s‖²/(2σ²) + Σ|differences|/b. Where ‖g(x)‖ ≈ ‖g‖, the first term is ‖s‖‖g‖/σ² times 1 - cos(g(x), s). Divided
by that factor, the second is the mean absolute difference times

    σ² (number of differences) / (b ‖s‖ ‖g‖).

‖g‖² is ‖s‖² less the energy of the noise, and no less than what the chance in that energy leaves open. Weighted sums
take the place of plain ones where tensors carry different noise.
"""

from math import sqrt

from gradveil.attacks.matching import Matching, precisions
from gradveil.tree import parameters
from gradveil.types import Observation


def map_smoothness(seen: Observation, contrast: float) -> float:
    """Return the weight of the total variation beside the cosine distance; 0 where no noise is known."""
    noisy = {n: seen.noise[n] / seen.update.num_steps for n in seen.visible if seen.noise.get(n, 0.0) > 0}
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
