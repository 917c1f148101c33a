"""Any defence around training that knows nothing of it: a function, by one line, or a framework's, by a callback."""

import functools
from collections.abc import Callable
from fnmatch import fnmatch
from typing import ParamSpec, TypeVar, Unpack

from torch import Generator, Tensor, nn

from gradveil.errors import DefenseError
from gradveil.privacy.accountant import Account
from gradveil.protection.defense import Defense, build
from gradveil.protection.passes import Report
from gradveil.protection.protect import Guard, RecordSettings, protect
from gradveil.registry import describe

P = ParamSpec("P")
R = TypeVar("R")

BUFFERS = ("*running_mean", "*running_var", "*num_batches_tracked")  # state that no gradient step makes


def defended(
    defense: str | Defense, *, lr: float = 1.0, simulated: Generator | None = None, **settings: Unpack[RecordSettings]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Put a defence around a training function: ``@defended("representation:share=0.4")``.

    The function's first ``nn.Module`` argument is the model. Its local steps are defended while the function runs,
    and the change of its weights after that, so what is then sent is the defended update. Raises ``DefenseError``
    where the function trained and nothing was defended.

    Args:
        defense: a spec or a defence.
        lr: of the local steps; for defences of the update, which act on (W_before - W_after) / lr.
        simulated: a generator for simulations and tests; None: secret noise, as ``protect`` draws it.
        settings: of a defence of records, as ``protect`` takes them.
    """

    def decorate(train: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(train)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            model = _model(train.__name__, [*args, *kwargs.values()])
            before = {name: value.detach().clone() for name, value in model.state_dict().items()}
            with protect(model, defense, simulated=simulated, **settings) as guard:
                try:
                    result = train(*args, **kwargs)
                finally:
                    keep_account(guard, settings)
                after = guard.update(before, model.state_dict(), lr=lr)
            guard.check()
            model.load_state_dict(after)
            return result

        return run

    return decorate


def is_trained(name: str, value: Tensor) -> bool:
    """Return whether a tensor of a state dict is a weight, not a counter or a running statistic."""
    return value.is_floating_point() and not any(fnmatch(name, pattern) for pattern in BUFFERS)


def _model(function: str, values: list[object]) -> nn.Module:
    for value in values:
        if isinstance(value, nn.Module):
            return value
    raise DefenseError(f"{function}() was called without an nn.Module, so there is no model to defend. Pass it in.")


class CallbackGuard:
    """Guards a model, or a part of it, from ``start`` to ``stop``; ``report`` says what was defended.

    The base of a framework's callback, which says when that is. ``module`` names the part that is called, where it is
    not the model itself.
    """

    def __init__(
        self,
        defence_or_spec: Defense | str,
        *,
        module: str | None = None,
        simulated: Generator | None = None,
        strict: bool = True,
        **settings: Unpack[RecordSettings],
    ) -> None:
        super().__init__()
        self.defense = build(defence_or_spec)
        if "update" in self.defense.acts_on:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and a callback does not see what is sent. Use "
                f"gradveil.protect and guard.update(before, after) where the weights are sent."
            )
        self._module, self._simulated, self._strict, self._settings = module, simulated, strict, settings
        self._guard: Guard | None = None
        self.report = Report()

    def start(self, model: nn.Module) -> None:
        part = model.get_submodule(self._module) if self._module else model
        self._guard = protect(part, self.defense, simulated=self._simulated, strict=self._strict, **self._settings)
        self.report = self._guard.report

    def stop(self) -> None:
        """Training is over: detach, and raise where nothing was defended."""
        if (guard := self._released()) is not None:
            guard.close()

    def abandon(self) -> None:
        """Training failed: detach only."""
        if (guard := self._released()) is not None:
            guard.remove()

    def _released(self) -> Guard | None:
        guard, self._guard = self._guard, None
        if guard is not None:
            keep_account(guard, self._settings)
        return guard

    @property
    def account(self) -> Account | None:
        """What a defence of records has spent so far; None where it has no account yet, or promises nothing."""
        if self._guard is not None:
            keep_account(self._guard, self._settings)
        return self._settings.get("account")


def keep_account(guard: Guard, settings: RecordSettings) -> None:
    """Go on with what a guard has spent, in the next training of the same client."""
    if "records" in guard.defense.acts_on:
        settings["account"] = guard.account
