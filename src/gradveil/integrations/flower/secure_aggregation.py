"""Secure aggregation for Flower's Message API: a client's mod, and a server's grid that gives a strategy the sum only.

The protocol is Flower's own SecAgg+, a workflow of the older API. Its masks come from a generator with a seed of 32
bits, which a server can try one by one (flwrlabs/flower#7522), so a stream cipher takes its place on both sides.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from gradveil.errors import DefenseError, GradveilError
from gradveil.integrations.flower.grids import GridView
from gradveil.integrations.flower.mods import PUBLIC, check_reply
from gradveil.integrations.flower.records import (
    COUNT,
    LOG,
    UNRELEASED,
    WITHHELD,
    Next,
    arrays_of,
    is_training,
    number,
    params_of,
    record_of,
    withhold,
)
from gradveil.integrations.flower.settings import MODULUS, Cohort
from gradveil.integrations.flower.site import STATEMENT, veil_in
from gradveil.protection.defense import Defense, accounted


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


class SecureGrid(GridView):
    """The grid with SecAgg+ in it: ``strategy.start(grid=secured(grid), ...)``; clients need ``secure_mod``.

    Every client that arrived answers the strategy with the same weights: those that the sum of all changes leads to.
    So a strategy gets the weighted mean, and none that looks at single updates makes sense here. Where too few
    arrived, nothing is unmasked, every reply is an error, and the strategy keeps its weights.

    Args:
        grid: the grid that the ServerApp was given.
        lost: the share of a round's clients that may drop out of it.
        reach: the largest change of one weight that is sent as it is; a larger one is cut to it.
        max_examples: the most examples that one client may have.
        defense: of the clients; with ``tier=aggregate`` it says ``lost`` and ``reach``.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        lost: float = 0.0,
        reach: float = 8.0,
        max_examples: int = 1000,
        defense: Defense | None = None,
    ) -> None:
        super().__init__(grid)
        self.lost, self.reach, self.max_examples = lost, reach, max_examples
        self.defense = defense
        self.released = True  # the last round's sum: too few may have arrived

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; those for training go through the protocol."""
        out = list(messages)
        asked = {message.metadata.dst_node_id: message for message in out if is_training(message)}
        others = [message for message in out if not is_training(message)]
        replies = list(self._grid.send_and_receive(others, timeout=timeout)) if others or not asked else []
        return replies + (self._sum(asked, timeout) if asked else [])

    def _sum(self, asked: dict[int, Message], timeout: float | None) -> list[Message]:
        first, cohort, reach = next(iter(asked.values())), Cohort(len(asked), self.lost), self.reach
        if self.defense is not None and accounted(self.defense).min_clients:
            noise = NoisySum.of(self.defense)
            cohort, reach = noise.cohort, noise.reach(number(first, "lr", 1.0), self.max_examples)
        stages, protocol = Stages(self._grid), SecureSum(asked, cohort, reach, self.max_examples, timeout)
        protocol.run(stages)
        failed = {node: reason for node, reason in stages.failed.items() if node not in protocol.metrics}
        replies = [
            withhold(asked[node], reason) for node, reason in failed.items() if node in asked
        ]  # not the SuperLink
        self.released = protocol.mean is not None
        if protocol.mean is None:
            why = (
                f"{UNRELEASED}{len(stages.answered)} of {cohort.size} clients arrived, {cohort.min_clients} are needed."
            )
            LOG.warning("Secure sum %s", why)
            return replies + [withhold(asked[node], why) for node in stages.answered]
        key, record = arrays_of(first)
        before = params_of(record)
        after = dict(before)
        for name, change in zip(floating(before), protocol.mean, strict=True):
            after[name] = (before[name].double() - torch.from_numpy(change)).to(before[name].dtype)
        new = record_of(after)
        for node, metrics in protocol.metrics.items():
            said = metrics.pop(STATEMENT, None)
            content = RecordDict({key: new, "metrics": MetricRecord(metrics)})
            with suppress(TypeError, ValueError):  # what cannot be read was not said
                content[STATEMENT] = ConfigRecord(json.loads(str(said)))
            replies.append(Message(content, reply_to=asked[node]))
        return replies


secured = SecureGrid


class Stages(GridView):
    """Passes the protocol's messages on, and keeps who answered the last time, and why others failed."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.answered: list[int] = []
        self.failed: dict[int, str] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies."""
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self.answered = [reply.metadata.src_node_id for reply in replies if not reply.has_error()]
        for reply in replies:
            if reply.has_error():
                self.failed[reply.metadata.src_node_id] = str(reply.error.reason).removeprefix(WITHHELD)
        return replies


@dataclass(frozen=True)
class NodeProxy:
    """A client as the older API's workflow wants it."""

    node_id: int


class SecureSum(SecAggPlusWorkflow):  # type: ignore[misc]
    """One secure sum. To the workflow it is strategy and client manager as well.

    In a cohort of up to ``NEIGHBOURS`` every client shares its keys with every other one, and nobody unmasks before
    enough have arrived. In a larger one clients see their neighbours only, and the server counts.
    """

    def __init__(
        self, asked: dict[int, Message], cohort: Cohort, reach: float, max_examples: int, timeout: float | None
    ) -> None:
        super().__init__(
            1.0 if cohort.shares == cohort.size else cohort.shares,
            cohort.threshold / cohort.shares,
            max_weight=float(max_examples),
            clipping_range=float(reach),
            quantization_range=cohort.levels,
            modulus_range=MODULUS,
            timeout=timeout,
        )
        self._asked, self._fewest = asked, cohort.min_clients
        self.mean: list[Any] | None = None
        self.metrics: dict[int, dict[str, Any]] = {}

    def run(self, grid: Grid) -> None:
        state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})})
        state[MAIN_PARAMS_RECORD] = record_of({})
        self(grid, LegacyContext(Context(0, 0, {}, state, {}), strategy=self, client_manager=self))

    def num_available(self) -> int:
        return len(self._asked)

    def configure_fit(self, *_: Any) -> list[tuple[NodeProxy, FitIns]]:
        """Return whom to ask; what is asked is put in by ``setup_stage``."""
        return [(NodeProxy(node), FitIns(Parameters([], ""), {})) for node in self._asked]

    def setup_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the public keys; the training messages stay those of the strategy."""
        done = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {node: RecordDict(dict(message.content)) for node, message in self._asked.items()}
        return bool(done)

    def share_keys_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the shares of the keys; who has given none is left out, and nobody is asked for its keys."""
        done = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = set(state.active_node_ids)
        state.nid_to_neighbours = {n: state.nid_to_neighbours[n] & state.active_node_ids for n in state.active_node_ids}
        return bool(done)

    def collect_masked_vectors_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Collect the masked updates; too few are not unmasked."""
        done = super().collect_masked_vectors_stage(grid, context, state)
        return bool(done) and len(state.active_node_ids) >= self._fewest

    def aggregate_fit(
        self, number: int, results: list[tuple[NodeProxy, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        """Keep the mean, weighted by the number of examples."""
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        self.metrics = {proxy.node_id: dict(result.metrics) for proxy, result in results}
        return None, {}
