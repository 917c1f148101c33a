"""What holds for every command, found from the app: help, JSON, quiet, completion."""

import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from conftest import Command
from safetensors.torch import save_file
from typer.core import TyperArgument, TyperOption
from typer.testing import CliRunner

import gradveil
from gradveil.auditing.saved_update import UpdateAuditConfig
from gradveil.auditing.train import TrainConfig
from gradveil.auditing.update_files import write_examples, write_update
from gradveil.cli import options
from gradveil.cli.main import COMMANDS, app, module_of, whole_command
from gradveil.threats.setup import AuditConfig
from schemas import FOLDER, described, schema_of

DERIVED = {"audit", "train", "infer", "certify", "plan", "verify"}  # of the fields of settings
SERVES = {"play"}  # shows a page until it is stopped: it has no result
NAMES = [name for name in COMMANDS if name not in SERVES]
LENET = "--model lenet:strides=2/1"
FILE = f"--update update.safetensors --dataset digits {LENET}"

# A short run of every command; those above leave files for those below.
RUNS: dict[str, list[str]] = {
    "audit": [
        f"{FILE} --truth truth.safetensors --attack analytic --out run",
        f"{FILE} --truth truth.safetensors --attack analytic --defense gaussian:scale=0.1 --out other",
    ],
    "report": ["run", "run other"],
    "train": ["--rounds 1 --clients 1 --model logistic --out trained"],
    "infer": [f"{FILE} --truth truth.safetensors"],
    "check-model": [f"sent.safetensors {LENET} --examples truth.safetensors"],
    "certify": [
        "--images 1 --model lenet:width=3 --kind global --kind reach",
        "--images 1 --model lenet:width=3 --no-meter --defense veil:promise=reconstruction",
    ],
    "plan": ["", "--dataset digits --model logistic", "--check flower.toml"],
    "verify": ["--model logistic --engine sequential --canaries 8 --trials 12 --seed 1"],
    "dossier": ["run", "run --out filed", "--check filed"],
    "reproduce": ["", "claims --only nothing --data absent --out reproduced"],
    "leaderboard": ["--defense none --only floors/* --jobs 1 --out board"],
    "list": ["", "defense"],
}


def shown(name: str) -> list[TyperOption | TyperArgument]:
    """The options and arguments that a command's help shows."""
    params = whole_command(name).params
    return [p for p in params if isinstance(p, TyperOption | TyperArgument) and p.name != "help_all"]


def page(*words: str, width: int = 80) -> str:
    done = CliRunner().invoke(app, [*words], env={"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def files(command: Command, tmp_path: Path) -> Path:
    """An update, what it was made from, the weights it was made at, and a Flower configuration."""
    data = gradveil.dataset("digits")
    model = gradveil.model("lenet:strides=2/1", data.input_shape, data.num_classes)
    truth = data.train.batch([3])
    rng = torch.Generator().manual_seed(0)
    write_update("update.safetensors", gradveil.local_update(model, truth, "none", lr=0.1, rng=rng))
    write_examples("truth.safetensors", truth)
    save_file(model.state_dict(), "sent.safetensors")
    Path("flower.toml").write_text("clipping-norm = 1\nnoise-multiplier = 1\nnum-sampled-clients = 10\n")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_default_and_what_every_argument_is(name: str) -> None:
    lines = page(name, "--help-all" if name in DERIVED else "--help", width=400).splitlines()
    for param in shown(name):
        word = param.opts[0] if isinstance(param, TyperOption) else param.name
        (line,) = [line for line in lines if re.match(rf"│ \*? *{word}(,-\w)? ", line)]
        assert param.help
        assert " ".join(param.help.split()) in line
        flag = isinstance(param, TyperOption) and param.is_flag
        assert flag or "[default: " in line or "[required]" in line, line


@pytest.mark.parametrize("name", sorted(DERIVED))
def test_a_first_help_has_at_most_twelve_options_and_says_where_the_others_are(name: str) -> None:
    first, everything = page(name, "--help"), page(name, "--help-all")
    options = re.findall(r"^│ \*? *(--[a-z-]+)", first, flags=re.MULTILINE)
    assert 8 <= len(options) <= 14  # with --help and --help-all
    assert {"--help", "--help-all"} <= set(options)
    assert set(options) <= set(re.findall(r"^│ \*? *(--[a-z-]+)", everything, flags=re.MULTILINE))
    assert len(everything) > len(first)


@pytest.mark.parametrize("config", [AuditConfig, TrainConfig])
def test_every_setting_is_an_option_with_words(config: type) -> None:
    offered = {p.name: p for p in shown("audit" if config is AuditConfig else "train")}
    for field in fields(config):
        option = offered[options.NAMES.get(field.name, field.name)]
        assert option.help, field.name


@pytest.mark.parametrize(
    ("name", "config"), [("audit", AuditConfig()), ("audit", UpdateAuditConfig("none")), ("train", TrainConfig())]
)
def test_a_default_in_words_is_the_one_that_is_used(name: str, config: Any) -> None:
    words = {p.name: p.show_default for p in shown(name) if isinstance(p.show_default, str)}
    told = {"num_classes": "classes", "num_steps": "steps", "num_examples": "examples"}
    compared = 0
    for field in fields(config):
        value, option = getattr(config, field.name), told.get(field.name, field.name)
        if isinstance(value, bool | tuple | None) or value == "" or option not in words:
            continue  # those have no number or name to show, or are no options
        first, _, with_update = words[option].partition("; with --update ")
        said = with_update if with_update and isinstance(config, UpdateAuditConfig) else first
        assert said == (f"{value:g}" if isinstance(value, float) else str(value)), field.name
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", COMMANDS)
def test_no_sentence_of_a_help_comes_twice(name: str) -> None:
    told = [COMMANDS[name], *(param.help or "" for param in shown(name))]
    assert repeated(" ".join(told)) == []


def repeated(text: str) -> list[str]:
    """Sentences, of six words at least, that a text holds more than once; settings with their ranges are none."""
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.?!])\s+|\n|  +", text)]
    counts = Counter(s for s in sentences if len(s.split()) > 5 and "=" not in s.split()[0])
    return [sentence for sentence, count in counts.items() if count > 1]


@pytest.mark.parametrize("name", NAMES)
def test_json_is_offered_and_described(name: str) -> None:
    assert "--json" in [opt for param in shown(name) for opt in param.opts]
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema_of(name))
    assert schema_of(name)["title"] == f"What gradveil {name} --json prints"
    assert name in RUNS, f"{name}: give RUNS the words of a short run"


def test_every_schema_is_of_a_command() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


def test_every_command_prints_one_json_value_as_its_schema_says(command: Command, files: Path) -> None:
    pytest.importorskip("jsonschema")
    for name, runs in RUNS.items():
        for words in runs:
            code, out, err = command(name, *words.split(), "--json")
            assert (code, err) == (0, ""), (name, err)
            described(name, out)


def test_quiet_is_quiet_and_no_sentence_comes_twice(
    command: Command, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")  # a paragraph is a line
    for name, runs in RUNS.items():
        for words in runs:
            code, out, err = command(name, *words.split(), *(["--quiet"] if speaks(name) else []))
            assert (code, err) == (0, ""), (name, err)
            assert out.strip(), name
            assert not re.search(r"\x1b|\[/", out), name
            assert repeated(out) == [], name


def speaks(name: str) -> bool:
    """Whether a command shows progress."""
    source = inspect.getsource(import_module(module_of(name)))
    return "shared.running(" in source or "shared.working(" in source


@pytest.mark.parametrize("name", NAMES)
def test_what_shows_progress_can_be_quiet(name: str) -> None:
    offered = [opt for param in shown(name) for opt in param.opts]
    assert ("--quiet" in offered) == speaks(name)
    assert speaks(name) or name in ("report", "list", "dossier")  # these are short


@pytest.mark.parametrize("colour", [{}, {"NO_COLOR": "1"}])
def test_the_list_is_plain_text_of_80_columns(colour: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for key, value in colour.items():
        monkeypatch.setenv(key, value)
    text = page("list")
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\x1b|``|\[/?\w+\]|\*\*", text)
    for wanted in ("  representation\n", "    share=0.4 (from 0 to 1), ", "DEFENSE\n", "METRIC\n"):
        assert wanted in text


@pytest.mark.parametrize(
    ("words", "wanted", "unwanted"),
    [
        ("gradveil c", {"certify", "check-model"}, "plan"),
        ("gradveil plan --ep", {"--epochs", "--epsilon"}, "--rounds"),
        ("gradveil report --", {"--json", "--help"}, "--model"),
    ],
)
def test_a_shell_completes_commands_and_their_options(words: str, wanted: set[str], unwanted: str) -> None:
    asked = {"_GRADVEIL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'gradveil'; from gradveil.cli.main import entry; entry()"],
        env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wanted <= set(done.stdout.split()), done.stderr
    assert unwanted not in done.stdout.split()


def test_an_unknown_command_is_an_error() -> None:
    done = CliRunner().invoke(app, ["adit"])
    assert done.exit_code == 2
    assert "No such command 'adit'" in done.output
    assert isinstance(click.Context(whole_command("list")).command, click.Command)


@pytest.mark.parametrize("name", ["audit", "infer"])
def test_an_update_that_is_not_there_is_what_is_complained_of(command: Command, name: str) -> None:
    for more in ([], ["--dataset", "nothing"], ["--classes", "3"]):
        code, out, err = command(name, "--update", "nofile", *more)
        assert (code, out, err) == (2, "", "gradveil: There is no file nofile.\n")
