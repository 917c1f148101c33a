"""The network of the DLG experiments: four convolutions and one fully connected layer."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.models.base import MODELS, Builder, Shape
from gradveil.models.parts import ACTIVATIONS, Activation, Init, Layers, chain, initialise


@MODELS.register("lenet")
@dataclass(frozen=True)
class LeNet(Builder):
    """Four 5x5 convolutions of width 12 and one linear layer (Sun et al. 2020, appendix; Zhu et al. 2019).

    The defaults are those of the attacks: sigmoid, weights and biases uniform in ±0.5, strides 2, 2, 1, 1 and
    padding 2, so that r has 768 entries for 32x32 and 588 for 28x28. They hardly train.
    ``lenet:activation=relu,init=kaiming`` trains: learning rate 0.01 with batches of 32 on MNIST and CIFAR-10,
    0.2 with batches of 8 on digits.
    """

    activation: Activation = "sigmoid"
    init: Init = "uniform"
    strides: tuple[int, ...] = (2, 2, 1, 1)  # one convolution each
    padding: int = 2
    width: int = 12
    batchnorm: bool = False
    normalize: str = "none"  # none, half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: conv1, act1, ..., flatten, fc."""
        features: Layers = {}
        channels = input_shape[0]
        for i, stride in enumerate(self.strides, start=1):
            features[f"conv{i}"] = nn.Conv2d(channels, self.width, 5, stride, self.padding)
            if self.batchnorm:
                features[f"norm{i}"] = nn.BatchNorm2d(self.width)
            features[f"act{i}"] = ACTIVATIONS[self.activation]()
            channels = self.width
        model = chain("lenet", input_shape, self.normalize, features, lambda n: {"fc": nn.Linear(n, num_classes)})
        initialise(model, self.init, rng)
        return model
