"""Write docs/methods.md from the registry, and docs/how-to/node-settings.md; with --check, only say what is stale."""

import sys

from marked_blocks import ROOT, write_or_check

from gradveil.cli.list import everything, say_ranges
from gradveil.integrations.allowed import FILES, SITE, WORDS, keys

TITLES = {
    "dataset": "Data sets",
    "partition": "Partitions",
    "model": "Models",
    "defense": "Defences",
    "attack": "Attacks",
    "loss": "Losses",
    "engine": "Engines of federated averaging",
    "aggregator": "Aggregators",
    "schedule": "Learning-rate schedules",
    "metric": "Metrics",
}
NODE = """\
# What a node takes from a run

Made by `make docs` from the code that decides it, `gradveil.integrations.allowed`. The ready app
(`gradveil.flower:client_app`) reads a run's settings by it: who submits a run chooses among what gradveil has, and the
**site** alone names code and files.

`module:function`, a path, and the settings that name files ({files})
are refused where a run gives them, in one line that quotes the run alone. Everything else that goes wrong on a node
leaves it as the name of the error; its text is in the node's own log.

A site sets {site}, `defense` and [the rest](train-with-flower.md) by `--node-config`, and what it sets
stands above the run: `--node-config "partition-id=0 dataset='my_module:my_data' data='/srv/images'"`.
Weights with NaN, infinite values or a layer of zeros are not trained at, and a message's map is bytes, of at most
2<sup>28</sup>.

| key of the run config | who may set it on a node | what it may be |
|---|---|---|
{rows}
"""


def page() -> str:
    """Return one table per kind, made from the registry."""
    lines = ["# All methods", "", "Made from the registry by `make docs`; `gradveil list` shows the same.", ""]
    lines += ["A number outside its range is refused in one line; where no upper end is given it is 10⁹.", ""]
    rows = everything()
    for kind, title in TITLES.items():
        lines += [f"## {title}", "", "| name | settings (default) | numbers | what it is |", "|---|---|---|---|"]
        for row in (r for r in rows if r["kind"] == kind):
            settings = ", ".join(f"`{k}={v}`" for k, v in row["settings"].items())
            lines.append(f"| `{row['name']}` | {settings} | {say_ranges(row['ranges'])} | {row['about']} |")
        lines.append("")
    return "\n".join(lines)


def node_settings() -> str:
    """Return the page of what a run may set on a node."""
    files = [f"`{kind}:{name}=`" for kind, names in FILES.items() for name in sorted(names)]
    files += [
        f"`{kind}:{name}=` but for {', '.join(words)}" for kind, of in WORDS.items() for name, words in of.items()
    ]
    rows = "\n".join(f"| `{key.name}` | {key.who} | {key.range} |" for key in keys())
    return NODE.format(files=", ".join(files), site=", ".join(f"`{name}`" for name in SITE), rows=rows)


if __name__ == "__main__":
    docs = ROOT / "docs"
    sys.exit(
        write_or_check({docs / "methods.md": page(), docs / "how-to" / "node-settings.md": node_settings()}, __doc__)
    )
