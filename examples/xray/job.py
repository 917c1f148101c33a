"""Run the two sites on NVFlare's simulator, checks and a run folder on the server: ``python job.py --out runs/xray``.

On a real site the filter of records stands in the site's own ``privacy.json``, where no job can take it off:

    {"scopes": [{"name": "site", "task_result_filters": [{"direction": "out",
      "path": "gradveil.integrations.nvflare.RecordsFilter", "args": {"defense": "veil:z=2,clip=0.5"}}]}],
     "default_scope": "site"}
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    """Train for three rounds and draw the page."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.client.config import TransferType
    from nvflare.recipe import SimEnv
    from xray_site import RUN, XrayNet

    import gradveil
    from gradveil.integrations.nvflare import MonitorFilter, RecordsFilter

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/xray")
    parser.add_argument("--workspace", default=None)
    given = parser.parse_args()
    out, defense = Path(given.out).resolve(), "veil:epsilon=8,clip=0.5"
    with tempfile.TemporaryDirectory() as accounts:
        os.environ.setdefault("GRADVEIL_ACCOUNTS", accounts)  # of sites that are simulated: not for the next run
        recipe = FedAvgRecipe(
            name="xray",
            model=XrayNet(),
            min_clients=2,
            num_rounds=3,
            train_script=str(Path(__file__).with_name("xray_site.py")),
            train_args=f"--defense {defense}",
            params_transfer_type=TransferType.DIFF,
        )
        # the least that a round may cost: that of the plan, whose z a filter is told
        z = gradveil.defense(defense).for_run(RUN).multiplier
        recipe.add_client_output_filter(RecordsFilter(f"veil:z={z:.6g},clip=0.5"), tasks=["train"])
        recipe.add_server_input_filter(MonitorFilter(str(out), budget=5.0, require_steps=True), tasks=["train"])
        run = recipe.execute(SimEnv(num_clients=2, workspace_root=given.workspace or tempfile.mkdtemp()))
        run.get_result()
    print(gradveil.write_report(out))


if __name__ == "__main__":
    main()
