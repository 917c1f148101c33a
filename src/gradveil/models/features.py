"""A frozen backbone under a small head: the head alone is trained, and each record's features are worked out once.

The backbone's weights are the user's own or an installed package's; nothing is downloaded. They are no part of the
model's weights: a site brings its own, and a number in the state dict tells another backbone from the run's.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Generator, Tensor, nn

from gradveil.errors import GradveilError, ModelError, SpecError
from gradveil.files import cache_folder, read_safetensors, wrap_os_errors, write_atomically
from gradveil.imports import calling
from gradveil.modalities import IMAGE, Modality
from gradveil.models.backbones import Backbone, find_backbone
from gradveil.models.base import MODELS, Builder, Shape
from gradveil.models.parts import Rank, Width, initialise, normalizer
from gradveil.models.scatter import Basis
from gradveil.ranges import Range

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
        hooks = [net.get_submodule(name).register_forward_hook(_noting(seen, name)) for name in self.layers]
        try:
            with calling(f"The backbone {backbone.name} cannot be run on inputs of shape {tuple(x.shape)}", ModelError):
                out, mask = backbone(net, x)
        finally:
            for hook in hooks:
                hook.remove()
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


def _noting(seen: dict[str, Tensor], name: str) -> Any:
    def note(module: nn.Module, inputs: Any, out: Any) -> None:
        seen[name] = _tensor(out)  # of a module that runs several times the last

    return note


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

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        return self.build_for(IMAGE, input_shape, num_classes, rng)

    def build_for(self, modality: Modality, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
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
