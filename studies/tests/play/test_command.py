"""``gradveil play`` at the command line."""

import builtins
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from conftest import Command


def test_without_gradio_one_line_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "gradio":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = command("play")
    assert (code, out) == (2, "")
    assert err == ("gradveil: The playground needs an optional dependency. Install it: pip install 'gradveil[play]'.\n")


def test_a_data_set_that_does_not_exist_is_one_line(command: Command) -> None:
    pytest.importorskip("gradio", reason="the extra `play` is not installed")
    code, _, err = command("play", "--dataset", "digitz")
    assert code == 2
    assert err.startswith("gradveil:")
    assert "digits" in err
    assert err.count("\n") == 1


def test_it_serves_this_machine_alone_until_it_is_stopped() -> None:
    pytest.importorskip("gradio", reason="the extra `play` is not installed")
    command = [sys.executable, "-m", "gradveil", "play"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert re.fullmatch(r"Playground: http://127\.0\.0\.1:\d+/ \(on 127\.0\.0\.1 alone; Ctrl-C ends it\)\n", said)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert err.endswith("gradveil: stopped.\n")
