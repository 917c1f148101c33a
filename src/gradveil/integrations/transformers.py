"""Hugging Face: ``Trainer(callbacks=[GuardCallback("representation:share=0.4")])``; the extra ``transformers``."""

from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.protection.protect import CallbackGuard

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("The Hugging Face callback", "transformers") from error


class TransformersGuard(CallbackGuard, TrainerCallback):  # type: ignore[misc]
    """Defend what ``Trainer.train`` does to a model; the same steps as a plain defended loop.

    The examples are the first floating point argument of the model, ``pixel_values`` for images. A Trainer that
    stops with an error does not tell its callbacks: call ``abandon`` then.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()


GuardCallback = TransformersGuard
