"""A Flower server's grid that turns away replies which would spoil the average, and says which and why."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid

from gradveil.auditing.train import listed
from gradveil.errors import GradveilError, SpecError, UpdateError
from gradveil.integrations.flower.grids import GridView
from gradveil.integrations.flower.mods import check_reply
from gradveil.integrations.flower.records import (
    LOG,
    SPENT,
    UNRELEASED,
    WITHHELD,
    Refused,
    add_metrics,
    arrays_of,
    is_training,
    lengths,
    middle,
    number,
    params_of,
    withhold,
)
from gradveil.integrations.flower.site import (
    OTHER,
    check_statement,
    is_simulation,
    lacks,
    shown,
    statement_in,
    told,
)
from gradveil.integrations.leaks import CHECKED, LEAK_METRICS, PSNR
from gradveil.integrations.monitor import MonitorSettings, NodeReport, RunMonitor
from gradveil.privacy.accountant import NOISE, SIMULATED
from gradveil.protection.defense import Defense, build
from gradveil.tree import Params

MALFORMED, KIND, FAR, CLAIM, METRICS = "malformed", "wrong type", "too far", "too many examples", "other metrics"
FEW, LEAK = "too few replies", "leak"
STATISTICS = 10  # running statistics may differ by so much more than weights: one step moves them a tenth of the way
CLAIMS = 100  # how many times the round's median a reply may count examples, where no bound is given

Faults = dict[int, Refused]  # node -> what is wrong with its reply


class CheckedGrid(GridView):
    """The grid with unsound replies turned into errors: ``strategy.start(grid=checked(grid), ...)``.

    Refused are replies with other names, shapes or types of numbers than the model's, numbers that are not finite, a
    change of the weights many times the round's median, more examples than a client can have, or metrics that the
    others do not have. Of two replies that differ so much the smaller one is believed; a single one has none to be
    held against. What is sent by ``push_messages`` is checked reply by reply, without the others.

    ``counts`` has one row per round: sent, kept, failed, rejected, silent, and where there are any the reasons of the
    rejected, simulated (noise, as stated), spent (a budget) and not released (a secure sum of too few). Flower stops at
    metrics that not every reply has. Where some clients measured a leak and some did not, those get the average of the
    others, weighted by examples, so that Flower's average is that of the clients that measured; their ``leak-checked``
    is 0.

    Args:
        grid: the grid that the ServerApp was given.
        max_change: how many times the round's median length a reply's change of the weights may be; 0: no bound.
        max_examples: the most examples that one client can have; 0: 100 times the round's median.
        defense: of the run. Clients that say that they used another one are logged, and counted under ``stated``.
        min_replies: sound ones that a round needs; where there are fewer, none is averaged.
        require_defense: replies that do not say that this one was used are refused. It is the client's word, no proof.
        simulation: the run is one, so that noise which can be drawn again is what is expected; None: as the process
            was told (``GRADVEIL_NOISE=simulated``).
    """

    def __init__(
        self,
        grid: Grid,
        *,
        max_change: float = 10.0,
        max_examples: float = 0.0,
        min_replies: int = 1,
        defense: str | Defense | None = None,
        require_defense: str | Defense | None = None,
        simulation: bool | None = None,
    ) -> None:
        super().__init__(grid)
        if not 0 <= max_change < math.inf or not 0 <= max_examples < math.inf:
            raise SpecError("max_change and max_examples must be 0 (no bound of its own) or above.")
        self.max_change, self.max_examples, self.min_replies = max_change, max_examples, min_replies
        self._usual = build(defense) if defense else None
        self._demand = build(require_defense) if require_defense else None
        self._simulation = is_simulation() if simulation is None else simulation
        self._simulated = 0  # replies that say that their noise is simulated
        self._stated: Counter[str] = Counter()  # other defences than the run's, by name
        self.counts: list[dict[str, Any]] = []
        self.last_reason = ""  # why a reply was not kept
        self.kinds: dict[str, torch.dtype] = {}  # of the model's tensors, as they were first sent
        self._rejected: Counter[str] = Counter()
        self._lengths: dict[int, tuple[float, float]] = {}  # node -> of its change: weights, running statistics

    def received(self, sent: Message, reply: Message) -> Message:
        """Return the reply, or an error in its place."""
        if reply.has_error():
            self.last_reason = str(reply.error.reason)
            return reply
        try:
            self._hear(sent, reply)
            self._check(sent, reply)
        except GradveilError as error:
            return self._refuse(sent, error)
        return reply

    def _hear(self, sent: Message, reply: Message) -> None:
        """Take note of what the client says that it did; raise where that is not what the run demands."""
        said = statement_in(reply)
        if said is not None and self._usual is not None and lacks(self._usual, said["settings"]):
            LOG.warning("Node %s: %s, and the run has another.", sent.metadata.dst_node_id, told(said))
            self._stated[shown(said)] += 1
        self._simulated += said is not None and said.get("noise") == SIMULATED
        if self._demand is not None:
            check_statement(self._demand, reply, self._simulation)

    def _check(self, sent: Message, reply: Message) -> None:
        """Raise where the reply by itself shows that it is unsound."""
        (key, asked), (own, got) = arrays_of(sent), arrays_of(reply)
        if key != own:
            raise UpdateError(f"The reply calls its weights {own!r}, and the message {key!r}.")
        before, after = params_of(asked), params_of(got)
        self._check_kinds(before, after)
        check_reply(before, after)
        if not 0 < (examples := number(reply, "num-examples", 1.0)) < math.inf:
            raise UpdateError(f"The reply counts {examples} examples; it takes at least one.")
        if self.max_examples and examples > self.max_examples:
            raise _claims(examples, f"a client can have {self.max_examples:g} at most")
        for name in LEAK_METRICS:
            number(reply, name, 0.0)
        self._lengths[reply.metadata.src_node_id] = lengths(before, after)

    def _check_kinds(self, before: Params, after: Params) -> None:
        """Raise where numbers are of another type; counters may be as first sent, or as Flower's average has them."""
        for name, value in before.items():
            first = self.kinds.setdefault(name, value.dtype)
            if name in after and (found := after[name].dtype) not in (first, value.dtype):
                raise Refused(KIND, f"{name!r} is {found} in the reply and {value.dtype} as sent.")

    def _refuse(self, sent: Message, error: GradveilError) -> Message:
        LOG.warning("Reply of node %s refused: %s", sent.metadata.dst_node_id, error)
        self.last_reason = str(error)
        self._rejected[why(error)] += 1
        return withhold(sent, str(error))

    def together(self, sent: list[Message], replies: list[Message]) -> list[Message]:
        """Hold the replies of a round against each other."""
        asked = {message.metadata.dst_node_id: message for message in sent}
        replies = [reply if reply.has_error() or _answers(reply, asked) else self._stray(sent[0]) for reply in replies]
        good = {reply.metadata.src_node_id: reply for reply in replies if not reply.has_error()}
        looks: list[Callable[[dict[int, Message]], Faults]] = [self._claims, self._far, _other_metrics]
        refused: dict[int, Message] = {}
        for look in looks:
            for node, fault in look(good).items():
                refused[node] = self._refuse(asked[node], fault)
                del good[node]
        if len(good) < self.min_replies:
            few = Refused(FEW, f"{len(good)} sound replies came, and a round needs {self.min_replies} (min_replies).")
            refused |= {node: self._refuse(asked[node], few) for node in good}
        return [refused.get(reply.metadata.src_node_id, reply) for reply in replies]

    def _stray(self, sent: Message) -> Message:
        return self._refuse(sent, UpdateError("The reply is no answer to a message of this round."))

    def _claims(self, replies: dict[int, Message]) -> Faults:
        if self.max_examples:  # seen to already
            return {}
        counts = {node: number(reply, "num-examples", 1.0) for node, reply in replies.items()}
        most = CLAIMS * middle(counts.values())
        return {
            node: _claims(n, f"{CLAIMS} times the round's median is {most:g}") for node, n in counts.items() if n > most
        }

    def _far(self, replies: dict[int, Message]) -> Faults:
        if not self.max_change:
            return {}
        faults: Faults = {}
        for part, times in enumerate((self.max_change, STATISTICS * self.max_change)):
            found = {node: self._lengths[node][part] for node in replies}
            median = middle(found.values())
            for node, length in found.items():
                if not length <= times * median:
                    what = ("weights", "running statistics")[part]
                    faults[node] = Refused(
                        FAR,
                        f"The {what} moved by {length:.3g}, and the round's median is {median:.3g}: {times:g} times "
                        f"that is allowed (max_change).",
                    )
        return faults

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Count the round."""
        reasons = [str(reply.error.reason) for reply in replies if reply.has_error()]
        spent, unreleased = (sum(word in reason for reason in reasons) for word in (SPENT, UNRELEASED))
        if others := sum(reason.startswith(f"{WITHHELD}{OTHER}") for reason in reasons):  # said by the client itself
            self._rejected[OTHER] += others
        failed, rejected = len(reasons), self._rejected.total()
        row: dict[str, Any] = {
            "sent": len(sent),
            "kept": len(replies) - failed,
            "failed": failed - rejected - spent - unreleased,
            "rejected": rejected,
            "silent": len(sent) - len(replies),
        }
        row |= {"reasons": dict(self._rejected)} if rejected else {}
        row |= {"stated": dict(self._stated)} if self._stated else {}
        row |= {"simulated": self._simulated} if self._simulated else {}
        row |= {"spent": spent} if spent else {}
        row |= {"not released": unreleased} if unreleased else {}
        self.counts.append(row)
        if rejected:
            which = int(number(sent[0], "server-round", len(self.counts)))
            said = listed(row["reasons"])
            LOG.warning("Round %s: %s of %s replies refused: %s.", which, rejected, len(replies), said)
        self._rejected.clear()
        self._simulated = 0
        self._stated.clear()
        self._lengths.clear()


checked = CheckedGrid


class MonitoredGrid(CheckedGrid):
    """A checked grid that keeps a run folder: ``strategy.start(grid=monitored(grid, "runs/mine"), ...)``.

    ``gradveil report runs/mine`` draws it: per round and node what leaked (as ``leak_guard`` on the nodes
    measured it), what was refused and why, and what was spent. A node for which a
    round might cost more than is left of ``budget`` is not asked: its reply is an error. Where that goes for all, the
    weights stay.

    Args:
        grid: the grid that the ServerApp was given.
        out: the run folder.
        budget: as in ``MonitorSettings``, and ``max_psnr`` and ``delta``; nodes may have bounds of their own.
        resume: go on in a folder that has rounds.
        tensorboard: write event files as well.
        say: gets a line for each round; None: the run's log.
        bounds: those of ``checked``.
    """

    def __init__(
        self,
        grid: Grid,
        out: str | Path,
        *,
        budget: float = 0.0,
        max_psnr: float = 0.0,
        delta: float = 1e-5,
        resume: bool = False,
        tensorboard: bool = False,
        say: Callable[[str], None] | None = None,
        **bounds: Any,
    ) -> None:
        super().__init__(grid, **bounds)
        defense, required = (str(bounds.get(name) or "") for name in ("defense", "require_defense"))
        settings = MonitorSettings("flower", defense, required, max_psnr, budget, delta)
        self.monitor = RunMonitor(out, settings, resume=resume, tensorboard=tensorboard, say=say or LOG.info)
        self._why: dict[int, str] = {}  # node -> the word under which its reply was refused
        self._leaks: dict[int, float] = {}  # node -> of a reply that was refused for it

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies; none for training where the budget is spent."""
        out = list(messages)
        spent = [m for m in out if is_training(m) and not self.monitor.can_pay(str(m.metadata.dst_node_id))]
        others = [message for message in out if not any(message is one for one in spent)]
        replies = list(super().send_and_receive(others, timeout=timeout)) if others else []
        why = self.monitor.halted or "This node's part of the run's budget is used up."
        return replies + [withhold(message, f"{SPENT}{why}") for message in spent]

    def _check(self, sent: Message, reply: Message) -> None:
        super()._check(sent, reply)
        limit, leak = self.monitor.settings.max_psnr, number(reply, PSNR, -math.inf)
        if limit and leak > limit:
            self._leaks[sent.metadata.dst_node_id] = leak  # it has arrived: what is refused has leaked all the same
            raise Refused(LEAK, f"An example came out of the update at {leak:.1f} dB; the limit is {limit:g} dB.")

    def _refuse(self, sent: Message, error: GradveilError) -> Message:
        self._why[sent.metadata.dst_node_id] = why(error)
        return super()._refuse(sent, error)

    def round_ended(self, sent: list[Message], replies: list[Message]) -> None:
        """Write what each node did."""
        super().round_ended(sent, replies)
        number_ = max(int(number(sent[0], "server-round", 0)), self.monitor.last + 1)
        arrived = {reply.metadata.src_node_id: reply for reply in replies}
        for message in sent:
            node = message.metadata.dst_node_id
            self.monitor.add(number_, self._seen(node, arrived.get(node)))
        self.monitor.end(number_)
        self._why.clear()
        self._leaks.clear()

    def _seen(self, node: int, reply: Message | None) -> NodeReport:
        if reply is None:
            return NodeReport(str(node), False, "no reply")
        if reply.has_error():
            text = str(reply.error.reason)
            words = {SPENT: "budget spent", UNRELEASED: "not released", "dB": "leak", WITHHELD: "withheld by the node"}
            word = next((word for part, word in words.items() if part in text), "failed")
            return NodeReport(str(node), False, self._why.get(node, word), leak_psnr=self._leaks.get(node))
        said = statement_in(reply) or {}
        leak, floor, checked_ = (number(reply, name, math.nan) for name in LEAK_METRICS)
        return NodeReport(
            str(node),
            True,
            examples=int(number(reply, "num-examples", 0)) or None,
            defense=shown(said) if said else None,
            noise=_text(said.get("noise")),
            leak_psnr=None if math.isnan(leak) or not checked_ else leak,
            leak_floor=None if math.isnan(floor) else floor,
            leak_checked=None if math.isnan(checked_) else int(checked_),
            spent=_real(said.get("spent")),
            limit=_real(said.get("limit")),
        )


monitored = MonitoredGrid


def _real(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < math.inf else None


def _text(value: Any) -> str | None:
    return value if value in NOISE else None


def why(error: GradveilError) -> str:
    """Return the word under which a refusal is counted."""
    return error.why if isinstance(error, Refused) else MALFORMED


def _claims(examples: float, bound: str) -> Refused:
    return Refused(CLAIM, f"The reply counts {examples:g} examples, and {bound} (max_examples).")


def _answers(reply: Message, asked: dict[int, Message]) -> bool:
    return reply.metadata.src_node_id in asked and is_training(reply)


def _other_metrics(replies: dict[int, Message]) -> Faults:
    """Return those whose metrics are not the ones that most have: Flower's strategies stop the run at them.

    Where two kinds are equally many, the one that counts examples and says no more is believed.
    """
    _even(list(replies.values()))
    names = {node: _names(reply) for node, reply in replies.items()}
    times = Counter(names.values())
    usual = max(times, key=lambda n: (times[n], any("num-examples" in one for one in n), -len(n), n), default=())
    text = "The reply's metrics are not those of the other replies; send the same ones from every client."
    return {node: Refused(METRICS, text) for node, own in names.items() if own != usual}


def _names(reply: Message) -> tuple[tuple[str, str, int], ...]:
    """Return record, name and length (of a list) of every metric; an empty record stops Flower's average as well."""
    records: dict[str, MetricRecord] = reply.content.metric_records
    empty = [(key, "", -2) for key in records]
    pairs = [(key, name, value) for key, record in records.items() for name, value in record.items()]
    return tuple(sorted([*empty, *((key, name, len(v) if isinstance(v, list) else -1) for key, name, v in pairs)]))


def _even(replies: list[Message]) -> None:
    """Give every reply the leak metrics that some have."""
    for name in LEAK_METRICS:
        values = [number(reply, name, math.nan) for reply in replies]
        known = [(number(r, "num-examples", 1.0), v) for r, v in zip(replies, values, strict=True) if not math.isnan(v)]
        if not known:
            continue
        mean = sum(w * v for w, v in known) / sum(w for w, _ in known)
        for reply, value in zip(replies, values, strict=True):
            if math.isnan(value):
                add_metrics(reply, {name: 0.0 if name == CHECKED else mean})
