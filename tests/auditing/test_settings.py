import tomllib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.auditing.run_folder import from_toml, to_toml
from gradveil.errors import SpecError

texts = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)


@dataclass(frozen=True)
class Settings:
    name: str = "digits"
    data: str | None = None
    share: float = 0.4
    rounds: int = 3
    quick: bool = False
    defenses: tuple[str, ...] = ("none",)


@given(texts, st.none() | texts, st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.lists(texts))
def test_settings_survive_the_way_through_toml(
    name: str, data: str | None, share: float, quick: bool, defenses: list[str]
) -> None:
    settings = Settings(name, data, share, 7, quick, tuple(defenses))
    assert from_toml(Settings, to_toml(settings)) == settings


def test_the_text_is_toml_with_every_default_in_it() -> None:
    assert tomllib.loads(to_toml(Settings())) == {
        "name": "digits", "share": 0.4, "rounds": 3, "quick": False, "defenses": ["none"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("round = 3", "No setting is called 'round'. Did you mean 'rounds'?"),
        ("rounds = 'three'", "rounds=three: give a whole number"),
        ("rounds = true", "rounds=True: give a whole number"),
        ("defenses = 'none'", "defenses=none: give text; several in a list"),
        (f"share = 1{400 * '0'}", "...: give a number"),
        ("rounds = ", "not TOML"),
    ],
)
def test_a_wrong_setting_is_named(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        from_toml(Settings, text)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_whole_number_is_good_for_a_fraction() -> None:
    assert from_toml(Settings, "share = 1").share == 1.0
