"""Representation inference: the algorithms done one row at a time, the rules, the trace, and what must hold exactly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.errors import AttackError, LayerError
from gradveil.modules import trace
from gradveil.types import Update
from gradveil_studies.paper.inference import RULES, InferenceSettings, Inferred, chain_of, infer, infer_stacked
from gradveil_studies.paper.representations import class_means, class_set_accuracy, correlation, representation_scores

SHAPE = (1, 8, 8)


class Shuffled(nn.Module):
    """Registers its layers in an order that is not the order they run in, and calls F.relu."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 5)
        self.unused = nn.Linear(3, 3)
        self.second = nn.Linear(20, 12)
        self.first = nn.Linear(3 * 16, 20)
        self.conv = nn.Conv2d(1, 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        r = F.relu(self.conv(x)).flatten(1)
        return self.last(F.relu(self.second(F.relu(self.first(r)))))  # type: ignore[no-any-return]


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Shuffled()


def update_of(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int = 1) -> Update:
    loss = F.cross_entropy(model(inputs), labels)
    used = [(n, p) for n, p in model.named_parameters() if not n.startswith("unused")]
    gradient = torch.autograd.grad(loss, [p for _, p in used])
    return Update({n: g for (n, _), g in zip(used, gradient, strict=True)}, len(labels), steps)


def devices(model: nn.Module, count: int = 6, per_class: int = 8) -> tuple[list[Update], Tensor, list[Tensor]]:
    """Return updates of devices with two classes each, their class sets (D, K), and the true class means."""
    rng = torch.Generator().manual_seed(5)
    centers = torch.rand(5, 1, 8, 8, generator=rng)
    updates, present, inputs, groups = [], torch.zeros(count, 5, dtype=torch.bool), [], []
    for d in range(count):
        classes = torch.randperm(5, generator=rng)[:2]
        present[d, classes] = True
        labels = classes.repeat_interleave(per_class)
        x = (centers[labels] + 0.1 * torch.randn(len(labels), 1, 8, 8, generator=rng)).clamp(0, 1)
        updates.append(update_of(model, x, labels))
        inputs.append(x)
        groups.append(labels + 5 * d)
    return updates, present, [torch.cat(inputs), torch.cat(groups)]


def one_row_at_a_time(update: Update, layers: list[str], m: float) -> dict[str, np.ndarray]:
    """Algorithms 3 and 4 as printed, with the signs of rows aligned by the bias."""
    g = {n: v.double().numpy() for n, v in update.gradient.items()}
    found = {layers[-1]: -g[f"{layers[-1]}.weight"]}
    for after, layer in zip(layers[::-1], layers[-2::-1], strict=False):
        weight, bias = g[f"{layer}.weight"], g[f"{layer}.bias"]
        rows = []
        for c in range(len(found[after])):
            order = sorted(range(len(weight)), key=lambda k: -abs(found[after][c][k]))
            total = np.zeros(weight.shape[1])
            for k in order[: round(m * len(weight))]:
                total += np.sign(bias[k]) * weight[k]
            rows.append(total)
        found[layer] = np.stack(rows)
    return found


def test_the_vectorised_algorithms_are_those_done_one_row_at_a_time(net: nn.Module) -> None:
    updates, _, _ = devices(net)
    found = infer(net, updates, SHAPE, 5, InferenceSettings(m=0.5, convolutions=False))
    for d, update in enumerate(updates):
        slow = one_row_at_a_time(update, ["first", "second", "last"], 0.5)
        for layer, vectors in slow.items():
            torch.testing.assert_close(found.vectors[layer][d].double(), torch.tensor(vectors), rtol=1e-4, atol=1e-7)


def test_many_updates_at_once_give_what_each_gives_alone(net: nn.Module) -> None:
    updates, _, _ = devices(net, 3)
    together = infer(net, updates, SHAPE, 5)
    for d, update in enumerate(updates):
        alone = infer(net, update, SHAPE, 5)
        assert alone.classes(0) == together.classes(d)
        torch.testing.assert_close(alone.confidence[0], together.confidence[d])
        for layer, vectors in alone.vectors.items():
            torch.testing.assert_close(vectors[0], together.vectors[layer][d])


def test_layers_are_found_in_the_order_they_run(net: nn.Module) -> None:
    chain = chain_of(net, SHAPE, 5)
    assert [v.path for v in chain.dense] == ["first", "second", "last"]
    assert [v.path for v in chain.convolutions] == ["conv"]
    assert trace(net, SHAPE).output == "last"


def test_the_trace_leaves_the_model_as_it_was(net: nn.Module) -> None:
    net.train()
    net.conv.eval()  # type: ignore[union-attr]
    state = torch.random.get_rng_state()
    trace(net, SHAPE)
    assert net.training
    assert not net.conv.training  # type: ignore[union-attr]
    assert torch.equal(state, torch.random.get_rng_state())
    assert not any(m._forward_hooks for m in net.modules())


def test_a_layer_that_runs_twice_ends_the_chain() -> None:
    class Tied(Shuffled):
        def forward(self, x: Tensor) -> Tensor:
            r = F.relu(self.first(self.conv(x).flatten(1)))[:, :12].repeat(1, 2)[:, :20]
            return self.last(F.relu(self.second(F.relu(self.second(r).repeat(1, 2)[:, :20]))))  # type: ignore[no-any-return]

    assert [v.path for v in chain_of(Tied(), SHAPE, 5).dense] == ["last"]


def test_a_model_whose_last_rows_are_no_classes_is_refused(net: nn.Module) -> None:
    with pytest.raises(LayerError, match="7 outputs"):
        chain_of(net, SHAPE, 7)


def test_one_example_of_a_class_gives_its_representation_at_every_dense_layer_exactly(net: nn.Module) -> None:
    x, label = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3)), torch.tensor([2])
    found = infer(net, update_of(net, x, label), SHAPE, 5)
    truth = class_means(net, ["first", "second", "last"], x, label, 5)
    for layer, means in truth.items():
        cor = correlation(found.vectors[layer][0, 2], means[2])
        assert float(cor) == pytest.approx(1.0, abs=1e-5), layer  # and of the right sign
        exact = found.vectors[layer][0, 2] / found.scales[layer][0, 2]
        torch.testing.assert_close(exact, means[2], atol=1e-5, rtol=1e-4)


def test_without_aligned_signs_the_sum_of_rows_loses_the_representation(net: nn.Module) -> None:
    updates, present, (inputs, groups) = devices(net, 20)
    truth = class_means(net, ["first"], inputs, groups, 100)["first"].view(20, 5, -1)
    scores = {
        align: representation_scores(
            infer(net, updates, SHAPE, 5, InferenceSettings(align=align)).vectors["first"], truth, present
        )["own"]
        for align in ("auto", "sum", "none")
    }
    assert scores["auto"].nanmean() > 0.75
    assert scores["sum"].nanmean() > 0.75
    assert scores["none"].nanmean() < 0.6


@pytest.mark.parametrize("rule", ["bias_sign", "row_sum"])
def test_the_class_set_is_read_off_the_update(net: nn.Module, rule: str) -> None:
    updates, present, _ = devices(net, 20)
    found = infer(net, updates, SHAPE, 5, InferenceSettings(rule=rule))  # type: ignore[arg-type]
    assert float(class_set_accuracy(found.present, present).mean()) >= 0.95


@pytest.mark.parametrize("rule", list(RULES))
def test_a_rule_finds_peaks_that_stand_out_and_is_sure_of_them(rule: str) -> None:
    rows = 0.01 * torch.rand(1, 6, 4)
    rows[0, [1, 4]] = -torch.tensor([[1.0], [1.5]])
    present, confidence = RULES[rule](rows, rows.sum(2))  # type: ignore[index]
    assert present[0].nonzero().flatten().tolist() == [1, 4]
    assert 0 <= float(confidence.min()) <= float(confidence.max()) <= 1
    assert float(confidence[0, 4]) == 1.0


def test_without_a_bias_the_sign_rule_falls_back_on_the_rows() -> None:
    rows = torch.tensor([[[1.0, 2.0], [-3.0, 1.0]]])
    assert RULES["bias_sign"](rows, None)[0].tolist() == RULES["row_sum"](rows, None)[0].tolist() == [[False, True]]


@given(st.integers(0, 5), st.floats(0.1, 10))
def test_renaming_classes_renames_what_is_inferred_and_scaling_changes_nothing(seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5))
    chain = chain_of(model, SHAPE, 5)
    gradients = {n: torch.randn(2, *p.shape, generator=rng) for n, p in model.named_parameters()}
    order = torch.randperm(5, generator=rng)
    renamed = gradients | {n: scale * gradients[n][:, order] for n in ("3.weight", "3.bias")}
    plain, other = infer_stacked(chain, gradients), infer_stacked(chain, renamed)
    assert torch.equal(plain.present[:, order], other.present)
    torch.testing.assert_close(plain.confidence[:, order], other.confidence)
    torch.testing.assert_close(plain.vectors["1"][:, order], other.vectors["1"])


@pytest.mark.parametrize(("m", "rows"), [(0.5, 10), (1.0, 20), (3.0, 3), (0.001, 1), (500.0, 20)])
def test_m_is_a_share_of_the_rows_or_a_count(net: nn.Module, m: float, rows: int) -> None:
    updates, _, _ = devices(net, 1)
    marked = dict(updates[0].gradient)
    marked["first.weight"] = torch.zeros_like(marked["first.weight"])
    marked["first.weight"][:, 0] = marked["first.bias"].sign().where(marked["first.bias"] != 0, torch.ones(()))
    found = infer(net, Update(marked), SHAPE, 5, InferenceSettings(m=m))
    dead = int((marked["first.bias"] == 0).sum())
    assert rows - dead <= float(found.vectors["first"][0, 0, 0]) <= rows


def test_convolutions_give_the_mean_patch_of_one_example() -> None:
    """One channel out: its gradient is the sum of patches weighed by δ, so equal δ give the mean patch."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(1, 5))
    x, label = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3)), torch.tensor([2])
    found = infer(model, update_of(model, x, label), SHAPE, 5)
    truth = class_means(model, ["0"], x, label, 5)["0"]
    assert float(correlation(found.vectors["0"][0, 2], truth[2])) == pytest.approx(1.0, abs=1e-5)


def test_the_part_of_the_chain_that_was_sent_is_enough(net: nn.Module) -> None:
    updates, _, _ = devices(net, 1)
    only = {n: g for n, g in updates[0].gradient.items() if n.startswith(("last", "second", "conv"))}
    found = infer(net, Update(only), SHAPE, 5)
    assert list(found.vectors) == ["last", "second"]
    with pytest.raises(LayerError, match="names the classes"):
        infer(net, Update({n: g for n, g in only.items() if not n.startswith("last")}), SHAPE, 5)


def test_wrong_settings_and_no_updates_are_refused_in_words(net: nn.Module) -> None:
    with pytest.raises(AttackError, match="m=0"):
        InferenceSettings(m=0)
    with pytest.raises(AttackError, match="bias_sign"):
        InferenceSettings(rule="peak")  # type: ignore[arg-type]
    with pytest.raises(AttackError, match="no update"):
        infer(net, [], SHAPE, 5)


def test_the_result_names_classes_per_device() -> None:
    present = torch.tensor([[True, False, True], [False, True, False]])
    found = Inferred(present, torch.zeros(2, 3), {}, {})
    assert (found.classes(0), found.classes(1)) == ([0, 2], [1])


def test_a_channel_counts_by_all_its_positions_not_by_its_largest() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3))
    rows = torch.zeros(3, 8)
    rows[0] = -torch.tensor([3.0, 0, 0, 0, 1, 1, 1, 1])  # of class 0: one large entry, or four that sum to more
    gradients = {"2.weight": rows, "2.bias": -torch.ones(3), "0.weight": torch.tensor([5.0, 7.0]).reshape(2, 1, 1, 1)}
    gradients["0.bias"] = torch.ones(2)
    found = infer_stacked(
        chain_of(model, (1, 2, 2), 3), {n: g[None] for n, g in gradients.items()}, InferenceSettings(m=0.5)
    )
    assert float(found.vectors["0"][0, 0]) == 7.0


def test_a_bias_that_one_update_lacks_is_used_for_none(net: nn.Module) -> None:
    updates, _, _ = devices(net, 2)
    without = {n: g for n, g in updates[1].gradient.items() if n != "last.bias"}
    found = infer(net, [updates[0], Update(without, updates[1].num_examples)], SHAPE, 5)
    assert "last" not in found.scales
    assert torch.equal(found.present, infer(net, updates, SHAPE, 5, InferenceSettings(rule="row_sum")).present)


def test_a_class_is_ruled_out_with_confidence_too() -> None:
    rows = torch.tensor([[[4.0], [1.0], [0.0], [0.5]]])
    present, confidence = RULES["mean"](rows, None)  # the mean norm is 1.375
    assert present.tolist() == [[True, False, False, False]]
    torch.testing.assert_close(confidence, torch.tensor([[1.0, 0.375 / 1.375, 1.0, 0.875 / 1.375]]))


def test_only_what_lies_after_the_last_missing_layer_is_inferred(net: nn.Module) -> None:
    updates, _, _ = devices(net, 1)
    only = {n: g for n, g in updates[0].gradient.items() if n.startswith(("last", "first"))}
    assert list(infer(net, Update(only), SHAPE, 5).vectors) == ["last"]


def test_a_convolution_in_groups_ends_the_chain() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten(),
        nn.Linear(32, 5),
    )  # fmt: skip
    assert [v.path for v in chain_of(model, SHAPE, 5).layers] == ["4", "6"]


def test_a_convolution_whose_channels_do_not_reach_the_dense_layer_ends_the_chain() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(64 + 3 * 36, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.cat([x.flatten(1), self.conv(x).flatten(1)], 1))  # type: ignore[no-any-return]

    assert (64 + 3 * 36) % 3  # so the inputs cannot be three channels, flattened
    assert [v.path for v in chain_of(Beside(), SHAPE, 5).layers] == ["fc"]


def test_a_batch_norm_in_training_is_traced_without_moving_its_averages() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5)).train()
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert trace(model, SHAPE).paths() == ("1", "4")
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(m.training for m in model.modules())


def test_a_layer_whose_output_is_changed_afterwards_does_not_give_the_logits() -> None:
    layers = [nn.Flatten(), nn.Linear(64, 5)]
    assert trace(nn.Sequential(*layers), SHAPE).output == "1"
    assert trace(nn.Sequential(*layers, nn.LogSoftmax(1)), SHAPE).output is None
