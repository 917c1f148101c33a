"""The playground speaks to its own page alone, takes uploads up to a limit in all, and leaves no file behind."""

import asyncio
import http.client
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradveil_studies.play import visits
from gradveil_studies.play.visits import Visits

OWN = {"host": "127.0.0.1:7860"}
REFUSED: dict[str, dict[str, str]] = {
    "a name bound to this machine": {"host": "evil.example:7860"},
    "a name that begins like it": {"host": "127.0.0.1.evil.example:7860"},
    "no host": {},
    "another page": OWN | {"origin": "http://evil.example"},
    "another port": OWN | {"origin": "http://127.0.0.1:8000"},
    "another scheme": OWN | {"origin": "https://127.0.0.1:7860"},
    "a page in a sandbox": OWN | {"origin": "null"},
    "the same site": OWN | {"sec-fetch-site": "same-site"},
    "across sites": OWN | {"sec-fetch-site": "cross-site"},
    "all at once": {"host": "localhost:7860", "origin": "http://127.0.0.1:7860"},
}
TAKEN: dict[str, dict[str, str]] = {
    "no page": OWN,
    "its page": OWN | {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin"},
    "by name": {"host": "localhost:7860", "origin": "http://localhost:7860"},
    "typed": OWN | {"sec-fetch-site": "none"},
}


def status(app: Visits, heads: dict[str, str], path: str = "/", body: bytes = b"", kind: str = "http") -> int:
    """Send a request and return the status; 1008 where a socket is closed."""
    sent: list[Any] = []
    parts = [body[i : i + 1000] for i in range(0, len(body), 1000)] or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(k.encode(), v.encode("latin-1")) for k, v in heads.items()]}
    with ThreadPoolExecutor(1) as other:  # a browser of another test may keep a loop in this thread
        other.submit(lambda: asyncio.run(app(scope, receive, send))).result()
    return int(sent[0].get("status") or sent[0]["code"])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An app that reads all it is given."""
    while (message := await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 499 if message["type"] == "http.disconnect" else 200})


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    assert status(Visits(echo), REFUSED[name]) == 403
    assert status(Visits(echo), REFUSED[name], kind="websocket") == 1008


@pytest.mark.parametrize("name", TAKEN)
def test_its_own_page_is_served(name: str) -> None:
    assert status(Visits(echo), TAKEN[name]) == 200


def test_uploads_have_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MOST", 10_000)
    app = Visits(echo)
    assert [status(app, OWN, "/gradio_api/upload", bytes(3000)) for _ in range(5)] == [200, 200, 200, 499, 413]
    assert status(Visits(echo), OWN | {"content-length": "20000"}, "/gradio_api/upload") == 413
    assert status(Visits(echo), OWN | {"content-length": "²"}, "/gradio_api/upload") == 413
    assert status(app, OWN, "/other", bytes(3000)) == 200


def test_whatever_the_heads_are_nobody_else_comes_in() -> None:
    draws = random.Random(0)
    words = [
        "127.0.0.1",
        "localhost",
        ":7860",
        "http://",
        "evil.example",
        "@",
        ".",
        "/",
        "null",
        "",
        "\0",
        "ÿ",
        ":",
        "#",
    ]
    for _ in range(5000):
        heads = {
            name: "".join(draws.choices(words, k=draws.randint(0, 4)))
            for name in draws.sample(["host", "origin", "sec-fetch-site", "content-length"], draws.randint(0, 4))
        }
        if status(Visits(echo), heads) == 200:
            assert heads["host"].split(":")[0] in visits.HOSTS
            assert heads.get("origin") in (None, f"http://{heads['host']}")


@pytest.mark.slow
def test_a_playground_keeps_others_out_and_leaves_no_file() -> None:
    pytest.importorskip("gradio", reason="the extra `play` is not installed")
    from gradveil_studies.play.page import Playground

    playground = Playground()
    address = playground.launch()
    port = int(address.rstrip("/").rpartition(":")[2])
    folder = Path(playground.folder.name)

    def ask(method: str, path: str, heads: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body, {"Host": f"127.0.0.1:{port}"} | heads)
        answer = connection.getresponse()
        return answer.status, answer.read()

    try:
        assert ask("GET", "/", {})[0] == 200
        assert ask("GET", "/", {"Host": f"evil.example:{port}"})[0] == 403
        assert ask("GET", "/config", {"Origin": "http://evil.example"})[0] == 403
        form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nsecret\r\n--x--\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        assert ask("POST", "/gradio_api/upload", kind | {"Origin": "http://evil.example"}, form)[0] == 403
        assert not list(folder.rglob("*.png"))
        code, said = ask("POST", "/gradio_api/upload", kind, form)
        assert code == 200, said
        assert [path.read_bytes() for path in folder.rglob("*.png")] == [b"secret"]
    finally:
        playground.close()
    assert not folder.exists()
