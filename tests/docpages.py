"""Pages of the documentation: the code in them, of a whole page or of one section."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def section(page: str, heading: str = "") -> str:
    """Return the text of a page under docs, or what stands under one of its headings."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if not heading:
        return text
    level = len(heading) - len(heading.lstrip("#"))
    body = text[text.index(f"\n{heading}\n") + len(heading) + 2 :]
    plain = re.sub(r"```.*?```", lambda block: "`" * len(block[0]), body, flags=re.DOTALL)
    end = re.search(rf"^#{{1,{level}}} ", plain, re.MULTILINE)
    return body[: end.start()] if end else body


def blocks(text: str, language: str) -> list[str]:
    """Return the code of a text; a block that is not run, or needs an extra, says so above it."""
    found = re.findall(rf"(<!-- (?:not run|needs): [^>]+ -->\n)?```{language}\n(.*?)```", text, re.DOTALL)
    return [code for why, code in found if not why]


def needing(text: str, extra: str) -> list[str]:
    """Return the Python that needs an extra."""
    return re.findall(rf"<!-- needs: {extra} -->\n```python\n(.*?)```", text, re.DOTALL)
