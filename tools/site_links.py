"""A hook of mkdocs: a link from a page to a file outside docs/ becomes its path: the site does not hold the file."""

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page's text without links that lead out of docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def plain(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        return link[0] if path.startswith("docs/") else f"{link['words']} (`{path}`)"

    return re.sub(r"(?<!!)\[(?P<words>[^\]\n]+)\]\((?P<path>\.\./[^)#\s]+)\)", plain, markdown)
