"""What can be said of a model's parts by their names."""

from torch import nn

from gradveil.modules import is_trained


def test_statistics_and_counters_are_told_from_weights() -> None:
    state = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)).state_dict()
    assert [n for n, v in state.items() if is_trained(n, v)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
