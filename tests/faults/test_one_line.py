"""What ended in a traceback: odd tensors, odd texts, lost workers, odd folders, and users' own code that fails."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from faults.conftest import Count, times
from faults.stage import Act, Stage, one_line
from faults.test_hostile import idle, refused  # noqa: F401

pytestmark = pytest.mark.slow
LOGISTIC = ("--model", "logistic", "--input-shape", "1x8x8", "--classes", "5")
FLOATS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.uint8,
    torch.bool,
)
SHAPES = ((5, 64), (64, 5), (5,), (), (0,), (1, 5), (5, 1), (1,), (2, 5), (5, 64, 1))


def state(weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"1.weight": weight, "1.bias": bias}


WORDS = {
    "infer": ("infer", "--update", "file.safetensors", *LOGISTIC),
    "audit": ("audit", "--update", "file.safetensors", *LOGISTIC, "--attack", "analytic", "--out", "run"),
    "check-model": ("check-model", "file.safetensors", *LOGISTIC),
}


@pytest.mark.parametrize("command", WORDS)
def test_tensors_of_every_type_and_shape(stage: Stage, tmp_path: Path, command: str, count: Count) -> None:
    kinds = [state(torch.randn(5, 64).to(kind), torch.randn(5)) for kind in FLOATS]
    kinds += [state(torch.randn(5, 64), torch.randn(5).to(kind)) for kind in FLOATS]
    kinds += [state(torch.randn(5, 64), torch.randn(shape)) for shape in SHAPES]
    kinds += [state(torch.randn(shape), torch.randn(5)) for shape in SHAPES]
    kinds += [state(torch.full((5, 64), value), torch.zeros(5)) for value in (float("nan"), float("inf"), 0.0)]
    for i, tensors in enumerate(kinds[:: times(4, 1)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "file.safetensors")
        (found,) = stage.run(Act(WORDS[command], str(folder)))
        assert found.code in (0, 1, 2, 3), (tensors, found)
        assert "Traceback" not in found.err, (tensors, found)
        assert found.code != 2 or one_line(found), (tensors, found)
        count("odd tensors")


def odd_text(folder: Path, column: str, raw: bytes) -> None:
    """A column of texts that are no UTF-8: pyarrow takes the bytes as they are."""
    offsets = np.array([0, *np.cumsum([len(raw)] * 8)], np.int32)
    texts = pa.Array.from_buffers(pa.string(), 8, [None, pa.py_buffer(offsets), pa.py_buffer(raw * 8)])
    table = {"name": pa.array(list("abcdabcd")), "y": pa.array([0, 1] * 4)} | {column: texts}
    pq.write_table(pa.table(table), folder / "odd.parquet")


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\xc3", b"a\x80b", b"\xed\xa0\x80"])
def test_texts_that_are_no_utf_8(stage: Stage, idle: int, tmp_path: Path, raw: bytes, count: Count) -> None:  # noqa: F811
    for column in ("name", "y", "more"):
        odd_text(tmp_path, column, raw)
        words = ("train", "--rounds", "1", "--out", "run", "--dataset", "table:path=odd.parquet,target=y")
        refused(stage, idle, tmp_path, *words)
        count("odd texts")


def test_odd_folders(stage: Stage, idle: int, tmp_path: Path, count: Count) -> None:  # noqa: F811
    train = ("train", "--rounds", "1", "--model", "logistic")
    cases = [
        (*train, "--out", "x" * 300),
        (*train, "--out", "/".join(["x" * 200] * 30)),
        ("audit", "--out", "x" * 300, "--images", "1"),
        (*train, "--dataset", "folder:path=/", "--out", "run"),
        (*train, "--dataset", "folder:path=/proc", "--out", "run"),
        (*train, "--dataset", "folder:path=/dev", "--out", "run"),
        (*train, "--dataset", f"folder:path={'x' * 5000}", "--out", "run"),
        (*train, "--dataset", "mnist", "--data", "x" * 5000, "--out", "run"),
        (*train, "--dataset", f"table:path={'x' * 5000},target=y", "--out", "run"),
        ("report", "x" * 300),
        ("report", "/"),
        ("report", "/proc/self"),
        ("audit", "--config", "x" * 300),
        ("audit", "--update", "x" * 5000, "--classes", "3"),
        ("plan", "--check", "x" * 300),
        ("plan", "--check", "/dev/zero"),
        ("check-model", "/dev/zero", *LOGISTIC),
    ]
    for words in cases:
        refused(stage, idle, tmp_path, *words)
        count("odd folders")


def test_a_folder_that_was_removed(tmp_path: Path, count: Count) -> None:
    for words in (["list"], ["train", "--out", "run"], ["audit"]):
        script = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -P -m gradveil {' '.join(words)}"
        done = subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2, done
        assert done.stderr.count("\n") == 1, done
        assert "current folder was removed" in done.stderr, done
        count("odd folders")


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
SAYS = {
    "list": ("list",),
    "plan": ("plan",),
    "audit": ("audit", "--images", "1", "--rounds", "1", "--clients", "2", "--attack", "analytic", "--no-meter"),
    "certify": ("certify", "--images", "1", "--model", "lenet:width=3", "--kind", "global"),
    "no file": ("report", "Ünïcödé"),
}


@pytest.mark.parametrize(
    "name", [n if n in ("plan", "no file") else pytest.param(n, marks=pytest.mark.long) for n in SAYS]
)
def test_output_that_takes_ascii_alone(tmp_path: Path, name: str, count: Count) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gradveil", *SAYS[name]], cwd=tmp_path, capture_output=True, timeout=300,
        check=False, env=os.environ | ASCII,
    )  # fmt: skip
    assert done.returncode == (2 if name == "no file" else 0), done
    assert b"Traceback" not in done.stderr, done
    count("output in ASCII")


DEFENCE = """
import numpy as np

def act(given):
    {fault}
"""
FAULTS = {
    "numpy": "np.zeros(3) + np.zeros(4)",
    "numpy of a gradient": "np.linalg.inv(np.zeros((2, 3)))",
    "a key": "{}['x']",
    "a division": "1 / 0",
    "an assertion": "assert False",
    "its own": "class Odd(Exception): pass\n    raise Odd('odd\\\\n\\\\x1b[2J')",
    "recursion": "act(given)",
}


@pytest.mark.parametrize("fault", [f if f == "numpy" else pytest.param(f, marks=pytest.mark.long) for f in FAULTS])
def test_a_defence_of_ones_own_that_fails(stage: Stage, tmp_path: Path, fault: str, count: Count) -> None:
    for method in ("on_update", "on_batch"):
        (tmp_path / "own.py").write_text(DEFENCE.format(method=method, fault=FAULTS[fault]))
        for command in (("train", "--clients", "2"), ("audit", "--images", "1", "--attack", "analytic", "--no-meter")):
            words = (
                *command,
                "--rounds",
                "1",
                "--model",
                "logistic",
                "--defense",
                f"mine:at={method}",
                "--out",
                f"{command[0]}-{method}",
            )
            (found,) = stage.run(Act(words, str(tmp_path)))
            if command[0] == "audit" and found.code == 0:  # a finding of the audit, which goes on
                assert "The defence ends with an" in found.out, found
                assert "Traceback" not in found.out + found.err, found
            else:
                assert found.code == 2, found
                assert one_line(found), found
                assert "own.py" in found.err, found
            count("defences of one's own that fail")


DATA = {
    "a key": "return {}['x']",
    "numpy": "np.zeros(3) + np.zeros(4)",
    "no memory": "raise MemoryError",
    "nothing": "pass",
    "a number": "return 3",
    "texts": "return ['a'], ['b']",
    "objects": "return np.array([{}]), np.array([0])",
    "a ragged list": "return [[1], [1, 2]], [0, 1]",
    "complex": "return np.zeros((4, 8, 8), complex), [0, 1, 0, 1]",
}


@pytest.mark.parametrize("fault", DATA)
def test_data_of_ones_own_that_fails(stage: Stage, idle: int, tmp_path: Path, fault: str, count: Count) -> None:  # noqa: F811
    (tmp_path / "own.py").write_text(f"import numpy as np\ndef data():\n    {DATA[fault]}\n")
    refused(stage, idle, tmp_path, "train", "--rounds", "1", "--dataset", "own:data", "--out", "run")
    refused(stage, idle, tmp_path, "train", "--dataset", "table:path=own:data,target=y", "--out", "run")
    count("data of one's own that fails", 2)


def children(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]


@pytest.mark.parametrize("command", ["leaderboard", "train"])
def test_a_worker_that_is_killed(tmp_path: Path, command: str, count: Count) -> None:
    words = {
        "leaderboard": ["--only", "attack/*", "--defense", "gaussian:scale=0.001", "--jobs", "2"],
        "train": ["--rounds", "500", "--model", "logistic", "--engine", "processes:workers=2"],
    }[command]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gradveil", command, *words, "--out", "run"], cwd=tmp_path, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    killed = False
    until = time.monotonic() + 120
    while not killed and time.monotonic() < until and process.poll() is None:
        time.sleep(0.2)
        for pid in _below(process.pid):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes()
                busy = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) > 100
                if busy and (b"spawn_main" in text or b"forkserver" in text) and not children(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
                    break
    assert killed, process.communicate(timeout=60)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("gradveil: "), err
    count("workers that are killed")


def _below(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(grand for child in found for grand in _below(child))]
