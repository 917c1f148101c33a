"""gradveil: what does a federated learning update leak, how do I stop it, and what can be promised?"""

import ast
from importlib import import_module
from importlib.resources import files
from typing import Any

__version__ = "0.2.0"

# name -> its module and what it is called there, as ``__init__.pyi`` has it for type checkers; loaded on first use, so
# that `import gradveil` and `gradveil --help` stay free of torch
_PUBLIC = {
    alias.asname or alias.name: (node.module, alias.name)
    for node in ast.parse((files("gradveil") / "__init__.pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
}
_PACKAGES = ("attacks", "defenses")  # whose names are methods

__all__ = ["__version__", *sorted(_PUBLIC.keys() - set(_PACKAGES))]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"gradveil.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gradveil' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
