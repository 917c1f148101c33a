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
    "two_keys": "no more than 21 bits",
    "next_follows": "are drawn by themselves",
    "hidden_sums": "are drawn by themselves",
    "low_rank_whole": "are drawn by themselves",
    "codebook": "its law has edges",
    "turned_pairs": "picks the right one in 24 of 24",
}
UNDONE = {  # by a server of what was found, whatever is declared
    "twins": "quiet", "numpy_twins": "quiet", "quiet_subspace": "quiet", "weight_and_bias": "quiet",
    "loud_entries": "quiet", "low_bits": "quiet", "four_rounds": "rounds",
    "fine_lattice": "undo", "in_numpy": "undo",
}  # fmt: skip


NEEDED = {  # rule: a defence, and what is said of it by this rule alone
    "structure.quiet_directions": ("quiet_subspace", "directions carry none"),
    "structure._still_sums": ("centred_laplace", "sums over rows or columns"),
    "structure._silent_entries": ("loud_entries", "carry less than a twentieth"),
    "structure._silent_runs": ("rare_rounds", "of all draws there is hardly any"),
    "structure.round_flaws": ("negated_later", "hangs together"),
    "structure._of_size": ("small_gradients_spared", "times the size have hardly any"),
    "structure._of_time": ("at_night", "there is hardly any"),
    "structure._of_caller": ("knows_the_audit", "where no audit is on the call stack"),
    "structure._of_message": ("key_in_the_message", "it follows from the gradient or from what is sent"),
    "structure.tied": ("sizes_follow", "of 5854 entries are drawn by themselves"),
    "structure.odd_law": ("uniform_noise", "times as clearly as under normal noise"),
    "structure._again": ("own_generator", "came up twice"),
    "probes.picked_by_moments": ("powers_of_two", "picks the right one in"),
    "probes.hidden_bits": ("low_bits", "lowest bits"),
    "probes.beside": ("wide_type", "Beside the numbers"),
    "probes.told_apart": ("fixed_length", "are picked out of 6"),
    "findings.Explorer._keyed": ("sixteen_bit_key", "bits, which a server tries"),
    "probes._Probe._clients": ("spared_class", "it hides hardly anything"),
    "noise_tests._strength": ("overstated_noise", "is measured"),
    "noise_tests._everywhere": ("sparse_noise", "are sent without"),
    "noise_tests._independent": ("row_noise", "of its"),
    "noise_tests._rounds": ("same_each_round", "rounds is declared to be independent"),
}
NOTHING: dict[str, object] = {
    "structure.round_flaws": [], "probes.beside": [], "probes._Probe._clients": [],
    "probes.told_apart": "",
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rule", NEEDED)
def test_each_rule_finds_what_no_other_says(
    rule: str, scene: tuple[nn.Module, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, said = NEEDED[rule]
    assert said in " ".join(probed(name, scene).errors)
    place = "gradveil.threats." if rule.startswith("probes.") else "gradveil.threats.probing."
    monkeypatch.setattr(place + rule, lambda *args, **kwargs: NOTHING.get(rule))
    assert said not in " ".join(probed(name, scene).errors)
