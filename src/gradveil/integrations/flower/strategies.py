"""Flower's strategies by name, with their settings: ``fedavg``, ``fedadam:eta=0.01``, ``fedprox:proximal_mu=0.1``."""

import inspect
from typing import Any

from flwr.serverapp import strategy as flower

from gradveil.errors import SpecError, did_you_mean
from gradveil.registry import convert, parse

# those that work on any model's weights; users of the others write their own ServerApp
STRATEGIES: dict[str, Any] = {
    name.lower(): getattr(flower, name)
    for name in (
        "FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi",
        "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan",
    )
}  # fmt: skip


def build_strategy(spec: str) -> flower.Strategy:
    """Return the strategy; which nodes take part is decided by the grid, so it is told to take all it sees."""
    parsed = parse(spec)
    if parsed.name not in STRATEGIES:
        hint = did_you_mean(parsed.name, STRATEGIES)
        raise SpecError(f"No strategy is called {parsed.name!r}. {hint}Known: {', '.join(STRATEGIES)}.")
    cls = STRATEGIES[parsed.name]
    numbers = {
        name: type(p.default)
        for name, p in inspect.signature(cls).parameters.items()
        if isinstance(p.default, (int, float)) and not name.startswith(("fraction_", "min_"))
    }
    values: dict[str, Any] = {}
    for key, text in parsed.settings.items():
        if key not in numbers:
            raise SpecError(f"Flower's {parsed.name} has no {key!r}. It has: {', '.join(numbers) or 'no settings'}.")
        values[key] = convert(text, numbers[key], f"{parsed.name}:{key}")
    return cls(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, **values)
