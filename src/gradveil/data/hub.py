"""Download from the Hugging Face hub, through the optional library ``datasets``."""

from typing import Any

from gradveil.errors import MissingExtraError


def download(repository: str, config: str | None) -> dict[str, Any]:
    """Return the splits ``train`` and ``test`` as pyarrow tables with the images still encoded."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"Downloading {repository}", "hub") from error
    found = datasets.load_dataset(repository, config)
    return {part: found[part].with_format("arrow")[:] for part in ("train", "test")}
