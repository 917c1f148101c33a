"""Groups of units, one after the other or in worker processes; what each yields is the same."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from gradveil.federated.processes import available_cores
from gradveil.paper.base import ITEMS, Context, Item, Row
from gradveil.registry import describe

Done = tuple[dict[str, list[Row]], float]  # rows by unit, and seconds


MOST_JOBS = 8  # by default: each process loads the data set and PyTorch


def usual_jobs(context: Context) -> int:
    """Return how many processes to use where nobody says: one for each core; on CUDA one, which fills the device."""
    if context.device.type != "cpu":
        return 1
    return min(available_cores(), MOST_JOBS)


def run_groups(item: Item, groups: Sequence[list[str]], context: Context, jobs: int = 1) -> Iterator[Done]:
    """Yield what every group gives, as soon as it is done; with several jobs, not in order.

    Each job is a process of one thread. An error in one ends the run; what was yielded before is kept.
    """
    if jobs == 1 or len(groups) < 2:
        for group in groups:
            yield _timed(item, group, context)
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(groups)), spawn, torch.set_num_threads, (1,)) as pool:
        waiting = [pool.submit(_elsewhere, describe(item), group, context) for group in groups]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _timed(item: Item, group: Sequence[str], context: Context) -> Done:
    start = time.perf_counter()
    return item.run_group(group, context), time.perf_counter() - start


def _elsewhere(spec: str, group: Sequence[str], context: Context) -> Done:
    return _timed(ITEMS.build(spec), group, context)
