"""What the house looks like, read from the code itself: `make house`.

    python tools/house.py [--root TREE] [--no-way]

It prints, for src/gradveil:

- files and lines of each package, how many files are ideas (flat) and how many machinery (in a folder below), and the
  lines of tests for each line of code;
- cycles between packages. An import inside a function and one by name ("gradveil.data.base:DATASETS") count as *lazy*,
  one under TYPE_CHECKING as *typing*; both make a cycle as much as one at the top does. The package's own ``__init__``
  is the door and no part of the graph;
- class names that are used twice;
- modules with one importer and under 60 lines, leaving out methods that a registry finds, commands and ``__init__``;
- the way of one client's batch through audit, train and one point of the paper's trade-off (house_way.py says how it is
  counted).

Aims stand beside. A cycle or a name used twice is an error; what an aim misses is only said.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = 60  # lines
AIMS = {"files": 160, "lines": 22_000, "audit: files": 25, "audit: folder changes": 12}


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


def modules(root: Path) -> dict[str, Module]:
    """Return the source files by module name."""
    source = root / "src"
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
        for name in ("audit", "train", "tradeoff")
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


def show(title: str, lines: Sequence[str]) -> None:
    """Print one part: how many, then which."""
    print(f"\n{title}: {len(lines) or 'none'}", *(f"  {line}" for line in lines), sep="\n")


def main() -> int:
    """Print everything; return 1 for a cycle or a name used twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree of gradveil")
    parser.add_argument("--no-way", action="store_true", help="do not run anything")
    given = parser.parse_args()
    root = given.root.resolve()
    known = modules(root)
    edges = imports(known)
    print(table(folders(known, root)))

    at_top = cycles([edge for edge in edges if edge.kind == "top"], known)
    loops, twice = cycles(edges, known), names_twice(known)
    show("Cycles between packages, imports at the top only", [_packages(loop, known) for loop in at_top])
    show("Cycles between packages, lazy and typing imports counted", [_packages(loop, known) for loop in loops])
    for loop in loops:
        print(*sorted(f"    {edge.source} -> {edge.target} ({edge.kind})" for edge in loop), sep="\n")
    show("Class names used twice", [f"{name}: {', '.join(where)}" for name, where in twice.items()])
    small = small_with_one_importer(edges, known)
    show(f"Modules with one importer and under {SMALL} lines", [f"{m} <- {importer}" for m, importer in small.items()])

    measured = {"files": len(known), "lines": sum(m.lines for m in known.values())}
    if not given.no_way:
        print("\nThe way of one client's batch")
        counted = ways(root)
        print(table([{"through": name, **numbers} for name, numbers in counted.items()]))
        measured |= {f"audit: {key}": n for key, n in counted["audit"].items()}
    print("\nAims")
    for name, most in AIMS.items():
        if name in measured:
            print(f"  {name}: {measured[name]}, aim at most {most}: {'met' if measured[name] <= most else 'missed'}")
    print(f"  cycles: {len(loops)}, aim none: {'missed' if loops else 'met'}")
    print(f"  class names used twice: {len(twice)}, aim none: {'missed' if twice else 'met'}")
    return int(bool(loops or twice))


def _packages(loop: Sequence[Import], known: Mapping[str, Module]) -> str:
    return ", ".join(sorted({known[edge.source].package for edge in loop}))


if __name__ == "__main__":
    sys.exit(main())
