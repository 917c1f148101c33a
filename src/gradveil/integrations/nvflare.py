"""NVFlare: an output filter that runs an update-level defence on a site, outside the researcher's code.

A defence of the local steps goes into the client script: ``with protect(model, spec) as guard``; its count of
defended steps can be sent along as ``FLModel(..., meta={"defended-steps": guard.report.steps})``, and this
filter can ask for it. A defence of records (``veil``) has a filter of its own, which pays for each round out of the
site's account and lets nothing through beside the update: ``RecordsFilter``.
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil import tree
from gradveil.errors import GradveilError, MissingExtraError
from gradveil.integrations.local_training import BUFFERS, is_trained
from gradveil.privacy.accountant import SECRET, account_path, spend_from
from gradveil.privacy.draws import SecretDraws
from gradveil.protection.defense import build
from gradveil.protection.protect import refuse_idle
from gradveil.registry import describe
from gradveil.types import Update

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.filter import ContentBlockedException, Filter
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.utils.fl_context_utils import add_job_audit_event
except ImportError as error:
    raise MissingExtraError("Working with NVFlare", "nvflare") from error

STEPS, SPENT = "defended-steps", "spent"  # in a result's meta: report.steps and report.spent of its guard
CAME = "gradveil-came"  # in the context of a task: the form of what was sent


class UpdateFilter(Filter):  # type: ignore[misc]
    """Defends the weight difference that leaves a site; what it cannot read it blocks.

    ``recipe.add_client_output_filter(UpdateFilter("gaussian:scale=0.01,on=update", lr=0.01), tasks=["train"])``.
    NVFlare's own ``DXOFilter`` lets through what it does not know; this one does not.
    """

    def __init__(self, defense: str, lr: float = 1.0, require_steps: bool = False) -> None:
        """Set up the filter.

        Args:
            defense: a spec that acts on what is sent, e.g. ``pruning:share=0.9,on=update``.
            lr: of the local steps, to turn the difference into a gradient, (W_before - W_after) / lr.
            require_steps: block an update whose meta does not say that a local step was defended.
        """
        super().__init__()
        self.defense = defense  # NVFlare writes the arguments into the job by these names
        self.lr = lr
        self.require_steps = require_steps

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result with what may leave the site; raise where nothing may."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable  # an error report, no update
        try:
            dxo = from_shareable(shareable)
        except Exception as error:
            raise ContentBlockedException(f"Update withheld: the result holds no DXO ({error}).") from error
        if dxo.data_kind == DataKind.METRICS:
            return shareable
        try:
            sent = self.defend(dxo)
        except GradveilError as error:
            raise ContentBlockedException(f"Update withheld: {error}") from error
        except Exception as error:
            raise ContentBlockedException("Update withheld: the result cannot be read.") from error
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


class RecordsFilter(Filter):  # type: ignore[misc]
    """Pays for the rounds of a defence of records, and lets nothing through that has no noise.

    ``RecordsFilter("veil:z=2")`` belongs on every task of a site: in its own ``privacy.json``, where no job can take it
    off, or by ``recipe.add_client_output_filter`` on each task of a job. The client script trains under
    ``protect(model, "veil:z=2", ...)`` and says in the result's meta what that was: ``{"defended-steps":
    guard.report.steps, "spent": guard.report.spent}``. The result is made anew of the weights and of the number of
    steps. Results of tasks that do not train (``validate``, ``submit_model``) and the content of error reports stay on
    the site.

    As a filter of what comes in as well (``add_client_input_filter``), it knows the names, shapes and types that were
    sent, and lets no others out.
    """

    def __init__(
        self,
        defense: str,
        account: str | None = None,
        limit: float | None = None,
        tasks: Sequence[str] = ("train",),
        allow: Sequence[str] = (),
        most_steps: int = 10_000,
        noise: str = SECRET,
    ) -> None:
        """Set up the filter.

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
        super().__init__()
        self.defense = defense  # NVFlare writes the arguments into the job by these names
        self.account = account
        self.limit = limit
        self.tasks = tasks
        self.allow = allow
        self.most_steps = most_steps
        self.noise = noise

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
        try:
            if task not in self.tasks:
                raise GradveilError("this site sends results of training alone: others would tell of its records.")
            sent = self.outgoing(from_shareable(shareable), str(fl_ctx.get_identity_name() or "site"), fl_ctx)
        except GradveilError as error:
            raise ContentBlockedException(f"Update withheld: {error}") from error
        except Exception as error:
            raise ContentBlockedException("Update withheld: the result cannot be read.") from error
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"gradveil: {self.defense} paid for, and nothing else is sent")
        sent.add_filter_history(type(self).__name__)
        return sent.to_shareable()

    def outgoing(self, dxo: DXO, client: str, fl_ctx: FLContext) -> DXO:
        """Pay, and return a result of nothing but weights and the number of steps."""
        if dxo.data_kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise GradveilError(f"the result is {dxo.data_kind}: only weights have noise on them.")
        steps = self._pay(dxo, client)  # whatever else is found: an error tells something too
        data = _sound(dxo.data, fl_ctx.get_prop(CAME))
        return DXO(dxo.data_kind, data, {STEPS: steps, MetaKey.NUM_STEPS_CURRENT_ROUND: steps})

    def _pay(self, dxo: DXO, client: str) -> int:
        defense = build(self.defense)
        least = defense.spends(1)
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
        limit = defense.allowance if self.limit is None else self.limit
        path = account_path(client) if self.account is None else Path(self.account)
        spend_from(path, client, float(cost), inf if limit is None else limit, noise=noise)
        return int(steps)


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
