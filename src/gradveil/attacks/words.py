"""The words of a text without their order: the rows of the embedding's gradient that are not zero.

Only tokens that are there move their own rows of the embedding. Pruning leaves the largest entries of just these rows,
and noise makes all rows alike but for those that stand out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator

from gradveil.attacks.base import ATTACKS, Attack, check_seen, refuse_adaptive
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.sequences.attention import word_table
from gradveil.attacks.sequences.rows import present
from gradveil.errors import AttackError
from gradveil.ids import PADDING
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("words")
@dataclass(frozen=True)
class Words(Attack):
    """Take the tokens whose rows of the embedding's gradient stand out: the words of the batch, in no order.

    Any number of local steps and any batch. Tokens that stand in several places come once.
    """

    kind = "closed form"

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Read the words of each update."""
        check_seen(seen, for_ids=True)
        refuse_adaptive(seen, "words")
        return [self._one(s) for s in at_one_model(seen)]

    def _one(self, seen: Observation) -> Reconstruction:
        name = f"{word_table(seen)}.weight"
        rows = seen.update.gradient.get(name)
        if rows is None:
            raise AttackError(f"The update has no gradient of the embedding {name!r}: it is frozen or was dropped.")
        rows = (rows * seen.weights[name] if name in seen.weights else rows).double().cpu()
        rows[PADDING] = 0.0
        count, (length,) = seen.num_examples, seen.input_shape
        there = present(rows, count * length)
        order = there[rows[there].norm(dim=1).argsort(descending=True)]
        ids = torch.full((count * length,), PADDING)
        ids[: len(order)] = order
        ids = ids.reshape(length, count).T  # each sequence has its share of the plainest
        found = ids.to(next(seen.model.parameters()))
        return Reconstruction(found, seen.labels, 0.0, bool(len(there)), {"words": float(len(there))})
