"""Federated training on NVFlare's simulator: the guard in the client script, a filter on what leaves each site.

Run it where gradveil and nvflare are installed: ``python examples/nvflare/job.py --workspace /tmp/flare``.
"""

import argparse
from pathlib import Path

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from gradveil.integrations.nvflare import UpdateFilter


def main() -> None:
    """Run two sites for a few rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workspace", default="/tmp/flare")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--defense", default="representation:share=0.4", help="inside the local steps")
    parser.add_argument("--update-defense", default="gaussian:scale=0.001,on=update", help="on what is sent")
    args = parser.parse_args()
    recipe = FedAvgRecipe(
        name="gradveil",
        model=Net(),
        min_clients=2,
        num_rounds=args.rounds,
        train_script=str(Path(__file__).with_name("client.py")),
        train_args=f"--defense {args.defense} --lr 0.1",
        params_transfer_type=TransferType.DIFF,
    )
    recipe.add_client_output_filter(UpdateFilter(args.update_defense, lr=0.1, require_steps=True), tasks=["train"])
    run = recipe.execute(SimEnv(num_clients=2, workspace_root=args.workspace))
    print(run.get_result())


if __name__ == "__main__":
    main()
