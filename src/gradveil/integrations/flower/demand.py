"""The defence that a run demands of every client."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradveil.defenses.compose import Compose
from gradveil.errors import DefenseError
from gradveil.protection.defense import Defense
from gradveil.registry import Spec, describe

OTHER = "other defence"  # the word under which updates with another one are counted


@dataclass(frozen=True)
class Demand:
    """At least the parts of this defence, with these settings; a client may do more."""

    defense: Defense

    def lacks(self, settings: Iterable[str]) -> bool:
        """Return whether some part is not among those that a client names, as ``parts_of`` does."""
        return not set(parts_of(self.defense)) <= set(settings)

    def check(self, own: Defense) -> None:
        """Raise on a client that is about to do something else: in a secure sum it could not be left out later."""
        if self.lacks(parts_of(own)):
            raise DefenseError(f"{OTHER}: this site uses {name_of(own)!r}, the run demands {name_of(self.defense)!r}.")


def parts_of(defense: Defense) -> list[str]:
    """Return each part of a defence with all its settings, defaults too: those of two versions may differ."""
    return [_in_full(part) for part in (defense.parts if isinstance(defense, Compose) else (defense,))]


def _in_full(part: Any) -> str:
    fields = [f.name for f in dataclasses.fields(part) if f.init and not f.name.startswith("_")]
    return str(Spec(_word(part), {name: str(getattr(part, name)) for name in fields}))


def _word(part: Defense) -> str:
    return str(getattr(part, "spec_name", type(part).__qualname__))


def name_of(defense: Defense) -> str:
    """Return the spec of a defence, or the name of its class where it has none."""
    return describe(defense) if hasattr(defense, "spec_name") else _word(defense)
