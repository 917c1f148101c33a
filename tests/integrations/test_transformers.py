from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader

from gradveil.errors import DefenseError
from gradveil.protection.protect import protect

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(nn.Module):
    """Called as a Trainer calls models: arguments by keyword, the loss among the outputs."""

    def __init__(self, around: bool = False) -> None:
        super().__init__()
        self.around = around
        self.conv, self.fc = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(36, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        r = F.relu(self.conv(pixel_values)).flatten(1)
        logits = F.linear(r, self.fc.weight, self.fc.bias) if self.around else self.fc(r)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def parts(around: bool = False) -> tuple[Classifier, list[dict[str, Tensor]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        data = [{"pixel_values": torch.rand(1, 8, 8), "labels": torch.tensor(n % 5)} for n in range(12)]
        return Classifier(around), data


def fit(model: nn.Module, data: Any, folder: Path, callback: Any) -> None:
    class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> DataLoader[Any]:
            return self.accelerator.prepare(DataLoader(data, batch_size=4))

    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    InOrder(model, args, train_dataset=data, callbacks=[callback]).train()


@pytest.mark.parametrize("spec", ["representation:share=0.4", "random_mask+gaussian:scale=0.1", "veil:z=0.5"])
def test_the_trainer_takes_the_very_steps_of_a_plain_defended_loop(spec: str, tmp_path: Path) -> None:
    from gradveil.integrations.transformers import GuardCallback

    model, data = parts()
    callback = GuardCallback(spec, simulated=Generator().manual_seed(1))
    fit(model, data, tmp_path, callback)

    plain, data = parts()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with protect(plain, spec, simulated=Generator().manual_seed(1)):
        for _ in range(2):
            for batch in DataLoader(data, batch_size=4):  # type: ignore[arg-type]
                optimizer.zero_grad()
                plain(**batch)["loss"].backward()
                optimizer.step()

    assert callback.report.steps == 6
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_goes_around_its_layer_is_refused(tmp_path: Path) -> None:
    from gradveil.integrations.transformers import GuardCallback

    model, data = parts(around=True)
    callback = GuardCallback("representation")
    with pytest.raises(DefenseError, match="did not run fc as a layer"):
        fit(model, data, tmp_path, callback)
    callback.abandon()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
