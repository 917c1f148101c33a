"""What the playground offers, and the stage for it: a data set, a network, and one client's private example."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gradveil.attacks.base import default_panel
from gradveil.data.base import Dataset
from gradveil.data.images import decode_images, levels_of
from gradveil.data.text import words_of
from gradveil.errors import DataError, SpecError
from gradveil.federated.settings import Local
from gradveil.modalities.tokens import PADDING, UNKNOWN, Tokens
from gradveil.protection.defense import Defense
from gradveil.protection.defense import build as build_defense
from gradveil.seeds import Seeds
from gradveil.threats.setup import fitting_model, for_client, load_dataset
from gradveil.threats.trial import Public
from gradveil.types import Batch, Update

DATASETS = {
    "digits": "Pictures: handwritten digits",
    "breast_cancer": "Rows of a table: breast masses",
    "made_up_patients": "Rows of a table: made-up patients",
    "manual": "Sentences: Python's manual",
}
MODELS = {  # by modality: spec -> name; the first is what is shown first
    "image": {
        "lenet:strides=2/1": "LeNet, sigmoid",
        "lenet:strides=2/1,activation=relu,init=kaiming": "LeNet, ReLU",
        "mlp": "Perceptron",
    },
    "table": {"mlp": "Perceptron"},
    "tokens": {"gpt_tiny:depth=2,width=192,heads=4": "A small GPT"},
}


@dataclass(frozen=True)
class Dial:
    """A defence that can be turned up."""

    name: str
    setting: str  # the setting that is turned
    values: tuple[str, ...]  # from weak to strong

    def spec(self, strength: int, defense: str) -> str:
        if not 1 <= strength <= STRENGTHS:
            raise SpecError(f"A strength of {strength} is not on the dial. Choose 1 to {STRENGTHS}.")
        return f"{defense}:{self.setting}={self.values[strength - 1]}"


STRENGTHS = 6
DIALS = {
    "gaussian": Dial("Gaussian noise", "scale", ("0.001", "0.003", "0.01", "0.03", "0.1", "0.3")),
    "veil": Dial("veil: clipping and accounted noise", "z", ("0.01", "0.03", "0.1", "0.3", "1", "3")),
    "representation": Dial("Representation pruning", "share", ("0.1", "0.2", "0.4", "0.6", "0.8", "0.9")),
    "pruning": Dial("Gradient pruning", "share", ("0.5", "0.7", "0.8", "0.9", "0.95", "0.99")),
    "quantise": Dial("Rounding to few bits", "bits", ("8", "6", "5", "4", "3", "2")),
}


def spec_of(defense: str, strength: int) -> str:
    """Return the spec of a defence of the dials, or ``none``."""
    return "none" if defense == "none" else DIALS[defense].spec(strength, defense)


@dataclass(frozen=True)
class PlayStage:
    """Where a client trains one step on one example, and servers attack what it sends."""

    dataset: Dataset
    model: nn.Module  # untrained: the weights of a first round
    public: Public
    loss: str
    attack: str  # of servers that have no better one

    @property
    def classes(self) -> int:
        return self.dataset.outputs(self.loss)

    @property
    def local(self) -> Local:
        """How the client trains: one step on all that it has."""
        return Local(batch_size=None, loss=self.loss)

    def defense(self, spec: str) -> Defense:
        """Return a defence as the client runs it that received this model."""
        return for_client(build_defense(spec), self.model, self.public.batch, self.loss)

    def chosen(self, index: int) -> Batch:
        """Return an example of the data set by its number."""
        if not 0 <= index < len(self.dataset.train):
            raise DataError(f"There is no example {index}. Choose 0 to {len(self.dataset.train) - 1}.")
        return self.dataset.train.batch([index])

    def uploaded(self, path: str | Path, label: int) -> Batch:
        """Return a picture from a file, scaled to the size of the data set's, as an example of a class."""
        shape = self.dataset.input_shape
        if self.dataset.modality.spec_name != "image" or shape[-1] != shape[-2]:
            raise DataError(f"Pictures cannot be uploaded for {self.dataset.name}: its examples are of another shape.")
        try:
            picture = [Path(path).read_bytes()]
            pixels = decode_images(picture, shape[-1], shape[0] == 1, levels_of(picture))
        except DataError as error:
            raise DataError(f"This file cannot be used as a picture. {error}") from error
        return Batch(torch.from_numpy(pixels).float() / 255, torch.tensor([label]))

    def typed(self, text: str) -> Batch:
        """Return a sentence as an example, whose targets are the next words; words that are not known stay so."""
        kind = self.dataset.modality
        if not isinstance(kind, Tokens):
            raise DataError(f"Sentences cannot be typed for {self.dataset.name}: its examples are {kind.many}.")
        number = {word: i for i, word in enumerate(kind.vocabulary)}
        ids = [number.get(word, UNKNOWN) for word in words_of(text)]
        (length,) = self.dataset.input_shape
        if not 2 <= len(ids) <= length + 1:
            raise DataError(f"The sentence has {len(ids)} words and signs. Type 2 to {length + 1}.")
        if all(i == UNKNOWN for i in ids):
            raise DataError("The vocabulary of Python's manual has none of these words. Type others, in English.")
        row = np.array([*ids, *[PADDING] * (length + 1 - len(ids))])[None]
        return Batch(torch.from_numpy(row[:, :-1].astype(np.float32)), torch.from_numpy(row[:, 1:].copy()))


@lru_cache(maxsize=8)
def stage(dataset: str, model: str = "", data: str | None = None) -> PlayStage:
    """Build a stage; without a model, the first that is offered for this kind of examples."""
    found = load_dataset(dataset, data)
    kind, loss = found.modality, found.fitting_loss("cross_entropy")
    if found.train.labels.is_floating_point() and loss == "cross_entropy":
        loss = "mse"
    network = fitting_model(model or next(iter(MODELS[kind.spec_name])), found, loss, 0)
    public = Public.draw(found, Seeds(0)("public"), rank=None if isinstance(kind, Tokens) else 256)
    return PlayStage(found, network, public, loss, default_panel(network, Update({}), kind)[0])
