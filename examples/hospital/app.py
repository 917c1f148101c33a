"""A Flower app of ten hospitals that learn from a table: veil on every site, checks and a run folder on the server.

Each site has 45 rows of measurements (``breast_cancer``). Its noise and its account are its own; the server refuses
replies that do not state the defence, and stops asking a site whose part of the budget is used up.
"""

import os

import torch
from evidence import scores
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import gradveil
from gradveil import PlannedRun
from gradveil.integrations.flower import guard_mod, monitored
from gradveil.integrations.monitor import add_figures

SITES, ROWS = 10, 45
ROUNDS = int(os.environ.get("HOSPITAL_ROUNDS", "6"))
PARTITION = f"iid:devices={SITES},per_device={ROWS}"
LR, MODEL = 5.0, "logistic:init=zeros,normalize=half"  # chosen on this set, which is public
PLAN = PlannedRun(records=ROWS, batch_size=None, epochs=1, rounds=ROUNDS, participations=ROUNDS, cohort=SITES)
DEFENSE = "veil:epsilon=8,clip=0.5"


def make_model() -> nn.Module:
    """Return the model that all sites train."""
    return gradveil.model(MODEL, (30,), 2)


client_app = ClientApp(mods=[guard_mod(DEFENSE, settings={"run": PLAN})])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take one step on all rows of this site: ordinary training code."""
    rows = gradveil.dataset("breast_cancer").train
    batch = rows.batch(gradveil.partition(rows.labels, PARTITION)[int(context.node_config["partition-id"])])
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=float(message.content["config"]["lr"]))
    nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(batch)})}
    return Message(RecordDict(content), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Average, keep the run folder, and evaluate on rows that no site holds."""
    data, out = gradveil.dataset("breast_cancer"), os.environ.get("HOSPITAL_OUT", "runs/hospital")

    def score(number: int, arrays: ArrayRecord) -> MetricRecord:
        model = make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        found = scores(model, data)
        add_figures(out, number, **found)
        return MetricRecord(found)

    watched = monitored(grid, out, require_defense=DEFENSE, budget=5.0, say=print)
    result = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES).start(
        grid=watched, initial_arrays=ArrayRecord(make_model().state_dict()), num_rounds=ROUNDS,
        train_config=ConfigRecord({"lr": LR}), evaluate_fn=score,
    )  # fmt: skip
    watched.monitor.close()
    print(dict(result.evaluate_metrics_serverapp[ROUNDS]))
