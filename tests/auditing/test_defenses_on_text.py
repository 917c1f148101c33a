"""Every defence on ids of tokens: it runs before servers whose attacks take ids, or is refused in one line."""

from pathlib import Path

import pytest

from gradveil.auditing.train import TrainConfig, train
from gradveil.data import load
from gradveil.errors import DefenseError, GradveilError
from gradveil.protection.defense import DEFENSES
from gradveil.threats.panel import _used
from gradveil.threats.setup import AuditConfig, AuditSetup, build_setup, fitting_model

DATA, MODEL = "manual:length=8,vocabulary=64", "gpt_tiny:width=32,heads=2,length=8"
REFUSED = {"ats", "concealed", "decoy", "mixup"}  # they change the numbers of examples


def scene_with(defense: str, dataset: str = DATA, model: str = MODEL) -> AuditSetup:
    data = load(dataset)
    config = AuditConfig(dataset=dataset, model=model, loss=data.fitting_loss("cross_entropy"), clients=1, images=2)
    built = fitting_model(model, data, config.loss, 0).train()
    return build_setup(config, data, built, {defense: defense}, {"span": "span"})


@pytest.mark.parametrize("name", sorted({*DEFENSES.names()} - {"none"}))
def test_a_defence_runs_on_ids_or_is_refused_in_one_line(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(DefenseError, match=rf"^{name} .*ids of tokens.* Use one on gradients.*veil.*\Z"):
            scene_with(name)
        return
    if name.startswith("representation"):  # takes derivatives by them
        with pytest.raises(GradveilError) as error:
            scene_with(name)
        assert "\n" not in str(error.value)
        return
    scene = scene_with(name)
    for server in scene.acting(name, scene.model).servers(scene.model):
        assert set(_used(scene, server)) <= {"span"}, server.name  # none that searches for pixels


def test_a_server_that_weighs_by_the_noise_attacks_text_with_the_audits_own() -> None:
    scene = scene_with("gaussian:scale=0.1")
    servers = scene.acting("gaussian:scale=0.1", scene.model).servers(scene.model)
    assert [_used(scene, server) for server in servers] == [["span"]]
    images = scene_with("gaussian:scale=0.1", "digits", "mlp")
    servers = images.acting("gaussian:scale=0.1", images.model).servers(images.model)
    assert [_used(images, server) for server in servers] == [["newton"]]


def test_a_part_that_changes_examples_is_refused_in_training_too(tmp_path: Path) -> None:
    config = TrainConfig(dataset=DATA, model=MODEL, defense="mixup+pruning:share=0.5")
    with pytest.raises(DefenseError, match="ids of tokens are names"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
