"""A training run from its settings to its folder: what ``gradveil train`` does."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradveil.errors import DataError, MissingExtraError, SpecError

if TYPE_CHECKING:
    from gradveil.federated.run import Row, RunFolder


# may differ when a run is continued: they change where and how long, not what
_FREE = {"rounds", "data", "engine", "device", "early_stop", "save_every"}


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run, as config.toml holds them."""

    dataset: str = "digits"
    data: str | None = None
    model: str = "lenet:activation=relu,init=kaiming"
    partition: str = "iid:devices=10"
    defense: str = "none"
    rounds: int = 20
    devices: int = 10
    epochs: int = 1
    batch_size: int | None = 8
    lr: float = 0.2
    schedule: str = "constant"
    sampling: Literal["without", "with"] = "without"
    weighting: Literal["samples", "paper", "uniform"] = "samples"
    server: str = "fedavg"
    weight_decay: float = 0.0
    proximal: float = 0.0
    faults: str = ""
    engine: str = "auto"
    device: str = "auto"
    early_stop: int | None = None
    evaluate_every: int = 1
    save_every: int = 1
    seed: int = 0


def train(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    progress: "Callable[[Row], None]" = lambda row: None,
) -> dict[str, Any]:
    """Run the rounds and return a summary; the folder holds settings, versions, rounds and weights."""
    import torch

    from gradveil.data import load
    from gradveil.data.partition import partition
    from gradveil.defenses.base import build as build_defense
    from gradveil.federated.engines import World
    from gradveil.federated.run import RunFolder, run
    from gradveil.federated.server import Faults
    from gradveil.federated.simulate import Training, choose, simulate
    from gradveil.models import build as build_model
    from gradveil.seeds import Seeds

    faults = Faults.parse(config.faults) if config.faults else None
    defense = build_defense(config.defense)
    names = {f.name for f in fields(Training)}
    training = Training(**{key: value for key, value in asdict(config).items() if key in names})
    dataset = load(config.dataset, config.data)
    seeds = Seeds(config.seed)
    clients = partition(dataset.train.labels, config.partition, seeds("partition"))
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecError("--device cuda: no CUDA device was found. Use --device cpu.")
    model = build_model(config.model, dataset.input_shape, dataset.num_classes, config.seed).to(device)
    folder = RunFolder(out)
    prepare(folder, config, resume)
    start = folder.resume() if resume else None
    first = start.round if start else 0
    engine = config.engine
    if engine == "auto":
        engine = choose(World(model, dataset.train, defense, training.local), (config.rounds - first) * config.devices)
    rounds = simulate(model, dataset, clients, training, defense, seeds, engine=engine, faults=faults, resume=start)
    driven = run(
        rounds,
        dataset.test,
        folder,
        last=config.rounds,
        patience=config.early_stop,
        evaluate_every=config.evaluate_every,
        save_every=config.save_every,
        watch=_board(out) if tensorboard else lambda row: None,
    )
    for row in driven:
        progress(row)
    return _summary(folder, config, engine)


def prepare(folder: "RunFolder", config: TrainConfig, resume: bool) -> None:
    """Write settings and versions, or check that the folder holds this run."""
    from gradveil.experiments.run_folder import dumps, to_toml, versions, write_atomically

    path = folder.path / "config.toml"
    if path.exists():
        if not resume:
            raise DataError(f"{folder.path} already holds a run. Continue it with --resume, or choose another --out.")
        _check_same(folder.path, tomllib.loads(path.read_text(encoding="utf-8")), asdict(config))
    elif folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise DataError(f"{folder.path} exists and is not an empty folder. Choose another --out.")
    folder.path.mkdir(parents=True, exist_ok=True)
    write_atomically(folder.path / "versions.toml", dumps(versions()).encode())
    write_atomically(path, to_toml(config).encode())


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    free = _FREE if not str(now["schedule"]).startswith("cosine") else _FREE - {"rounds"}
    changed = [key for key in now if key not in free and before.get(key) != now[key]]
    if changed:
        found = "; ".join(f"{key} was {before.get(key)!r}, now {now[key]!r}" for key in changed)
        raise DataError(f"{folder} holds a run with other settings: {found}. Choose another --out.")


def _summary(folder: "RunFolder", config: TrainConfig, engine: str) -> dict[str, Any]:
    rows = folder.rows()
    measured = [row for row in rows if row.get("accuracy") is not None]
    best = max(measured, key=lambda row: row["accuracy"], default={})
    last = measured[-1] if measured else {}
    rejected: dict[str, int] = {}
    for row in rows:
        for reason, count in row["rejected"].items():
            rejected[reason] = rejected.get(reason, 0) + count
    return {
        "folder": str(folder.path),
        "rounds": rows[-1]["round"] if rows else 0,
        "stopped_early": bool(rows) and rows[-1]["round"] < config.rounds,
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "best_accuracy": best.get("accuracy"),
        "best_round": best.get("round"),
        "rejected": rejected,
        "engine": engine,
        "defense": config.defense,
        "seconds": round(sum(row["seconds"] for row in rows), 3),
    }


def _board(out: Path) -> "Callable[[Row], None]":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("TensorBoard", "tensorboard") from error
    writer = SummaryWriter(str(out / "tensorboard"))

    def write(row: "Row") -> None:
        for name in ("accuracy", "loss", "lr"):
            if row.get(name) is not None:
                writer.add_scalar(name, row[name], row["round"])
        writer.flush()

    return write
