"""The leak check: attack one's own update before it leaves, and withhold it where too much came of it."""

from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradveil.attacks.base import Attack
from gradveil.errors import DefenseError, GradveilError
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.protection.defense import Defense
from gradveil.protection.passes import Examples
from gradveil.step_rule import BETA1, BETA2, EPS, StepRule
from gradveil.threats.one_update import SAMPLE, SECONDS, OthersKnown, Probe, TrainingPass, worst
from gradveil.tree import Params
from gradveil.types import Batch, Update

PSNR, FLOOR, CHECKED = LEAK_METRICS = "leak-psnr", "leak-floor", "leak-checked"  # what a check adds to the metrics
KEPT = 2**32  # bytes of weights that are kept of a client's passes


@dataclass(eq=False)
class LeakCheck:
    """An attack on one's own update before it leaves, held against the examples that it was made of.

    A score below the threshold says that *this attack* failed, not that none would succeed. Of more than
    ``max_examples`` examples a sample is checked, each against a server that knows all the others.

    Args:
        attack: a spec or an attack.
        max_psnr: an update from which some image comes out better than this is withheld.
        defense: what is in force: the server that knows it is played too; None takes the site's or the run's.
        public: inputs (M, *shape) of the same kind that are no secret: what the attacker knows beforehand.
        max_examples: an update of more examples is not attacked as a whole; a sample of them is, one by one.
        sample: how many examples of such an update are checked.
        seconds: after this time no further example is begun; one is always checked.
        send_unchecked: send such an update where no example could be checked, with ``leak-checked`` 0 and no score;
            otherwise it is withheld.
        bounds: of the inputs.
        loss: that the client minimises: a spec, a loss or a function.
        lr: of the local steps; None takes the one that was asked for, and 1 where there is none.
        seed: for tests only; None draws from the operating system.
    """

    attack: str | Attack = "newton"
    _: KW_ONLY
    max_psnr: float = 20.0
    defense: str | Defense | None = None
    public: Tensor | None = None
    max_examples: int = 16
    sample: int = SAMPLE
    seconds: float = SECONDS
    send_unchecked: bool = False
    bounds: tuple[float, float] = (0.0, 1.0)
    loss: str | Loss = "cross_entropy"
    lr: float | None = None
    seed: int | None = None

    def judge(self, weights: Params, update: Update, defense: str | Defense, seen: "SeenInputs") -> dict[str, float]:
        """Return the figures of an update that may leave; raise where it may not."""
        if seen.model is None:
            raise DefenseError("the model was not seen in training, so the update could not be checked for leaks.")
        truth = seen.examples()
        if seen.rule is not None:
            update = replace(update, rule=seen.rule, num_steps=max(update.num_steps, seen.steps))
        shape, loss = tuple(truth.inputs.shape[1:]), build_loss(self.loss)
        probe = Probe(self.attack, shape, seen.num_classes, defense, self.bounds, self.public, loss)
        rng, knowing = Generator(), ""
        rng.manual_seed(rng.seed() if self.seed is None else self.seed)
        if len(truth) <= self.max_examples and seen.optimizer is None:
            rows, count = probe.run(seen.model, weights, update, rng, truth), len(truth)
        else:
            knowing = " by knowing all others"
            order = torch.randperm(len(truth), generator=rng)[: self.sample]
            truth = Batch(truth.inputs[order], truth.labels[order])
            try:
                plain = update.rule.is_plain and seen.optimizer is None
                unlike = None if plain else seen.optimizer or str(update.rule)
                each = OthersKnown(seen.model, seen.passes, update, unlike).check(probe, truth, rng, self.seconds)
                rows, count = [worst(rows) for rows in each], len(each)
            except GradveilError as error:
                if not self.send_unchecked:
                    raise DefenseError(f"no example could be checked: {error} send_unchecked=True sends it.") from error
                return {CHECKED: 0}
        row = worst(rows)
        if row["worst-psnr"] > self.max_psnr:
            raise DefenseError(
                f"{row['attack']} ({row['server']}) rebuilt a training example at {row['worst-psnr']:.1f} dB{knowing}; "
                f"the limit is {self.max_psnr:g} dB. Train on more examples at once, or use a stronger defense."
            )
        return {PSNR: row["worst-psnr"], FLOOR: probe.floor(truth[:count]), CHECKED: count}


def rule_in(optimizer: Optimizer, group: dict[str, Any]) -> StepRule | None:
    """Return the rule that a torch optimizer's steps follow; None where it is none of those known."""
    usual = {
        "dampening": 0,
        "nesterov": False,
        "maximize": False,
        "amsgrad": False,
        "betas": (BETA1, BETA2),
        "eps": EPS,
    }
    names: dict[type, str] = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}
    if type(optimizer) not in names or any(group.get(name, value) != value for name, value in usual.items()):
        return None
    decay, momentum = float(group.get("weight_decay", 0)), float(group.get("momentum", 0))
    return StepRule(optimizer=names[type(optimizer)], weight_decay=decay, momentum=momentum)  # type: ignore[arg-type]


@dataclass
class SeenInputs:
    """Keeps the inputs of a model's training passes, on the client, until the reply has been judged."""

    model: nn.Module | None = None
    num_classes: int = 0
    passes: list[TrainingPass] = field(default_factory=list)
    rule: StepRule | None = None  # of the optimizer that took the steps; None: no step was seen
    steps: int = 0
    optimizer: str | None = None  # its name, where its steps follow no rule that is known
    _handles: list[Any] = field(default_factory=list)
    _bytes: int = 0

    def attach(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._handles.append(model.register_forward_hook(self._leave))
        self._handles.append(
            register_optimizer_step_post_hook(partial(self._stepped, {id(p) for p in model.parameters()}))
        )

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def examples(self) -> Batch:
        """Return every different example that was trained on; labels are not seen."""
        trained = [one for one in self.passes if one.slopes is not None] or self.passes
        inputs = torch.unique(torch.cat([one.inputs for one in trained]), dim=0)
        return Batch(inputs, torch.full((len(inputs),), -1))

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            examples = Examples(args, kwargs)
            if len(examples.parts) > 1:
                raise DefenseError(
                    f"The leak check rebuilds one input, and the model was called with {len(examples.parts)}. Turn it "
                    f"off, or join them in one tensor."
                )
            self.passes.append(TrainingPass(examples.x.detach().cpu().clone(), self._weights(model)))
            self.model = model

    def _leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            self.num_classes = output.shape[-1] if output.ndim > 1 else 1
            if model.training and output.requires_grad:
                output.register_hook(partial(self._slopes, self.passes[-1]))

    def _stepped(self, own: set[int], optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if any(id(p) in own for p in group["params"]):
                rule = rule_in(optimizer, group)
                if rule is None or self.rule not in (None, rule):
                    self.optimizer = type(optimizer).__name__
                self.rule = rule
        self.steps += 1

    def _slopes(self, one: TrainingPass, slopes: Tensor) -> None:
        one.slopes = slopes.detach().cpu().clone()

    def _weights(self, model: nn.Module) -> Params:
        """Return the weights as they are, or none where too much is kept already."""
        state = {name: value.detach() for name, value in model.state_dict().items()}
        self._bytes += sum(value.nbytes for value in state.values())
        return {name: value.cpu().clone() for name, value in state.items()} if self._bytes <= KEPT else {}
