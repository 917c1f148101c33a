"""The dossier: what it says of runs, what is missing, which clauses it answers, and that a forged file is noticed."""

import json
import os
import shutil
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from conftest import Command

from gradveil.report import dossier as made
from gradveil.report.dossier import ABOUT, Inputs, _content

AUDIT = (
    "audit", "--model", "logistic", "--images", "2", "--rounds", "1", "--clients", "2", "--attack", "analytic",
    "--defense", "pruning:share=0.8", "--no-meter", "--quiet", "--out", "audited",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit, a training run under veil, a plan and a measured promise."""
    import contextlib
    import io

    from typer.testing import CliRunner

    from gradveil.cli.main import app

    folder = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        for words in (
            AUDIT,
            (
                "train",
                "--model",
                "logistic",
                "--rounds",
                "1",
                "--clients",
                "2",
                "--defense",
                "veil:z=1,clip=1",
                "--quiet",
                "--out",
                "veiled",
            ),
        ):
            assert CliRunner().invoke(app, list(words)).exit_code == 0
        plan = CliRunner().invoke(app, ["plan", "--json"])
        (folder / "plan.json").write_text(plan.stdout)
    (folder / "verify.json").write_text(
        json.dumps(
            {"defense": "veil", "mu_proved": 1.41, "mu_measured": 1.3, "low": 1.2, "high": 1.5, "verdict": "consistent"}
        )
    )
    return folder


def test_every_field_answers_clauses_with_source_and_date() -> None:
    table = tomllib.loads((files("gradveil.report") / "clauses.toml").read_text("utf-8"))
    fields = [field["name"] for field in _content(Inputs())["fields"]]
    assert set(table["fields"]) == set(fields)
    named = {id for field in table["fields"].values() for id in field["clauses"]}
    assert named == set(table["clauses"])
    for one in table["clauses"].values():
        assert one["source"]
        assert one["date"][:2] == "20"
        assert one["clause"]
        assert one["asks"].endswith(".")


def test_what_no_input_says_is_missing() -> None:
    content = _content(Inputs())
    missing = {field["name"] for field in content["fields"] if field["is_missing"]}
    assert missing >= {
        "system",
        "data",
        "adversaries",
        "controls",
        "records",
        "proved",
        "composition",
        "measured",
        "measures",
    }
    assert "sees" not in missing
    assert all(field["missing"] for field in content["fields"] if field["is_missing"])


def test_an_audit_that_was_too_short_is_asked_for_more_minutes(runs: Path, command: Command, tmp_path: Path) -> None:
    short = shutil.copytree(runs / "audited", tmp_path / "short")
    rows = [json.loads(line) for line in (short / "rows.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] != "attack" or row["defense"] == "none"]
    assert len(kept) < len(rows)
    (short / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    _, out, _ = command("dossier", str(short), "--json")
    (records,) = [field for field in json.loads(out)["fields"] if field["name"] == "records"]
    assert records["is_missing"]
    assert "more minutes" in records["missing"]


def test_a_dossier_says_what_was_tried_found_proved_and_spent(runs: Path, command: Command) -> None:
    code, out, err = command(
        "dossier", *(str(runs / name) for name in ("audited", "veiled", "plan.json", "verify.json")), "--json"
    )
    assert (code, err) == (0, "")
    fields = {field["name"]: field for field in json.loads(out)["fields"]}
    rows = {name: [" | ".join(row) for row in field["rows"]] for name, field in fields.items()}
    adaptive = next(row for row in rows["adversaries"] if "Adaptive server" in row)
    assert "analytic" in adaptive
    assert "images back" in adaptive
    assert any("Malicious server" in row and "Was not run" in row for row in rows["adversaries"])
    assert any("Malicious server on" in row for row in rows["not_tried"])
    assert any(row.startswith("No defence") for row in rows["controls"])
    assert any(row.startswith("Blind guess") for row in rows["controls"])
    assert len(rows["records"]) == 1
    assert any("nothing is proved" in row.lower() for row in rows["proved"])
    assert any("μ = 1, ε =" in row for row in rows["composition"])
    assert "right at most 69 times in 100" in fields["composition"]["text"]  # Φ(1/2)
    short = dict(json.loads(out)["short"])
    assert "not shown either way for the" in short["What attackers got"]
    assert "the noise was simulated" in short["What is promised to one person"]
    assert "simulated" in fields["generator"]["text"]
    assert rows["measured"] == ["veil | 1.41 | 1.3 [1.2, 1.5] | consistent"]
    assert "no finding that data or model are anonymous" in json.loads(out)["note"]
    page = Path("dossier/dossier.html").read_text()
    assert "<script" not in page
    assert "Adaptive server" in page
    assert "Not signed." in page


def test_a_record_that_was_picked_from_a_list_is_not_called_rebuilt(
    runs: Path, command: Command, tmp_path: Path
) -> None:
    def lowest(run: Path, out: str) -> list[list[str]]:
        _, said, _ = command("dossier", str(run), "--out", str(tmp_path / out), "--json")
        return next(field["rows"] for field in json.loads(said)["fields"] if field["name"] == "records")

    run = shutil.copytree(runs / "audited", tmp_path / "picked")
    lines = (run / "rows.jsonl").read_text().splitlines()
    known = [row for row in map(json.loads, lines) if row["kind"] == "attack" and row["defense"] != "none"]
    picked = known[0] | {"attack": "candidates", "tier": "informed", "mse": 0.0, "unit": "piece/list", "of": 1}
    (run / "rows.jsonl").write_text("\n".join([*lines, json.dumps(picked)]) + "\n")
    assert lowest(run, "with") == lowest(runs / "audited", "without")


def test_an_audit_of_a_saved_update_is_evidence_too(command: Command, tmp_path: Path) -> None:
    kept = Path(__file__).parents[1] / "goldens" / "inputs"
    words = ("--model", "lenet:strides=2/1", "--attack", "analytic", "--quiet", "--out", str(tmp_path / "saved"))
    given = ("--update", str(kept / "update.safetensors"), "--truth", str(kept / "truth.safetensors"))
    assert command("audit", *given, *words)[0] == 0
    code, said, _ = command("dossier", str(tmp_path / "saved"), "--out", str(tmp_path / "evidence"), "--json")
    assert code == 0
    fields = {field["name"]: json.dumps(field) for field in json.loads(said)["fields"]}
    assert "analytic fails without any defence" in fields["controls"]


def test_a_forged_file_is_noticed_and_a_key_signs(runs: Path, command: Command) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("own", "other"):
        key = Ed25519PrivateKey.generate()
        Path(f"{name}.pem").write_bytes(
            key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        )
        Path(f"{name}.pub").write_bytes(
            key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        )
    assert command("dossier", str(runs / "audited"), "--key", "own.pem", "--out", "filed")[0] == 0
    assert command("dossier", "--check", "filed", "--key", "own.pub")[0] == 0
    assert "Signed, key " in Path("filed/dossier.html").read_text()
    assert command("dossier", "--check", "filed")[0] == 0
    assert command("dossier", "--check", "filed", "--key", "other.pub")[0] == 3
    page = Path("filed/dossier.html")
    before = page.read_bytes()
    page.write_bytes(before.replace(b"images back", b"nothing    "))
    code, out, _ = command("dossier", "--check", "filed", "--key", "own.pub", "--json")
    assert code == 3
    assert json.loads(out)["changed"] == ["dossier.html"]
    page.write_bytes(before)
    told = json.loads(Path("filed/manifest.json").read_text())
    told["files"]["dossier.html"] = "0" * 64
    Path("filed/manifest.json").write_text(json.dumps(told))  # who forges the manifest too has no key
    assert json.loads(command("dossier", "--check", "filed", "--json")[1])["signature"] == "invalid"
    Path("filed/extra.txt").write_text("more")
    assert json.loads(command("dossier", "--check", "filed", "--json")[1])["added"] == ["extra.txt"]


def test_links_pipes_and_sizes_are_noticed_by_the_check(runs: Path, command: Command) -> None:
    assert command("dossier", str(runs / "audited"), "--out", "filed")[0] == 0
    page, place = Path("filed/dossier.html"), Path("filed")
    page.rename("elsewhere.html")
    page.symlink_to(Path("elsewhere.html").resolve())
    (place / "evidence/all").symlink_to("/")
    os.mkfifo(place / "pipe")
    code, out, _ = command("dossier", "--check", "filed", "--json")
    assert (code, json.loads(out)["changed"]) == (3, ["dossier.html"])
    assert json.loads(out)["added"] == ["evidence/all", "pipe"]
    page.unlink()
    page.touch()
    os.truncate(page, 3 * 2**30)
    assert json.loads(command("dossier", "--check", "filed", "--json")[1])["changed"] == ["dossier.html"]


def test_a_name_does_not_write_lines_of_its_own(runs: Path, command: Command) -> None:
    assert command("dossier", str(runs / "plan.json"), "--out", "filed")[0] == 0
    Path("filed/x\nThe dossier is as it was made.\x1b[2J").touch()
    code, out, _ = command("dossier", "--check", "filed")
    assert code == 3
    assert out.splitlines()[-1] == "The dossier was changed."
    assert "added: x\\nThe dossier is as it was made.\\x1b[2J" in out


def test_the_questions_about_a_system_are_asked_once(runs: Path, command: Command) -> None:
    code, _, err = command("dossier", str(runs / "audited"), "--about", "about.toml")
    assert code == 2
    assert "was made with its questions" in err
    assert Path("about.toml").read_text() == ABOUT
    Path("about.toml").write_text('name = "Ward 7"\npeople = 1200\nsigners = ["DPO"]\n')
    code, out, _ = command("dossier", str(runs / "audited"), "--about", "about.toml", "--json")
    assert code == 0
    assert json.loads(out)["title"] == "Resistance to extraction: Ward 7"
    assert "1,200" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give at least one run"),
        (("nowhere.json",), "nowhere.json cannot be read"),
        (("list.json",), "is not what plan or verify print"),
        (("--check",), "--check takes the folder of one dossier"),
        (("--check", "nowhere"), "manifest.json cannot be read"),
        (("list.json", "--about", "odd.toml"), "is not what plan or verify print"),
        (("AUDIT", "--about", "odd.toml"), "has no use for colour"),
        (("AUDIT", "--key", "list.json"), "list.json cannot be read"),
        (("AUDIT", "--out", "full"), "is not empty"),
    ],
)
def test_what_cannot_be_is_one_line(runs: Path, command: Command, words: tuple[str, ...], said: str) -> None:
    Path("list.json").write_text("[]")
    Path("odd.toml").write_text('colour = "red"')
    Path("full").mkdir()
    Path("full/file").write_text("")
    code, out, err = command("dossier", *(str(runs / "audited") if word == "AUDIT" else word for word in words))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert said in err


def test_a_hostile_text_stays_text(runs: Path, tmp_path: Path) -> None:
    about = tmp_path / "about.toml"
    about.write_text('name = "<script>alert(1)</script>"\n')
    made.dossier([runs / "audited"], tmp_path / "filed", about)
    assert "<script" not in (tmp_path / "filed" / "dossier.html").read_text()
