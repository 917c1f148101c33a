"""Small files of every kind, made on the spot."""

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def pixels(n: int, channels: int, side: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, channels, side, side)).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)).save(out, "PNG")
    return out.getvalue()


def write_parquet(
    path: Path, images: np.ndarray, labels: Any, column: str = "image", names: tuple[str, ...] | None = None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": png(image), "path": None} for image in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(rows, kind), "label": pa.array(labels)})
    if names:
        features = {column: {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(names)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


def write_idx(folder: Path, train: np.ndarray, test: np.ndarray, zipped: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, images in (("train", train), ("t10k", test)):
        labels = (np.arange(len(images)) % 10).astype(np.uint8)
        for stem, values in ((f"{part}-images-idx3-ubyte", images[:, 0]), (f"{part}-labels-idx1-ubyte", labels)):
            raw = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()
            path = folder / (f"{stem}.gz" if zipped else stem)
            path.write_bytes(gzip.compress(raw) if zipped else raw)


def write_cifar(folder: Path, images: np.ndarray, kind: str) -> None:
    """Six batches of equal size; the last is the test batch."""
    folder.mkdir(parents=True, exist_ok=True)
    stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for stem, part in zip(stems, np.array_split(images, 6), strict=True):
        labels = [i % 10 for i in range(len(part))]
        flat = part.reshape(len(part), -1)
        if kind == "python":
            (folder / stem).write_bytes(pickle.dumps({b"data": flat, b"labels": labels}, protocol=2))
        else:
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], flat], axis=1)
            (folder / f"{stem}.bin").write_bytes(rows.tobytes())
