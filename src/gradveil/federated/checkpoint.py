"""Where a training run stands, in one safetensors file: weights, buffers, the server's memory, the round."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gradveil.errors import DataError
from gradveil.federated.server import Memory
from gradveil.files import read_safetensors, wrap_parse_errors, write_atomically
from gradveil.ranges import MOST
from gradveil.tree import Params


@dataclass(frozen=True)
class Checkpoint:
    """All that the next round depends on; its randomness comes from the seed and the round's number."""

    round: int  # the last one that was finished
    state: Params  # the model's state dict
    memory: Memory  # the server optimiser's
    notes: dict[str, Any]  # anything else worth keeping, as JSON

    def save(self, path: Path) -> None:
        """Write the file; an interrupted write leaves the old one whole."""
        from safetensors.torch import save

        tensors = {f"model/{name}": value.detach().cpu().contiguous() for name, value in self.state.items()}
        for kind, tree in self.memory.items():
            tensors |= {f"server/{kind}/{name}": value.detach().cpu().contiguous() for name, value in tree.items()}
        write_atomically(path, save(tensors, {"round": str(self.round), "notes": json.dumps(self.notes)}))

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read a file that ``save`` wrote."""
        state: Params = {}
        memory: Memory = {}
        with wrap_parse_errors(path, DataError, "It is not a checkpoint of gradveil. Start again without --resume."):
            tensors, about = read_safetensors(path)
            for key, value in tensors.items():
                kind, _, name = key.partition("/")
                if kind == "model":
                    state[name] = value
                else:
                    which, _, name = name.partition("/")
                    memory.setdefault(which, {})[name] = value
            found = cls(int(about["round"]), state, memory, json.loads(about["notes"]))
            if not 0 <= found.round <= MOST or not isinstance(found.notes, dict):
                raise ValueError(f"round {about['round']}, notes {about['notes'][:50]}")
        return found

    def restore(self, model: nn.Module) -> None:
        """Load the weights into a model of the same kind."""
        try:
            model.load_state_dict(self.state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise DataError(f"The checkpoint of round {self.round} belongs to another model ({reason}).") from error
