"""A text classifier under a promise: frozen features of words, a small head, all notes of a site in one step.

Six sites hold short notes, made up here, and learn which ones speak of pain. The words of a note are hashed into fixed
directions, so that only the head is trained and sent. ``python examples/text_classifier.py --out runs/text``
"""

import argparse
import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import gradveil
from gradveil.data.base import Split
from gradveil.integrations.monitor import MonitorSettings, NodeReport, RunMonitor

WIDTH = 64
PAIN = ("strong pain in the", "sharp ache of the", "it hurts around the", "sore and tender")
CALM = ("no complaints of the", "well healed", "moves freely, the", "without findings:")
PLACES = ("left knee", "right hip", "lower back", "shoulder", "neck", "wrist")
MORE = ("since Monday", "after sports", "in the morning", "as last year", "on both sides", "at rest")


def note(rng: random.Random) -> tuple[str, int]:
    """Return a note and whether it speaks of pain."""
    label = rng.randrange(2)
    return f"{rng.choice((CALM, PAIN)[label])} {rng.choice(PLACES)} {rng.choice(MORE)}", label


def features(text: str) -> np.ndarray:
    """Return the mean of a fixed direction for each word and each pair of words: nothing of it is learned."""
    words = text.split()
    found = np.zeros(WIDTH, np.float32)
    for one in [*words, *(f"{a} {b}" for a, b in pairwise(words))]:
        seed = int.from_bytes(hashlib.sha256(one.encode()).digest()[:4], "big")
        found += np.random.default_rng(seed).normal(size=WIDTH).astype(np.float32)
    return found / np.linalg.norm(found)


def split(count: int, seed: int) -> Split:
    """Return so many notes as features and labels."""
    rng = random.Random(seed)
    texts, labels = zip(*(note(rng) for _ in range(count)), strict=True)
    return Split(np.stack([features(text) for text in texts]), torch.tensor(labels), scale=1.0)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train, say what the promise costs, and return the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/text")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args(arguments)
    train, test = split(600, 1), split(300, 2)
    data = gradveil.Dataset("notes", train, test, ("calm", "pain"))
    clients = gradveil.partition(train.labels, "iid:devices=6,per_device=100")
    settings = gradveil.Training(rounds=given.rounds, clients=6, batch_size=None, lr=3.0)
    scores = {}
    for defense in ("none", "veil:epsilon=3,clip=0.5,tier=aggregate"):
        model = gradveil.model("logistic:init=zeros", (WIDTH,), 2)
        monitor = None if defense == "none" else RunMonitor(given.out, MonitorSettings("simulated", defense), say=print)
        for round_ in gradveil.simulate(model, data, clients, settings, defense, seeds=0):
            scores[defense] = gradveil.evaluate(round_.model, test).accuracy
            if monitor is not None:
                for client in round_.clients:
                    spent = round_.accounts[client].spent
                    monitor.add(
                        round_.number, NodeReport(str(client), True, examples=100, defense=defense, spent=spent)
                    )
                monitor.end(round_.number, accuracy=scores[defense])
        if monitor is not None:
            monitor.close()
    most = float(torch.bincount(test.labels).max()) / len(test)
    print(f"always the most frequent class: {most:.3f}; " + "; ".join(f"{k}: {v:.3f}" for k, v in scores.items()))
    return gradveil.write_report(given.out)


if __name__ == "__main__":
    print(main())
