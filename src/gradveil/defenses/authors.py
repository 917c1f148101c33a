"""The rule as the authors' published code has it, for comparison: not the rule that the paper prints."""

import torch
from torch import Tensor


def authors_mask(r: Tensor, norms: Tensor, share: float, offset: float) -> Tensor:
    """Return the mask (N, L) of the entries that the authors' code zeroes: one row for the whole batch.

    Score ||∇r_i|| / (r_i + offset), with the sign of r, summed over the batch; the threshold is the percentile
    100 × share of these signed sums, and entries whose sum is *in absolute value* strictly below it are zeroed.
    So dead entries (sum 0) go first, nothing goes while the threshold is zero or less, and one entry with
    0 / 0 (dead, offset 0) makes the threshold NaN, and nothing goes at all.
    """
    sums = (norms / (r + offset)).sum(0)  # (L,)
    threshold = torch.quantile(sums, share)
    return (sums.abs() < threshold).expand_as(r)
