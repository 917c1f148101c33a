"""Fail when a source file is longer than its budget: one idea a file."""

import sys
from pathlib import Path

BUDGET = 300

long = {
    path: count for path in sorted(Path("src").rglob("*.py")) if (count := len(path.read_text().splitlines())) > BUDGET
}
for path, count in long.items():
    print(f"{path}: {count} lines; the budget is {BUDGET}. Split it by idea.")
sys.exit(bool(long))
