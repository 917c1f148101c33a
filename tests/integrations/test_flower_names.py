import pytest

pytest.importorskip("flwr")

from importlib import import_module
from pkgutil import iter_modules

from gradveil.integrations import flower


def test_every_public_name_is_a_function_also_when_all_modules_are_loaded() -> None:
    for module in iter_modules(flower.__path__):
        import_module(f"{flower.__name__}.{module.name}")
    assert all(callable(getattr(flower, name)) for name in flower.__all__)
    assert set(flower.__all__) <= set(dir(flower))
