"""What the callbacks of all training frameworks share: a guard that is on while the framework trains."""

from torch import Generator, nn

from gradveil.defenses.base import Defense, build
from gradveil.defenses.guard.passes import Report
from gradveil.defenses.guard.protect import Guard, protect
from gradveil.errors import DefenseError
from gradveil.registry import describe


class CallbackGuard:
    """Guards a model, or a part of it, from ``start`` to ``stop``."""

    def __init__(self, defence_or_spec: Defense | str, module: str | None, rng: Generator | None, strict: bool) -> None:
        self.defense = build(defence_or_spec)
        if "update" in self.defense.acts_on:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and a callback does not see what is sent. Use "
                f"gradveil.protect and guard.update(before, after) where the weights are sent."
            )
        self._module, self._rng, self._strict = module, rng, strict
        self._guard: Guard | None = None
        self.report = Report()

    def start(self, model: nn.Module) -> None:
        """Attach the defence."""
        part = model.get_submodule(self._module) if self._module else model
        self._guard = protect(part, self.defense, rng=self._rng, strict=self._strict)
        self.report = self._guard.report

    def stop(self) -> None:
        """Training is over: detach, and raise where nothing was defended."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def abandon(self) -> None:
        """Training failed: detach only."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.remove()
