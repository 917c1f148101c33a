from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil.errors import DefenseError
from gradveil.protection.protect import protect

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def parts() -> tuple[nn.Module, DataLoader[Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
        data = TensorDataset(torch.rand(12, 1, 8, 8), torch.randint(0, 5, (12,)))
    return net, DataLoader(data, batch_size=4)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, net: nn.Module, through: str) -> None:
        super().__init__()
        self.net, self.through = net, through

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        run = {"self": self, "net": self.net, "forward": self.net.forward}[self.through]
        return F.cross_entropy(run(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(net: nn.Module, loader: DataLoader[Any], through: str, folder: Path, callback: Any) -> None:
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Lit(net, through), loader)


@pytest.mark.parametrize(
    "spec", ["representation:share=0.4", "random_mask+gaussian:scale=0.1", "pruning", "veil:z=0.5"]
)
@pytest.mark.parametrize(("through", "module"), [("self", None), ("net", "net")])
def test_lightning_takes_the_very_steps_of_a_plain_defended_loop(
    through: str, module: str | None, spec: str, tmp_path: Path
) -> None:
    from gradveil.integrations.lightning import GuardCallback

    net, loader = parts()
    callback = GuardCallback(spec, module=module, simulated=Generator().manual_seed(1))
    fit(net, loader, through, tmp_path, callback)

    plain, loader = parts()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with protect(plain, spec, simulated=Generator().manual_seed(1)):
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(plain(x), y).backward()
                optimizer.step()

    assert callback.report.steps == 6
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_training_step_that_goes_around_the_guard_is_refused_and_hooks_are_gone(tmp_path: Path) -> None:
    from gradveil.integrations.lightning import GuardCallback

    net, loader = parts()
    with pytest.raises(DefenseError):
        fit(net, loader, "forward", tmp_path, GuardCallback("representation", module="net"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_defence_of_the_update_has_no_place_in_a_callback() -> None:
    from gradveil.integrations.lightning import GuardCallback

    with pytest.raises(DefenseError, match=r"guard\.update"):
        GuardCallback("gaussian:on=update")
