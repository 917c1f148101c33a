import importlib
import sys

import pytest

from gradveil.errors import MissingExtraError


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_without_the_framework_the_extra_to_install_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"gradveil.integrations.{name}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'gradveil\[{name}\]'"):
        importlib.import_module(f"gradveil.integrations.{name}")
