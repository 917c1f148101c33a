"""Build the site: data become tables with a filter, links out of docs/ become paths, and zensical draws the pages.

python tools/build_site.py [FOLDER]    into FOLDER, or site/

A link or an anchor that leads nowhere, a picture that is not there and a page that the menu leaves out are errors.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "    options: {show_source: true, show_root_full_path: true, members: []}"
DATA = re.compile(r"^<!-- data: (?P<path>\S+?)(?P<one> one at a time)? -->$", re.MULTILINE)
LINKS = re.compile(r"(?<!!)\[(?P<words>[^\]\n]+)\]\((?P<path>\.\./[^)#\s]+)\)")
PICTURES = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)")


def build(site: Path, docs: Path = ROOT / "docs") -> None:
    """Build the site of a folder of pages, strictly."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(docs, folder / "docs", ignore=shutil.ignore_patterns("*.jsonl", "*.toml"))
        (folder / "src").symlink_to(ROOT / "src")
        (folder / "studies").symlink_to(ROOT / "studies")
        shutil.copy(ROOT / "zensical.toml", folder)
        pages = sorted((folder / "docs").rglob("*.md"))
        check(folder / "docs", pages, tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
        for path in pages:
            path.write_text(page(path, path.relative_to(folder).as_posix()))
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr))  # without colours
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(folder / "site", site)


def check(docs: Path, pages: list[Path], menu: Any) -> None:
    """End where menu and pages differ, or a picture is missing."""
    names, listed = {path.relative_to(docs).as_posix() for path in pages}, set(_listed(menu))
    if wrong := names ^ listed:
        raise SystemExit(f"zensical.toml and docs/ differ on {', '.join(sorted(wrong))}. Name each page once.")
    pictures = [(path, one) for path in pages for one in PICTURES.findall(path.read_text())]
    if gone := [f"{path.name}: {one}" for path, one in pictures if not (path.parent / one).exists()]:
        raise SystemExit(f"There is no such picture: {', '.join(gone)}")


def _listed(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [name for part in parts for name in _listed(part)]


def page(path: Path, name: str) -> str:
    """Return a page's text with its data, and without links that lead out of docs/."""

    def plain(link: re.Match[str]) -> str:
        to = posixpath.normpath(posixpath.join(posixpath.dirname(name), link["path"]))
        return link[0] if to.startswith("docs/") else f"{link['words']} (`{to}`)"

    def shown(mark: re.Match[str]) -> str:
        return tables(path.parent / mark["path"], bool(mark["one"]))

    text = path.read_text()
    if name == "docs/theory/paper.md":  # code as it runs, to unfold
        text = re.sub(r"^(::: \S+)$", r"\1\n" + SOURCE, text, flags=re.MULTILINE)
    return LINKS.sub(plain, DATA.sub(shown, text))


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


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site")
