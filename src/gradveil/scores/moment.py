"""``moment``: one forward pass with squared weights stands for all row norms."""

from gradveil.scores.rows import Rows
from gradveil.scores.tape import Tape


def moment_rows(tape: Tape) -> Rows:
    """Return r and sqrt of s, where s starts as ones and each layer A maps it to (A∘A) s.

    That is diag(JJᵀ) with all cross terms left out: exact where every input reaches an entry by one path only, right on
    average where weights have independent random signs, and off where training has made paths add up.
    """
    return Rows(tape.r.flatten(1), {2.0: tape.spread().flatten(1).sqrt()})
