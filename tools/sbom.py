"""Write what is installed in this environment as a CycloneDX 1.6 list (JSON) and as a table of licences (Markdown).

`python tools/sbom.py FOLDER` takes gradveil and all that it needs, by the metadata that each brings; the hash of
each file is in `locks/`.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HASH = re.compile(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


def needed(
    name: str, extras: tuple[str, ...] = (), found: dict[str, Distribution] | None = None
) -> dict[str, Distribution]:
    """Return a package and what it needs, as far as it is installed, by canonical name."""
    found = {} if found is None else found
    key = canonicalize_name(name)
    try:
        package = found.get(key) or distribution(name)
    except ModuleNotFoundError:  # of an extra that is not installed
        return found
    seen = key in found
    found[key] = package
    for text in package.requires or []:
        need = Requirement(text)
        asked = any(need.marker is None or need.marker.evaluate({"extra": extra}) for extra in extras or ("",))
        by_extra = need.marker is not None and "extra" in str(need.marker)
        if asked and (by_extra or not seen):
            needed(need.name, tuple(need.extras), found)
    return found


def licence(package: Distribution) -> str:
    """Return what the package says of its licence: the expression, else classifiers, else a line."""
    said = package.metadata
    if said.get("License-Expression"):
        return str(said["License-Expression"])
    kinds = [c.split(" :: ")[-1] for c in said.get_all("Classifier") or [] if c.startswith("License :: ")]
    field = (said.get("License") or "").strip().splitlines()
    return ", ".join(kinds) or (field[0] if field and len(field[0]) < 60 else "not stated: see its files")


def component(package: Distribution, hashes: dict[tuple[str, str], str]) -> dict[str, object]:
    """Return one entry of the list."""
    name, version = canonicalize_name(package.metadata["Name"]), package.version
    entry: dict[str, object] = {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
    }
    entry["bom-ref"], entry["licenses"] = f"{name}=={version}", [{"license": {"name": licence(package)}}]
    found = hashes.get((name, version))
    return entry | ({"hashes": [{"alg": "SHA-256", "content": found}]} if found else {})


def main(folder: Path) -> None:
    """Write `sbom.json` and `licences.md`."""
    locks = [HASH.match(line) for path in Path("locks").glob("*.txt") for line in path.read_text().splitlines()]
    hashes = {(canonicalize_name(one[1]), one[2]): one[3] for one in locks if one}
    whole = needed("gradveil", tuple(distribution("gradveil").metadata.get_all("Provides-Extra") or ()))
    own = component(whole.pop("gradveil"), hashes) | {"type": "application"}
    packages = [whole[name] for name in sorted(whole)]
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}}
    folder.mkdir(parents=True, exist_ok=True)
    listed = bom | {"components": [component(package, hashes) for package in packages]}
    (folder / "sbom.json").write_text(json.dumps(listed, indent=1) + "\n")
    lines = [f"| {p.metadata['Name']} | {p.version} | {licence(p)} |\n" for p in packages]
    (folder / "licences.md").write_text("| package | version | licence |\n|---|---|---|\n" + "".join(lines))
    print(f"{folder}/sbom.json, {folder}/licences.md: {len(packages)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
