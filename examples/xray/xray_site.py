"""Two sites with images under a frozen backbone, on NVFlare: the script that a job brings, and what a site brings.

The images are made up: noise, and in half of them a bright spot. The backbone is a convolution with fixed weights, so
that nothing is downloaded; put a pretrained one in its place (``features:backbone=module:function``).
"""

import argparse

import torch
from torch import Tensor, nn

import gradveil

SHAPE, IMAGES, LR = (1, 16, 16), 240, 0.06
RUN = gradveil.PlannedRun(records=IMAGES, batch_size=None, epochs=1, rounds=8, participations=8, cohort=2)


def make_images(seed: int, count: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Return images, half of them with a spot, and which ones."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    images = 0.3 * torch.rand(count, *SHAPE, generator=rng)
    for image, label in zip(images, labels, strict=True):
        row, column = torch.randint(2, 11, (2,), generator=rng).tolist()
        image[0, row : row + 4, column : column + 4] += 0.6 * float(label)
    return images, labels


def make_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images of all sites, and others to test on, for the audit."""
    return make_images(1, 2 * IMAGES), make_images(99, 200)


class XrayNet(nn.Module):
    """A frozen backbone with a head; only the head is trained."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = (nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(3), nn.Flatten())
            backbone = nn.Sequential(*layers, nn.LayerNorm(72, elementwise_affine=False))
        self.backbone = backbone.requires_grad_(False)
        self.head = nn.Linear(72, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.backbone(x))
        return logits


def main() -> None:
    """Answer every round with a weight difference, what was defended, and what it cost."""
    import nvflare.client as flare
    from nvflare.client import FLModel, ParamsType

    parser = argparse.ArgumentParser()
    parser.add_argument("--defense", required=True)
    parser.add_argument("--lr", type=float, default=LR)
    given = parser.parse_args()
    flare.init()
    images, labels = make_images(int(flare.get_site_name().split("-")[1]))
    model = XrayNet()
    while flare.is_running():
        received = flare.receive()
        before = {name: torch.as_tensor(value) for name, value in received.params.items()}
        model.load_state_dict(before)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=given.lr)
        with gradveil.protect(model, given.defense, run=RUN) as guard:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        change = {name: value - before[name] for name, value in model.state_dict().items()}
        seen = guard.report
        meta = {"defended-steps": seen.steps, "spent": seen.spent, "noise": seen.noise, "NUM_STEPS_CURRENT_ROUND": 1}
        flare.send(FLModel(params_type=ParamsType.DIFF, params=change, meta=meta))


if __name__ == "__main__":
    main()
