"""Simulate federated averaging with veil, keep a run folder, and draw it.

python examples/simulate_with_veil.py --out runs/simulated
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import gradveil
from gradveil.integrations.monitor import MonitorSettings, NodeReport, RunMonitor


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train ten clients of a round for some rounds; return the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/simulated")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args(arguments)
    digits = gradveil.dataset("digits")
    model = gradveil.model("logistic", digits.input_shape, digits.num_classes)
    clients = gradveil.partition(digits.train.labels, "iid:devices=20,per_device=60")
    training = gradveil.Training(rounds=given.rounds, clients=10, batch_size=None, lr=2.0)
    defense = "veil:promise=reconstruction,clip=0.5,tier=aggregate"
    monitor = RunMonitor(given.out, MonitorSettings("simulated", defense), say=print)
    for round_ in gradveil.simulate(model, digits, clients, training, defense, seeds=0):
        for client in round_.clients:
            spent = round_.accounts[client].spent
            monitor.add(round_.number, NodeReport(str(client), True, examples=60, defense=defense, spent=spent))
        monitor.end(round_.number, accuracy=gradveil.evaluate(round_.model, digits.test).accuracy)
    monitor.close()
    return gradveil.write_report(given.out)


if __name__ == "__main__":
    print(main())
