"""What privacy means to a person: can the reconstruction be told to be of *this* image?"""

from torch import Tensor


def identification(found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
    """Return 1 where a reconstruction is nearer to its original than to every other image: -> (N,).

    ``gallery`` (M, *shape) holds other images of the same kind, so each original stands among M + 1. Nearest in
    mean squared error; a tie counts against the attack. Guessing scores 1 / (M + 1).
    """
    flat = found.flatten(1).double()
    own = (flat - truth.flatten(1).double()).square().sum(dim=1)  # (N,)
    others = (flat[:, None] - gallery.flatten(1).double()[None]).square().sum(dim=2)  # (N, M)
    return (own[:, None] < others).all(dim=1).float()


def label_accuracy(found: Tensor, truth: Tensor) -> Tensor:
    """Return 1 for each true label (N,) that is among the labels found, each found label used once: -> (N,).

    The order is disregarded: an update does not tell in which order its examples came.
    """
    left = found.tolist()
    hits = truth.new_zeros(len(truth)).float()
    for i, label in enumerate(truth.tolist()):
        if label in left:
            left.remove(label)
            hits[i] = 1.0
    return hits
