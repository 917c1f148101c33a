"""Run the hospitals' app on this machine, ten simulated sites, and draw its page: ``python run.py runs/hospital``.

The noise of a simulation can be drawn again from its seed, and its page says so. On real sites leave GRADVEIL_NOISE out
and start each with ``python -P -m gradveil.integrations.flower.supernode``, which holds what leaves to the site's own
``--node-config "defense='...'"``.
"""

import os
import sys
from pathlib import Path

os.environ |= {"GRADVEIL_NOISE": "simulated", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "FLWR_TELEMETRY_ENABLED": "0"}


def main(out: str) -> Path:
    """Train and return the page."""
    from app import SITES, client_app, server_app
    from flwr.simulation import run_simulation

    import gradveil

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ["HOSPITAL_OUT"] = str(Path(out).resolve())
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=SITES, backend_config=resources)
    return gradveil.write_report(os.environ["HOSPITAL_OUT"])


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/hospital"))
