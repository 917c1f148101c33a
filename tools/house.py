"""Budgets of the house, counted from the code and the pages themselves: `make house`.

    python tools/house.py [--root TREE] [--walks] [--packages]

A line of `BUDGETS` is what is counted, the aim, and the cap that fails the build. Where the tree is over its aim the
cap is what it was when it was last lowered: a ratchet, which goes down and never up. Counted are

- files and lines of `src/gradveil`, lines of `studies/src` and of `studies/bench` (without tests), the longest file,
  the longest function, the most parameters of one (without ``self`` and ``cls``; a command's are its options, counted
  by themselves);
- cycles between packages. An import inside a function, one by name ("gradveil.data.base:DATASETS") and one under
  TYPE_CHECKING make a cycle as much as one at the top does. The package's own ``__init__`` is the door, no part of it;
- class names that are used twice;
- pages under `docs` and their words, without what a tool wrote between two marks; words and links of the README.

`--walks` traces one client's batch through audit, train and a point of the paper (house_way.py says how);
`--packages` prints files, lines and tests of each package and modules with one importer and under 60 lines.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = 60  # lines
WALKS = {"audit": (30, 30), "train": (20, 20)}  # files, folder changes: aims
GENERATED = re.compile(r"<!-- begin: .*?<!-- end: [^>]+-->", re.DOTALL)


@dataclass(frozen=True)
class Budget:
    """What is counted, what it should be at most, and what fails."""

    name: str
    aim: int
    cap: int


BUDGETS = (
    Budget("library: files", 200, 200),
    Budget("library: lines", 36_000, 46_324),
    Budget("studies: lines", 8_000, 8_000),
    Budget("studies: lines of benchmarks", 5_000, 5_000),
    Budget("longest file", 500, 500),
    Budget("longest function", 80, 81),
    Budget("most parameters", 12, 15),
    Budget("most options of a command", 12, 12),
    Budget("cycles between packages", 0, 0),
    Budget("class names used twice", 0, 0),
    Budget("pages", 40, 40),
    Budget("words of pages", 45_000, 45_000),
    Budget("README: words", 600, 600),
    Budget("README: links", 15, 15),
)


@dataclass(frozen=True)
class Import:
    """One module of the package imports another."""

    source: str
    target: str
    kind: str  # top, lazy or typing


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str  # gradveil.attacks.dlg
    path: Path
    text: str

    @property
    def lines(self) -> int:
        """How long it is."""
        return len(self.text.splitlines())

    @property
    def package(self) -> str:
        """The package right below gradveil, or the file's own name where it lies beside the packages."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def is_flat(self) -> bool:
        """Whether it lies right in its package, where the ideas are."""
        return self.name.count(".") <= 2 and self.path.name != "__init__.py"

    @property
    def is_found_by_name(self) -> bool:
        """Whether nobody has to import it: a registered method, a command, a way in."""
        by_name = ".register(" in self.text or "\ndef command(" in self.text
        return by_name or self.path.name in ("__init__.py", "__main__.py")


@dataclass(frozen=True)
class Function:
    """One function: where it stands, how long it is, how many parameters it takes."""

    place: str
    lines: int
    parameters: int
    is_command: bool = False


def functions(known: Mapping[str, Module]) -> list[Function]:
    """Return every function of the modules, methods among them."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [
        Function(
            f"{module.name}:{node.name}",
            (node.end_lineno or node.lineno) - node.lineno + 1,
            sum(arg.arg not in ("self", "cls") for arg in _parameters(node.args)),
            ".cli." in module.name and node.name == "command",
        )
        for module in known.values()
        for node in ast.walk(ast.parse(module.text))
        if isinstance(node, kinds)
    ]


def _parameters(given: ast.arguments) -> list[ast.arg]:
    starred = [arg for arg in (given.vararg, given.kwarg) if arg is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def modules(source: Path) -> dict[str, Module]:
    """Return the source files below a folder by module name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, path.read_text())
    return found


def imports(known: Mapping[str, Module]) -> list[Import]:
    """Return every import between modules of the package."""
    return [
        Import(module.name, target, kind)
        for module in known.values()
        if module.name != "gradveil"
        for target, kind in sorted(set(_targets(ast.parse(module.text), known, "top")))
        if target not in ("gradveil", module.name)
    ]


def _targets(node: ast.AST, known: Mapping[str, Module], kind: str) -> Iterator[tuple[str, str]]:
    """Yield (module, kind) for what a piece of code imports."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, kind) for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module in known:
        for alias in node.names:
            below = f"{node.module}.{alias.name}"
            yield (below if below in known else str(node.module)), kind
    elif isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in known:
        yield str(node.value).partition(":")[0], "lazy"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        kind = "lazy"
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        kind = "typing"
    for child in ast.iter_child_nodes(node):
        yield from _targets(child, known, kind)


def cycles(edges: Sequence[Import], known: Mapping[str, Module]) -> list[list[Import]]:
    """Return, for each group of packages that reach one another, the imports between them."""
    pairs = [(known[edge.source].package, known[edge.target].package, edge) for edge in edges]
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target, _ in pairs:
        graph[source].add(target)
    reach = {name: _reached(name, graph) for name in list(graph)}
    group = {name: frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in reach}
    return [
        [edge for source, target, edge in pairs if source != target and source in members and target in members]
        for members in sorted(set(group.values()), key=sorted)
        if len(members) > 1
    ]


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        for after in graph.get(todo.pop(), set()) - reached:
            reached.add(after)
            todo.append(after)
    return reached


def names_twice(known: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the class names that stand in more than one place, with the modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in known.values():
        for node in ast.walk(ast.parse(module.text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def small_with_one_importer(edges: Sequence[Import], known: Mapping[str, Module]) -> dict[str, str]:
    """Return short modules that only one other imports, with that other."""
    importers: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        importers[edge.target].add(edge.source)
    return {
        name: next(iter(importers[name]))
        for name, module in known.items()
        if len(importers[name]) == 1 and module.lines < SMALL and not module.is_found_by_name
    }


def folders(known: Mapping[str, Module], root: Path) -> list[dict[str, object]]:
    """Return one line per package: files, ideas, machinery, lines, lines of tests, and their ratio."""
    home = root / "tests"
    tests = {path.relative_to(home): len(path.read_text().splitlines()) for path in home.rglob("*.py")}
    by_package: dict[str, list[Module]] = defaultdict(list)
    for module in known.values():
        by_package["" if module.path.parent.name == "gradveil" else module.package].append(module)
    table = []
    for name, mine in sorted(by_package.items(), key=lambda item: (not item[0], item[0])):
        tested = sum(n for path, n in tests.items() if path.parts[0] == name or not (name or path.parts[1:]))
        table.append(_line(name or "(beside them)", mine, tested))
    return [*table, _line("all", list(known.values()), sum(tests.values()))]


def _line(name: str, mine: Sequence[Module], tests: int) -> dict[str, object]:
    lines, flat = sum(m.lines for m in mine), sum(m.is_flat for m in mine)
    below = sum(m.path.name != "__init__.py" for m in mine) - flat
    files = {"package": name, "files": len(mine), "flat": flat, "below": below}
    return files | {"lines": lines, "tests": tests, "tests/code": f"{tests / lines:.2f}"}


def ways(root: Path) -> dict[str, dict[str, int]]:
    """Return what house_way.py counts, each command in a process of its own."""
    tool = Path(__file__).with_name("house_way.py")
    started = {
        name: subprocess.Popen(
            [sys.executable, str(tool), name, "--root", str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("audit", "train", "tradeoff", "veil")
    }
    counted = {}
    for name, process in started.items():
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"The way through {name} could not be traced:\n{err[-2000:]}")
        counted[name] = json.loads(out)
    return counted


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as aligned text."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  " + "  ".join(map(str.rjust, line, widths)) for line in lines)


def measured(root: Path) -> dict[str, tuple[int, list[str]]]:
    """Return what each budget counts, with the places where it is the most."""
    known, studied = modules(root / "src"), modules(root / "studies" / "src")
    benches = [path.read_text() for path in (root / "studies" / "bench").rglob("*.py")]
    edges, called = imports(known), functions(known | studied)
    loops, twice = cycles(edges, known), names_twice(known)
    pages = {path: path.read_text() for path in sorted((root / "docs").rglob("*.md"))}
    words = {str(path.relative_to(root)): len(GENERATED.sub("", text).split()) for path, text in pages.items()}
    readme = (root / "README.md").read_text() if (root / "README.md").exists() else ""
    found = {
        "library: files": (len(known), []),
        "library: lines": (sum(m.lines for m in known.values()), []),
        "studies: lines": (sum(m.lines for m in studied.values()), []),
        "studies: lines of benchmarks": (sum(len(text.splitlines()) for text in benches), []),
        "longest file": _most({m.name: m.lines for m in (known | studied).values()}),
        "longest function": _most({f.place: f.lines for f in called}),
        "most parameters": _most({f.place: f.parameters for f in called if not f.is_command}),
        "most options of a command": _most({f.place: f.parameters for f in called if f.is_command}),
        "cycles between packages": (len(loops), [line for loop in loops for line in _edges(loop, known)]),
        "class names used twice": (len(twice), [f"{name}: {', '.join(where)}" for name, where in twice.items()]),
        "pages": (len(pages), []),
        "words of pages": (sum(words.values()), _most(words)[1]),
        "README: words": (len(readme.split()), []),
        "README: links": (readme.count("]("), []),
    }
    assert set(found) == {budget.name for budget in BUDGETS}
    return found


def _most(values: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return the largest value, and the five largest with their places."""
    ranked = sorted(values.items(), key=lambda item: -item[1])[:5]
    return (ranked[0][1] if ranked else 0), [f"{name}: {value}" for name, value in ranked]


def _edges(loop: Sequence[Import], known: Mapping[str, Module]) -> list[str]:
    edges = sorted(f"{edge.source} -> {edge.target} ({edge.kind})" for edge in loop)
    return [", ".join(sorted({known[edge.source].package for edge in loop})), *edges]


def main() -> int:
    """Print each budget; return 1 where one is over its cap."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree of gradveil")
    parser.add_argument("--walks", action="store_true", help="run audit, train and a point of the paper and trace them")
    parser.add_argument("--packages", action="store_true", help="print each package, and modules that are small")
    given = parser.parse_args()
    root = given.root.resolve()
    if given.packages:
        known = modules(root / "src")
        print(table(folders(known, root)))
        small = small_with_one_importer(imports(known), known)
        print(f"\nModules with one importer and under {SMALL} lines: {len(small)}")
        print(*(f"  {name} <- {importer}" for name, importer in small.items()), sep="\n", end="\n\n")
    counted = measured(root)
    over = [budget for budget in BUDGETS if counted[budget.name][0] > budget.cap]
    rows = [
        {
            "what": budget.name,
            "now": (now := counted[budget.name][0]),
            "cap": budget.cap,
            "aim": budget.aim,
            "": "OVER" if budget in over else "" if now <= budget.aim else "above its aim",
        }
        for budget in BUDGETS
    ]
    print(table(rows))
    for budget in over:
        print(f"\n{budget.name}: {counted[budget.name][0]}, at most {budget.cap}. Make it smaller; the cap stays.")
        print(*(f"  {line}" for line in counted[budget.name][1]), sep="\n", end="")
    if given.walks:
        print("\nThe way of one client's batch")
        walked = ways(root)
        print(table([{"through": name, **numbers} for name, numbers in walked.items()]))
        for name, (files, changes) in WALKS.items():
            print(f"  {name}: aims at {files} files and {changes} folder changes at most")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
