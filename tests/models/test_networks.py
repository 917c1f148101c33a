"""The networks of today: as published, at every size, trained, attacked, defended and, where it must be, refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradveil
from gradveil.errors import CertificateError, SpecError
from gradveil.models import build, build_working
from gradveil.types import Batch

SMALL = ["resnet18:width=4", "vit_tiny:depth=2,width=16,heads=2"]


def weights(spec: str, shape: tuple[int, ...], num_classes: int) -> int:
    return sum(p.numel() for p in build(spec, shape, num_classes).parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "published"),
    [
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("vit_tiny:patch=16,depth=12,width=192,heads=3", (3, 224, 224), 1000, 5_717_416),  # ViT-Ti/16
        ("resnet18:width=16", (3, 32, 32), 10, 701_466),  # as our own page says, and below
        ("vit_tiny", (3, 32, 32), 10, 208_074),
    ],
)
def test_they_have_as_many_weights_as_published(
    spec: str, shape: tuple[int, ...], classes: int, published: int
) -> None:
    assert weights(spec, shape, classes) == published


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (2, 9, 13)])
def test_one_image_in_training_mode_is_enough_and_every_pixel_counts(spec: str, shape: tuple[int, ...]) -> None:
    model = build_working(spec, shape, 10)
    assert list(model._modules)[-1] == "fc"
    x = torch.rand(1, *shape, requires_grad=True)
    logits = model(x)
    assert logits.shape == (1, 10)
    (slope,) = torch.autograd.grad(logits.square().sum(), x)
    assert slope.abs().sum((0, 1)).min() > 0


@pytest.mark.parametrize("spec", ["resnet18:width=8", "vit_tiny"])
def test_the_loss_goes_down_in_a_few_steps(spec: str) -> None:
    digits = gradveil.dataset("digits")
    model, batch = build(spec, digits.input_shape, 10), digits.train.batch(slice(0, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.inputs), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_stages_are_as_published() -> None:
    resnet, vit = (build(spec, (3, 32, 32), 10) for spec in SMALL)
    shapes = []
    for i in (2, 4, 6, 8):
        resnet.get_submodule(f"block{i}").register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    resnet(torch.rand(1, 3, 32, 32))
    assert shapes == [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]
    assert vit.get_submodule("tokens")(torch.rand(1, 3, 32, 32)).shape == (1, 65, 16)


def test_attention_is_that_of_pytorch() -> None:
    block = build("vit_tiny:depth=1,width=16,heads=2", (1, 8, 8), 10).get_submodule("block1")
    theirs = nn.TransformerEncoderLayer(16, 2, 64, 0.0, F.gelu, batch_first=True, norm_first=True)
    ours = dict(block.named_parameters())
    names = {
        "self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.", "norm1.": "norm1.",
        "norm2.": "norm2.", "linear1.": "perceptron.0.", "linear2.": "perceptron.2.",
    }  # fmt: skip
    theirs.load_state_dict({a + kind: ours[b + kind] for a, b in names.items() for kind in ("weight", "bias")})
    x = torch.randn(3, 5, 16)
    assert torch.allclose(block(x), theirs(x), atol=1e-5)


@pytest.mark.parametrize("spec", SMALL)
def test_scores_protection_and_attacks_take_them(spec: str) -> None:
    model = build(spec, (1, 8, 8), 10)
    batch = Batch(torch.rand(2, 1, 8, 8), torch.tensor([3, 7]))
    scores = gradveil.leak_scores(model, None, batch.inputs)
    assert scores.shape == (2, model.get_submodule("fc").weight.shape[1])  # type: ignore[union-attr]
    assert bool((scores >= 0).all())
    mine = copy.deepcopy(model)
    guard = gradveil.protect(mine, "representation:share=0.4")
    F.cross_entropy(mine(batch.inputs), batch.labels).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(mine.parameters(), lr=0.1).step()
    assert guard.report.steps == 1
    update = gradveil.local_update(model, batch[:1], "none", 0.1, torch.Generator().manual_seed(0))
    seen = gradveil.Observation(model, update, (1, 8, 8), 10)
    found = gradveil.attack("gs:steps=2,restarts=1").reconstruct(seen, torch.Generator().manual_seed(0))
    assert found.inputs.shape == (1, 1, 8, 8)
    assert torch.isfinite(found.inputs).all()


@pytest.mark.parametrize("spec", SMALL)
def test_certificates_refuse_in_one_line(spec: str) -> None:
    model = build(spec, (1, 8, 8), 10).eval()
    with pytest.raises(CertificateError) as caught:
        gradveil.certify(model, None, torch.rand(1, 1, 8, 8), torch.rand(1, 4), kind="global")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("vit_tiny:heads=3", "cannot be dealt out to 3 heads"), ("vit_tiny:patch=0", "from 1 to 64"),
        ("resnet18:width=0", "from 1 to 4,096"),
    ],
)  # fmt: skip
def test_settings_that_make_no_network_are_refused(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build(spec, (1, 8, 8), 10)
