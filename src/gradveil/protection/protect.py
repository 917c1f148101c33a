"""``protect``: a defence attached to a model's training, which refuses a step that would go out undefended."""

from functools import partial
from math import inf
from types import TracebackType
from typing import Any, TypedDict, Unpack

import torch
from torch import Generator, nn

from gradveil.errors import DefenseError, UpdateError
from gradveil.modules import check_ready
from gradveil.privacy.accountant import Account, Spending
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.attachment import Attachment, attachment_of
from gradveil.protection.defense import Defense, accounted, build, own_draws
from gradveil.protection.passes import Report
from gradveil.protection.per_record_step import PerRecordStep, is_same, left_as_it_was
from gradveil.protection.provenance import CHANGED
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Batch, Update


class Guard:
    """A defended model: call it in place of the model, leave it (``with``) or ``remove`` it when training is over."""

    def __init__(self, attachment: Attachment, model: nn.Module) -> None:
        self._attachment = attachment
        self.model = model  # as it was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove() if kind is not None else self.close()

    @property
    def defense(self) -> Defense:
        return self._attachment.defense

    @property
    def report(self) -> Report:
        """What was done so far: steps, entries asked for and removed, distances."""
        return self._attachment.report

    @property
    def account(self) -> Account:
        """What a defence of records has spent of its budget so far; save it with the client."""
        if (releases := self._attachment.per_record) is None:
            raise DefenseError(f"{describe(self.defense)} promises nothing of single records, so it spends no budget.")
        return releases.spending.account

    def remove(self) -> None:
        """Take every hook off the model again. Checks nothing: see ``check``."""
        self._attachment.detach()

    def close(self) -> None:
        """Take every hook off, and raise ``DefenseError`` where a strict guard saw training but defended none of it."""
        self.remove()
        if self._attachment.strict:
            if self.report.optimizer_steps > 0 or self._attachment.weights_changed:
                self._check_done()
            self.verify()

    def verify(self) -> None:
        """Raise ``DefenseError`` where something went past the defence; ``check`` asks for training as well."""
        if self._attachment.went_past:
            raise DefenseError(f"{CHANGED} Do not send this update.")
        if self._attachment.per_record is not None:
            self._attachment.per_record.check_carried()
        if bare := self._attachment.without_noise:
            raise DefenseError(
                f"The gradient of {', '.join(bare[:3])} was not made by the defence, or was changed since. Do not send "
                f"it; clear it with optimizer.zero_grad() where it was for something else."
            )
        if self.report.unchanged:
            raise DefenseError(
                f"{describe(self.defense)} changed nothing in {self.report.unchanged} training passes. Give it more to "
                f"change, and do not send this update."
            )

    def check(self) -> None:
        """Raise ``DefenseError`` unless something was defended; for callers that have trained and are about to send."""
        self.verify()
        self._check_done()

    def _check_done(self) -> None:
        """Raise where the defence has not acted where it should have."""
        needed = self.defense.acts_on
        if needed - {"update"} and not self.report.steps:
            in_passes = self._attachment.in_passes or self._attachment.per_record is not None
            where = "model(x) or guard(x) in train mode" if in_passes else "a torch optimizer"
            raise DefenseError(
                f"No training step was defended by {describe(self.defense)} ({self.report.optimizer_steps} optimizer "
                f"steps were taken). Train through {where}, and do not send this update."
            )
        if "update" in needed and not self.report.updates:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and no update passed through it. Send what "
                f"guard.update(before, after) returns, called while the guard is on."
            )

    def update(
        self, before: Params, after: Params, *, lr: float = 1.0, num_examples: int = 1, num_steps: int = 1
    ) -> Params:
        """Return the weights to send in place of ``after``: the update from ``before`` to it, defended.

        Both are state dicts; entries that are not trained pass through. ``lr`` is that of the local steps: it says
        what a unit of noise on the update is.
        """
        if "update" not in self.defense.acts_on:
            return dict(after)
        names = [name for name, p in self._attachment.model.named_parameters() if p.requires_grad]
        if lost := [name for name in names if name not in before or name not in after]:
            raise UpdateError(f"{', '.join(lost)} is missing from the weights before or after. Give whole state dicts.")
        start = {name: before[name].detach() for name in names}
        update = Update.from_weights(start, after, lr, num_examples, num_steps)
        with own_draws(self.defense):
            changed = self.defense.on_update(update, self._attachment.rng)
        if is_same(changed.gradient, update.gradient):
            self._attachment.undefended(left_as_it_was(self.defense, "update"))
        else:
            self.report.updates += 1
        return dict(after) | {name: start[name] - lr * changed.gradient[name] for name in names}


class RecordSettings(TypedDict, total=False):
    """What a defence of records (``veil``) asks of a training loop; all public.

    slots: the records of a step, which its sum is divided by; the first batch's where it is not given.
    records: how many the client has: no step can hold more. What each of them pays, ``counted`` loaders tell; without
        one every step counts for all records.
    run: the planned run, for a promise over the whole of it; it says slots and records too.
    account: what the client has spent so far; a step that would overspend is refused.
    public: public examples, for coordinates and a clip that follow from them.
    mean_loss: the loss is the mean of one loss per record, where its graph does not show it.
    """

    slots: int | None
    records: int | None
    run: PlannedRun | None
    account: Account | None
    public: Batch | None
    mean_loss: bool


def protect(
    model: nn.Module,
    defence_or_spec: Defense | str,
    *,
    simulated: Generator | None = None,
    strict: bool = True,
    **settings: Unpack[RecordSettings],
) -> Guard:
    """Attach a defence to a model's training: its gradients are defended from here to ``remove``.

    Acts in train mode with gradients on. A strict guard refuses a step that was not defended; one that is not
    strict counts it in ``report.skipped``. The defence's noise is secret: nobody can draw it again, and no copy
    repeats it. ``simulated`` is a generator for simulations and tests, whose noise anybody with its seed takes off
    again; ``report.noise`` says which it was.
    The other settings are for a defence of records (``RecordSettings``).
    """
    defense = build(defence_or_spec)
    if strict:
        refuse_idle(defense)
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    check_ready(bare)
    _refuse_opacus(bare)
    if (other := attachment_of(bare)) is not None:
        raise DefenseError(
            f"This model is guarded by {describe(other.defense)} already. Remove that guard first, or join the two "
            f"with '+' in one spec."
        )
    releases = _releases(bare, defense, strict, settings)
    if bare is not model or any(m._compiled_call_impl is not None for m in bare.modules()):
        torch.compiler.reset()  # code compiled before would run on without the hooks
    attachment = Attachment(bare, defense, simulated, strict, releases)
    attachment.attach()
    return Guard(attachment, model)


def _releases(model: nn.Module, defense: Defense, strict: bool, settings: RecordSettings) -> PerRecordStep | None:
    """Return what makes releases of the records' gradients; None for a defence that does not act on them."""
    if "records" not in defense.acts_on:
        if given := [name for name, value in settings.items() if value not in (None, False)]:
            raise DefenseError(f"{', '.join(given)}: {describe(defense)} does not act on records. Leave it out.")
        return None
    if not strict:
        raise DefenseError(
            f"{describe(defense)} promises something of every step: it cannot be used with strict=False."
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise DefenseError("Records cannot be kept apart over several devices. Protect the module inside, on one.")
    acts = accounted(defense)
    run, slots, records = settings.get("run"), settings.get("slots"), settings.get("records")
    account = settings.get("account")
    if run is not None:
        acts, slots, records = accounted(acts.for_run(run)), run.slots, run.records
    cost = acts.cost(1)
    if account is None:
        limit = cost * run.uses if run is not None and cost is not None else inf
        account = Account("this client", limit=limit)
    known_mean = bool(settings.get("mean_loss"))
    return PerRecordStep(model, acts, Spending(cost, account), slots, known_mean, settings.get("public"), records)


def refuse_idle(defense: Defense) -> None:
    """Raise where the settings of a defence, or of a part of it, leave everything as it is."""
    if defense.idle:
        raise DefenseError(
            f"{describe(defense)} changes nothing, or a part of it does not, so it would count as a defence that it is "
            f"not. Give it more to change, leave that part out, or say 'none'."
        )


def guard_of(model: nn.Module) -> Guard | None:
    """Return the guard of a guarded model, also of a copy or a pickle of one; ``None`` where there is none."""
    attachment = attachment_of(getattr(model, "_orig_mod", model))
    return None if attachment is None else Guard(attachment, model)


class CallbackGuard:
    """Guards a model, or a part of it, from ``start`` to ``stop``; ``report`` says what was defended.

    The base of a framework's callback, which says when that is. ``module`` names the part that is called, where it is
    not the model itself.
    """

    def __init__(
        self,
        defence_or_spec: Defense | str,
        *,
        module: str | None = None,
        simulated: Generator | None = None,
        strict: bool = True,
        **settings: Unpack[RecordSettings],
    ) -> None:
        super().__init__()
        self.defense = build(defence_or_spec)
        if "update" in self.defense.acts_on:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and a callback does not see what is sent. Use "
                f"gradveil.protect and guard.update(before, after) where the weights are sent."
            )
        self._module, self._simulated, self._strict, self._settings = module, simulated, strict, settings
        self._guard: Guard | None = None
        self.report = Report()

    def start(self, model: nn.Module) -> None:
        part = model.get_submodule(self._module) if self._module else model
        self._guard = protect(part, self.defense, simulated=self._simulated, strict=self._strict, **self._settings)
        self.report = self._guard.report

    def stop(self) -> None:
        """Training is over: detach, and raise where nothing was defended."""
        if (guard := self._released()) is not None:
            guard.close()

    def abandon(self) -> None:
        """Training failed: detach only."""
        if (guard := self._released()) is not None:
            guard.remove()

    def _released(self) -> Guard | None:
        self._keep_account()
        guard, self._guard = self._guard, None
        return guard

    def _keep_account(self) -> None:
        """Go on with what the guard has spent, in the next training of the same client."""
        if self._guard is not None and "records" in self.defense.acts_on:
            self._settings["account"] = self._guard.account

    @property
    def account(self) -> Account | None:
        """What a defence of records has spent so far; None where it has no account yet, or promises nothing."""
        self._keep_account()
        return self._settings.get("account")


def _refuse_opacus(model: nn.Module) -> None:
    """Raise where Opacus has hooked or wrapped the model: its per-example gradients would not be ours."""
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
        if any(_origin(thing).startswith("opacus") for thing in [type(module), *hooks]):
            raise DefenseError(
                f"Opacus is at work on {name or type(module).__name__!r}: it computes gradients per example by hooks "
                f"of its own, and the two cannot share a model. Pick one: protect the plain module, or keep Opacus."
            )


def _origin(thing: Any) -> str:
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None) or type(thing).__module__)
