"""The examples beside the public names run, and every public name that is called has one."""

import doctest
import re
import warnings
from pathlib import Path

import pytest

import gradveil
from docpages import blocks, section

PAGE = "api.md"
# Names that a user meets elsewhere: what is only read, and what has a page of its own.
SHOWN_ELSEWHERE = {"ATTACKS", "Countermeasure", "Dataset", "Defense", "DefenseError", "GradveilError", "Observation",
                   "Reconstruction", "__version__", "save_prior", "verify"}  # fmt: skip


@pytest.mark.slow
def test_the_examples_of_the_interface_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(blocks(section(PAGE), "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE, PAGE, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.run(test, out=said.append)
    assert runner.tries > 30
    assert not runner.failures, "".join(said)


def test_every_public_name_has_an_example() -> None:
    used = set(re.findall(r"gradveil\.(\w+)", "\n".join(blocks(section(PAGE), "pycon"))))
    assert set(gradveil.__all__) - used == SHOWN_ELSEWHERE - used
    assert set(gradveil.__all__) >= SHOWN_ELSEWHERE
