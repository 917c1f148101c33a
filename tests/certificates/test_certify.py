"""The front door: tightness where theory gives equality, the sentences, the conversions, the refusals."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.errors import CertificateError, LayerError
from gradveil.representation.certify import KINDS, certify, readable_p
from gradveil.representation.norms import norm
from gradveil.representation.problem import blind_mse, largest_mse
from gradveil.types import Batch

NORMS = (1, 2, inf)


def linear_model(weight: Tensor) -> nn.Sequential:
    """f(x) = W x, then a layer to defend."""
    out, size = weight.shape
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, out, bias=False), nn.Linear(out, 2)).double()
    model[1].weight.data = weight.double()
    return model


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("kind", ["local", "global", "box", "reach"])
def test_a_scaled_identity_is_certified_with_equality(kind: str, p: float) -> None:
    x = 0.2 + 0.6 * torch.rand(3, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = 0.2 + 0.6 * torch.rand(3, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    certificate = certify(linear_model(2 * torch.eye(6)), "2", x, 2 * other.flatten(1), p, kind)
    distance = norm(x - other, p)
    if kind == "reach":  # along r′ - r: exact for p = 2, a lower bound for the others
        assert (certificate.bound <= distance * (1 + 1e-9)).all()
        assert (certificate.bound >= (0.97 if p == 2 else 0.1) * distance).all()
    else:
        torch.testing.assert_close(certificate.bound, distance, rtol=1e-6, atol=0)


@given(st.integers(0, 50))
def test_an_orthogonal_map_is_certified_with_equality_in_the_2_norm(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(5, 5, generator=rng, dtype=torch.float64))
    x, other = torch.rand(2, 2, 1, 1, 5, generator=rng, dtype=torch.float64)
    for kind in ("local", "global", "box"):
        certificate = certify(linear_model(q), None, x, other.flatten(1) @ q.T, 2, kind)
        torch.testing.assert_close(certificate.bound, norm(x - other, 2), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("p", NORMS)
def test_the_zeroed_pixels_of_a_linear_model_are_the_certified_distance(p: float) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    x = torch.rand(2, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    kept = x.flatten(1).clone()
    kept[:, [1, 5]] = 0
    certificate = certify(model, None, x, kept, p, "global")
    torch.testing.assert_close(certificate.bound, norm(x.flatten(1)[:, [1, 5]].double(), p), rtol=1e-6, atol=0)
    if p == 2:
        torch.testing.assert_close(certificate.to_mse(), ((x.flatten(1) - kept) ** 2).double().mean(1))


@given(st.integers(0, 50))
def test_the_converted_mse_never_exceeds_the_true_one(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, other = torch.rand(2, 3, 1, 1, 7, generator=rng)
    mse = ((x - other).double() ** 2).flatten(1).mean(1)
    for p in NORMS:
        certificate = certify(linear_model(torch.eye(7)), None, x.double(), other.flatten(1).double(), p)
        assert (certificate.to_mse() <= mse * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_states_what_it_rests_on(kind: str, model: nn.Module, batch: Batch) -> None:
    r = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    x = batch.inputs.clone()
    certificate = certify(model, "5", x, r, 2, kind, residual=0.01 if kind == "residual" else None)
    assert certificate.bound.shape == (3,)
    assert not certificate.bound.isnan().any()
    assert (certificate.bound >= 0).all()
    assert certificate.kind == kind
    assert certificate.how
    assert certificate.assumptions
    assert all(sentence.endswith(".") for sentence in certificate.assumptions)
    assert certificate.sound == (kind not in ("local", "empirical"))
    scoped = "does not need f(X′) = r′" in " ".join(certificate.assumptions)
    assert scoped == (kind != "empirical")
    assert torch.equal(x, batch.inputs)


def test_the_papers_figure_says_that_it_is_no_certificate(model: nn.Module, batch: Batch) -> None:
    certificate = certify(model, None, batch.inputs, torch.zeros(3, 64), 2, "local")
    assert "not a certificate" in certificate.assumptions[0]


def test_the_kinds_are_ordered_as_the_theory_says(model: nn.Module, batch: Batch) -> None:
    r = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.4
    for p in NORMS:
        found = {k: certify(model, None, batch.inputs, r, p, k).bound for k in ("global", "box", "local")}
        assert (found["global"] <= found["box"] * (1 + 1e-9)).all()
        assert (found["box"] <= found["local"] * (1 + 1e-4)).all()


def test_the_residual_bound_falls_to_zero_at_the_residual_that_the_truth_leaves(model: nn.Module, batch: Batch) -> None:
    r, x, model = torch.zeros(3, 64).double(), batch.inputs.double(), model.double()
    plain = certify(model, None, x, r, 2, "global")
    gap = plain.details["distance"]
    at = {t: certify(model, None, x, r, 2, "residual", residual=t * gap).bound for t in (0.0, 0.5, 1.0, 2.0)}
    torch.testing.assert_close(at[0.0], plain.bound)
    torch.testing.assert_close(at[0.5], plain.bound / 2)
    assert at[1.0].abs().max() < 1e-9
    assert at[2.0].abs().max() == 0


def test_the_largest_and_the_blind_mse_are_those_of_the_worst_and_the_mean_image() -> None:
    x = torch.tensor([[0.0, 1.0], [0.5, 0.25]]).reshape(2, 1, 1, 2)
    assert largest_mse(x).tolist() == pytest.approx([1.0, (0.25 + 0.5625) / 2])
    assert blind_mse(x, torch.tensor([0.5, 0.5])).tolist() == [0.25, 0.03125]


def test_faulty_calls_are_refused_in_one_line(model: nn.Module, batch: Batch) -> None:
    r = torch.zeros(3, 64)
    for says, error, call in [
        ("No certificate is of kind 'globl'. Did you mean 'global'", CertificateError, {"kind": "globl"}),
        ("p is 3", CertificateError, {"p": 3}),
        ("needs residual=", CertificateError, {"kind": "residual"}),
        ("no linear or convolutional layer 'fc'", LayerError, {"layer": "fc"}),
        ("3 inputs and 2 representations", CertificateError, {"r_perturbed": r[:2]}),
        ("takes 64 numbers per example; r_perturbed has 60", CertificateError, {"r_perturbed": r[:, :60]}),
        ("outside the data range", CertificateError, {"bounds": (0.0, 0.5)}),
        ("has no end", CertificateError, {"bounds": (0.0, inf)}),
        ("Inputs are torch.int64; a distance needs real numbers", CertificateError, {"x": batch.inputs.long()}),
        ("Representations are torch.int64", CertificateError, {"r_perturbed": r.long()}),
        ("NaN or infinite", CertificateError, {"r_perturbed": r + torch.nan}),
        ("0 or more", CertificateError, {"kind": "residual", "residual": -1.0}),
        ("0 or more", CertificateError, {"kind": "residual", "residual": torch.nan}),
    ]:
        arguments = {"model": model, "layer": "5", "x": batch.inputs, "r_perturbed": r, "p": 2} | call
        with pytest.raises(error, match=says):
            certify(**arguments)
    with pytest.raises(CertificateError, match="r_perturbed is"):
        certify(model, "5", batch.inputs, r[:, :60], 2, "local")
    with pytest.raises(CertificateError, match="p is 'two'"):
        readable_p("two")
    assert [readable_p(t) for t in ("1", "2", "inf")] == [1, 2, inf]
