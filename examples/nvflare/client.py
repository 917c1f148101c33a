"""A client of NVFlare: ordinary training code, with the guard in one line."""

import argparse

import nvflare.client as flare
import torch
from net import Net
from nvflare.client import FLModel, ParamsType
from torch import nn

import gradveil


def examples(site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this site's share of the digits."""
    digits = gradveil.dataset("digits")
    share = gradveil.partition(digits.train.labels, "iid:devices=2,per_device=64")[int(site.split("-")[1]) - 1]
    batch = digits.train.batch(share)
    return batch.inputs, batch.labels


def train(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, lr: float) -> None:
    """Train one epoch in batches of 16."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in zip(inputs.split(16), labels.split(16), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    """Answer every round with a weight difference."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--defense", default="representation:share=0.4")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    flare.init()
    inputs, labels = examples(flare.get_site_name())
    model = Net()
    while flare.is_running():
        received = flare.receive()
        before = {name: torch.as_tensor(value) for name, value in received.params.items()}
        model.load_state_dict(before)
        with gradveil.protect(model, args.defense) as guard:
            train(model, inputs, labels, args.lr)
        change = {name: value - before[name] for name, value in model.state_dict().items()}
        flare.send(
            FLModel(
                params_type=ParamsType.DIFF,
                params=change,
                meta={"NUM_STEPS_CURRENT_ROUND": guard.report.steps, "defended-steps": guard.report.steps},
            )
        )


if __name__ == "__main__":
    main()
