"""Hooks of mkdocs: data become tables with a filter, and a link to a file outside docs/ becomes its path."""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

SOURCE = "    options: {show_source: true, show_root_full_path: true, members: []}"
DATA = re.compile(r"^<!-- data: (?P<path>\S+?)(?P<one> one at a time)? -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page's text with its data, and without links that lead out of docs/."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def plain(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        return link[0] if path.startswith("docs/") else f"{link['words']} (`{path}`)"

    def shown(mark: re.Match[str]) -> str:
        return tables(Path(config.docs_dir, page.file.src_uri).parent / mark["path"], bool(mark["one"]))

    if page.file.src_uri == "theory/paper.md":  # code as it runs, to unfold
        markdown = re.sub(r"^(::: \S+)$", r"\1\n" + SOURCE, markdown, flags=re.MULTILINE)
    links = re.compile(r"(?<!!)\[(?P<words>[^\]\n]+)\]\((?P<path>\.\./[^)#\s]+)\)")
    return links.sub(plain, DATA.sub(shown, markdown))


def tables(path: Path, one: bool) -> str:
    """Return the sections of a file of data as Markdown; assets/filter.js puts a filter above them."""
    said = [f'<div class="filtered{" one" if one else ""}" markdown>']
    for section in json.loads(path.read_text()):
        anchor = section["title"].lower().replace(":", "").replace(",", "").replace(" ", "-")
        said += [f"### {section['title']} {{ #{anchor} }}", *map(_part, section["parts"])]
    return "\n\n".join([*said, "</div>"])


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    rows = [part["columns"], ["---"] * len(part["columns"]), *part["rows"]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
