"""No public name vanishes unnoticed, and the command line stays quick."""

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "ATTACKS",
    "Account",
    "Attack",
    "AuditConfig",
    "Batch",
    "Countermeasure",
    "DEFENSES",
    "Dataset",
    "Defense",
    "DefenseError",
    "GaussianPrior",
    "GradveilError",
    "Observation",
    "PlannedRun",
    "Reconstruction",
    "Training",
    "Update",
    "__version__",
    "attack",
    "audit",
    "certify",
    "check_model",
    "counted",
    "dataset",
    "defense",
    "draws",
    "evaluate",
    "guard_of",
    "leak_scores",
    "local_update",
    "loss",
    "model",
    "partition",
    "protect",
    "read_examples",
    "read_update",
    "save_prior",
    "simulate",
    "spend_from",
    "step_gradient",
    "verify",
    "write_examples",
    "write_report",
    "write_update",
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"]
PAGES += sorted((ROOT / "docs" / "how-to").glob("*.md"))
DEEPER = {  # what these pages may import beside gradveil itself
    "gradveil.attacks",
    "gradveil.integrations.flower",  # each needs an extra of its own
    "gradveil.integrations.lightning",
    "gradveil.integrations.nvflare",
    "gradveil.integrations.transformers",
    "gradveil.attacks.search.matching",  # the engine that an attack of the package is built on
    "gradveil.attacks.search.minimise",
    "gradveil.attacks.search.restarts",
    "gradveil.representation.rules.activations",  # the table that a new layer type goes into
    "gradveil.representation.rules.base",
    "gradveil.representation.rules.shapes",
    "gradveil.modalities",  # what a new kind of example is made of, and the data that names it
    "gradveil.data.base",
}


def test_the_public_names_are_these() -> None:
    assert sorted(gradveil.__all__) == PUBLIC
    assert dir(gradveil) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name: str) -> None:
    scope: dict[str, object] = {}
    exec(f"from gradveil import {name}", scope)
    assert scope[name] is getattr(gradveil, name)


def test_a_type_checker_sees_what_is_loaded_on_first_use() -> None:
    tree = ast.parse(Path(gradveil.__file__).with_suffix(".pyi").read_text())
    (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(names)) == PUBLIC
    for name in set(PUBLIC) - {"__version__"}:
        assert (getattr(gradveil, name)) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_for_users_imports_nothing_deeper_than_gradveil(page: Path) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    assert set(re.findall(r"\bgradveil(?:\.\w+)+(?= import)|(?<=import )gradveil(?:\.\w+)+", code)) <= DEEPER


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(gradveil, "nothing")


def test_import_and_help_do_not_import_torch() -> None:
    code = "import sys, gradveil, gradveil.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_answers_in_half_a_second() -> None:
    """In processor time, so that a busy machine does not count."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "gradveil", "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "audit" in done.stdout
        return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

    assert min(once() for _ in range(5)) < 0.5


def test_an_unknown_command_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run([sys.executable, "-m", "gradveil", "adit"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
