"""Where a defence gets its turn when weights are loaded, and when they are read to be sent."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from gradveil.guard.hooks import ForwardHooks


@dataclass(eq=False)
class BeforeLoading:
    """Before ``load_state_dict`` writes to a part's weights."""

    interceptor: ForwardHooks

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Weights that a round ends with must be accounted for."""
        self.interceptor.traces.tie()
        self.interceptor.check_weights(self.interceptor.traces.of(module))
        if self.interceptor.releases is not None:
            self.interceptor.releases.before_loading(module)


@dataclass(eq=False)
class AfterLoading:
    """After ``load_state_dict`` wrote to a part's weights."""

    interceptor: ForwardHooks

    def __call__(self, module: nn.Module, _: Any) -> None:
        """A round begins with these weights."""
        self.interceptor.traces.load(module)
        if self.interceptor.releases is not None:
            self.interceptor.releases.loaded(module)


@dataclass(eq=False)
class BeforeSaving:
    """Before the whole model's ``state_dict()`` is read, under a defence of records."""

    interceptor: ForwardHooks

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """What may be sent from here must be accounted for."""
        interceptor = self.interceptor
        if interceptor.releases is None or interceptor.releases.carried.looking or interceptor.stepping:
            return
        interceptor.traces.tie()
        interceptor.check_weights(interceptor.traces.parts)
        interceptor.releases.check_carried()
