"""What running a defence of the zoo finds, rule by rule; and that sound ones are not accused by any."""

from collections.abc import Iterator

import pytest
import torch
from torch import Generator, nn

from gradveil.data import load
from gradveil.federated.settings import Local
from gradveil.models import build_working
from gradveil.protection.defense import build
from gradveil.seeds import Seeds
from gradveil.threats.probes import Probed, probe
from gradveil.types import Batch
from zoo.keeper import names, opened

FOUND = {
    "twins": "directions carry none, always the same ones",
    "quiet_subspace": "directions carry none, always the same ones",
    "weight_and_bias": "is measured",
    "smooth_noise": "directions carry none, always the same ones",
    "orthogonal_noise": "that of the gradient itself",
    "numpy_twins": "is measured",
    "loud_entries": "carry less than a twentieth of it",
    "module_generator": "none is drawn",
    "millisecond_seed": "none is drawn",
    "sixteen_bit_key": "no more than 16 bits",
    "four_rounds": "rounds hangs together",
    "late_calls": "in a client's run 50",
    "rare_rounds": "there is hardly any",
    "spared_class": "(label 3) it hides hardly anything",
    "low_bits": "the 16 lowest bits",
    "wide_type": "in float64",
    "in_buffers": "tensors that the model has not",
}
UNDONE = {  # by a server of what was found, whatever is declared
    "twins": "quiet", "numpy_twins": "quiet", "quiet_subspace": "quiet", "weight_and_bias": "quiet",
    "loud_entries": "quiet", "low_bits": "quiet", "four_rounds": "rounds",
    "fine_lattice": "undo", "in_numpy": "undo",
}  # fmt: skip


@pytest.fixture(scope="module")
def scene() -> tuple[nn.Module, Batch]:
    model = build_working("lenet:strides=2/1", (1, 8, 8), 10, 0).train()
    return model, load("digits").test.sample(600, Generator().manual_seed(0))


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def probed(name: str, scene: tuple[nn.Module, Batch], seed: int = 0) -> Probed:
    with opened(name):
        return probe(build(name), *scene, 1, Local(batch_size=1), 0.3, Seeds(seed), 10)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted({*FOUND, *UNDONE}))
def test_what_is_wrong_is_found(name: str, scene: tuple[nn.Module, Batch]) -> None:
    found = probed(name, scene)
    assert FOUND.get(name, "") in " ".join(found.errors)
    if name in UNDONE:
        assert UNDONE[name] in [server.name for server in found.servers]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [n for n in names("sound") if not n.startswith("dp_")])
def test_a_sound_one_is_not_accused(name: str, scene: tuple[nn.Module, Batch]) -> None:
    assert probed(name, scene, 1).errors == ()
