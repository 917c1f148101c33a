"""Run the two sites on NVFlare's simulator and file the dossier: ``python job.py --out runs/xray``.

On a real site the filter of records stands in the site's own ``privacy.json``, where no job can take it off:

    {"scopes": [{"name": "site", "task_result_filters": [{"direction": "out",
      "path": "gradveil.integrations.nvflare.RecordsFilter", "args": {"defense": "veil:z=2,clip=6"}}]}],
     "default_scope": "site"}
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]


def main() -> None:
    """Train with the promise and without, look for leaks, and file the dossier."""
    import torch
    from evidence import file_dossier, scores, train_unprotected
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import TransferType
    from nvflare.recipe import SimEnv
    from xray_site import LR, RUN, XrayNet, make_data

    import gradveil
    from gradveil.integrations.monitor import add_figures
    from gradveil.integrations.nvflare import MonitorFilter, RecordsFilter

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/xray")
    parser.add_argument("--workspace", default=None)
    parser.add_argument("--minutes", default="2", help="of the audit")
    given = parser.parse_args()
    out, defense = Path(given.out).resolve(), "veil:epsilon=8,clip=6"
    with tempfile.TemporaryDirectory() as accounts:
        os.environ.setdefault("GRADVEIL_ACCOUNTS", accounts)  # of sites that are simulated: not for the next run
        recipe = FedAvgRecipe(
            name="xray",
            model=XrayNet(),
            min_clients=2,
            num_rounds=RUN.rounds,
            train_script=str(Path(__file__).with_name("xray_site.py")),
            train_args=f"--defense {defense}",
            params_transfer_type=TransferType.DIFF,
        )
        # the least that a round may cost: that of the plan, whose z a filter is told
        z = gradveil.defense(defense).for_run(RUN).multiplier
        recipe.add_client_output_filter(RecordsFilter(f"veil:z={z},clip=6"), tasks=["train"])
        recipe.add_server_input_filter(
            MonitorFilter(str(out / "protected"), budget=5.0, require_steps=True), tasks=["train"]
        )
        workspace = Path(given.workspace or tempfile.mkdtemp())
        recipe.execute(SimEnv(num_clients=2, workspace_root=str(workspace))).get_result()
    model, data = XrayNet(), gradveil.dataset(make_data)
    last = torch.load(next(workspace.rglob("FL_global_model.pt")), weights_only=True)  # noqa: TID251 (NVFlare's format)
    model.load_state_dict(last["model"])
    add_figures(out / "protected", RUN.rounds, **scores(model, data))
    print(gradveil.write_report(out / "protected"))

    partition, rounds = f"iid:devices=2,per_device={RUN.records}", str(RUN.rounds)
    training = gradveil.Training(rounds=RUN.rounds, clients=2, batch_size=None, lr=LR)
    train_unprotected(out / "unprotected", data, XrayNet(), partition, training)
    what = ["--model", "xray_site:XrayNet", "--dataset", "xray_site:make_data"]
    local = ["--clients", "2", "--partition", partition, "--batch-size", "0", "--lr", str(LR), "--rounds", rounds]
    limits = ["--images", "4", "--trained", "--minutes", given.minutes]
    page = file_dossier(
        out,
        HOME,
        audit=[*what, *local, "--defense", defense, *limits],
        plan=["--cohort", "2", "--records", str(RUN.records), "--rounds", rounds, "--epsilon", "8"],
        verify=[*what, "--rounds", rounds, "--defense", f"veil:z={z},clip=6"],
    )
    print(page)


if __name__ == "__main__":
    main()
