"""A drill of the deployment in docs/how-to/train-with-flower.md, with TLS and keys: ``make deploy``."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from integrations.test_flower_page import blocks, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.timeout(3600)]
PATIENCE = 600.0  # seconds that one step of the drill may take on a busy machine


class Site:
    """Processes of this drill in one folder; each is the leader of its own group, and ended by it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, environment(folder)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, line: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        words = shlex.split(line.replace("\\\n", " ").strip().removesuffix("&"))
        self.running[name] = subprocess.Popen(
            words, cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
        )
        return self.running[name]

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def rows(self) -> list[dict[str, object]]:
        path = self.folder / "runs" / "secure" / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, what: str, holds) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, f"{what}: not in {PATIENCE:g} s. Rows: {self.rows()}" + "".join(
                f"\n--- {name}\n{self.said(name)[-1500:]}" for name in self.running
            )
            time.sleep(1)


def block(mark: str, language: str = "bash") -> str:
    (found,) = blocks(mark, language)
    return found


def commands(mark: str) -> list[str]:
    return [line for line in block(mark).replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The page's SuperLink, with both keys registered; no node yet."""
    folder = tmp_path_factory.mktemp("drill")
    here = Site(folder)
    run(block("deploy tls"), folder)
    (folder / "flwr").mkdir()
    config = block("deploy secure config", "toml").replace("/full/path/to", str(folder))
    (folder / "flwr" / "config.toml").write_text(config)
    try:
        here.start("superlink", block("deploy secure superlink"))
        here.until("the SuperLink listens", lambda: listening(here))
        run(block("deploy secure register"), folder)
        yield here
    finally:
        for name in [*here.running]:
            here.kill(name)


def listening(here: Site) -> bool:
    done = subprocess.run(
        ["flwr", "supernode", "list", "secure", "--format", "json"], cwd=here.folder, env=here.env,
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return done.returncode == 0


def nodes_online(here: Site) -> int:
    out = run("flwr supernode list secure --format json", here.folder)
    found = json.loads(out[out.index("{") : out.rindex("}") + 1])
    return sum(node["status"] == "online" for node in found["nodes"])


def test_strangers_are_not_let_in(site: Site) -> None:
    run("ssh-keygen -q -t ecdsa -b 384 -N '' -f stranger", site.folder)
    other = block("deploy tls").splitlines()[:2]
    run("mkdir -p other && cd other && " + "\n".join(other), site.folder)
    base = "flower-supernode --superlink 127.0.0.1:18443 --max-wait-time 10 --node-config partition-id=0 --port"
    strangers = {  # and what Flower says of each
        "wrong certificate": ("--root-certificates other/ca.crt --auth-supernode-private-key node0", "VERIFY_FAILED"),
        "unknown key": ("--root-certificates ca.crt --auth-supernode-private-key stranger", "code: 2004"),
        "no key": ("--root-certificates ca.crt", "code: 2001"),
        "plaintext": ("--insecure", "Server disconnected without sending a response"),
    }
    for place, (name, (options, _)) in enumerate(strangers.items()):
        site.start(name, f"{base} {18811 + place} {options}")
    ended = {name: site.running[name] for name in strangers}
    site.until("all strangers give up", lambda: all(one.poll() is not None for one in ended.values()))
    codes = {name: site.running.pop(name).returncode for name in strangers}
    print("strangers, by exit code:", codes)
    assert all(codes.values()), codes
    for name, (_, reason) in strangers.items():  # turned away for what it did, not ended by something else
        assert "Exit Code: 305" in site.said(name), site.said(name)
        assert reason in site.said(name), site.said(name)
    assert nodes_online(site) == 0


def test_it_trains_loses_a_node_and_its_superlink_and_ends_whole(site: Site) -> None:
    nodes = dict(zip(("node0", "node1"), commands("deploy secure nodes"), strict=True))
    for name, line in nodes.items():
        site.start(name, line)
    (train,) = commands("deploy secure train")
    assert "--rounds 4" in train
    site.start("train", train.replace("--rounds 4", "--rounds 40"))  # ended long before by what follows
    site.until("a first round of both", lambda: site.rows())
    assert site.rows()[0]["accepted"] == 2

    site.kill("node1")
    site.until("a round without the lost node", lambda: any(row["accepted"] == 1 for row in site.rows()))
    alone = len(site.rows())
    site.start("node1", nodes["node1"])
    site.until("it is back in a round", lambda: any(row["accepted"] == 2 for row in site.rows()[alone:]))

    site.kill("superlink")
    site.kill("train")
    kept = site.rows()
    site.start("superlink", block("deploy secure superlink"))
    site.until("the SuperLink listens again", lambda: listening(site))
    rounds = len(kept) + 1
    resumed = site.start("resumed", train.replace("--rounds 4", f"--rounds {rounds} --resume"))
    site.until("the run that is continued ends", lambda: resumed.poll() is not None)
    assert resumed.returncode == 0, site.said("resumed")[-3000:]

    rows = site.rows()
    print("rounds, by accepted updates:", [(row["round"], row["accepted"], row["rejected"]) for row in rows])
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert rows[: len(kept)] == kept
    assert rows[-1]["accepted"] == 2  # the nodes came back by themselves
    assert (site.folder / "runs" / "secure" / "model.safetensors").exists()
