"""What a server tells its clients of a round's public coordinates: the clip, and where they are not plain the map."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ConfigRecord, Message
from torch import nn

from gradveil.defenses.compose import Compose
from gradveil.defenses.veil import Veil
from gradveil.errors import DefenseError
from gradveil.integrations.flower.values import asked
from gradveil.protection.defense import Defense
from gradveil.protection.records.coordinates import check_clip
from gradveil.tree import parameters

CLIP, MAP = "public-clip", "public-map"  # in the config of a training message


def veil_in(defense: Defense) -> Veil | None:
    """Return the part of a defence that clips records and adds noise; None where there is none."""
    parts = defense.parts if isinstance(defense, Compose) else (defense,)
    return next((part for part in parts if isinstance(part, Veil)), None)


def said_of(defense: Defense, model: nn.Module) -> dict[str, Any]:
    """Return what clients are told of a defence for this round; nothing where its settings say all."""
    veil = veil_in(defense)
    if veil is None or (veil.shape == "iso" and veil.quantile is None):
        return {}
    now = veil.measured
    if now.coordinates is None:
        return {CLIP: now.clip}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "map.safetensors"
        now.save(model, str(path))
        return {CLIP: now.clip, MAP: path.read_bytes()}


def hear(defense: Defense, message: Message, model: nn.Module) -> Defense:
    """Return the client's defence with what the server said; only what follows from public data is taken from it."""
    veil, said = veil_in(defense), next(iter(message.content.config_records.values()), ConfigRecord())
    if veil is None or (veil.shape == "iso" and veil.quantile is None) or CLIP not in said:
        return defense
    clip = check_clip(asked(message, CLIP, 1.0), "that the server sent")
    told = replace(veil, quantile=None, clip=clip if veil.clip is None else veil.clip)
    if veil.shape != "iso":
        content, size = said.get(MAP, b""), sum(p.numel() for p in parameters(model).values())
        most = 8 * veil.rank * (size + 1) + 2**16 + 500 * len(parameters(model))
        if not isinstance(content, bytes) or len(content) > most:
            raise DefenseError(f"the server's {MAP} is no file of at most {most:,} bytes (rank {veil.rank}).")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "map.safetensors"
            path.write_bytes(content)
            told = replace(told, shape=str(path)).for_round(model, None)
    if not isinstance(defense, Compose):
        return told
    return replace(defense, parts=tuple(told if part is veil else part for part in defense.parts))
