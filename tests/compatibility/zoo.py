"""Small models of every kind that people train, most of them unlike ours. To add one, add a function."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

CLASSES = 4
IMAGE, ROW, SEQUENCE = (2, 5, 5), (10,), (4, 6)


@dataclass(frozen=True)
class Model:
    """A kind of model, and what it is called with."""

    name: str
    group: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGE  # of one example; the first input where there are several
    inputs: Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]] | None = None  # from x; None: x alone
    logits: Callable[[Any], Tensor] = lambda output: output
    dtype: torch.dtype = torch.float64
    autocast: bool = False  # whether the client calls it under autocast

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what its user calls the model with."""
        return ((x,), {}) if self.inputs is None else self.inputs(x)

    @property
    def plain(self) -> bool:
        """Whether the model is a function of one tensor of numbers."""
        return self.inputs is None

    def build(self) -> nn.Module:
        """Return the model in float64 and train mode (parts that a kind holds in eval mode stay so)."""
        torch.manual_seed(7)
        model = self.make()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases that matter, and no dead layer
                nn.init.uniform_(parameter, 0.1, 0.5)
        return model.to(self.dtype)

    def examples(self, count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
        """Return x (count, *shape) within [0, 1] and labels, all different while there are enough classes."""
        rng = torch.Generator().manual_seed(seed)
        x = torch.rand(count, *self.shape, generator=rng, dtype=torch.float64).to(self.dtype)
        return x, torch.arange(count) % CLASSES

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits (N, K) of x, called as its user would call it."""
        args, kwargs = self.arguments(x)
        return self.call_with(model, args, kwargs)

    def call_with(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the logits (N, K) for these arguments."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.logits(model(*args, **kwargs))


ZOO: dict[str, Model] = {}


def kind(group: str, **settings: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add the kind of model that the function below makes; its name is the function's."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        name = make.__name__.strip("_").replace("_", " ")
        assert name not in ZOO
        ZOO[name] = Model(name, group, make, **settings)
        return make

    return add


class Body(nn.Module):
    """Any function before the last layer ``fc``."""

    def __init__(self, width: int, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.fc = nn.Linear(width, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[operator, no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).flatten(1))  # type: ignore[no-any-return]


def chain(*parts: nn.Module, shape: tuple[int, ...] = IMAGE) -> nn.Module:
    """Return the parts one after the other, and a last layer that fits."""
    body = nn.Sequential(*parts, nn.Flatten())
    with torch.no_grad():
        width = body.double().eval()(torch.rand(2, *shape, dtype=torch.float64)).shape[1]
    body.train()
    return nn.Sequential(*body, nn.Linear(width, CLASSES))


def block(forward: Callable[[Any, Tensor], Tensor], width: int, **parts: nn.Module) -> nn.Module:
    """Return a model whose body is a function of its parts."""
    cls = type("Block", (Body,), {"features": forward})
    return cls(width, **parts)  # type: ignore[no-any-return]


def conv(out: int = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(2, out, 3, **settings)


def held(model: nn.Module) -> nn.Module:
    """Return the model with its normalisation layers in eval mode, as people freeze them."""
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.eval()
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 2.0)
    return model


# --- chains of layers ------------------------------------------------------------------------------------------------


@kind("layers")
def logistic_regression() -> nn.Module:
    return chain()


@kind("layers", shape=ROW)
def fully_connected() -> nn.Module:
    return chain(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), shape=ROW)


@kind("layers", shape=ROW)
def without_biases() -> nn.Module:
    model = chain(nn.Linear(10, 8, bias=False), nn.Tanh(), shape=ROW)
    model[-1] = nn.Linear(8, CLASSES, bias=False)  # type: ignore[operator]
    return model


@kind("layers")
def convolution() -> nn.Module:
    return chain(conv(), nn.ReLU())


@kind("layers")
def strided_sigmoid_convolutions() -> nn.Module:
    return chain(conv(4, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(4, 3, 3, padding=1), nn.Sigmoid())


@kind("layers")
def grouped_convolution() -> nn.Module:
    return chain(conv(4), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU())


@kind("layers")
def depthwise_separable_convolution() -> nn.Module:
    return chain(conv(2, groups=2, padding=1), nn.ReLU6(), nn.Conv2d(2, 4, 1), nn.ReLU6())


@kind("layers")
def dilated_convolution() -> nn.Module:
    return chain(nn.Conv2d(2, 3, 2, dilation=2), nn.ReLU())


@kind("layers")
def even_kernel_same_padding() -> nn.Module:
    return chain(nn.Conv2d(2, 3, 2, padding="same"), nn.ReLU())


@kind("layers")
def reflected_padding() -> nn.Module:
    return chain(conv(padding=1, padding_mode="reflect"), nn.ReLU())


@kind("layers")
def circular_padding() -> nn.Module:
    return chain(conv(padding=1, padding_mode="circular"), nn.Tanh())


@kind("layers", shape=(2, 8))
def convolution_in_one_dimension() -> nn.Module:
    return chain(nn.Conv1d(2, 3, 3), nn.ReLU(), shape=(2, 8))


@kind("layers", shape=(1, 3, 3, 3))
def convolution_in_three_dimensions() -> nn.Module:
    return chain(nn.Conv3d(1, 3, 2), nn.ReLU(), shape=(1, 3, 3, 3))


@kind("layers")
def transposed_convolution() -> nn.Module:
    return chain(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 2, 2, stride=2), nn.ReLU())


@kind("layers")
def max_pooling() -> nn.Module:
    return chain(conv(4, padding=1), nn.ReLU(), nn.MaxPool2d(2))


@kind("layers")
def max_pooling_rounded_up() -> nn.Module:
    return chain(conv(4, padding=1), nn.MaxPool2d(2, ceil_mode=True), nn.Tanh())


@kind("layers")
def average_pooling() -> nn.Module:
    return chain(conv(4, padding=1), nn.ReLU(), nn.AvgPool2d(2, padding=1))


@kind("layers")
def adaptive_pooling() -> nn.Module:
    return chain(conv(5, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))


@kind("layers")
def adaptive_max_pooling() -> nn.Module:
    return chain(conv(5, padding=1), nn.Tanh(), nn.AdaptiveMaxPool2d(2))


@kind("layers")
def power_pooling() -> nn.Module:
    return chain(conv(4, padding=1), nn.Sigmoid(), nn.LPPool2d(2, 2))


@kind("layers")
def upsampling() -> nn.Module:
    return chain(conv(2), nn.ReLU(), nn.Upsample(scale_factor=2, mode="nearest"))


@kind("layers")
def bilinear_upsampling() -> nn.Module:
    return chain(conv(2), nn.ReLU(), nn.Upsample(size=(4, 4), mode="bilinear", align_corners=False))


@kind("layers")
def pixel_shuffle() -> nn.Module:
    return chain(conv(4), nn.ReLU(), nn.PixelShuffle(2))


@kind("layers")
def patches_by_unfold() -> nn.Module:
    return chain(nn.Unfold(3, stride=2), nn.Tanh())


# --- activations -----------------------------------------------------------------------------------------------------


def activation(name: str, make: Callable[[], nn.Module]) -> None:
    ZOO[name] = Model(name, "activations", lambda: chain(conv(), make()))


class HalfElu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, -0.5)


for _name, _make in {
    "leaky relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "elu of negative alpha": HalfElu,
    "selu": nn.SELU,
    "celu": partial(nn.CELU, 0.5),
    "gelu": nn.GELU,
    "gelu by tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus with a low threshold": partial(nn.Softplus, threshold=1.0),
    "prelu": nn.PReLU,
    "hardswish": nn.Hardswish,
    "hardtanh": partial(nn.Hardtanh, -0.2, 0.2),
    "relu6": nn.ReLU6,
    "softsign": nn.Softsign,
    "softmax": partial(nn.Softmax, 1),
    "threshold with a jump": partial(nn.Threshold, 0.1, 2.0),
    "random leaky relu": nn.RReLU,
}.items():
    activation(_name, _make)


@kind("activations")
def gated_linear_unit() -> nn.Module:
    return chain(conv(4), nn.GLU(1))


@kind("activations")
def maxout() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        return torch.maximum(self.a(x), self.b(x))

    return block(features, 27, a=conv(), b=conv())


# --- normalisation ---------------------------------------------------------------------------------------------------


@kind("normalisation")
def batch_norm_in_train_mode() -> nn.Module:
    return chain(conv(), nn.BatchNorm2d(3), nn.ReLU())


@kind("normalisation")
def batch_norm_in_eval_mode() -> nn.Module:
    return held(chain(conv(), nn.BatchNorm2d(3), nn.ReLU()))


@kind("normalisation")
def batch_norm_without_running_statistics() -> nn.Module:
    return chain(conv(), nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU())


@kind("normalisation")
def group_norm() -> nn.Module:
    return chain(conv(4), nn.GroupNorm(2, 4), nn.ReLU())


@kind("normalisation")
def layer_norm() -> nn.Module:
    return chain(conv(), nn.LayerNorm([3, 3, 3]), nn.ReLU())


@kind("normalisation")
def instance_norm() -> nn.Module:
    return chain(conv(), nn.InstanceNorm2d(3, affine=True), nn.ReLU())


@kind("normalisation")
def instance_norm_in_eval_mode() -> nn.Module:
    return held(chain(conv(), nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU()))


@kind("normalisation", shape=ROW)
def rms_norm() -> nn.Module:
    return chain(nn.Linear(10, 8), nn.RMSNorm(8), nn.Tanh(), shape=ROW)


@kind("normalisation")
def local_response_norm() -> nn.Module:
    return chain(conv(4), nn.LocalResponseNorm(2, alpha=0.5), nn.ReLU())


@kind("normalisation")
def weight_norm_parametrisation() -> nn.Module:
    return chain(weight_norm(conv()), nn.ReLU())


@kind("normalisation")
def spectral_norm_in_train_mode() -> nn.Module:
    return chain(spectral_norm(conv()), nn.ReLU())


@kind("normalisation", shape=ROW)
def weight_norm_on_the_last_layer() -> nn.Module:
    model = chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW)
    weight_norm(model[-1])  # type: ignore[operator]
    return model


# --- wiring ----------------------------------------------------------------------------------------------------------


@kind("wiring")
def residual() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return F.relu(y + self.b(y))

    return block(features, 50, a=conv(2, padding=1), b=conv(2, padding=1))


@kind("wiring")
def dense_concatenation() -> nn.Module:
    return block(lambda self, x: torch.cat([x, F.relu(self.a(x))], 1), 125, a=conv(3, padding=1))


@kind("wiring")
def squeeze_and_excite() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return y * self.b(y.mean((2, 3))).sigmoid()[:, :, None, None]

    return block(features, 27, a=conv(), b=nn.Linear(3, 3))


@kind("wiring", shape=ROW)
def multiplied_branches() -> nn.Module:
    return block(lambda self, x: self.a(x) * self.b(x).sigmoid(), 8, a=nn.Linear(10, 8), b=nn.Linear(10, 8))


@kind("wiring", shape=ROW)
def a_layer_used_twice() -> nn.Module:
    return block(lambda self, x: torch.tanh(self.a(torch.tanh(self.a(x)))), 10, a=nn.Linear(10, 10))


@kind("wiring", shape=ROW)
def the_last_layer_used_twice() -> nn.Module:
    class Twice(Body):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.body(x))  # type: ignore[operator]
            return self.fc(torch.tanh(self.fc(y)) @ torch.ones(4, 8).to(y)) + self.fc(y)  # type: ignore[no-any-return]

    return Twice(8, body=nn.Linear(10, 8))


@kind("wiring", shape=ROW)
def tied_weights() -> nn.Module:
    model = block(lambda self, x: torch.tanh(self.a(x)) @ self.mix.weight, 4, a=nn.Linear(10, 4), mix=nn.Linear(4, 4))
    model.mix.weight = model.fc.weight  # type: ignore[union-attr, assignment]
    return model


@kind("wiring", shape=ROW)
def the_last_weight_used_directly_as_well() -> nn.Module:
    class Leak(Body):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.body(x))  # type: ignore[operator]
            return self.fc(y) + 0.5 * F.linear(y, self.fc.weight)  # type: ignore[no-any-return]

    return Leak(8, body=nn.Linear(10, 8))


@kind("wiring", shape=ROW)
def no_layer_but_functions() -> nn.Module:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 10) / 3), nn.Parameter(torch.randn(CLASSES, 8) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, self.a)), self.b)

    return Functions()


@kind("wiring", shape=ROW)
def einsum_and_normalised_features() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        return F.normalize(torch.einsum("nd,hd->nh", x, self.a.weight), dim=1)

    return block(features, 8, a=nn.Linear(10, 8))


@kind("wiring", shape=ROW)
def distances_to_prototypes() -> nn.Module:
    return block(lambda self, x: torch.cdist(x, self.a.weight), 8, a=nn.Linear(10, 8))


@kind("wiring", shape=ROW)
def sorted_features() -> nn.Module:
    return block(lambda self, x: self.a(x).sort(1).values, 8, a=nn.Linear(10, 8))


@kind("wiring", shape=(8,))
def fourier_features() -> nn.Module:
    return block(lambda self, x: torch.fft.rfft(self.a(x)).abs(), 5, a=nn.Linear(8, 8))


@kind("wiring", shape=SEQUENCE)
def running_sum_over_time() -> nn.Module:
    return block(lambda self, x: self.a(x).cumsum(1), 32, a=nn.Linear(6, 8))


# --- attention and recurrence ----------------------------------------------------------------------------------------


@kind("attention and recurrence", shape=SEQUENCE)
def multihead_attention() -> nn.Module:
    return block(lambda self, x: self.a(x, x, x)[0], 24, a=nn.MultiheadAttention(6, 2, batch_first=True))


@kind("attention and recurrence", shape=SEQUENCE)
def scaled_dot_product_attention() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return block(features, 24, a=nn.Linear(6, 18))


@kind("attention and recurrence", shape=SEQUENCE)
def transformer_layer() -> nn.Module:
    return block(lambda self, x: self.a(x), 24, a=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True))


@kind("attention and recurrence", shape=SEQUENCE)
def transformer_layer_with_dropout() -> nn.Module:
    return block(lambda self, x: self.a(x), 24, a=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True))


@kind("attention and recurrence")
def vision_transformer() -> nn.Module:
    class Vit(Body):
        def __init__(self) -> None:
            layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
            super().__init__(6, patch=nn.Conv2d(2, 6, 2, stride=2), a=layer, norm=nn.LayerNorm(6))
            self.token = nn.Parameter(torch.randn(1, 1, 6))
            self.place = nn.Parameter(torch.randn(1, 5, 6))

        def features(self, x: Tensor) -> Tensor:
            y = self.patch(x).flatten(2).mT  # type: ignore[operator]
            y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.place
            return self.norm(self.a(y))[:, 0]  # type: ignore[operator, no-any-return]

    return Vit()


def recurrent(layer: nn.Module, width: int) -> nn.Module:
    return block(lambda self, x: self.a(x)[0][:, -1], width, a=layer)


@kind("attention and recurrence", shape=SEQUENCE)
def rnn() -> nn.Module:
    return recurrent(nn.RNN(6, 5, batch_first=True), 5)


@kind("attention and recurrence", shape=SEQUENCE)
def lstm() -> nn.Module:
    return recurrent(nn.LSTM(6, 5, batch_first=True), 5)


@kind("attention and recurrence", shape=SEQUENCE)
def bidirectional_gru() -> nn.Module:
    return recurrent(nn.GRU(6, 5, batch_first=True, bidirectional=True), 10)


@kind("attention and recurrence", shape=SEQUENCE)
def lstm_cell_by_hand() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.a(step, state)
        return state[0]  # type: ignore[no-any-return]

    return block(features, 5, a=nn.LSTMCell(6, 5))


@kind("attention and recurrence", shape=SEQUENCE)
def the_last_layer_at_every_step() -> nn.Module:
    class Every(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.body(x))).mean(1)  # type: ignore[operator, no-any-return]

    return Every(5, body=nn.Linear(6, 5))


# --- what a model is called with, and what it returns ----------------------------------------------------------------


class Words(Body):
    """Token ids, their embeddings, their mean."""

    def __init__(self) -> None:
        super().__init__(6, words=nn.Embedding(11, 6))

    def features(self, x: Tensor) -> Tensor:
        return self.words(x.long()).mean(1)  # type: ignore[operator, no-any-return]


def ids(x: Tensor) -> Tensor:
    return (x * 10).long()


@kind("inputs and outputs", shape=(4,), inputs=lambda x: ((ids(x),), {}))
def token_ids() -> nn.Module:
    return Words()


@kind("inputs and outputs", shape=(4,), inputs=lambda x: ((ids(x).to(x),), {}))
def token_ids_as_floats() -> nn.Module:
    return Words()


class Two(Body):
    """An image and a row of numbers."""

    def __init__(self) -> None:
        super().__init__(12, a=nn.Linear(10, 8), b=nn.Linear(3, 4))

    def forward(self, x: Tensor, z: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        return self.fc(torch.tanh(torch.cat([self.a(x), self.b(z)], 1) * scale))  # type: ignore[operator, no-any-return]


@kind("inputs and outputs", shape=ROW, inputs=lambda x: ((x, x[:, :3] ** 2), {}))
def two_inputs() -> nn.Module:
    return Two()


@kind("inputs and outputs", shape=ROW, inputs=lambda x: ((x,), {"z": x[:, :3] ** 2}))
def a_second_input_by_name() -> nn.Module:
    return Two()


@kind("inputs and outputs", shape=ROW, inputs=lambda x: ((x, ids(x[:, :4])), {}))
def numbers_and_token_ids() -> nn.Module:
    class Mixed(Body):
        def __init__(self) -> None:
            super().__init__(14, a=nn.Linear(10, 8), words=nn.Embedding(11, 6))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.fc(torch.tanh(torch.cat([self.a(x), self.words(z).mean(1)], 1)))  # type: ignore[operator, no-any-return]

    return Mixed()


@kind("inputs and outputs", shape=ROW, inputs=lambda x: (({"x": x},), {}))
def a_dictionary_of_inputs() -> nn.Module:
    class Packed(Body):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            return self.fc(torch.tanh(self.body(batch["x"])))  # type: ignore[operator, no-any-return]

    return Packed(8, body=nn.Linear(10, 8))


@kind("inputs and outputs", shape=ROW, inputs=lambda x: ((x,), {}), logits=lambda output: output["logits"])
def a_dictionary_of_outputs() -> nn.Module:
    class Named(Body):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            y = torch.tanh(self.body(x))  # type: ignore[operator]
            return {"logits": self.fc(y), "features": y}

    return Named(8, body=nn.Linear(10, 8))


@kind("inputs and outputs", shape=SEQUENCE)
def time_before_examples() -> nn.Module:
    class TimeFirst(Body):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.body(x.transpose(0, 1)))  # type: ignore[operator]
            return self.fc(y).mean(0)  # type: ignore[no-any-return]

    return TimeFirst(5, body=nn.Linear(6, 5))


# --- what a forward pass may do --------------------------------------------------------------------------------------


@kind("forward passes")
def relu_in_place() -> nn.Module:
    return chain(conv(), nn.ReLU(inplace=True))


@kind("forward passes", shape=ROW)
def a_write_into_a_slice() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :3] *= 10
        return torch.tanh(y)

    return block(features, 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def a_write_through_a_view() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        y.view(-1, 2, 4)[:, 1].mul_(-2).add_(0.3)
        return y.relu_()

    return block(features, 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def a_branch_on_values() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.tanh(y) if float(y.detach().sum()) > -100 else y * 7

    return block(features, 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def a_choice_by_where() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.where(y > 0.3, y * 2, y.sin())

    return block(features, 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def division_rounded_down() -> nn.Module:
    return block(
        lambda self, x: self.a(x) + torch.div(x.sum(1, True), 0.1, rounding_mode="floor"), 8, a=nn.Linear(10, 8)
    )


@kind("forward passes", shape=ROW)
def a_no_grad_block() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.b(x).sigmoid() * 3
        return torch.tanh(self.a(x) * gate)

    return block(features, 8, a=nn.Linear(10, 8), b=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def a_detached_branch() -> nn.Module:
    return block(lambda self, x: torch.tanh(self.a(x) * self.b(x).detach()), 8, a=nn.Linear(10, 8), b=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def features_under_no_grad() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.tanh(self.a(x))

    return block(features, 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def a_straight_through_step() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        return y + (y.sign() - y).detach()

    return block(features, 8, a=nn.Linear(10, 8))


class Reversed(torch.autograd.Function):
    """The identity whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -2 * grad


@kind("forward passes", shape=ROW)
def a_gradient_of_its_own() -> nn.Module:
    return block(lambda self, x: torch.tanh(Reversed.apply(self.a(x))), 8, a=nn.Linear(10, 8))  # type: ignore[no-untyped-call, no-any-return]


@kind("forward passes", shape=ROW)
def a_hook_that_changes_values() -> nn.Module:
    model = chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW)
    model[0].register_forward_hook(lambda module, args, out: out * 2)  # type: ignore[operator]
    return model


@kind("forward passes", shape=ROW)
def dropout() -> nn.Module:
    return chain(nn.Linear(10, 12), nn.Tanh(), nn.Dropout(0.3), shape=ROW)


@kind("forward passes", shape=ROW)
def noise_in_the_forward_pass() -> nn.Module:
    return block(lambda self, x: torch.tanh(self.a(x) + 0.1 * torch.randn(8, dtype=x.dtype)), 8, a=nn.Linear(10, 8))


@kind("forward passes", shape=ROW)
def frozen_first_layer() -> nn.Module:
    model = chain(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), shape=ROW)
    model[0].requires_grad_(False)  # type: ignore[operator]
    return model


@kind("forward passes", shape=ROW)
def frozen_last_layer() -> nn.Module:
    model = chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW)
    model[-1].requires_grad_(False)  # type: ignore[operator]
    return model


# --- examples that see each other ------------------------------------------------------------------------------------


def mixing(name: str, mix: Callable[[Tensor], Tensor]) -> None:
    ZOO[name] = Model(
        name, "examples that see each other",
        lambda: block(lambda self, x: torch.tanh(mix(self.a(x))), 8, a=nn.Linear(10, 8)), shape=ROW,
    )  # fmt: skip


for _name, _mix in {
    "batch centring by hand": lambda y: y - y.mean(0),
    "softmax over the batch": lambda y: 5 * y.softmax(0),
    "examples rolled": lambda y: y + y.roll(1, 0),
    "running sum over the batch": lambda y: y.cumsum(0),
    "attention over the batch": lambda y: (y @ y.T).softmax(1) @ y,
    "scaled by the largest of the batch": lambda y: y / y.abs().max(),
}.items():
    mixing(_name, _mix)


# --- styles of training ----------------------------------------------------------------------------------------------


@kind("styles of training", shape=ROW, dtype=torch.float32, autocast=True)
def autocast_around_the_call() -> nn.Module:
    return chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW)


@kind("styles of training", shape=ROW)
def compiled() -> nn.Module:
    return torch.compile(chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW).double(), backend="eager")  # type: ignore[return-value]


@kind("styles of training", shape=ROW)
def checkpointing_before_the_last_layer() -> nn.Module:
    def features(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False)  # type: ignore[no-any-return]

    return block(features, 8, a=nn.Linear(10, 8))


@kind("styles of training", shape=ROW)
def checkpointing_over_the_last_layer() -> nn.Module:
    class Whole(Body):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.fc(torch.tanh(self.body(x))), x, use_reentrant=False)  # type: ignore[operator, no-any-return]

    return Whole(8, body=nn.Linear(10, 8))


@kind("precision", shape=ROW, dtype=torch.float32)
def float32() -> nn.Module:
    return chain(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), shape=ROW)


@kind("precision", shape=ROW, dtype=torch.bfloat16)
def bfloat16() -> nn.Module:
    return chain(nn.Linear(10, 8), nn.Tanh(), shape=ROW)
