"""``protect``: a defence attached to a model's training, which refuses a step that would go out undefended."""

from types import TracebackType
from typing import Any

import torch
from torch import Generator, nn

from gradveil.defenses.base import Defense, build
from gradveil.defenses.guard.attachment import Attachment, attachment_of, is_same, left_as_it_was, refuse_opacus
from gradveil.defenses.guard.hooks import CHANGED
from gradveil.defenses.guard.passes import Report
from gradveil.errors import DefenseError, UpdateError
from gradveil.layers.modules import check_ready
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Update


class Guard:
    """A defended model: call it in place of the model, leave it (``with``) or ``remove`` it when training is over."""

    def __init__(self, attachment: Attachment, model: nn.Module) -> None:
        self._attachment = attachment
        self.model = model  # as it was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove() if kind is not None else self.close()

    @property
    def defense(self) -> Defense:
        """The defence at work."""
        return self._attachment.defense

    @property
    def report(self) -> Report:
        """What was done so far: steps, entries asked for and removed, distances."""
        return self._attachment.report

    def remove(self) -> None:
        """Take every hook off the model again. Checks nothing: see ``check``."""
        self._attachment.detach()

    def close(self) -> None:
        """Take every hook off, and raise ``DefenseError`` where a strict guard saw training but defended none of it."""
        self.remove()
        if self._attachment.strict:
            self._check_attempts()
            self.verify()

    def verify(self) -> None:
        """Raise ``DefenseError`` where something went past the defence; ``check`` asks for training as well."""
        if self._attachment.went_past:
            raise DefenseError(f"{CHANGED} Do not send this update.")
        if self.report.unchanged:
            raise DefenseError(
                f"{describe(self.defense)} changed nothing in {self.report.unchanged} training passes. Give it more to "
                f"change, and do not send this update."
            )

    def check(self) -> None:
        """Raise ``DefenseError`` unless something was defended; for callers that have trained and are about to send."""
        self.verify()
        needed = self.defense.acts_on
        if needed - {"update"} and not self.report.steps:
            raise DefenseError(self._nothing_done())
        self._check_update(needed)

    def _check_attempts(self) -> None:
        """Raise where training took place and the defence did not."""
        tried = self.report.optimizer_steps > 0 or self._attachment.weights_changed
        needed = self.defense.acts_on
        if tried and needed - {"update"} and not self.report.steps:
            raise DefenseError(self._nothing_done())
        if tried:
            self._check_update(needed)

    def _check_update(self, needed: frozenset[str]) -> None:
        if "update" in needed and not self.report.updates:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and no update passed through it. Send what "
                f"guard.update(before, after) returns, called while the guard is on."
            )

    def _nothing_done(self) -> str:
        where = "model(x) or guard(x) in train mode" if self._attachment.in_passes else "a torch optimizer"
        return (
            f"No training step was defended by {describe(self.defense)} ({self.report.optimizer_steps} optimizer steps "
            f"were taken). Train through {where}, and do not send this update."
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
        changed = self.defense.on_update(update, self._attachment.rng)
        if is_same(changed.gradient, update.gradient):
            self._attachment.undefended(left_as_it_was(self.defense, "update"))
        else:
            self.report.updates += 1
        return dict(after) | {name: start[name] - lr * changed.gradient[name] for name in names}


def protect(
    model: nn.Module, defence_or_spec: Defense | str, *, rng: Generator | None = None, strict: bool = True
) -> Guard:
    """Attach a defence to a model's training: its gradients are defended from here to ``remove``.

    Acts in train mode with gradients on. A strict guard refuses a step that was not defended; one that is not
    strict counts it in ``report.skipped``. Without ``rng`` the defence's noise comes from the system's entropy;
    a generator makes it repeatable, and then a copy of the guarded model repeats its noise: give each its own.
    """
    defense = build(defence_or_spec)
    if strict:
        refuse_idle(defense)
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    check_ready(bare)
    refuse_opacus(bare)
    if bare is not model or any(m._compiled_call_impl is not None for m in bare.modules()):
        torch.compiler.reset()  # code compiled before would run on without the hooks
    if (other := attachment_of(bare)) is not None:
        raise DefenseError(
            f"This model is guarded by {describe(other.defense)} already. Remove that guard first, or join the two "
            f"with '+' in one spec."
        )
    attachment = Attachment(bare, defense, rng, strict)
    attachment.attach()
    return Guard(attachment, model)


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
