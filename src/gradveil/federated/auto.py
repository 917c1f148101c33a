"""Which engine pays: stacked clients on CUDA, processes on a CPU once the run is long enough to start them."""

from gradveil.federated.engines import World
from gradveil.federated.processes import available_cores
from gradveil.federated.vectorised import why_not

FEW = 300  # clients' trainings in a run; below, starting workers costs more than it saves


def choose(world: World, trainings: int) -> str:
    """Return the spec of the engine for a run of that many clients' trainings in all."""
    if next(world.model.parameters()).device.type == "cuda":
        return "sequential" if why_not(world) else "vectorised"
    return "processes" if available_cores() > 1 and trainings >= FEW else "sequential"
