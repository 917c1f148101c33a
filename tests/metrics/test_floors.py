import torch

from gradveil.metrics import blind_guesses
from gradveil.types import Batch

PUBLIC = Batch(torch.tensor([[0.0, 0.0], [0.2, 0.4], [1.0, 0.8]]), torch.tensor([0, 1, 1]))


def test_blind_guesses_know_public_data_and_never_the_inputs() -> None:
    labels = torch.tensor([1, 0])
    one = blind_guesses(Batch(torch.zeros(2, 2), labels), PUBLIC)
    other = blind_guesses(Batch(torch.ones(2, 2), labels), PUBLIC)
    assert one.keys() == other.keys() == {"grey", "mean image", "class mean"}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_blind_guesses_done_by_hand() -> None:
    guesses = blind_guesses(Batch(torch.zeros(2, 2), torch.tensor([1, 0])), PUBLIC)
    assert torch.allclose(guesses["grey"], torch.full((2, 2), 0.5))
    assert torch.allclose(guesses["mean image"], torch.tensor([[0.4, 0.4], [0.4, 0.4]]))
    assert torch.allclose(guesses["class mean"], torch.tensor([[0.6, 0.6], [0.0, 0.0]]))


def test_a_class_without_public_images_gets_the_mean_image() -> None:
    guesses = blind_guesses(Batch(torch.zeros(1, 2), torch.tensor([7])), PUBLIC)
    assert torch.allclose(guesses["class mean"], guesses["mean image"])
