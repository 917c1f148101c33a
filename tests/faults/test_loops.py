"""Training loops at random under a guard of records: nothing without noise is sent, and no record goes unpaid."""

from collections import Counter

import pytest

from faults.conftest import Count, times
from faults.loops import Broken, Loop


@pytest.mark.parametrize("part", range(4))
def test_nothing_without_noise_leaves_a_loop_that_was_made_at_random(part: int, count: Count) -> None:
    ends: Counter[str] = Counter()
    for seed in range(part, times(400, 8_000), 4):
        loop = Loop(seed)
        try:
            ends[loop.run(25)] += 1
        except Broken as error:
            raise AssertionError(f"loop {seed}: {error} after {', '.join(loop.done)}") from error
    assert min(ends["sent"], ends["refused"]) > 10
    count("training loops, sent in the end", ends["sent"])
    count("training loops, refused on the way", ends["refused"])
