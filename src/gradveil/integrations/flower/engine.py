"""Run gradveil's Flower app: simulated on this machine, or submitted to a running SuperLink.

Flower reads some of its settings from the environment when it is imported, so this module sets them first.
"""

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.errors import GradveilError, MissingExtraError

if TYPE_CHECKING:
    from gradveil.integrations.flower.app import Outcome
    from gradveil.integrations.flower.settings import FlowerSettings

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns at each start
}
PYPROJECT = """\
[project]
name = "gradveil-app"
version = "{version}"
description = "Federated training with a defence inside"
license = {{ text = "MIT" }}
dependencies = []  # gradveil is installed on every site; Flower would make a new environment for each run otherwise

[tool.flwr.app]
publisher = "gradveil"

[tool.flwr.app.components]
serverapp = "gradveil.flower:server_app"
clientapp = "gradveil.flower:client_app"

[tool.flwr.app.config]
{config}
"""


def check(settings: "FlowerSettings") -> int:
    """Raise unless data, model, strategy and devices fit together; return the number of devices."""
    if importlib.util.find_spec("flwr") is None:
        raise MissingExtraError("The Flower engine", "flower")
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    from gradveil.integrations.flower.settings import build_strategy, load_data
    from gradveil.threats.setup import fitting_model

    dataset, shares = load_data(settings.dataset, settings.data, settings.partition, settings.seed)
    fitting_model(settings.model, dataset, settings.loss, settings.seed, settings.trains)
    settings.ledger(shares)
    build_strategy(settings.strategy, settings.clients)
    if settings.clients > len(shares):
        raise GradveilError(f"{settings.clients} clients a round were asked for and there are {len(shares)}.")
    return len(shares)


def simulate(settings: "FlowerSettings") -> "Outcome":
    """Run every device as a simulated node on this machine and return what came of it."""
    devices = check(settings)  # whatever does not fit is said now, not from another process
    from gradveil.integrations.flower.app import make_client_app, make_server_app

    try:
        from flwr.simulation import run_simulation
    except ImportError as error:
        raise MissingExtraError("A simulation on Flower", "flower") from error
    outcomes: list[Outcome] = []
    with _ray(os.cpu_count() or 1) as at_home:
        run_simulation(
            make_server_app(settings, outcomes.append, simulation=True),
            make_client_app(settings, [at_home], simulation=True),
            num_supernodes=devices,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    if not outcomes:
        raise GradveilError("The simulation ended without a result. The lines above say why.")
    return outcomes[0]


@contextmanager
def _ray(cores: int) -> Iterator[Any]:
    """Start Ray, and give a mod that takes its workers to the current folder.

    They import from the folder in which Ray is started before all others, so that is an empty one.
    """
    import ray

    home = os.getcwd()
    path = os.pathsep.join(place or home for place in sys.path)

    def at_home(message: Any, context: Any, call_next: Any) -> Any:
        os.chdir(home)
        return call_next(message, context)

    empty = tempfile.mkdtemp(prefix="gradveil-")  # as long as this process: Ray may live longer than a run
    atexit.register(shutil.rmtree, empty, ignore_errors=True)
    os.chdir(empty)
    try:
        if not ray.is_initialized():
            about = {"env_vars": {"PYTHONPATH": path}}
            ray.init(num_cpus=cores, log_to_driver=False, include_dashboard=False, runtime_env=about)
    finally:
        os.chdir(home)
    try:
        yield at_home
    finally:
        ray.shutdown()


def submit(
    settings: "FlowerSettings",
    superlink: str,
    root_certificates: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Send the app to a SuperLink (``host:port``), pass on its log, and raise unless the run completes.

    ``root_certificates``: of a SuperLink that speaks TLS; None means a plain connection.

    Real clients draw their noise themselves: who submits the run, and the server, know its seed.
    """
    with tempfile.TemporaryDirectory(prefix="gradveil-") as folder:
        app, home = Path(folder) / "gradveil_app", Path(folder) / "home"
        write_app(app, settings)
        home.mkdir()
        (home / "config.toml").write_text(_connection(superlink, root_certificates), encoding="utf-8")
        env = os.environ | QUIET | {"FLWR_HOME": str(home)}
        run_id = str(_flwr(["run", str(app), "gradveil", "--format", "json"], env)["run-id"])
        log = subprocess.Popen(
            [_command(), "log", run_id, "gradveil", "--stream"], env=env, stdout=subprocess.PIPE, text=True
        )
        for line in log.stdout or ():
            say(line.rstrip())
        log.wait()
        listed = _flwr(["list", "--run-id", run_id, "gradveil", "--format", "json"], env)
    status = str(listed["runs"][0]["status"])
    if status != "finished:completed":
        raise GradveilError(f"Run {run_id} on {superlink} ended as {status}. The log above says why.")


def write_app(folder: Path, settings: "FlowerSettings") -> None:
    """Write a Flower app folder that runs ``gradveil.flower`` with these settings: ``flwr run FOLDER``."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.to_config().items()]
    folder.mkdir(parents=True, exist_ok=True)
    text = PYPROJECT.format(version=version("gradveil"), config="\n".join(lines))
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def _connection(superlink: str, root_certificates: Path | None) -> str:
    lines = ["[superlink]", 'default = "gradveil"', "[superlink.gradveil]", f"address = {json.dumps(superlink)}"]
    if root_certificates is None:
        lines.append("insecure = true")
    else:
        lines.append(f"root-certificates = {json.dumps(str(root_certificates.resolve()))}")
    return "\n".join(lines) + "\n"


def _command() -> str:
    beside = Path(sys.executable).with_name("flwr")
    found = str(beside) if beside.exists() else shutil.which("flwr")
    if found is None:
        raise MissingExtraError("Submitting to a SuperLink", "flower")
    return found


def _flwr(arguments: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a flwr command that answers in JSON, and return the answer."""
    done = subprocess.run([_command(), *arguments], env=env, capture_output=True, text=True, check=False)
    out = done.stdout
    answer: dict[str, Any] = json.loads(out[out.index("{") : out.rindex("}") + 1]) if "{" in out else {}
    if done.returncode != 0 or not answer.get("success"):
        reason = " ".join(str(answer.get("error-message") or done.stderr or out).split())[:400]
        raise GradveilError(f"flwr {arguments[0]} failed: {reason} Is the SuperLink up, and the address right?")
    return answer
