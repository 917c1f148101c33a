"""The cipher and the noise of CUDA devices: by Triton's interpreter where there is Triton, and on a device."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from gradveil.privacy import noise as gaussian
from gradveil.privacy.noise import ERROR, Drawn, SecretDraws, grid_of, release

CHECK = """
import json, os, sys
import numpy as np, torch
from gradveil.privacy import chacha
from gradveil.privacy.noise import Drawn, grid_of, normals_of

device = torch.device(sys.argv[1])
keys = [os.urandom(32) for _ in range(3)]
streams = [chacha.stream(key, 3, device).cpu() for key in keys]
os.urandom = lambda count: keys[0]
words = streams[0].view(3, chacha.LANES, 8).numpy().view(np.uint64)
expected = torch.from_numpy(normals_of(words[..., :4], words[..., 4:])).permute(1, 3, 0, 2).flatten()
found = torch.empty(len(expected) - 5, dtype=torch.float64, device=device)
chacha.normals(found, 1.0)
error = float((found.cpu() - expected[:-5]).abs().max())
grid, equal = grid_of(0.3), []
for kind in (torch.float32, torch.float64):
    total = (100 * torch.randn(len(expected) - 5, dtype=torch.float64)).to(device, kind)
    total[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    normal = found * (0.3 / grid) * grid
    equal.append(torch.equal(chacha.release(total, 0.3, grid), Drawn(normal, grid).on(total)))
hexes = [stream.numpy().tobytes().hex() for stream in streams]
print(json.dumps({"keys": [key.hex() for key in keys], "streams": hexes, "error": error, "equal": equal}))
"""


def check(device: str, **environment: str) -> None:
    """In a process of its own: whether Triton interprets is settled when it is imported."""
    call = [sys.executable, "-W", "ignore", "-c", CHECK, device]
    done = subprocess.run(call, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for key, stream in zip(found["keys"], found["streams"], strict=True):
        cipher = Cipher(ChaCha20(bytes.fromhex(key), bytes(16)), mode=None).encryptor()
        assert bytes.fromhex(stream) == cipher.update(bytes(len(stream) // 2))
    assert found["error"] <= ERROR / 4
    assert found["equal"] == [True, True]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_of_devices_is_the_library_byte_by_byte() -> None:
    check("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernel_of_devices_is_the_library_on_a_device() -> None:
    check("cuda")
    assert gaussian._on_cuda() is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_releases_on_a_device_are_normal_and_on_the_grid() -> None:
    total = torch.arange(2**20, device="cuda", dtype=torch.float64) * 1000
    found = release(total, 1.0, SecretDraws())
    assert found.is_cuda
    away, whole = found - total, found / grid_of(1.0)
    assert torch.equal(whole, whole.round())
    assert abs(float(away.std()) - 1) < 0.01
    assert float(away.abs().max()) < 10


def test_without_a_kernel_noise_is_made_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "library", lambda: None)
    found = release(torch.zeros(1001), 1.0, SecretDraws())
    assert torch.equal(found, Drawn(found.double(), grid_of(1.0)).on(torch.zeros(1001)))
    assert 0.8 < float(found.std()) < 1.2
