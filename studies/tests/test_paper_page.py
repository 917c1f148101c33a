"""The pages of results say what the committed rows say, and finished runs get there by a tool."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradveil.auditing.run_folder import RunFolder
from gradveil_studies.cli.reproduce import ItemConfig
from gradveil_studies.paper.base import ITEMS, Context, Judgement
from gradveil_studies.paper.dlg_reference import DLGReference

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return {name: importlib.import_module(name) for name in ("results", "items", "pages", "verdict_lines")}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the committed results, free to change."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "results")
    return tmp_path / "results"


def test_the_pages_are_what_the_committed_rows_give() -> None:
    tool = ROOT / "tools" / "pages.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def text_of(parts: list[Any]) -> str:
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


def test_every_item_has_a_section_a_line_in_the_index_and_one_in_the_table_of_verdicts(
    tools: dict[str, ModuleType],
) -> None:
    sections, index = tools["items"].item_sections(), tools["items"].overview()
    assert sections.keys() == {"all verdicts", *ITEMS.names()}
    ((verdicts,),) = (sections["all verdicts"],)
    for name in ITEMS.names():
        assert f"| [{name}](items.md#{name}) | " in index
        assert [row for row in verdicts if row["item"] == name]


def test_another_row_gives_another_verdict_everywhere(tools: dict[str, ModuleType], results: Path) -> None:
    def made() -> dict[str, str]:
        sections = {name: text_of(parts) for name, parts in tools["items"].item_sections(results).items()}
        return sections | {"index": tools["items"].overview(results)}

    before = made()
    path = results / "dlg-reference" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if (row["defense"], row["server"]) == ("representation:share=0.4", "oblivious"):
            row["mse"] = 0.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = made()
    claim = r"\*\*(.*)\*\*: The defence stops a server that does not know it"
    assert re.findall(claim, before["dlg-reference"]) == ["reproduced"]
    assert re.findall(claim, after["dlg-reference"]) == ["not reproduced"]
    changed = {name for name, text in before.items() if after[name] != text}
    assert changed == {"dlg-reference", "all verdicts", "index"}


def test_an_item_that_was_not_run_shows_no_number_of_ours(tools: dict[str, ModuleType], results: Path) -> None:
    shutil.rmtree(results / "dlg-reference")
    text = text_of(tools["items"].parts(DLGReference(), results))
    assert "not run at full size yet" in text
    assert "mse" not in text
    assert "--only" not in text


def test_the_few_units_that_were_not_run_are_named(tools: dict[str, ModuleType], results: Path) -> None:
    path = results / "dlg-reference" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["unit"] != rows[-1]["unit"]))
    text = text_of(tools["items"].parts(DLGReference(), results))
    assert f"What is missing (`{rows[-1]['unit']}`) has not been run at full size yet." in text


def test_a_number_can_be_rerun_by_the_command_under_it(tools: dict[str, ModuleType]) -> None:
    page = tools["items"]
    for item in page.in_order():
        if not (page.has_rows(item) and page.units(item)):
            continue
        text = text_of(page.parts(item))
        command = re.search(
            r"A single number: `gradveil reproduce (\S+) --scale full --seed \d+.* --only '(.*)' --out", text
        )
        assert command is not None, item.spec_name
        assert ITEMS.build(command[1]) == item
        assert command[2] in page.units(item)
        every = item.units(Context(scale="full"))
        assert [sum(fnmatch(unit, other) for unit in every) for other in every] == [1] * len(every)


def test_a_page_is_filled_between_the_markers_only(tools: dict[str, ModuleType]) -> None:
    page = tools["pages"]
    begin, end = "<!-- begin: lines -->", "<!-- end: lines -->"
    marks = "<!-- begin: items -->\n<!-- end: items -->\n"
    new = page.filled("results/paper.md", text=f"before\n\n{begin}\nstale words\n{end}\n\nafter\n{marks}")
    assert new.startswith(f"before\n\n{begin}\n\n- ")
    assert f"{end}\n\nafter\n" in new
    assert "stale words" not in new
    assert page.filled("results/paper.md", text=new) == new
    with pytest.raises(SystemExit, match="markers"):
        page.filled("results/paper.md", text="no markers")


def test_a_claim_has_one_word_everywhere(tools: dict[str, ModuleType]) -> None:
    sections = tools["items"].item_sections()
    words: dict[str, set[str]] = {}
    for row in sections["all verdicts"][0]:
        words.setdefault(row["claim"].lower(), set()).add(row["verdict"])
    for name in ITEMS.names():
        for word, claim in re.findall(r"^- \*\*(.+?)\*\*: (.+?)\. Ours: ", text_of(sections[name]), re.M):
            words.setdefault(claim.lower(), set()).add(word)
    assert {claim: found for claim, found in words.items() if len(found) > 1} == {}
    page = (ROOT / "docs" / "results" / "paper.md").read_text()
    for maker in tools["verdict_lines"].LINES:
        line = maker(ROOT / "docs" / "results")
        assert f"- **{line.mark}**: {line.claim}: " in page
        assert {v.claim: words.get(v.claim.lower()) for v in line.verdicts} == {
            v.claim: {v.status} for v in line.verdicts
        }
    for name in ITEMS.names():
        (counted,) = re.findall(rf"^\| \[{name}\]\(items.md#{name}\) \| .* \| (.+?) \|$", page, re.M)
        judged = re.findall(r"^- \*\*(.+?)\*\*: .+?\. Ours: ", text_of(sections[name]), re.M)
        short = [re.sub("^reproduced only.*", "reproduced under a condition", status) for status in judged]
        assert counted == ", ".join(f"{short.count(status)} {status}" for status in dict.fromkeys(short))


@pytest.mark.parametrize(
    ("statuses", "word"),
    [
        (["reproduced", "reproduced"], "Holds"),
        (["not reproduced", "not reproduced"], "Fails"),
        (["reproduced", "not reproduced"], "Partly"),
        (["reproduced only to the eye"], "Partly"),
        (["not measured", "reproduced"], "Holds"),
        (["not measured"], "Not measured"),
    ],
)
def test_the_word_of_a_line_follows_from_its_verdicts(
    tools: dict[str, ModuleType], statuses: list[str], word: str
) -> None:
    verdicts = [Judgement("a claim", status, "a rule", "-", "-") for status in statuses]
    assert tools["verdict_lines"].Line("a claim", verdicts, "-").mark == word


def test_whether_the_score_matters_has_one_rule(tools: dict[str, ModuleType], results: Path) -> None:
    line = tools["verdict_lines"].random_mask
    before = line(results)
    assert before.mark == "Partly"
    assert "(DLG, MNIST: reproduced)" in before.numbers
    assert "(GS, CIFAR-10: not reproduced)" in before.numbers
    path = results / "tradeoff" / "rows.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    for row in rows:
        if row["defense"] == "random_mask:share=0.4" and row["server"] == "oblivious":
            row["mse"] = 0.1  # above the mean image's: hidden, and below ours everywhere
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert line(results).mark == "Holds"


def test_what_holds_follows_the_rows(tools: dict[str, ModuleType], results: Path) -> None:
    lines = tools["verdict_lines"].lines
    before = lines(results)
    assert len(before) == 10
    path = results / "tradeoff" / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["defense"] == "representation:share=0.4" and row["server"] != "oblivious":
            row |= {"mse": 0.9, "ssim": 0.0, "identified": 0.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = lines(results)
    changed = [new for old, new in zip(before, after, strict=True) if new != old]
    claim = "some share makes them unrecognisable to a server that knows it"
    assert any(old.startswith(f"- **Fails**: {claim}") for old in before)
    assert any(new.startswith(f"- **Holds**: {claim}: at 40 % MSE 0.9") for new in changed)


def test_what_was_not_run_is_named(tools: dict[str, ModuleType], results: Path) -> None:
    shutil.rmtree(results / "meter")
    shutil.rmtree(results / "accuracy")
    written = tools["verdict_lines"].lines(results)
    assert "- Not run at full size yet: meter." in written
    assert written.count("- Not run at full size yet: accuracy.") == 1


def run_folder(path: Path, rows: dict[str, list[float]], **changed: Any) -> Path:
    """Make a finished run of dlg-reference by hand: unit -> the images' MSE."""
    config = {"item": "dlg-reference", "scale": "full", "seed": 0, "device": "cuda"} | changed
    with RunFolder.start(path, ItemConfig(**config)) as folder:
        for unit, values in rows.items():
            shared = {"defense": unit, "server": "oblivious", "identified": 0.0}
            folder.add(unit, [shared | {"image": i, "mse": mse} for i, mse in enumerate(values)])
    return path


def test_runs_of_one_item_are_merged_by_unit(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    keep, kept = tools["results"], tools["results"]
    into = tmp_path / "results"
    keep.keep(run_folder(tmp_path / "a", {"ours oblivious": [0.1], "none": [0.2]}), "machine A", "abc1234", into)
    again = run_folder(tmp_path / "b", {"none": [0.3], "floors": [0.4]})
    assert keep.keep(again, "machine B", "abc1234", into) == "dlg-reference"
    rows = kept.own_rows("dlg-reference", into)
    assert [(r["unit"], r["mse"]) for r in rows] == [("floors", 0.4), ("none", 0.3), ("ours oblivious", 0.1)]
    assert [(r["machine"], r["units"]) for r in kept.runs("dlg-reference", into)] == [
        ("machine A", ["ours oblivious"]),
        ("machine B", ["none", "floors"]),
    ]
    first = kept.runs("dlg-reference", into)[0]
    assert first["command"] == "gradveil reproduce dlg-reference --scale full --seed 0 --device cuda"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first["date"])
    assert first["commit"] == "abc1234"
    assert any(v.startswith("torch ") for v in first["versions"])


def test_a_commit_that_is_not_there_is_refused(tools: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match="no-such-commit is no commit of this repository"):
        tools["results"].commit_named("no-such-commit")


def test_the_reference_names_the_code_and_the_versions_it_was_run_with(tools: dict[str, ModuleType]) -> None:
    for run in tools["results"].runs("dlg-reference"):
        assert re.fullmatch("[0-9a-f]{7,40}", run["commit"])
        assert {"python", "torch"} <= {version.split()[0] for version in run["versions"]}
        said = f"commit {run['commit']}, {', '.join(run['versions'])})"
        assert said in text_of(tools["items"].parts(DLGReference()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scale": "quick"}, "only full results"),
        ({"item": "dlg-reference:share=0.5"}, "was run as dlg-reference:share"),
    ],
)
def test_quick_runs_and_other_settings_are_not_mixed_in(
    tools: dict[str, ModuleType], tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    into = tmp_path / "results"
    tools["results"].keep(run_folder(tmp_path / "a", {"floors": [0.1], "none": [0.2]}), "machine", "abc1234", into)
    with pytest.raises(SystemExit, match=said):
        tools["results"].keep(run_folder(tmp_path / "b", {"none": [0.3]}, **changed), "machine", "abc1234", into)
    assert [r["mse"] for r in tools["results"].own_rows("dlg-reference", into)] == [0.1, 0.2]


def test_other_settings_may_take_the_place_of_all_that_is_there(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    into = tmp_path / "results"
    tools["results"].keep(run_folder(tmp_path / "a", {"none": [0.2]}), "machine", "abc1234", into)
    later = run_folder(tmp_path / "b", {"none": [0.3], "floors": [0.4]}, item="dlg-reference:share=0.5")
    tools["results"].keep(later, "machine", "abc1234", into)
    assert tools["results"].build("dlg-reference", into).share == 0.5
    assert [r["mse"] for r in tools["results"].own_rows("dlg-reference", into)] == [0.4, 0.3]


def test_other_settings_may_take_that_place_from_several_folders(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    keep, kept, into = tools["results"].keep, tools["results"], tmp_path / "results"
    keep(run_folder(tmp_path / "a", {"none": [0.2], "floors": [0.1]}), "machine", "abc1234", into)
    new = [
        run_folder(tmp_path / unit, {unit: [mse]}, item="dlg-reference:share=0.5")
        for unit, mse in {"none": 0.3, "floors": 0.4}.items()
    ]
    with pytest.raises(SystemExit, match="was run as dlg-reference:share"):
        keep(new[0], "machine", "abc1234", into)
    older = run_folder(tmp_path / "b", {"floors": [0.5]})
    with pytest.raises(SystemExit, match="was run as dlg-reference:share"):
        keep(new[0], "machine", "abc1234", into, later=[older])  # its floors have the old settings
    for i, folder in enumerate(new, 1):
        keep(folder, "machine", "abc1234", into, later=new[i:])
        assert len(kept.own_rows("dlg-reference", into)) == i  # no row is left whose run is not named
    assert [r["mse"] for r in kept.own_rows("dlg-reference", into)] == [0.4, 0.3]
    assert kept.build("dlg-reference", into).share == 0.5
    assert [run["units"] for run in kept.runs("dlg-reference", into)] == [["none", "floors"]]


def test_the_rows_that_an_item_needs_are_marked_as_anothers(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    tools["results"].keep(run_folder(tmp_path / "a", {"none": [0.2]}), "machine", "abc1234", tmp_path / "results")

    class Reader(DLGReference):
        spec_name = "reader"
        needs = ("dlg-reference",)

    rows = tools["results"].all_rows(Reader(), tmp_path / "results")
    assert [(r["item"], r["mse"]) for r in rows] == [("dlg-reference", 0.2)]


@pytest.mark.parametrize("name", [name for name in ITEMS.names() if name != "claims"])
def test_every_item_has_a_figure_of_its_committed_rows(name: str, tools: dict[str, ModuleType], tmp_path: Path) -> None:
    kept = tools["results"]
    item = kept.build(name)
    assert item.draw(kept.all_rows(item), tmp_path / name)
    for ending in (".svg", ".png"):
        assert (tmp_path / name).with_suffix(ending).stat().st_size > 1000
        assert (kept.RESULTS / name / name).with_suffix(ending).exists()
    assert f"]({name}/{name}.svg)" in tools["items"].parts(item)[1]  # the section begins with it
