"""Pages of which some parts are made: what stands between two markers, and the choice between writing and checking."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page with every marked block made anew; each marker must be there once."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"The page must have the markers {begin} and {end} once each.")
        fresh = f"{begin}\n\n{block}\n\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, fresh=fresh: fresh, text, flags=re.DOTALL)
    return text


def write_or_check(pages: Mapping[Path, str], description: str | None) -> int:
    """Write the pages or, with --check, only say which are stale; return the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run `make docs`")
        else:
            path.write_text(pages[path])
    return int(check and bool(stale))
