"""A run folder made by hand: what an audit would write, with numbers chosen so that every outcome occurs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.threats.setup import AuditConfig

IMAGES = 8
GALLERY = 100
# defence -> accuracy, and (server, attack) -> MSE; the blind guess lies at 0.07
Scene = dict[str, tuple[float, dict[tuple[str, str], float]]]
SCENE: Scene = {
    "none": (0.93, {("oblivious", "newton"): 1e-8, ("oblivious", "dlg"): 2e-4, ("oblivious", "weak"): 0.2}),
    "representation:share=0.4": (
        0.9,
        {("oblivious", "newton"): 0.28, ("oblivious", "dlg"): 0.3, ("drop", "newton"): 2e-8, ("mask", "newton"): 1e-8},
    ),
    "pruning:share=0.8": (0.92, {("oblivious", "newton"): 0.03, ("mask", "newton"): 5e-4}),
    "gaussian:std=0.1": (0.7, {("oblivious", "newton"): 0.2, ("whiten", "newton"): 0.066}),
    "<script>alert(1)</script>": (0.6, {("oblivious", "weak"): 0.25, ("drop", "weak"): 0.25}),
}


def attack_row(defense: str, server: str, attack: str, round_: str, example: int, mse: float) -> Row:
    weights = "start" if round_ == "first" else defense
    return {
        "kind": "attack", "round": round_, "round_number": 1 if round_ == "first" else 5, "weights": weights,
        "defense": defense, "server": server, "attack": attack, "example": example, "index": example, "mse": mse,
        "psnr": -10 * np.log10(mse), "ssim": max(0.0, 1 - 8 * mse), "fft": mse / 3, "label": 1.0,
        "identified": float(mse < 0.02), "gallery": GALLERY, "objective": mse, "converged": mse < 0.1,
    }  # fmt: skip


def write_run(folder: Path, scene: Scene, images: int = IMAGES) -> RunFolder:
    rng = np.random.default_rng(0)
    truth = rng.random((images, 1, 8, 8)).astype(np.float32)
    store = RunFolder.start(folder, AuditConfig(defenses=tuple(scene), images=images))
    floors: list[Row] = [
        {"kind": "floor", "guess": guess, "example": i, "mse": mse * (1 + 0.1 * (i % 3)), "identified": 0.0}
        for guess, mse in (("grey", 0.1), ("mean image", 0.07))
        for i in range(images)
    ]
    store.add("truth", floors, {"truth": truth, "grey": truth * 0 + 0.5, "mean image": truth * 0 + 0.3})
    for defense, (accuracy, _) in scene.items():
        rows: list[Row] = [
            {"kind": "accuracy", "defense": defense, "round": n, "accuracy": accuracy * n / 5, "loss": 1.0}
            for n in range(1, 6)
        ]
        why = [{"kind": "defense", "defense": defense, "server": "drop", "why": "Leaves the tensor out."}]
        store.add(f"train/{defense}", rows + (why if defense != "none" else []))
    promised: list[Row] = [
        {"kind": "certificate", "defense": "representation:share=0.4", "layer": "fc", "certificate": kind, "mse": mse,
         "sound": kind == "global", "says": "At least this.", "assumptions": ["The sky is blue."]}
        for kind, mse in (("local", 0.013), ("global", 2e-4))
    ]  # fmt: skip
    promised.append(
        {"kind": "meter", "defense": "none", "server": "plain", "mse": 6e-9, "says": "", "assumptions": ["Gaussian."]}
    )
    store.add("promise", promised)
    for round_ in ("first", "last"):
        for defense, (_, attacks) in scene.items():
            for (server, attack), mse in attacks.items():
                spread = mse * np.exp(0.5 * rng.standard_normal(images))
                rows = [attack_row(defense, server, attack, round_, i, float(m)) for i, m in enumerate(spread)]
                found = np.clip(truth + np.sqrt(mse) * rng.standard_normal(truth.shape), 0, 1).astype(np.float32)
                store.add(f"attack/{round_}/{defense}/{server}/{attack}", rows, {"found": found})
                if round_ == "last" and defense != "none" and server == "oblivious":  # its control, at the same weights
                    none = SCENE["none"][1][("oblivious", attack)]
                    extra = [
                        attack_row("none", "oblivious", attack, round_, i, none) | {"weights": defense}
                        for i in range(images)
                    ]
                    store.add(f"control/{round_}/{defense}/{attack}", extra, {"found": truth})
    return store


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "run"
    write_run(folder, SCENE).close()
    return folder
