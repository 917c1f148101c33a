"""Text by matching the gradient with mixtures of the tokens' embeddings (after Deng et al. 2021, TAG)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, in_groups
from gradveil.attacks.fedavg import local_training, unrolled_stack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import Matching
from gradveil.attacks.search.restarts import adam_search
from gradveil.attacks.sequences import word_table
from gradveil.modalities import IMAGE
from gradveil.modalities.tokens import PADDING, UNKNOWN
from gradveil.ranges import Count, Positive, Weight
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("tag")
@dataclass(frozen=True)
class EmbeddingMatching(Attack):
    """Match the direction of the update by mixtures of embeddings, then take each place's likeliest token.

    For models of text, also under noise, in several local steps and with more tokens than the model is wide, where
    ``span`` does not work. Departures from TAG (Deng et al. 2021): a place holds the softmax of free numbers over the
    vocabulary, so that what is searched stays between embeddings and the nearest token is the one with the largest
    share; the cosine distance in place of L1 and L2. Targets that are the next tokens are those of the search itself;
    classes are known or read off the last layer. Every sequence is taken to be as long as the longest can be.
    """

    kind = "search"
    applies_to = (AppliesTo(("tokens",), signs=True, default="steps=100"),)

    steps: Count = 200  # evaluations per start
    restarts: Count = 1
    lr: Positive = 0.3
    tol: Weight = 1e-3  # cosine distance at which the update counts as matched

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        models = {id(s.model): s for s in seen}
        mixing = {key: _mixing(s) for key, s in models.items()}
        relaxed = [_relaxed(s, mixing[id(s.model)]) for s in at_one_model(seen)]
        labelled = with_labels(relaxed, rngs)
        search = adam_search(self.steps, self.lr, restarts=self.restarts, tol=self.tol, stack=_stack)
        found = in_groups(labelled, rngs, local_training, search.run)
        return [_as_ids(s, one) for s, one in zip(seen, found, strict=True)]


def _mixing(seen: Observation) -> nn.Module:
    """Return a copy of the model that takes free numbers (N, L or more, tokens but the padding) in place of ids."""
    model, length = copy.deepcopy(seen.model), seen.input_shape[0]
    words, held = word_table(seen), list[Tensor]()

    def taken(module: nn.Module, given: tuple[Tensor]) -> Tensor:
        free = given[0]
        held[:] = [shares(free[..., :length, :])]
        return free.new_full((*free.shape[:-2], length), UNKNOWN)

    def mixed(module: nn.Module, given: tuple[Tensor], out: Tensor) -> Tensor:
        return held[0] @ cast(Tensor, module.weight)  # what functional_call put there

    model.register_forward_pre_hook(taken)
    model.get_submodule(words).register_forward_hook(mixed)
    return model


def shares(free: Tensor) -> Tensor:
    """Return each token's share (..., V) of a place, from free numbers of all but the padding."""
    return F.pad(free.softmax(-1), (PADDING + 1, 0))


def _relaxed(seen: Observation, model: nn.Module) -> Observation:
    """Return the same update as one of a model that takes free numbers; unknown next tokens are places of their own."""
    (length,), tokens = seen.input_shape, seen.loss.targets == "tokens"
    size = len(model.get_parameter(f"{word_table(seen)}.weight")) - 1
    labels, more = seen.labels, 0
    if tokens and labels is None:
        labels, more = torch.zeros(seen.num_examples, length, dtype=torch.long), 1  # not looked at
    shape = (length + more, size)
    return replace(seen, model=model, input_shape=shape, labels=labels, bounds=(0.0, 1.0), prior=None, modality=IMAGE)


def _stack(seen: Sequence[Observation]) -> Matching:
    plain, labels = unrolled_stack(seen), seen[0].labels
    if seen[0].loss.targets != "tokens" or labels is None or bool(labels.any()):
        return plain
    return replace(plain, trial=lambda x, y: plain.trial(x, shares(x[..., 1:, :])))


def _as_ids(seen: Observation, found: Reconstruction) -> Reconstruction:
    (length,), free = seen.input_shape, found.inputs if found.raw is None else found.raw
    ids = free.argmax(-1) + PADDING + 1
    labels = found.labels
    if seen.loss.targets == "tokens":
        labels = ids[:, 1:] if seen.labels is None else seen.labels
    return replace(found, inputs=ids[:, :length].to(found.inputs), labels=labels, raw=None)
