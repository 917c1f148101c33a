"""NVFlare: an output filter that runs an update-level defence on a site, outside the researcher's code.

A defence of the local steps goes into the client script: ``with protect(model, spec) as guard``; its count of
defended steps can be sent along as ``FLModel(..., meta={"defended-steps": guard.report.steps})``, and this
filter can ask for it. A defence of records (``veil``) has a filter of its own, which pays for each round out of the
site's account and lets nothing through beside the update: ``RecordsFilter``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil import tree
from gradveil.errors import GradveilError, MissingExtraError
from gradveil.gradients.functional import quiet
from gradveil.imports import import_object
from gradveil.integrations.leaks import LEAK_METRICS, LeakCheck, SeenInputs
from gradveil.integrations.monitor import MonitorSettings, NodeReport, RunMonitor
from gradveil.losses import build as build_loss
from gradveil.modules import BUFFERS, is_trained
from gradveil.privacy.accountant import SECRET, account_path, spend_from
from gradveil.privacy.noise import SecretDraws
from gradveil.protection.defense import accounted, build
from gradveil.protection.protect import refuse_idle
from gradveil.registry import describe
from gradveil.threats.one_update import TrainingPass
from gradveil.types import Batch, Update

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.filter import ContentBlockedException, Filter
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.utils.fl_context_utils import add_job_audit_event
    from nvflare.app_common.app_constant import AppConstants
except ImportError as error:
    raise MissingExtraError("Working with NVFlare", "nvflare") from error

STEPS, SPENT = "defended-steps", "spent"  # in a result's meta: report.steps and report.spent of its guard
TOTAL = "gradveil-spent"  # what the site's account has spent over all rounds
WEIGHTS = "gradveil-weights"  # in the context of a task: what was sent
CAME = "gradveil-came"  # in the context of a task: the form of what was sent


class Fields(Filter):  # type: ignore[misc]
    """A filter whose arguments are its fields: NVFlare writes them into the job by these names."""

    def __post_init__(self) -> None:
        super().__init__()


@contextmanager
def blocking() -> Iterator[None]:
    """Within, whatever goes wrong withholds the result; only errors of ours say what it was."""
    try:
        yield
    except GradveilError as error:
        raise ContentBlockedException(f"Update withheld: {error}") from error
    except Exception as error:
        raise ContentBlockedException("Update withheld: the result cannot be read.") from error


@dataclass(eq=False)
class UpdateFilter(Fields):
    """Defends the weight difference that leaves a site; what it cannot read it blocks.

    ``recipe.add_client_output_filter(UpdateFilter("gaussian:scale=0.01,on=update", lr=0.01), tasks=["train"])``.
    NVFlare's own ``DXOFilter`` lets through what it does not know; this one does not.

    Args:
        defense: a spec that acts on what is sent, e.g. ``pruning:share=0.9,on=update``.
        lr: of the local steps, to turn the difference into a gradient, (W_before - W_after) / lr.
        require_steps: block an update whose meta does not say that a local step was defended.
    """

    defense: str
    lr: float = 1.0
    require_steps: bool = False

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result with what may leave the site; raise where nothing may."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable  # an error report, no update
        with blocking():
            dxo = from_shareable(shareable)
            if dxo.data_kind == DataKind.METRICS:
                return shareable
            sent = self.defend(dxo)
        sent.add_filter_history(type(self).__name__)
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"gradveil: {self.defense} applied to the outgoing update")
        return sent.update_shareable(shareable)

    def defend(self, dxo: DXO) -> DXO:
        """Return the DXO with its weight difference defended."""
        if dxo.data_kind != DataKind.WEIGHT_DIFF:
            raise GradveilError(
                f"The filter defends a weight difference and the result is {dxo.data_kind}. "
                f"Send differences: params_transfer_type=TransferType.DIFF, or params_type=ParamsType.DIFF in FLModel."
            )
        if self.require_steps and not dxo.get_meta_prop(STEPS, 0) > 0:
            raise GradveilError(f"No local step was defended: the result's meta has no {STEPS!r}.")
        defense = build(self.defense)
        refuse_idle(defense)
        if defense.acts_on - {"update"}:
            raise GradveilError(
                f"{describe(defense)} acts inside the local steps: use protect() in the client script, or give it "
                f"on=update where it has that setting."
            )
        steps = int(dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1) or 1)
        change = {name: torch.as_tensor(np.asarray(value)) for name, value in dxo.data.items()}
        trained = {name: value for name, value in change.items() if is_trained(name, value)}
        odd = [name for name, value in change.items() if name not in trained and not _passes(str(name), value)]
        if odd:
            raise GradveilError(
                f"{odd[0]!r} is {change[odd[0]].dtype}: no weight that a defence acts on, and no counter."
            )
        if not trained or not tree.is_finite(trained):
            raise GradveilError("The update is empty or holds NaN or infinite values. Find the client's fault.")
        update = Update(tree.scale(trained, -1.0 / self.lr), num_steps=steps, lr=self.lr)
        sent = defense.on_update(update, SecretDraws())
        data: dict[str, Any] = dict(dxo.data)
        for name, gradient in sent.gradient.items():
            value = (-self.lr * gradient).to(change[name].dtype)
            data[name] = value if isinstance(dxo.data[name], torch.Tensor) else value.numpy()
        return DXO(dxo.data_kind, data, dxo.meta)


@dataclass(eq=False)
class RecordsFilter(Fields):
    """Pays for the rounds of a defence of records, and lets nothing through that has no noise.

    ``RecordsFilter("veil:z=2")`` belongs on every task of a site: in its own ``privacy.json``, where no job can take it
    off, or by ``recipe.add_client_output_filter`` on each task of a job. The client script trains under
    ``protect(model, "veil:z=2", ...)`` and says in the result's meta what that was: ``{"defended-steps":
    guard.report.steps, "spent": guard.report.spent}``. The result is made anew of the weights and of the number of
    steps. Results of tasks that do not train (``validate``, ``submit_model``) and the content of error reports stay on
    the site.

    As a filter of what comes in as well (``add_client_input_filter``), it knows the names, shapes and types that were
    sent, and lets no others out.

    Args:
        defense: the spec that the client script uses, with z.
        account: the file of the site's account, which is begun where there is none; None: that of its name in
            GRADVEIL_ACCOUNTS, or ``~/.gradveil/accounts``.
        limit: of μ² over all rounds; None: what the defence allows.
        tasks: that train; their results are paid for.
        allow: tasks whose results leave as they are, unpaid, e.g. ``validate``.
        most_steps: that a round may take: a larger number is none of steps.
        noise: ``simulated`` lets results through that say so in their meta (``"noise": guard.report.noise``).
    """

    defense: str
    account: str | None = None
    limit: float | None = None
    tasks: Sequence[str] = ("train",)
    allow: Sequence[str] = ()
    most_steps: int = 10_000
    noise: str = SECRET

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return what may leave the site; raise where nothing may."""
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            fl_ctx.set_prop(CAME, _forms(shareable), private=True, sticky=False)
            return shareable
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME) or self.tasks[0])
        if task in self.allow:
            return shareable
        if (code := shareable.get_return_code()) != ReturnCode.OK:
            return make_reply(code if code in vars(ReturnCode).values() else ReturnCode.ERROR)
        with blocking():
            if task not in self.tasks:
                raise GradveilError("this site sends results of training alone: others would tell of its records.")
            sent = self.outgoing(from_shareable(shareable), str(fl_ctx.get_identity_name() or "site"), fl_ctx)
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"gradveil: {self.defense} paid for, and nothing else is sent")
        sent.add_filter_history(type(self).__name__)
        return sent.to_shareable()

    def outgoing(self, dxo: DXO, client: str, fl_ctx: FLContext) -> DXO:
        """Pay, and return a result of nothing but weights and the number of steps."""
        if dxo.data_kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise GradveilError(f"the result is {dxo.data_kind}: only weights have noise on them.")
        steps, total = self._pay(dxo, client)  # whatever else is found: an error tells something too
        data = _sound(dxo.data, fl_ctx.get_prop(CAME))
        meta = {STEPS: steps, MetaKey.NUM_STEPS_CURRENT_ROUND: steps, TOTAL: total}
        noise = dxo.get_meta_prop("noise", None)  # as it was checked
        return DXO(dxo.data_kind, data, meta | ({} if noise is None else {"noise": noise}))

    def _pay(self, dxo: DXO, client: str) -> tuple[int, float]:
        defense = build(self.defense)
        least = accounted(defense).cost(1)
        if least is None:
            raise GradveilError(f"{describe(defense)} promises nothing of single records. Use UpdateFilter, or veil.")
        cost, steps = dxo.get_meta_prop(SPENT, 0.0), dxo.get_meta_prop(STEPS, 0)
        if not _is_number(cost, least * (1 - 1e-9), 1e12) or not _is_number(steps, 1, self.most_steps) or steps % 1:
            raise GradveilError(
                f"the result's meta must have {STEPS} from 1 to {self.most_steps} and {SPENT} of {least:g} or more, "
                f"which one epoch under {describe(defense)} costs. Send what guard.report says in this round."
            )
        noise = dxo.get_meta_prop("noise", None)
        if noise not in (None, SECRET, self.noise):
            raise GradveilError("the script says that its noise can be drawn again. Leave the seed out.")
        limit = accounted(defense).allowance if self.limit is None else self.limit
        path = account_path(client) if self.account is None else Path(self.account)
        account = spend_from(path, client, float(cost), inf if limit is None else limit, noise=noise)
        return int(steps), account.spent


@dataclass(eq=False, kw_only=True)
class LeakFilter(LeakCheck, Fields):
    """Attacks the update that leaves a site, and withholds it where too much of the site's own examples came of it.

    It belongs into the site's ``privacy.json``, as a filter of what comes in and of results (``"direction": "inout"``),
    or on both sides of a job's task (``add_client_input_filter``, ``add_client_output_filter``). The result's meta gets
    ``leak-psnr``, ``leak-floor`` and ``leak-checked``, as from ``leak_guard`` on Flower. An update of more than
    ``max_examples`` examples is checked by a sample, where it is of one step of all of them. All other settings are
    those of ``LeakCheck``.

    Args:
        model: ``module:function`` that makes the model.
        examples: ``module:function`` that returns the inputs and the labels that this site trains on.
        tasks: whose results are checked.
    """

    model: str
    examples: str
    tasks: Sequence[str] = ("train",)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep what comes in; attack what goes out, and raise where it may not."""
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME) or self.tasks[0])
        if task not in self.tasks:
            return shareable
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            fl_ctx.set_prop(WEIGHTS, from_shareable(shareable).data, private=True, sticky=False)
            return shareable
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        with blocking():
            dxo = from_shareable(shareable)
            figures = self.check(dxo, fl_ctx.get_prop(WEIGHTS))
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"gradveil: {self.attack} on the outgoing update: {figures}")
        for name, value in figures.items():
            dxo.set_meta_prop(name, value)
        return dxo.update_shareable(shareable)

    def check(self, dxo: DXO, came: dict[str, Any] | None) -> dict[str, float]:
        """Return the figures of a result that may leave."""
        if not came or dxo.data_kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise GradveilError(f"The leak check needs the weights that came, and the result is {dxo.data_kind}.")
        if SPENT in dxo.meta:
            raise GradveilError(
                "Its figures would leave beside the noise of a defence of records. Leave LeakFilter out."
            )
        model, (inputs, labels) = import_object(self.model)(), import_object(self.examples)()
        batch = Batch(inputs, labels)
        before = {name: torch.as_tensor(np.asarray(value)) for name, value in came.items()}
        sent = {name: torch.as_tensor(np.asarray(value)) for name, value in dxo.data.items()}
        change = sent if dxo.data_kind == DataKind.WEIGHT_DIFF else tree.subtract(sent, before)
        lr = 1.0 if self.lr is None else self.lr
        trained = {name: -value / lr for name, value in change.items() if is_trained(name, value)}
        steps = int(dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1) or 1)
        if steps > 1 and len(batch) > self.max_examples and not self.send_unchecked:
            raise GradveilError(
                f"{steps} steps on {len(batch)} examples are not checked by this filter (max_examples="
                f"{self.max_examples}): which examples a step took is not known to it. send_unchecked=true sends them."
            )
        model.load_state_dict(before)
        seen = SeenInputs(model.train(), passes=[TrainingPass.of(model, before, batch, build_loss(self.loss))])
        seen.num_classes = _outputs(model, inputs)
        update = Update(trained, num_examples=len(batch), num_steps=steps, lr=lr)
        return self.judge(before, update, self.defense or "none", seen)


def _outputs(model: torch.nn.Module, inputs: torch.Tensor) -> int:
    with torch.no_grad(), quiet(model):
        return int(model(inputs[:2]).shape[-1])


@dataclass(eq=False)
class MonitorFilter(Fields):
    """Checks what clients send on the server, and keeps a run folder that ``gradveil report`` draws.

    ``recipe.add_server_input_filter(MonitorFilter("runs/flare", model="net:Net"), tasks=["train"])``. Refused are
    results that are no weights, hold other names or shapes than the model's, NaN or infinite values, leak more than
    ``max_psnr`` by their own word, do not say that a step was defended (``require_steps``), and all that comes once the
    budget might be overspent.

    Args:
        out: the run folder.
        model: ``module:function`` that makes the model; without it names and shapes are those of the first result.
        max_psnr: what a result's own leak check may say, as in ``MonitorSettings``; so are ``budget`` and ``delta``.
        require_steps: refuse results whose meta does not say that a local step was defended.
        tensorboard: write event files as well.
    """

    out: str
    model: str = ""
    max_psnr: float = 0.0
    budget: float = 0.0
    delta: float = 1e-5
    require_steps: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._monitor: RunMonitor | None = None
        self._round = 0  # that is under way
        self._shapes: dict[str, tuple[int, ...]] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Close the last round at the end of the run."""
        if event_type == EventType.END_RUN and self._monitor is not None:
            self._end()
            self._monitor.close()
            self._monitor = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a sound result; raise on any other, and take note of both."""
        peer = fl_ctx.get_peer_context()
        node = str(peer.get_identity_name()) if peer is not None else "site"
        number = int(
            shareable.get_cookie(AppConstants.CONTRIBUTION_ROUND)
            or shareable.get_header(AppConstants.CURRENT_ROUND, 0)
            or 0
        )
        monitor = self._of_round(number)
        seen = NodeReport(node, False)
        try:
            seen = self._checked(shareable, node, monitor)
        except GradveilError as error:
            why = error.why if isinstance(error, Turned) else "malformed"
            seen = replace(error.seen if isinstance(error, Turned) else seen, reason=why)
            raise ContentBlockedException(f"Result of {node} refused: {error}") from error
        except Exception as error:
            seen = replace(seen, reason="malformed")
            raise ContentBlockedException(f"Result of {node} refused: it cannot be read.") from error
        finally:
            monitor.add(self._round, seen)
        return shareable

    def _of_round(self, number: int) -> RunMonitor:
        if self._monitor is None:
            settings = MonitorSettings(
                "nvflare", max_psnr=self.max_psnr, budget=self.budget, delta=self.delta,
                required="defended steps" if self.require_steps else "",
            )  # fmt: skip
            self._monitor = RunMonitor(self.out, settings, tensorboard=self.tensorboard, say=self.logger.info)
            if self.model:
                state = import_object(self.model)().state_dict()
                self._shapes = {name: tuple(value.shape) for name, value in state.items()}
        if number + 1 != self._round:
            if self._round:
                self._end()
            self._round = number + 1
        return self._monitor

    def _end(self) -> None:
        if self._monitor is not None and self._round > self._monitor.last:
            self._monitor.end(self._round)

    def _checked(self, shareable: Shareable, node: str, monitor: RunMonitor) -> NodeReport:
        if (code := shareable.get_return_code()) != ReturnCode.OK:
            raise Turned(f"the site answers {code}", "failed", NodeReport(node, False))
        dxo = from_shareable(shareable)
        leak, floor, count = (_real(dxo.get_meta_prop(name)) for name in LEAK_METRICS)
        steps, spent = (_real(dxo.get_meta_prop(name)) for name in (STEPS, SPENT))
        total, before = _real(dxo.get_meta_prop(TOTAL)), monitor.spent_of(node)
        if total is None and spent is not None:
            total = spent + before
        seen = NodeReport(
            node, False, leak_psnr=leak, leak_floor=floor, leak_checked=None if count is None else int(count),
            spent=total, noise=str(dxo.get_meta_prop("noise", "")) or None,
        )  # fmt: skip
        if dxo.data_kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise Turned(f"it is {dxo.data_kind}", "malformed", seen)
        shapes = {str(name): tuple(np.shape(value)) for name, value in dxo.data.items()}
        if self._shapes and any(self._shapes.get(name) != shape for name, shape in shapes.items()):
            raise Turned("its arrays are not those of the model", "malformed", seen)
        if not all(np.isfinite(np.asarray(value)).all() for value in dxo.data.values()):
            raise Turned("it holds NaN or infinite values", "not finite", seen)
        if self.require_steps and not steps:
            raise Turned("it does not say that a step was defended", "no defence stated", seen)
        if self.max_psnr and leak is not None and leak > self.max_psnr:
            raise Turned(f"an example came out at {leak:.1f} dB", "leak", seen)
        over = self.budget and total is not None and total > self.budget**2 * (1 + 1e-9)
        if over or (before and not monitor.can_pay(node)):
            raise Turned("this site's part of the run's budget is used up", "budget spent", seen)
        self._shapes = self._shapes or shapes
        return replace(seen, kept=True)


class Turned(GradveilError):
    """A result that a server refuses, with what is known of it."""

    def __init__(self, text: str, why: str, seen: NodeReport) -> None:
        super().__init__(text)
        self.why, self.seen = why, seen


def _real(value: Any) -> float | None:
    return float(value) if _is_number(value, 0.0, 1e12) else None


def _passes(name: str, value: torch.Tensor) -> bool:
    """Whether it may leave beside defended weights: a running statistic or counter, or what has not changed."""
    by_name = any(fnmatch(name, pattern) for pattern in BUFFERS)
    return not value.is_complex() and bool(value.isfinite().all()) and (by_name or not bool(value.any()))


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether it is one number in this range: no text, no array, no truth value, not NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _forms(shareable: Shareable) -> dict[str, Any]:
    """Return shape and type of each array that a server sent, by name; nothing where it sent none."""
    try:
        data = from_shareable(shareable).data
        return {name: (tuple(np.shape(value)), np.asarray(value).dtype) for name, value in data.items()}
    except Exception:  # not for this filter to say
        return {}


def _sound(data: dict[str, Any], came: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arrays of a result in the types that came; raise where they are no weights."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise GradveilError("the result holds NaN, infinite or whole numbers, or no numbers at all.")
        if came and (name not in came or came[name][0] != array.shape):
            raise GradveilError("the result holds arrays that are not those that were sent.")
        kind = came[name][1] if came and came[name][1].kind == "f" else np.dtype(np.float32)
        array = array.astype(min(kind, array.dtype, key=lambda one: one.itemsize))
        out[str(name)] = torch.from_numpy(array) if isinstance(value, torch.Tensor) else array
    return out
