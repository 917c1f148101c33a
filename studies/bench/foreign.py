"""Adapters to public attacks from checkouts: each takes our observation, a number of iterations and a seed.

github.com/JonasGeiping/invertinggradients (``inversefed``), .../breaching and github.com/aidotse/LeakPro run their
own loops with the settings of their scripts, in normalised pixels, behind a layer that undoes the normalisation.
Packages are entered without their ``__init__``, which ask for data sets, hydra and much else.
"""

import contextlib
import copy
import importlib
import io
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.types import Observation

MEAN, STD = {1: (0.1307,), 3: (0.4915, 0.4823, 0.4468)}, {1: (0.3081,), 3: (0.2470, 0.2435, 0.2616)}
TEMP = tempfile.gettempdir()
Way = Callable[[Observation, int, int], Tensor]  # update, evaluations, seed -> inputs in [0, 1]


class _Normalised(nn.Module):
    """A network that takes normalised pixels; its parameters are those of the network in it, in their order."""

    def __init__(self, model: nn.Module, channels: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(MEAN[channels])[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD[channels])[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * self.std + self.mean)  # type: ignore[no-any-return]


class _Absent(ModuleType):
    """A module that is not installed, for imports whose names are not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stand:
    """An importer that comes after all others, and makes what some packages miss."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        known = name.partition(".")[0] in ("torchvision", "optuna", "ignite", "seaborn", "dotmap")
        return ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Stand())  # type: ignore[arg-type]


def _enter(checkout: Path, *packages: str) -> None:
    """Make packages of a checkout importable without running their ``__init__``, which ask for data sets and hydra."""
    for name in packages:
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(checkout / name.replace(".", "/"))]


def inversefed(checkout: Path, tv: float) -> Way:
    """Return its ``GradientReconstructor`` with the settings of its scripts: signed, boxed, cosine, step decay."""
    _enter(checkout, "inversefed", "inversefed.nn")
    sys.modules["inversefed.nn"].MetaMonkey = None  # type: ignore[attr-defined]
    theirs = importlib.import_module("inversefed.reconstruction_algorithms")

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        channels = seen.input_shape[0]
        model = _Normalised(copy.deepcopy(seen.model), channels)
        settings = dict(
            signed=True, boxed=True, cost_fn="sim", indices="def", weights="equal", lr=0.1, optim="adam", restarts=1,
            max_iterations=evaluations, total_variation=tv, init="randn", filter="none", lr_decay=True,
            scoring_choice="loss",
        )  # fmt: skip
        torch.manual_seed(seed)
        attack = theirs.GradientReconstructor(model, (model.mean, model.std), settings, seen.num_examples)
        with contextlib.redirect_stdout(io.StringIO()):
            found, _ = attack.reconstruct(list(seen.update.gradient.values()), seen.labels, seen.input_shape)
        return found * model.std + model.mean  # type: ignore[no-any-return]

    return run


class _Settings(dict[str, Any]):
    """A dictionary with attributes, in the place of the configuration files' objects."""

    __getattr__ = dict.__getitem__


def breaching_attacker(checkout: Path, model: nn.Module, iterations: int, tv: float, device: str = "cpu") -> Any:
    """Return breaching's ``invertinggradients`` attack as configured there."""
    _enter(checkout, "breaching", "breaching.attacks", "breaching.cases", "breaching.cases.models")
    theirs = importlib.import_module("breaching.attacks.optimization_based_attack")
    optim = _Settings(
        optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=iterations,
        step_size_decay="step-lr", langevin_noise=0.0, warmup=0, grad_clip=None, callback=10**6,
    )  # fmt: skip
    settings = _Settings(
        type="invertinggradients", attack_type="optimization", init="randn", normalize_gradients=False,
        label_strategy="bias-corrected", text_strategy="run-embedding", token_recovery="from-labels",
        differentiable_augmentations=False, augmentations=_Settings(), optim=optim,
        objective=_Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0),
        restarts=_Settings(num_trials=1, scoring="cosine-similarity"),
        regularization=_Settings(total_variation=_Settings(scale=tv, inner_exp=1, outer_exp=1)),
        impl=_Settings(dtype="float", mixed_precision=False, JIT=None),
    )  # fmt: skip
    setup = {"device": torch.device(device), "dtype": torch.float}
    return theirs.OptimizationBasedAttacker(model, nn.CrossEntropyLoss(), settings, setup)


def breaching(checkout: Path, tv: float) -> Way:
    """Return breaching's attack; batch norm in evaluation mode."""

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        channels = seen.input_shape[0]
        model = _Normalised(copy.deepcopy(seen.model), channels)
        about = SimpleNamespace(shape=seen.input_shape, modality="vision", mean=MEAN[channels], std=STD[channels])
        parameters, buffers = [p.detach() for p in model.parameters()], list(model.buffers())
        payload = [{"parameters": parameters, "buffers": buffers, "metadata": about}]
        metadata = {"num_data_points": seen.num_examples, "labels": seen.labels, "local_hyperparams": None}
        shared = [{"gradients": list(seen.update.gradient.values()), "buffers": None, "metadata": metadata}]
        torch.manual_seed(seed)
        attack = breaching_attacker(checkout, model, evaluations, tv)
        found, _ = attack.reconstruct(payload, shared, server_secrets={})
        return found["data"] * model.std + model.mean  # type: ignore[no-any-return]

    return run


def leakpro(checkout: Path, tv: float) -> Way:
    """Return LeakPro's ``InvertingGradients``; its answer is that of least loss, not of the best SSIM to the truth."""
    parts = ("attacks", "attacks.gia_attacks", "fl_utils", "utils", "metrics")
    _enter(checkout, "leakpro", *(f"leakpro.{part}" for part in parts))
    theirs = importlib.import_module("leakpro.attacks.gia_attacks.invertinggradients")
    theirs.logger.remove() if hasattr(theirs.logger, "remove") else theirs.logger.setLevel("ERROR")
    loop = importlib.import_module("leakpro.attacks.gia_attacks.abstract_gia")
    loop.dataloaders_ssim_ignite = lambda *_: 1.0  # it looks at the truth, and is not asked
    loop.dataloaders_psnr, loop.GIAResults = lambda *_: 1.0, lambda *_, **__: None

    def run(seen: Observation, evaluations: int, seed: int) -> Tensor:
        channels, count = seen.input_shape[0], seen.num_examples or 1
        model = _Normalised(copy.deepcopy(seen.model), channels)
        torch.manual_seed(seed)
        hidden = torch.zeros(count, *seen.input_shape)  # stands for the client's images, which the attack must not see
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(hidden, seen.labels), batch_size=count)
        configs = theirs.InvertingConfig(tv_reg=tv, at_iterations=evaluations)
        with contextlib.chdir(TEMP):
            attack = theirs.InvertingGradients(model, loader, model.mean, model.std, configs=configs)
            attack.prepare_attack()
            attack.client_gradient = [-configs.optimizer.lr * g for g in seen.update.gradient.values()]
            for _ in attack.run_attack():
                pass
        return attack.best_reconstruction.dataset.reconstruction.detach() * model.std + model.mean  # type: ignore[no-any-return]

    return run
