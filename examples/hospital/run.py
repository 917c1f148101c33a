"""Run the hospitals' app here, ten simulated sites, and file the dossier: ``python run.py --out runs/hospital``.

The noise of a simulation can be drawn again from its seed, and its page says so. On real sites leave GRADVEIL_NOISE out
and start each with ``python -P -m gradveil.integrations.flower.supernode``, which holds what leaves to the site's own
``--node-config "defense='...'"``.
"""

import argparse
import os
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]
os.environ |= {"GRADVEIL_NOISE": "simulated", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "FLWR_TELEMETRY_ENABLED": "0"}


def main(out: Path, minutes: str) -> Path:
    """Train with the promise and without, look for leaks, and return the dossier."""
    from app import DEFENSE, LR, MODEL, PARTITION, PLAN, ROUNDS, ROWS, SITES, client_app, make_model, server_app
    from evidence import file_dossier, train_unprotected
    from flwr.simulation import run_simulation

    import gradveil

    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    os.environ["HOSPITAL_OUT"] = str(out / "protected")
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=SITES, backend_config=resources)
    print(gradveil.write_report(out / "protected"))

    training = gradveil.Training(rounds=ROUNDS, clients=SITES, batch_size=None, lr=LR)
    train_unprotected(out / "unprotected", gradveil.dataset("breast_cancer"), make_model(), PARTITION, training)
    what = ["--model", MODEL, "--dataset", "breast_cancer"]
    rounds = ["--rounds", str(ROUNDS)]
    local = ["--clients", str(SITES), "--partition", PARTITION, "--batch-size", "0", "--lr", str(LR)]
    limits = ["--images", "4", "--minutes", minutes]
    return file_dossier(
        out,
        HOME,
        audit=[*what, *rounds, *local, "--defense", DEFENSE, *limits],
        plan=[*what, *rounds, "--cohort", str(SITES), "--records", str(ROWS), "--epsilon", "8"],
        verify=[*what, *rounds, "--defense", f"veil:z={gradveil.defense(DEFENSE).for_run(PLAN).multiplier},clip=0.5"],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/hospital")
    parser.add_argument("--minutes", default="2", help="of the audit")
    given = parser.parse_args()
    print(main(Path(given.out).resolve(), given.minutes))
