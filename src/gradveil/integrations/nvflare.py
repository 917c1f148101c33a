"""NVFlare: an output filter that runs an update-level defence on a site, outside the researcher's code.

A defence of the local steps goes into the client script: ``with protect(model, spec) as guard``; its count of
defended steps can be sent along as ``FLModel(..., meta={"defended-steps": guard.report.steps})``, and this
filter can ask for it. A defence of records (``veil``) has a filter of its own, which pays for each round out of the
site's account and lets nothing through beside the update: ``RecordsFilter``.
"""

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil import tree
from gradveil.certificates.accountant import spend_from
from gradveil.defenses.base import build
from gradveil.defenses.guard.protect import refuse_idle
from gradveil.errors import GradveilError, MissingExtraError
from gradveil.integrations.local_training import fresh_rng, is_trained
from gradveil.registry import describe
from gradveil.types import Update

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.filter import ContentBlockedException, Filter
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.apis.utils.fl_context_utils import add_job_audit_event
except ImportError as error:
    raise MissingExtraError("Working with NVFlare", "nvflare") from error

STEPS, SPENT = "defended-steps", "spent"  # in a result's meta: report.steps and report.spent of its guard
PUBLIC = (STEPS, MetaKey.NUM_STEPS_CURRENT_ROUND)  # of the meta, counts that are taken for known


class _Outgoing(Filter):  # type: ignore[misc]
    """Lets through what ``defended`` returns of a result, and nothing where that raises."""

    defense: str

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result with what may leave the site; raise where nothing may."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable  # an error report, no update
        try:
            dxo = from_shareable(shareable)
        except Exception as error:
            raise ContentBlockedException(f"Update withheld: the result holds no DXO ({error}).") from error
        try:
            sent, done = self.outgoing(dxo, str(fl_ctx.get_identity_name() or "site"))
        except GradveilError as error:
            raise ContentBlockedException(f"Update withheld: {error}") from error
        if sent is dxo:
            return shareable
        sent.add_filter_history(type(self).__name__)
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"gradveil: {self.defense} {done}")
        return sent.update_shareable(shareable)

    def outgoing(self, dxo: DXO, client: str) -> tuple[DXO, str]:
        """Return what leaves the site, and what was done; the DXO itself where it needs nothing."""
        raise NotImplementedError


class UpdateFilter(_Outgoing):
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

    def outgoing(self, dxo: DXO, client: str) -> tuple[DXO, str]:
        """Return the defended update; metrics as they are."""
        return (dxo, "") if dxo.data_kind == DataKind.METRICS else (self.defend(dxo), "applied to the outgoing update")

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
        if not trained or not tree.is_finite(trained):
            raise GradveilError("The update is empty or holds NaN or infinite values. Find the client's fault.")
        update = Update(tree.scale(trained, -1.0 / self.lr), num_steps=steps, lr=self.lr)
        sent = defense.on_update(update, fresh_rng())
        data: dict[str, Any] = dict(dxo.data)
        for name, gradient in sent.gradient.items():
            value = (-self.lr * gradient).to(change[name].dtype)
            data[name] = value if isinstance(dxo.data[name], torch.Tensor) else value.numpy()
        return DXO(dxo.data_kind, data, dxo.meta)


class RecordsFilter(_Outgoing):
    """Pays for the rounds of a defence of records, and lets no number through that has no noise.

    ``recipe.add_client_output_filter(RecordsFilter("veil:z=2", "/var/lib/site/account.json"), tasks=["train"])``. The
    client script trains under ``protect(model, "veil:z=2", ...)`` and says in the result's meta what that was:
    ``{"defended-steps": guard.report.steps, "spent": guard.report.spent}``. Metrics and other meta are taken out.
    """

    def __init__(self, defense: str, account: str, limit: float | None = None) -> None:
        """Set up the filter.

        Args:
            defense: the spec that the client script uses, with z.
            account: the file of the site's account, which is begun where there is none.
            limit: of μ² over all rounds; None: what the defence allows.
        """
        super().__init__()
        self.defense = defense  # NVFlare writes the arguments into the job by these names
        self.account = account
        self.limit = limit

    def outgoing(self, dxo: DXO, client: str) -> tuple[DXO, str]:
        """Pay, and return the result without what tells of the records."""
        self._pay(dxo, client)
        meta = {name: value for name, value in dxo.meta.items() if name in PUBLIC}
        return DXO(
            dxo.data_kind, dxo.data, meta
        ), f"paid for, not sent: {', '.join(sorted(dxo.meta.keys() - meta.keys()))}"

    def _pay(self, dxo: DXO, client: str) -> None:
        defense = build(self.defense)
        least = defense.spends(1)
        if least is None:
            raise GradveilError(f"{describe(defense)} promises nothing of single records. Use UpdateFilter, or veil.")
        if dxo.data_kind not in (DataKind.WEIGHT_DIFF, DataKind.WEIGHTS):
            raise GradveilError(f"the result is {dxo.data_kind}: only weights have noise on them.")
        cost = dxo.get_meta_prop(SPENT, 0.0)
        if not dxo.get_meta_prop(STEPS, 0) > 0 or not cost >= least * (1 - 1e-9):
            raise GradveilError(
                f"the result's meta says {STEPS}={dxo.get_meta_prop(STEPS, 0)} and {SPENT}={cost}, and one epoch under "
                f"{describe(defense)} costs {least:g}. Send what guard.report says of a guard of this round."
            )
        limit = defense.allowance if self.limit is None else self.limit
        spend_from(Path(self.account), client, cost, inf if limit is None else limit)
