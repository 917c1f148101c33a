"""What benchmarks keep: on which machine they ran, and their rows."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> dict[str, Any]:
    """Return the device, the cores, the threads and the version of torch."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}


def keep(path: Path | None, found: object) -> None:
    """Write what was found, where a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row and return it."""
    print("  ", "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return row
