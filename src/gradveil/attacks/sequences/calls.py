"""The linear layers of a model as they run on tokens, and what an update shows of their inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor, nn

from gradveil.types import Observation


class _Seen(Exception):
    """Raised in a forward pass when all that was asked for was seen."""


@dataclass(frozen=True)
class Shown:
    """A gradient Σ δ xᵀ over what a layer saw."""

    gradient: Tensor  # (out, width), or (out, rank)
    through: Tensor | None  # (rank, width): A of low-rank factors, whose product with x the gradient of B shows
    noise: float  # std


def shown_inputs(seen: Observation, layer: str) -> list[Shown]:
    """Return the gradients that show a layer's inputs: of its weight, or of its low-rank factors, in float64."""
    found = []
    module = seen.model.get_submodule(layer)
    for name, _ in module.named_parameters():
        g = seen.update.gradient.get(f"{layer}.{name}") if f"{layer}.{name}" in seen.visible else None
        if g is None or not bool(g.any()) or g.ndim != 2:
            continue
        gradient, noise = g.double(), seen.noise.get(f"{layer}.{name}", 0.0)
        if "lora_b" in name.lower():
            first = name.replace("lora_b", "lora_a").replace("lora_B", "lora_A")
            found.append(Shown(gradient, module.get_parameter(first).detach().double(), noise))
        else:
            owner = module.get_submodule(name.rpartition(".")[0])
            transposed = type(owner).__name__ == "Conv1D"  # Hugging Face's has (in, out)
            found.append(Shown(gradient.T if transposed else gradient, None, noise))
    return found


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _linear_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers by name; one around which peft has put its factors counts with them as one."""
    found: dict[nn.Module, str] = {}
    around = tuple[str, ...]()
    for name, m in model.named_modules():
        if name.startswith(around):
            continue
        if _is_linear(m) or _is_linear(getattr(m, "base_layer", None)):
            found[m] = name
            around = (*around, f"{name}.")
    return found


def linear_calls(model: nn.Module, x: Tensor, until: str | None = None) -> list[tuple[str, Tensor, Tensor]]:
    """Return the linear layers that ran, each with its input and output; up to the layer named, with that one."""
    names = _linear_layers(model)
    calls: list[tuple[str, Tensor, Tensor]] = []

    def heard(module: nn.Module, given: Tensor, y: Tensor) -> None:
        calls.append((names[module], given, y))
        if names[module] == until:
            raise _Seen

    with hooked(list(names), heard), suppress(_Seen):
        model(x)
    return calls


@contextmanager
def hooked(modules: Sequence[nn.Module], heard: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """Within, each of the modules that runs is heard with its input and its output."""
    handles = [m.register_forward_hook(lambda m, args, y: heard(m, args[0], y)) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
