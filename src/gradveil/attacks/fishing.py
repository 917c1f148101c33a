"""Fishing: a last layer that lets the gradients of few examples through, and hides those of the rest of the batch."""

import math
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import ATTACKS, AppliesTo, Malicious, build, check_seen
from gradveil.attacks.labels import recover_labels
from gradveil.attacks.planted import nothing
from gradveil.errors import AttackError, LayerError
from gradveil.gradients.functional import output_of
from gradveil.modules import find_layer, representation, trace
from gradveil.ranges import Count, Positive, Whole
from gradveil.tree import named, norm
from gradveil.types import Batch, Observation, Reconstruction

FAR = 20.0  # logits: a class that lies so far off has no probability in single precision
STEEP = 50.0  # logits for each standard deviation of the feature
NOTHING = 1e-6  # of the row's norm: a gradient below it is of no example of the class
FEWEST = 0.25  # examples that a gradient is taken to be of: the count is read off one entry, which noise may spoil
THROUGH = 8  # examples of a class that are let through together; where more are expected the others are held back
RIDGE = 1.0  # of the features' mean variance, added to their covariance
ENOUGH = 256  # public examples that say how large the logit of a class gets


@ATTACKS.register("fishing")
@dataclass(frozen=True)
class Fishing(Malicious):
    """Change the last layer so that few examples of a batch make the whole gradient, then attack those alone.

    All rows but that of one class are zero, and that class is held for impossible: an example of it sends its row
    back in full, any other nothing (Wen et al. 2022, class fishing). How many came through is read off the row's bias,
    and they are attacked as a batch of so many. Where more of the class are expected than a small batch, the row is the
    direction that tells the class from the others on public data, with a threshold that all but about ``THROUGH`` of
    them pass: those are predicted for certain and send nothing either (feature fishing). Which classes a client has is
    read off an honest update of it, where one was seen. Its answer is what was caught, over and over, as many images as
    the batch has.
    """

    kind = "search"
    applies_to = (AppliesTo(tier="malicious"),)

    attack: str = "newton"  # on what was fished
    target: Whole | None = None  # the class; None: the rarest that the client has, or a random one of public examples
    examples: Count = 1  # of a batch, as the server expects
    gain: Positive = 1.0  # times, that the fished gradient is made as large as it would be; large ones beat noise

    def for_client(self, seen: Observation, rng: Generator) -> "Fishing":
        """Return the attack that is after a class of this client: that of the fewest examples."""
        if self.target is not None or seen.loss.targets != "classes":
            return self
        labels = recover_labels(seen, rng)
        if labels is None:
            return self
        classes, counts = labels.unique(return_counts=True)
        alone = int(counts.min()) == 1  # then there is none beside it to be held back
        return replace(self, target=int(classes[counts.argmin()]), examples=1 if alone else seen.num_examples)

    def plant(
        self, model: nn.Module, input_shape: tuple[int, ...], num_classes: int, public: Batch | None, rng: Generator
    ) -> nn.Module:
        if public is None or public.labels.ndim != 1 or public.labels.is_floating_point():
            raise AttackError("Fishing needs public examples with a class each; the server has none.")
        copied = deepcopy(model)
        path, layer = last_layer(copied, input_shape, num_classes)
        labels = public.labels.to(layer.weight.device)
        drawn = labels[torch.randint(len(labels), (1,), generator=rng, device=rng.device).to(labels.device)]
        target = int(drawn) if self.target is None else self.target
        of_class = labels == target
        if target >= num_classes or int(of_class.sum()) < 2:
            raise AttackError(f"There are not two public examples of class {target} among {num_classes} classes.")
        with torch.no_grad():
            expected = self.examples * float(of_class.float().mean())
            inputs = public.inputs if expected > THROUGH else public.inputs[:ENOUGH]
            r = representation(copied, path, inputs.to(layer.weight)).flatten(1)
            if expected <= THROUGH:
                row = self.gain * layer.weight[target]
                bias = -float((r @ row).max()) - FAR * max(1.0, self.gain)
            else:
                row, bias = _gate(r, of_class, expected)
            layer.weight.zero_()
            layer.bias.zero_()
            layer.weight[target], layer.bias[target] = row, bias + math.log(max(num_classes - 1, 1))
        return copied

    def after(self, model: nn.Module, batch: Batch) -> int | None:
        """Return the example that sends most through the last layer."""
        target = int(model.get_parameter(named(find_layer(model), "weight")).norm(dim=1).argmax())
        p = output_of(model, batch.inputs).softmax(1)[:, target].cpu()
        return int((p - (batch.labels == target).float()).abs().argmax())

    def reconstruct(self, seen: Observation, rng: Generator) -> Reconstruction:
        check_seen([seen], sizes_for="fishing")
        count, caught = _fished(seen)
        if caught is None:  # no example of the class was there
            return nothing(seen, {"fished": count})
        found = build(self.attack).reconstruct(caught, rng)
        again = torch.arange(seen.num_examples) % len(found.inputs)
        inputs = found.inputs[again.to(found.inputs.device)]
        labels = None if found.labels is None else found.labels[again.to(found.labels.device)]
        return Reconstruction(inputs, labels, found.objective, found.converged, {**found.details, "fished": count})


def last_layer(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> tuple[str, nn.Linear]:
    """Return the layer that gives the logits; raise where they do not come from a fully connected one with a bias."""
    with suppress(LayerError):
        path = find_layer(model)
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear) and layer.bias is not None and layer.out_features == num_classes:
            if set(dict(model.named_parameters())) == {named(path, "weight"), named(path, "bias")}:
                what = "has no weights before its last layer, so nothing can be fished there"
                raise AttackError(f"{type(model).__name__} {what}.")
            if trace(model, input_shape).output == path:
                return path, layer
    raise AttackError(
        f"The logits of {type(model).__name__} do not come straight from a fully connected layer with a bias and "
        f"one row for each of {num_classes} classes, so nothing can be fished by changing it."
    )


def _gate(r: Tensor, of_class: Tensor, expected: float) -> tuple[Tensor, float]:
    """Return a row and its bias that are above 0 for all but ``THROUGH`` of so many examples of a class."""
    ours, others = r[of_class].double(), r[~of_class].double()
    centred = torch.cat([ours - ours.mean(0), others - others.mean(0)])
    spread = centred.T @ centred / len(centred)
    ridge = RIDGE * spread.diagonal().mean() * torch.eye(len(spread)).to(spread)
    row: Tensor = torch.linalg.solve(spread + ridge, ours.mean(0) - others.mean(0))
    row = row * STEEP / (ours @ row).std().clamp_min(1e-12)
    return row.to(r), -float(torch.quantile(ours @ row, THROUGH / expected))


def _fished(seen: Observation) -> tuple[float, Observation | None]:
    """Return how many examples' gradients came through, and the update as that of these; None: nothing did."""
    path, layer = last_layer(seen.model, seen.input_shape, seen.num_classes)
    sizes = layer.weight.detach().norm(dim=1)
    target = int(sizes.argmax())
    weight, bias = named(path, "weight"), named(path, "bias")
    if int((sizes > 0).sum()) != 1 or seen.loss.targets != "classes" or bias not in seen.visible:
        raise AttackError(
            "fishing attacks what its own last layer let through, and this model's is not of its making, or is not "
            "seen. Let the clients train at what its plant() returns."
        )
    one = seen.as_one_step()
    count = -float(one.update.gradient[bias][target]) * seen.num_examples
    rest = norm({n: g for n, g in one.update.gradient.items() if n not in (weight, bias)})
    if float(rest) * seen.num_examples < NOTHING * float(sizes.max()):
        return count, None
    scale = seen.num_examples / max(count, FEWEST)
    gradient = {name: scale * g for name, g in one.update.gradient.items() if name != bias}
    mask = torch.zeros_like(layer.weight)
    mask[target] = 1.0
    shown = one.weights | ({weight: mask * one.weights.get(weight, 1.0)} if weight in gradient else {})
    noise = {name: scale * std for name, std in one.noise.items()}
    caught = max(1, min(round(count), seen.num_examples, THROUGH))
    labels = torch.full((caught,), target, device=layer.weight.device)
    update = replace(one.update, gradient=gradient, num_examples=caught, buffers={})
    return count, replace(one, update=update, labels=labels, weights=shown, noise=noise)
