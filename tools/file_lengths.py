"""Fail when a source file is longer than its budget: one idea a file."""

import sys
from pathlib import Path

BUDGET = 500

files = [path for folder in ("src", "studies/src") for path in sorted(Path(folder).rglob("*.py"))]
long = {path: count for path in files if (count := len(path.read_text().splitlines())) > BUDGET}
for path, count in long.items():
    print(f"{path}: {count} lines; the budget is {BUDGET}. Split it by idea.")
sys.exit(bool(long))
