"""Hugging Face: ``Trainer(callbacks=[GuardCallback("representation:share=0.4")])``; the extra ``transformers``."""

from typing import Any

from torch import Generator

from gradveil.defenses.base import Defense
from gradveil.defenses.guard.passes import Report
from gradveil.errors import MissingExtraError
from gradveil.integrations.local_training import CallbackGuard

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("The Hugging Face callback", "transformers") from error


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """Defend what ``Trainer.train`` does to a model; the same steps as a plain defended loop.

    The examples are the first floating point argument of the model, ``pixel_values`` for images. A Trainer that
    stops with an error does not tell its callbacks: call ``abandon`` then.
    """

    def __init__(
        self,
        defence_or_spec: Defense | str,
        *,
        module: str | None = None,
        rng: Generator | None = None,
        strict: bool = True,
    ) -> None:
        self._guard = CallbackGuard(defence_or_spec, module, rng, strict)

    @property
    def report(self) -> Report:
        """What was defended in the last training."""
        return self._guard.report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the defence."""
        self._guard.start(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach it, and raise where nothing was defended."""
        self._guard.stop()

    def abandon(self) -> None:
        """Take the hooks off after a training that failed."""
        self._guard.abandon()
