"""Configuration files of Flower, Opacus and NVFlare as plain settings."""

import io
import json
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

from gradveil.errors import CertificateError
from gradveil.files import read_whole

_LARGEST = 2**26  # bytes of a file of text
_CHECKPOINT = 2**30  # bytes of a checkpoint, and of what it unpacks to


def read(path: Path) -> Any:
    """Return what a file holds, as it is nested."""
    try:
        if path.suffix in (".pt", ".pth"):
            return _history(read_whole(path, _CHECKPOINT))
        text = read_whole(path, _LARGEST).decode()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except Exception as error:
        raise CertificateError(
            f"{path} cannot be read as TOML (.toml), JSON or an Opacus checkpoint (.pt): "
            f"{' '.join(str(error).split())[:150]}"
        ) from error


def _history(content: bytes) -> dict[str, Any]:
    """Return what an Opacus checkpoint has counted, as plain numbers; nothing else of it is looked at."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):  # CVE-2025-32434
        raise ValueError(f"torch {torch.__version__} may run code of a file: install 2.6 or newer, or give JSON")
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if (size := sum(part.file_size for part in file.infolist())) > _CHECKPOINT:
            raise ValueError(f"it unpacks to {size:,} bytes, and the most is {_CHECKPOINT:,}")
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)  # noqa: TID251 - no code in it
    counted = saved.get("privacy_accountant_state_dict", saved)["history"]
    if not all(isinstance(n, int | float) for one in counted for n in one):
        raise ValueError("its history is no list of numbers")
    return {"history": [tuple(one) for one in counted]}


def flat_settings(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of all levels by their last name, in one spelling."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from flat_settings(value)
            else:
                yield str(key).replace("-", "_").lower(), value
                yield from flat_settings(value)
    elif isinstance(values, list):
        for value in values:
            yield from flat_settings(value)


def filters(values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the class and the settings of each filter of an NVFlare configuration."""
    if isinstance(values, Mapping):
        for kind in ("task_result_filters", "task_data_filters"):
            for entry in values.get(kind) or ():
                for one in entry.get("filters", ()):
                    yield str(one.get("path") or one.get("name")).rpartition(".")[2], dict(one.get("args") or {})
        for key, value in values.items():
            if key not in ("task_result_filters", "task_data_filters"):
                yield from filters(value)
    elif isinstance(values, list):
        for value in values:
            yield from filters(value)


def number(flat: Mapping[str, Any], *names: str) -> float | None:
    """Return the first of these settings that there is."""
    for name in names:
        value = flat.get(name)
        if value is None or isinstance(value, bool):
            continue
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise CertificateError(f"{name} = {value!r} is not a number.") from None
    return None


def above_zero(flat: Mapping[str, Any], *names: str) -> float:
    """Return a setting that must be there and above 0."""
    found, name = number(flat, *names), names[0].replace("_", "-")
    if found is None:
        raise CertificateError(f"{name} is not in the file; it may be set in the code. Add it to say what is bought.")
    if not 0 < found < inf:
        raise CertificateError(f"{name} = {found:g}: it must be above 0.")
    return found
