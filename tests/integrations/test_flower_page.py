"""docs/how-to/train-with-flower.md: its commands in simulation, and on a SuperLink with two SuperNodes."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "train-with-flower.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (?P<mark>.*?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)


def blocks(mark: str | None, language: str = "bash") -> list[str]:
    """Return the page's blocks of code with this mark above them."""
    return [m["code"] for m in BLOCK.finditer(PAGE) if m["language"] == language and m["mark"] == mark]


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1"}


def run(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=550,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


# The page's commands one after the other in one process, since each of four would import torch again; Ray is started
# once, with one worker, for the same reason.
IN_ONE_PROCESS = r"""
import os, runpy, shlex, sys
import ray

os.cpu_count = lambda: 1
ray.shutdown = lambda *_, **__: None
from gradveil.cli.main import entry

for line in open("page.sh").read().replace("\\\n", " ").splitlines():
    first, *rest = sys.argv = shlex.split(line)
    if first == "export":
        os.environ.update(word.split("=") for word in rest)
    elif first == "gradveil":
        try:
            entry()
        except SystemExit as done:
            assert not done.code, line
    else:
        assert first == "python", line
        runpy.run_path(*rest, run_name="__main__")
"""
POISON = """
from flwr.app import ArrayRecord
from flwr.simulation import run_simulation
from gradveil.integrations.flower.app import make_client_app, make_server_app
from gradveil.integrations.flower.settings import FlowerSettings


def poison(message, context, call_next):
    reply = call_next(message, context)
    if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
        weights = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({name: value + 1e30 for name, value in weights.items()})
    return reply


run = FlowerSettings(partition="iid:devices=3,per_device=8", clients=3, rounds=1, model="logistic")
client, server = make_client_app(run, mods=[poison]), make_server_app(run, lambda out: print("poison:", out.rounds))
run_simulation(server, client, num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.mark.slow
def test_the_page_runs_in_simulation_and_gives_the_model_of_the_process(tmp_path: Path) -> None:
    for match in BLOCK.finditer(PAGE):
        if (match["mark"] or "").startswith("file: "):
            (tmp_path / match["mark"].removeprefix("file: ")).write_text(match["code"], encoding="utf-8")
    script = "".join(code for code in blocks(None) if not code.startswith("pip install"))
    assert (script.count("gradveil train"), script.count("python ")) == (2, 1)
    (tmp_path / "page.sh").write_text(f"{script}python poison.py\n")
    (tmp_path / "poison.py").write_text(POISON)
    (tmp_path / "in_one_process.py").write_text(IN_ONE_PROCESS)

    said = run("python in_one_process.py", tmp_path)

    flower, here = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("flower", "here"))
    assert flower.keys() == here.keys()
    assert max(float((flower[name] - here[name]).abs().max()) for name in here) < 1e-5
    assert "replies per round: [{'sent': 2, 'kept': 2," in said
    assert re.search(r"metrics per round: .*'defended-steps': 1\.0, 'leak-psnr'", said)
    assert re.search(r"poison: .*'accepted': 2, 'rejected': {'too far': 1}", said)


@pytest.mark.slow
@pytest.mark.deploy
def test_a_superlink_and_two_supernodes_train(tmp_path: Path) -> None:
    servers, submit = blocks("deploy")
    connection = '[superlink]\ndefault = "x"\n[superlink.x]\naddress = "127.0.0.1:18800"\ninsecure = true\n'
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(connection)
    with started(servers, tmp_path):
        run(submit, tmp_path)
        rounds = (tmp_path / "runs" / "deployed" / "rounds.jsonl").read_text().splitlines()
        assert len(rounds) == 2
        assert all('"accepted": 2' in row for row in rounds), rounds + [
            log.read_text()[-2000:] for log in tmp_path.glob("*.log")
        ]
        example = f"flwr run {ROOT / 'examples' / 'flower'} x --stream -c 'rounds=1 out=\"{tmp_path / 'example'}\"'"
        assert "Received 2 results and 0 failures" in run(example, tmp_path)
        assert (tmp_path / "example" / "model.safetensors").exists()


@contextmanager
def started(script: str, folder: Path) -> Iterator[None]:
    """Start each line that ends in & as a process of its own; end them, and only them, afterwards."""
    lines = [line.strip().removesuffix("&") for line in script.splitlines() if line.strip().endswith("&")]
    assert len(lines) == 3
    processes = []
    try:
        for number, line in enumerate(lines):
            log = (folder / f"{number}.log").open("w")
            processes.append(
                subprocess.Popen(
                    shlex.split(line),
                    cwd=folder,
                    env=environment(folder),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def test_the_example_has_the_settings_of_the_app() -> None:
    import tomllib

    from gradveil.integrations.flower.settings import FlowerSettings

    config = tomllib.loads((ROOT / "examples" / "flower" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert FlowerSettings.from_config(config["config"]).to_config() == config["config"]
    assert config["components"] == {
        "serverapp": "gradveil.flower:server_app",
        "clientapp": "gradveil.flower:client_app",
    }
