"""The table of rules, one file for each kind of layer. A file of this folder fills the table by being there."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
