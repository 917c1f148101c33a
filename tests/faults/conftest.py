"""Drills: what happens when a process is killed, a disk is full, or a file is hostile; counted, and told at the end."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from faults.stage import Stage

LONG = os.environ.get("GRADVEIL_FAULTS") == "long"  # `make faults`; else the short form, for every run of the tests
Count = Callable[..., None]
_COUNTED = "drills"


def times(short: int, long: int) -> int:
    """Return how often to try something: in the short form, and in the long one."""
    return long if LONG else short


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to the long form alone."""
    left_out = [] if LONG else [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """A warm process that runs commands: it takes as long to start as some ten of them to run."""
    found = Stage()
    yield found
    found.close()


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """``count("kills at a replace")`` or ``count("hostile files", 200)``: the figures that `make faults` prints."""

    def add(what: str, number: int = 1) -> None:
        request.node.user_properties.append((_COUNTED, (what, number)))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was tried, and what of it failed."""
    tried: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == _COUNTED and report.when == "call":
                    what, number = value
                    tried[what] += number
    if tried:
        failed = len(terminalreporter.stats.get("failed", []))
        terminalreporter.section(f"drills: {sum(tried.values()):,} in all, {failed} tests failed")
        for what, number in sorted(tried.items()):
            terminalreporter.write_line(f"{number:>9,}  {what}")
