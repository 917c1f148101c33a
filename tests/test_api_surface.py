"""No public name vanishes unnoticed, and the command line stays quick."""

import resource
import subprocess
import sys

import gradveil

PUBLIC = [
    "__version__",
    "attack",
    "audit",
    "certify",
    "dataset",
    "defense",
    "leak_scores",
    "model",
    "partition",
    "protect",
]


def test_the_public_names_are_these() -> None:
    assert sorted(gradveil.__all__) == PUBLIC
    assert all(getattr(gradveil, name) is not None for name in PUBLIC)


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
