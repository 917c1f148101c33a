"""Lightning: ``Trainer(callbacks=[GuardCallback("representation:share=0.4")])``; the extra ``lightning``."""

from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.protection.protect import CallbackGuard

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingExtraError("The Lightning callback", "lightning") from error


class LightningGuard(CallbackGuard, Callback):  # type: ignore[misc]
    """Defend what ``Trainer.fit`` does to a LightningModule; the same steps as a plain defended loop.

    The guard sits on the LightningModule, for a ``training_step`` that calls ``self(x)``. Where it calls a part, as
    in ``self.net(x)``, name that part: ``module="net"``.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.start(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.abandon()


GuardCallback = LightningGuard
