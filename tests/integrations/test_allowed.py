"""A node takes from a run registered names and numbers alone (a server's run settings run code and read files)."""

import time
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch

from gradveil.integrations.flower import site as allowed
from gradveil.integrations.flower.site import NodeError, RunRefused, check_map, check_spec, check_weights, taken
from gradveil.ranges import options_of
from gradveil.registry import settings
from test_ranges import registry

CODE = ("os:abort", "own:make", "builtins:exec", "gradveil.cli.main:entry", "a.b:c.d", "os:_exit")
PATHS = ("/etc/passwd", "notes.txt", "patients.csv", "../x", "~/x", "C:x", "/dev/zero", "weights.safetensors")


@pytest.mark.parametrize("kind", allowed.REGISTRIES)
@pytest.mark.parametrize("text", [*CODE, *PATHS, "", "x" * 10**6, "mnist\n", "digits\x1b[2J"])
def test_code_and_paths_are_refused_whatever_names_them(kind: str, text: str) -> None:
    with pytest.raises(RunRefused):
        check_spec(kind, text)


FILES = {
    "dataset": ("table:path=/etc/passwd,target=x", "text:path=notes.txt", "folder:path=/srv", "table:path=own:data"),
    "defense": (
        "decoy:prior=/etc/passwd", "decoy:secret=/etc/shadow", "veil:shape=/etc/x.safetensors,z=1",
        "gaussian:scale=1+decoy:secret=key", "veil:shape=x.safetensors",
    ),
}  # fmt: skip
FILES["require_defense"] = FILES["defense"]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in FILES.items() for text in texts])
def test_settings_that_name_files_are_refused(kind: str, text: str) -> None:
    with pytest.raises(RunRefused, match="names a file"):
        check_spec(kind, text)


GOOD = {
    "dataset": ("digits", "mnist", "made_up_patients", "digits:test_share=0.3"),
    "model": ("lenet", "mlp:width=8", "logistic"),
    "defense": ("none", "veil:z=2,shape=public", "gaussian:scale=1+pruning:share=0.9", "representation:layer=fc1/fc2"),
    "loss": ("cross_entropy", "mse", "cross_entropy:smoothing=0.1"),
    "partition": ("iid:devices=10", "natural"),
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in GOOD.items() for text in texts])
def test_registered_names_with_numbers_are_taken(kind: str, text: str) -> None:
    assert check_spec(kind, text) == text


HARMLESS = {
    "dataset": {
        "image",
        "label",
        "target",
        "text",
        "categorical",
        "drop",
        "by",
    },  # columns
    "model": {"normalize", "layer"},
    "defense": {"layer", "method", "kind", "policy"},
}


@pytest.mark.parametrize("kind", ["dataset", "model", "loss", "partition", "defense", "schedule"])
def test_every_setting_that_is_a_text_was_decided_upon(kind: str) -> None:
    """A new setting of a method that takes a text names a file until somebody says that it does not."""
    for name, cls in registry({"loss": "loss"}.get(kind, kind)):
        for one in settings(cls):
            kinds = [get_args(o)[0] if get_origin(o) is tuple else o for o in options_of(one.type)]
            files = allowed.FILES.get(kind, set()) | set(allowed.WORDS.get(kind, {}))
            assert str not in kinds or one.name in files | HARMLESS.get(kind, set()), (name, one.name)


def test_the_site_stands_above_the_run_and_alone_names_folders() -> None:
    run = {"dataset": "own:data", "model": "lenet", "data": "/etc", "batch-size": 8, "loss": "mse"}
    site = {"dataset": "mine:data", "data": "/srv", "loss": "mine:loss", "partition-id": 3}
    assert taken(run, site) == {
        "dataset": "mine:data", "model": "lenet", "data": "/srv", "batch_size": 8, "loss": "mine:loss",
    }  # fmt: skip
    assert "data" not in taken({"data": "/etc"}, {})
    with pytest.raises(RunRefused, match="dataset = 'own:data' is no registered name"):
        taken(run, {})


@pytest.mark.parametrize("key", ["trains", "strategy", "out", "seed", "optimizer", "x"])
@pytest.mark.parametrize("text", ["a" * 10**6, "\x1b[2J"])
def test_any_text_of_a_run_is_short_and_can_be_printed(key: str, text: str) -> None:
    with pytest.raises(RunRefused, match=f"the run's '{key}' has"):
        taken({key: text}, {})


@pytest.mark.parametrize("defense", ["none", "veil:z=1,clip=1", "veil:rho=0.5,clip=1"])
def test_a_number_of_rounds_takes_a_node_no_time(defense: str) -> None:
    """Each message would draw every round of the run again: 10⁹ rounds take a day."""
    pytest.importorskip("flwr")
    from gradveil.integrations.flower.settings import FlowerSettings

    run = FlowerSettings.from_config({"rounds": 10**9, "clients": 2, "defense": defense, "partition": "iid:devices=2"})
    began = time.process_time()
    run.ledger([np.arange(3), np.arange(3, 6)])
    assert time.process_time() - began < 5


WEIGHTS = {
    "NaN": torch.tensor([[1.0, float("nan")]]),
    "infinite": torch.tensor([1.0, float("-inf")]),
    "zeros": torch.zeros(3, 2),
    "zeros of a convolution": torch.zeros(3, 2, 1, 1),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_cannot_be_trained_at_are_refused(name: str) -> None:
    with pytest.raises(RunRefused, match=r"the weights 'fc\.weight'"):
        check_weights({"ok": torch.ones(2, 2), "fc.weight": WEIGHTS[name]}, {"fc.weight": torch.ones(3, 2)})
    zeros = {"bias": torch.zeros(3), "count": torch.tensor(0), "head.weight": torch.zeros(2, 2)}
    check_weights(zeros, zeros)  # a layer that begins at zero


@pytest.mark.parametrize("value", [10**9, 0, -1, 1.5, "x", [1, 2], True, None, [b"x"]])
def test_a_map_is_bytes(value: Any) -> None:
    with pytest.raises(RunRefused, match="public-map"):
        check_map(value)
    check_map(b"x")


def test_an_error_that_leaves_says_nothing_of_what_was_read(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def read() -> None:
        raise ValueError("line 1: root:x:0:0:root:/root:/bin/bash")

    with pytest.raises(NodeError) as told:
        allowed.said_outward(read)
    assert "root" not in str(told.value)
    assert told.value.__cause__ is None
    assert "ValueError" in str(told.value)
    assert "root:x:0:0" in caplog.text  # the node's own log
    with pytest.raises(RunRefused, match="all zero"):
        allowed.said_outward(lambda: check_weights({"w": torch.zeros(2, 2)}, {"w": torch.ones(2, 2)}))


SECRET = "root:x:0:0:secret"
RUNS: dict[str, dict[str, Any]] = {
    "code as model": {"model": "os:abort"},
    "code as data": {"dataset": "os:abort"},
    "code as loss": {"loss": "os:abort"},
    "a file of the node": {"dataset": "table:path={file},target=x"},
    "a text of the node": {"dataset": "text:path={file}"},
    "a folder of the node": {"dataset": "mnist", "data": "{folder}"},
    "a file as prior": {"defense": "decoy:prior={file}"},
    "a file as secret": {"defense": "decoy:secret={file}"},
    "a file as map": {"defense": "veil:z=1,shape={file}"},
    "a file demanded": {"defense": "decoy:prior={file}", "require-defense": "decoy:prior={file}"},
    "an unknown key": {"evil": "{file}"},
    "a number that is none": {"lr": "{file}"},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_ready_app_does_none_of_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

    from gradveil.integrations.flower.app import make_client_app
    from integrations import flower_parts  # which stands for an engine that has begun a run

    assert flower_parts.TaskIdentity.run_id == 1
    file = tmp_path / "secret.csv"
    file.write_text(f"{SECRET}\n{SECRET},{SECRET}\n")
    run = {
        key: value.replace("{file}", str(file)).replace("{folder}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in RUNS[name].items()
    }
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 2}, RecordDict(), run)
    weights = ArrayRecord({"1.weight": Array(np.ones((10, 64), np.float32))})
    message = Message(RecordDict({"arrays": weights, "config": ConfigRecord({"lr": 0.1})}), 1, MessageType.TRAIN)
    with pytest.raises((RunRefused, NodeError)) as told:
        make_client_app()(message, context)
    assert SECRET not in str(told.value)
    assert told.value.__cause__ is None
