"""What commands print for programs, held against docs/schemas: valid, and every key of it described."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"


def described(command: str, out: str) -> Any:
    """Return what a command printed, one JSON value as its schema says."""
    import jsonschema

    found, schema = json.loads(out), schema_of(command)
    jsonschema.Draft202012Validator(schema).validate(found)
    _described(found, schema, schema.get("$defs", {}))
    return found


def schema_of(command: str) -> dict[str, Any]:
    """Read the schema of a command."""
    found: dict[str, Any] = json.loads((FOLDER / f"{command}.json").read_text(encoding="utf-8"))
    return found


def _described(value: Any, schema: dict[str, Any], shared: dict[str, Any]) -> None:
    """A schema lets new keys pass; here each key must be in it."""
    import jsonschema

    schema = schema | (shared[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else {})
    for choice in schema.get("anyOf", []):
        if jsonschema.Draft202012Validator(choice | {"$defs": shared}).is_valid(value):
            _described(value, choice, shared)
    if isinstance(value, list):
        for one in value:
            _described(one, schema.get("items", {}), shared)
    elif isinstance(value, dict) and "properties" in schema:
        for key, inner in value.items():
            assert key in schema["properties"], key
            _described(inner, schema["properties"][key], shared)
