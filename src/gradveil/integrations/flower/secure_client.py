"""A Flower mod for SecAgg+ in Flower's Message API: what a client sends can be read as a part of a sum only.

The protocol is Flower's own (``flwr.client.mod.secaggplus_mod``). Its masks come from a generator with a seed of 32
bits, which a server can try one by one (flwrlabs/flower#7522), so a stream cipher takes its place on both sides.
"""

import hashlib
import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow import SecAggPlusWorkflow

from gradveil.errors import DefenseError, GradveilError
from gradveil.integrations.flower.mods import check_reply
from gradveil.integrations.flower.outgoing import PUBLIC
from gradveil.integrations.flower.public_map import veil_in
from gradveil.integrations.flower.records import WITHHELD, Next, arrays_of, is_training, number, params_of, withhold
from gradveil.integrations.flower.settings import Cohort
from gradveil.integrations.flower.statements import STATEMENT
from gradveil.integrations.flower.values import COUNT
from gradveil.protection.defense import Defense


@dataclass(frozen=True)
class SecureMod:
    """A mod for ``ClientApp(mods=[secure_mod(), ...])``: the update leaves masked, and only within a secure sum.

    Put it first. A message that asks for training outside the protocol is refused.
    """

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Take the protocol's next step; the client trains in the third; fail closed."""
        if not is_training(message):
            return call_next(message, context)
        try:
            if RECORD_KEY_CONFIGS not in message.content.config_records:
                raise DefenseError("the server asks for an update outside of secure aggregation.")
            said = message.content.config_records[RECORD_KEY_CONFIGS]
            if said.get(Key.STAGE) == Stage.SETUP:
                Cohort(int(said[Key.SAMPLE_NUMBER]))
            if said.get(Key.STAGE) == Stage.UNMASK:
                arrived, fewest = len(said[Key.ACTIVE_NODE_ID_LIST]), agreed(context)["threshold"]
                if arrived < fewest:
                    raise DefenseError(f"{arrived} clients arrived, and {fewest} are needed to unmask their sum.")
            return secaggplus_mod(message, context, lambda msg, own: _in_older_form(msg, call_next(msg, own), own))
        except GradveilError as error:
            return withhold(message, str(error))


secure_mod = SecureMod


def agreed(context: Context) -> dict[str, Any]:
    """Return what the server said of the secure sum that is under way."""
    return dict(context.state.config_records.get(RECORD_KEY_STATE, {}))


TAIL = 12.0  # standard deviations of noise that are never reached: 1e-32 for each number
FINE = 4.0  # the steps of the grid that a standard deviation must have, so that rounding is as good as none


@dataclass(frozen=True)
class NoisySum:
    """What ``tier=aggregate`` counts on: K clients, each of which adds its part of the noise to one step's sum."""

    cohort: Cohort
    longest: float  # that the part of one record can be
    std: tuple[float, float]  # of a client's noise, in the direction with least and with most of it

    @classmethod
    def of(cls, defense: Defense) -> "NoisySum":
        """Return what a defence with ``tier=aggregate`` counts on, in a planned run."""
        veil = veil_in(defense)
        if veil is None or veil.cohort is None:
            raise DefenseError("tier=aggregate needs the number of clients in a round.")
        now = veil.measured
        values = [1.0] if now.coordinates is None else [1.0, *now.coordinates.values.tolist()]
        least, most = (math.sqrt(value) for value in (min(values), max(values)))  # by which the way back stretches
        std = veil.client_multiplier * now.clip
        return cls(Cohort(veil.cohort, 1 - veil.min_clients / veil.cohort), most * now.clip, (least * std, most * std))

    def reach(self, lr: float, examples: int) -> float:
        """Return what no number of a client's change exceeds, counted as part of ``examples``."""
        return lr * (self.longest + TAIL * self.std[1] / examples)

    def check(self, said: dict[str, Any], lr: float) -> None:
        """Raise unless the secure sum that the server has set up keeps the promise."""
        wanted, size, opened = self.cohort, said.get("sample_num", 0), said.get("threshold", 0)
        if size != wanted.size or said["share_num"] < wanted.shares or opened < wanted.threshold:
            raise DefenseError(
                f"tier=aggregate counts on {wanted.size} clients, of which {wanted.min_clients} arrive, and the secure sum "  # noqa: E501
                f"is of {size}, and opened for {opened}."
            )
        most, reach = said["max_weight"], said["clipping_range"]
        if reach < self.reach(lr, most) * (1 - 1e-9):
            raise DefenseError("the secure sum would cut off what the noise needs.")
        step, std = 2 * reach / said["target_range"], lr * self.std[0] / most
        if step * FINE > std:
            raise DefenseError(
                f"the secure sum rounds to {step:.2g}, and the noise of a client is {std:.2g}: {FINE:g} steps a "
                f"standard deviation are needed. Use more noise, or clients with fewer records."
            )


def check_sum(defense: Defense, context: Context, lr: float) -> None:
    """Raise unless the secure sum that is under way keeps the promise of a defence with ``tier=aggregate``."""
    NoisySum.of(defense).check(agreed(context), lr)


def _in_older_form(message: Message, reply: Message, context: Context) -> Message:
    """Return a reply as Flower's mod wants it: the change of the weights, and the number of examples as its weight."""
    if reply.has_error():
        raise DefenseError(str(reply.error.reason).removeprefix(WITHHELD))
    before, after = params_of(arrays_of(message)[1]), params_of(arrays_of(reply)[1])
    check_reply(before, after)
    examples, most = int(number(reply, "num-examples", 1)), agreed(context)[Key.MAX_WEIGHT]
    if not 0 < examples <= most:
        raise DefenseError(f"the update is of {examples} examples, and the secure sum takes 1 to {most:g} of a client.")
    change = [(before[name].double() - after[name].double()).numpy() for name in floating(before)]
    counts = {
        name: record[name] for record in reply.content.metric_records.values() for name in PUBLIC if name in record
    }
    if odd := [name for name, value in counts.items() if value not in COUNT]:
        raise DefenseError(f"{odd[0]!r} leaves beside the secure sum and is not {COUNT}.")
    metrics: dict[str, Any] = {name: float(value) for name, value in counts.items()}
    if STATEMENT in reply.content.config_records:
        metrics[STATEMENT] = json.dumps(dict(reply.content.config_records[STATEMENT]))
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(change), examples, metrics)
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


def floating(weights: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are averaged; counters stay as the server has them."""
    return [name for name, value in weights.items() if value.is_floating_point()]


def masks(seed: bytes, num_range: int, dimensions_list: list[tuple[int, ...]]) -> list[Any]:
    """Return masks of these shapes, uniform below a power of two, from all bits of the seed (ChaCha20)."""
    cipher = Cipher(algorithms.ChaCha20(hashlib.sha256(seed).digest(), bytes(16)), mode=None).encryptor()
    return [
        (np.frombuffer(cipher.update(bytes(4 * math.prod(shape))), np.uint32) & np.uint32(num_range - 1))
        .astype(np.int64)
        .reshape(shape)
        for shape in dimensions_list
    ]


for _side in (secaggplus_mod, SecAggPlusWorkflow):
    if not hasattr(sys.modules[_side.__module__], "pseudo_rand_gen"):
        raise DefenseError("This version of Flower makes the masks of SecAgg+ in a way that is not known here.")
    vars(sys.modules[_side.__module__])["pseudo_rand_gen"] = masks
