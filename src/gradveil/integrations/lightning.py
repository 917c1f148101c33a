"""Lightning: ``Trainer(callbacks=[GuardCallback("representation:share=0.4")])``; the extra ``lightning``."""

from typing import Any

from torch import Generator

from gradveil.defenses.base import Defense
from gradveil.defenses.guard.passes import Report
from gradveil.errors import MissingExtraError
from gradveil.integrations.local_training import CallbackGuard

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtraError("The Lightning callback", "lightning") from error


class GuardCallback(Callback):  # type: ignore[misc]
    """Defend what ``Trainer.fit`` does to a LightningModule; the same steps as a plain defended loop.

    The guard sits on the LightningModule, for a ``training_step`` that calls ``self(x)``. Where it calls a part, as
    in ``self.net(x)``, name that part: ``module="net"``.
    """

    def __init__(
        self,
        defence_or_spec: Defense | str,
        *,
        module: str | None = None,
        rng: Generator | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self._guard = CallbackGuard(defence_or_spec, module, rng, strict)

    @property
    def report(self) -> Report:
        """What was defended in the last fit."""
        return self._guard.report

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the defence."""
        self._guard.start(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach it, and raise where nothing was defended."""
        self._guard.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach it."""
        self._guard.abandon()
