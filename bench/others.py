"""Attacks of other projects, run from a checkout: theirs is the code, ours only what calls it."""

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[int], float]  # iterations -> seconds


class _Settings(dict[str, Any]):
    """A dictionary with attributes, in the place of the configuration files' objects."""

    __getattr__ = dict.__getitem__


def breaching(checkout: Path, model: nn.Module, gradient: list[Tensor], labels: Tensor, shape: tuple[int, ...]) -> Run:
    """Return its ``invertinggradients`` attack on one update, with the settings of its own configuration.

    Its packages are entered without their ``__init__``, which ask for hydra and data sets; the attack needs torch only.
    """
    for name in ("breaching", "breaching.attacks", "breaching.cases", "breaching.cases.models"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(checkout / name.replace(".", "/"))]
    attacks = importlib.import_module("breaching.attacks.optimization_based_attack")
    settings = _Settings(
        type="invertinggradients", attack_type="optimization", init="randn", normalize_gradients=False,
        label_strategy="bias-corrected", text_strategy="run-embedding", token_recovery="from-labels",
        differentiable_augmentations=False, augmentations=_Settings(),
        objective=_Settings(type="cosine-similarity", scale=1.0, task_regularization=0.0),
        restarts=_Settings(num_trials=1, scoring="cosine-similarity"),
        optim=_Settings(
            optimizer="adam", signed="hard", step_size=0.1, boxed=True, max_iterations=24_000,
            step_size_decay="step-lr", langevin_noise=0.0, warmup=0, grad_clip=None, callback=1000,
        ),
        regularization=_Settings(total_variation=_Settings(scale=0.2, inner_exp=1, outer_exp=1)),
        impl=_Settings(dtype="float", mixed_precision=False, JIT=None),
    )  # fmt: skip
    device = labels.device
    # Neither public nor sent statistics: it then runs batch norm in train mode, as the client does.
    payload = [
        {
            "parameters": [p.detach() for p in model.parameters()],
            "buffers": None,
            "metadata": SimpleNamespace(shape=shape, modality="vision", mean=(0.5,) * shape[0], std=(0.25,) * shape[0]),
        }
    ]
    metadata = {"num_data_points": len(labels), "labels": labels, "local_hyperparams": None}

    def run(iterations: int) -> float:
        settings["optim"]["max_iterations"] = iterations
        shared = [{"gradients": list(gradient), "buffers": None, "metadata": metadata}]
        setup = {"device": device, "dtype": torch.float}
        attacker = attacks.OptimizationBasedAttacker(model, nn.CrossEntropyLoss(), settings, setup)
        start = time.perf_counter()
        attacker.reconstruct(payload, shared, server_secrets={})
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return run
