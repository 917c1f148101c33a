"""Kinds of models that verify measures: of the package, and a user's own."""

import torch
from torch import Tensor, nn

import gradveil
from gradveil.data.base import Dataset
from gradveil.modalities.tokens import Tokens
from gradveil.types import Batch


class OwnLstm(nn.Module):
    """Rows of an image one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


class OwnGates(nn.Module):
    """A parameter of its own, a layer norm, and a product of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(64, 16), nn.Linear(64, 16), nn.LayerNorm(16)
        self.scale, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.head(self.norm(self.one(flat).tanh() * self.two(flat).sigmoid()) * self.scale)


class Words(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.long()).mean(1).tanh())


IMAGES = {
    "logistic": "logistic",
    "MLP": "mlp:widths=32/16",
    "LeNet": "lenet:strides=2/1,activation=relu,init=kaiming",
    "small convolutions": "probe:width=6",
    "ResNet": "resnet18:width=4,norm=group",
    "ViT": "vit_tiny:width=24,depth=2,heads=2,patch=4",
    "ViT with LoRA": "vit_tiny:width=24,depth=2,heads=2,patch=4,lora=2",
    "fixed features": "scatter:dims=40",
    "LSTM": OwnLstm,
    "own module": OwnGates,
}
TEXT = {
    "text encoder": "bert_tiny:vocabulary=50,depth=1,width=24,heads=2,length=12",
    "text encoder with LoRA": "bert_tiny:vocabulary=50,depth=1,width=24,heads=2,length=12,lora=2",
    "bag of words": Words,
}
TABLE = {"MLP on a table": "mlp:widths=24"}


def build(kind: str) -> tuple[nn.Module, Batch]:
    """Return a model of a kind, and some examples."""
    torch.manual_seed(0)
    if kind in TEXT:
        tokens, labels = torch.randint(50, (64, 12)), torch.randint(2, (64,))
        spec = TEXT[kind]
        model = (
            gradveil.model(spec, (12,), 2, modality=Tokens(tuple(map(str, range(50)))))
            if isinstance(spec, str)
            else spec()
        )
        return model, Batch(tokens, labels)
    data: Dataset = gradveil.dataset("made_up_patients" if kind in TABLE else "digits")
    spec = TABLE[kind] if kind in TABLE else IMAGES[kind]
    model = gradveil.model(spec, data.input_shape, data.num_classes, modality=data.modality)
    if kind == "fixed features":
        from gradveil.models import fit_to_public

        fit_to_public(model, data.train.batch(slice(0, 200)).inputs)
    return model, data.train.batch(slice(0, 64))
