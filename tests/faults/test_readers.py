"""Every reader of files, specs and messages gives the right answer or one error of ours: tried by the thousand."""

import base64
import contextlib
import faulthandler
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save
from torch import nn

from data.helpers_data import pixels, png
from faults.conftest import Count, times
from faults.fuzz import TEXTS, WATCH, WRONG, damaged, drill, wrong_values
from gradveil import data
from gradveil.auditing.run_folder import RunFolder, changes, from_toml, to_toml
from gradveil.auditing.saved_update import UpdateAuditConfig
from gradveil.auditing.train import TrainConfig
from gradveil.auditing.update_files import load_weights, read_examples, read_loss, read_update, write_update
from gradveil.cli.list import KINDS
from gradveil.data.folder import Folder
from gradveil.data.images import decode_images, levels_of
from gradveil.data.known import Cifar10, Mnist
from gradveil.data.table import read_table
from gradveil.defenses import decoy
from gradveil.defenses import veil as coordinates
from gradveil.defenses.decoy import load_prior, save_prior
from gradveil.errors import GradveilError
from gradveil.federated.server import Checkpoint
from gradveil.privacy.accountant import Account, spend_from
from gradveil.privacy.configurations import check as check_configuration
from gradveil.ranges import read as read_setting
from gradveil.registry import settings, split_specs
from gradveil.report.dossier import check as check_dossier
from gradveil.report.dossier import dossier as write_dossier
from gradveil.report.page import write_report
from gradveil.threats.setup import AuditConfig
from gradveil.tree import parameters
from gradveil.types import Batch, GaussianPrior, Update
from test_ranges import registry

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GOLDENS = Path(__file__).parents[1] / "goldens" / "folders"
CLASSES = 5


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what lasts is not what is drilled here
    yield tmp_path
    assert not (tmp_path.parent / "y").exists()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


def to_file(path: Path, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    def put(content: bytes) -> Any:
        path.write_bytes(content)
        return read(path)

    return put


# ---- texts


def test_specs(place: Path, count: Count) -> None:
    valid = tuple(f"{kind}|{name}" for kind in KINDS for name, _ in registry(kind))
    names = [s.name for kind in KINDS for _, cls in registry(kind) for s in settings(cls)]
    values = st.sampled_from([str(w) for w in WRONG] + list(TEXTS) + ["1", "0.5", "nan", "inf", "1/2", "a+b", "x:y=1"])
    setting = st.builds("{}={}".format, st.sampled_from(sorted(set(names))) | st.text(max_size=5), values)
    whole = st.builds("{}:{}".format, st.sampled_from(valid), st.lists(setting, max_size=3).map(",".join))
    some = whole | damaged(tuple(v.encode() for v in valid)).map(lambda raw: raw.decode(errors="surrogateescape"))

    def build(text: str) -> None:
        kind, _, spec = text.partition("|")
        kind = kind if kind in KINDS else "defense"
        built = registry(kind).build(spec)
        assert built.spec_name in dict(registry(kind))
        assert split_specs(spec)

    drill("specs", some, build, place, times(300, 8_000), count)


def test_settings_in_toml(place: Path, count: Count) -> None:
    kinds = (AuditConfig(), TrainConfig(), UpdateAuditConfig("update.safetensors"))
    texts = tuple(to_toml(one) for one in kinds)
    lines = sorted({line.partition(" = ")[0] for text in texts for line in text.splitlines()})
    line = st.builds("{} = {}\n".format, st.sampled_from(lines), st.sampled_from(TEXTS))
    some = damaged(tuple(t.encode() for t in texts)) | st.builds(
        lambda text, more: (text + "".join(more)).encode(), st.sampled_from(("", *texts)), st.lists(line, max_size=3)
    )

    def read(raw: bytes) -> None:
        text = raw.decode(errors="replace")
        for one in kinds:
            found: Any = changes(text, one)
            assert isinstance(found, list)
        found = from_toml(TrainConfig, text)
        assert from_toml(TrainConfig, to_toml(found)) == found

    drill("settings in TOML", some, read, place, times(150, 5_000), count)


CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"clipping-norm": 1.0, "noise-multiplier": 0.5, "num-sampled-clients": 10, "num-server-rounds": 3},
    {"clipping-norm": 1.0, "sensitivity": 1.0, "epsilon": 1.0, "delta": 1e-5, "tool": {"flwr": {"rounds": 3}}},
    {"max-grad-norm": 1.0, "noise-multiplier": 1.1, "sample-rate": 0.01, "epochs": 3},
    {"history": [[1.1, 0.01, 100]], "mechanism": "rdp"},
    {"task_result_filters": [{"tasks": ["train"], "filters": [{"path": "SVTPrivacy", "args": {"epsilon": 0.1}}]}]},
)


def test_configurations_of_others(place: Path, count: Count) -> None:
    raw = tuple(json.dumps(one).encode() for one in CONFIGURATIONS)
    some = wrong_values(CONFIGURATIONS).map(lambda value: json.dumps(value).encode()) | damaged(raw)
    read = to_file(place / "config.json", check_configuration)
    drill("configurations of Flower, Opacus, NVFlare", some, read, place, times(150, 300), count)


def test_inputs_of_a_dossier(place: Path, count: Count) -> None:
    whole = {"mu": 1.0, "epsilon": 4.4, "delta": 1e-5, "blind_guess": 0.1, "guess": 0.4}
    plan = {"run": {"rounds": 3}, "whole_run": whole, "theorem": "of sums", "assumptions": ["a", "b"]}
    measured = {
        "defense": "veil",
        "mu_proved": 1.4,
        "mu_measured": 1.3,
        "low": 1.2,
        "high": 1.5,
        "verdict": "consistent",
    }
    asked = "name = 'x'\npeople = 12\nsigners = ['a']\nsees = 'sums'\ndata_categories = 'images'\nlikely = 'no'\n"
    answers = st.builds(
        "{} = {}\n".format, st.sampled_from(["people", "signers", "sees", "data_categories"]), st.sampled_from(TEXTS)
    )
    told = wrong_values((plan, measured)).map(lambda value: json.dumps(value).encode())
    some = st.tuples(st.just("plan.json"), told) | st.tuples(
        st.just("about.toml"), damaged((asked.encode(),)) | answers.map(str.encode)
    )

    def read(given: tuple[str, bytes]) -> None:
        shutil.rmtree(place / "out", ignore_errors=True)
        (place / "plan.json").write_text(json.dumps(plan))
        (place / given[0]).write_bytes(given[1])
        about = place / "about.toml" if given[0] == "about.toml" else None
        write_dossier([place / "plan.json"], place / "out", about)
        assert check_dossier(place / "out")["intact"]

    drill("inputs of a dossier", some, read, place, times(60, 200), count)


def test_accounts(place: Path, count: Count) -> None:
    valid = tuple(Account("a", spent=s, limit=m).to_json() for s, m in ((0.0, 1.0), (0.5, float("inf"))))
    some = wrong_values(valid).map(lambda v: json.dumps(v).encode()) | damaged(
        tuple(json.dumps(v).encode() for v in valid)
    )

    def read(path: Path) -> None:
        before = path.read_bytes()
        path.with_name("account.json.journal").unlink(missing_ok=True)
        try:
            after = spend_from(path, "a", 0.1, limit=2.0)
        except Exception:
            assert path.read_bytes() == before, "nothing was paid"
            raise
        assert 0.1 <= after.spent <= after.limit * 1.001 <= 2.01

    drill("accounts", some, to_file(place / "account.json", read), place, times(100, 400), count)


def test_journals_of_accounts(place: Path, count: Count) -> None:
    path, journal = place / "account.json", place / "account.json.journal"
    for _ in range(3):
        spend_from(path, "a", 0.1, limit=2.0)
    whole, summary = journal.read_bytes(), path.read_bytes()

    def read(damaged_one: Path) -> None:
        before = damaged_one.read_bytes()
        path.write_bytes(summary)
        try:
            after = spend_from(path, "a", 0.1, limit=2.0)
        except Exception:
            assert (damaged_one.read_bytes(), path.read_bytes()) == (before, summary), "nothing was paid"
            raise
        assert after.spent > 0.399  # never less than what the other of the two files says

    drill("journals of accounts", damaged((whole,)), to_file(journal, read), place, times(100, 400), count)


# ---- tensors


def metadata_of(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> st.SearchStrategy[bytes]:
    """A safetensors file whose header says something else than it should."""
    content = save(tensors, about)
    (size,) = struct.unpack("<Q", content[:8])
    head, body = json.loads(content[8 : 8 + size]), content[8 + size :]

    def pack(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    values = st.sampled_from(
        [str(w) for w in WRONG if w != "\ud800"] + ["nan", "inf", "-1", "1e309", "adam", "9" * 5000]
    )
    said = st.dictionaries(st.sampled_from(sorted(about)), values, max_size=3)
    wrong = wrong_values((head,)).map(pack)
    return wrong | damaged((content,)) | said.map(lambda more: save(tensors, about | more))


def test_updates_weights_and_examples(place: Path, count: Count) -> None:
    model = network()
    gradient = {name: torch.randn_like(p) for name, p in parameters(model).items()}
    write_update(place / "valid", Update(gradient, 4, 2, 0.1, 2))
    facts = {"kind": "difference", "lr": "0.1", "num_steps": "2", "num_examples": "4", "batch_size": "2"}
    facts |= {"optimizer": "sgd", "momentum": "0.9", "loss": "cross_entropy", "weight_decay": "0.1", "clip": "1.0"}
    batch = {"inputs": torch.rand(3, 1, 4, 4), "labels": torch.arange(3)}

    def update(path: Path) -> None:
        read_loss(path)
        found = read_update(path, model)
        assert found.num_examples >= 1
        assert all(bool(value.isfinite().all()) for value in found.gradient.values())
        assert {n: v.shape for n, v in found.gradient.items()} == {n: v.shape for n, v in gradient.items()}

    def examples(path: Path) -> None:
        found: Batch = read_examples(path, CLASSES)
        assert len(found.inputs) == len(found.labels)
        assert 0 <= float(found.inputs.min()) <= float(found.inputs.max()) <= 1

    def weights(path: Path) -> None:
        load_weights(network(), path)

    number = times(60, 600)
    for what, read, files in (
        ("updates", update, metadata_of(gradient, facts)),
        ("examples", examples, metadata_of(batch, {"a": "b"})),
        ("weights", weights, metadata_of(dict(model.state_dict()), {"a": "b"})),
    ):
        drill(f"safetensors: {what}", files, to_file(place / "file", read), place, number, count)


def test_checkpoints_of_torch(place: Path, count: Count) -> None:
    state = network().state_dict()
    path, valid = place / "weights.pt", []
    for new in (True, False):
        torch.save(state, path, _use_new_zipfile_serialization=new)
        valid.append(path.read_bytes())

    def read(_: Path) -> None:
        found = load_weights(network(), path)
        assert all(bool(value.isfinite().all()) for value in found.values())

    drill("checkpoints of torch", damaged(tuple(valid)), to_file(path, read), place, times(100, 1_000), count)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda w: w.to("meta"), lambda w: w.to(torch.complex64),
        lambda w: w.to(torch.float8_e4m3fn), lambda w: w.double() * 1e300, lambda w: torch.nested.nested_tensor([w[0]]),
        lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    ],
)  # fmt: skip
def test_weights_that_are_no_plain_numbers(place: Path, make: Callable[[torch.Tensor], Any], count: Count) -> None:
    state = network().state_dict()
    torch.save(state | {"1.weight": make(state["1.weight"])}, place / "weights.pt")
    with pytest.raises(GradveilError, match=r"no plain tensor|cannot hold"):
        load_weights(network(), place / "weights.pt")
    count("odd tensors")


def test_a_checkpoint_that_unpacks_to_more_is_refused(place: Path, count: Count) -> None:
    torch.save(network().state_dict() | {"more": torch.zeros(2**20)}, place / "stored.pt")
    with (
        zipfile.ZipFile(place / "stored.pt") as stored,
        zipfile.ZipFile(place / "w.pt", "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for part in stored.infolist():
            out.writestr(part.filename, stored.read(part))
    with pytest.raises(GradveilError, match="unpacks to more"):
        load_weights(network(), place / "w.pt")
    count("small files that stand for more")


def test_priors_and_public_coordinates(place: Path, count: Count) -> None:
    model = network()
    prior = GaussianPrior(torch.rand(16), torch.rand(16, 3), 0.1)
    save_prior(prior, place / "prior")
    like = parameters(model)
    size = sum(p.numel() for p in like.values())
    directions = torch.linalg.qr(torch.randn(size, 3)).Q.T
    coordinates.save(coordinates.Coordinates(directions, torch.tensor([3.0, 2.0, 1.0])), like, place / "map", 1.0)

    def a_prior(path: Path) -> None:
        _forget()
        found = load_prior(path)
        assert bool(found.factor.isfinite().all())

    def a_map(path: Path) -> None:
        _forget()
        found, clip = coordinates.load(str(path), like)
        assert bool(found.directions.isfinite().all())
        assert clip is None or 0 < clip < float("inf")

    for what, read in (("prior", a_prior), ("map", a_map)):
        files = metadata_of(load_file(place / what), {"a": "b"})
        drill(f"safetensors: {what}s", files, to_file(place / "file", read), place, times(40, 200), count)


def _forget() -> None:
    decoy._load.cache_clear()
    coordinates._read.cache_clear()


def test_checkpoints(place: Path, count: Count) -> None:
    model = network()
    state = dict(model.state_dict())
    tensors = {f"model/{name}": value for name, value in state.items()}
    tensors |= {f"server/momentum/{name}": value.clone() for name, value in state.items()}
    files = metadata_of(tensors, {"round": "3", "notes": json.dumps({"accounts": [{"client": "0", "spent": 0.1}]})})

    def read(path: Path) -> None:
        found = Checkpoint.read(path)
        assert 0 <= found.round <= 10**9
        assert isinstance(found.notes, dict)
        found.restore(network())

    drill("checkpoints", files, to_file(place / "checkpoint.safetensors", read), place, times(100, 2_000), count)


# ---- run folders


def rows_of(path: Path) -> tuple[Any, ...]:
    return tuple(json.loads(line) for line in path.read_text().splitlines())


def lines(rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def test_rows_and_their_report(place: Path, count: Count) -> None:
    shutil.copytree(GOLDENS / "audit-done", place / "run")
    whole = (place / "run" / "rows.jsonl").read_bytes()
    rows = list(rows_of(place / "run" / "rows.jsonl"))

    def read(path: Path) -> None:
        found = RunFolder.open(path.parent)
        assert all(row["of"] >= 1 for row in found.rows)
        write_report(path.parent)

    some = wrong_values((rows,)).map(lines) | damaged((whole,))
    drill("rows", some, to_file(place / "run" / "rows.jsonl", read), place, times(60, 200), count)


def test_the_other_files_of_a_run(place: Path, count: Count) -> None:
    for name in ("audit-done", "train-done"):
        shutil.copytree(GOLDENS / name, place / name)
    rounds, done = place / "train-done" / "rounds.jsonl", place / "audit-done"

    def read_rounds(path: Path) -> None:
        run = RunFolder(path.parent)
        assert all(isinstance(row["round"], int) for row in run.rounds)
        run.keep_rounds(2)
        assert all(row["round"] <= 2 for row in run.rounds)

    some = wrong_values((list(rows_of(rounds)),)).map(lines) | damaged((rounds.read_bytes(),))
    drill("rounds", some, to_file(rounds, read_rounds), place, times(60, 400), count)
    for name in ("config.toml", "versions.toml"):
        kept = (done / name).read_bytes()

        def tables(path: Path) -> None:
            run = RunFolder.open(path.parent)
            assert isinstance(run.settings, dict)
            assert isinstance(run.versions, dict)

        drill("settings of a run", damaged((kept,)), to_file(done / name, tables), place, times(40, 200), count)
        (done / name).write_bytes(kept)


def archive(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def test_images_of_a_run(place: Path, count: Count) -> None:
    with RunFolder.start(place / "run", AuditConfig()) as run:
        run.add("a", [{"kind": "x"}], {"truth": np.zeros((2, 3))})
        path = run._image_file("a")

        def read(_: Path) -> None:
            for array in run.arrays("a").values():
                assert not array.dtype.hasobject

        objects = io.BytesIO()
        np.savez(objects, a=np.array([{}], object))  # with a pickle in it
        valid = (
            archive(truth=np.random.rand(2, 1, 8, 8)),
            archive(a=np.arange(9), b=np.zeros((0, 4))),
            path.read_bytes(),
        )
        some = damaged(valid) | st.just(objects.getvalue())
        drill("npz", some, to_file(path, read), place, times(120, 1_000), count)


# ---- data sets


def test_images(place: Path, count: Count) -> None:
    picture = Image.fromarray(np.moveaxis(pixels(1, 3, 16)[0], 0, -1))
    valid = []
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"):
        out = io.BytesIO()
        picture.save(out, kind)
        valid.append(out.getvalue())
    for kind, values in (("PNG", np.uint16), ("TIFF", np.uint16), ("TIFF", np.int32), ("TIFF", np.float32)):
        out = io.BytesIO()
        Image.fromarray((1000 * np.random.rand(16, 16)).astype(values)).save(out, kind)
        valid.append(out.getvalue())
    valid.append(b"P5 16 16 4095\n" + np.arange(256, dtype=">u2").tobytes())

    def read(content: bytes) -> None:
        for size in (None, 8):
            found = decode_images([content], size, levels=levels_of([content]))
            assert found.dtype == np.uint8
            assert found.ndim == 4

    drill("images", damaged(tuple(valid)), read, place, times(200, 1_500), count)


def table_of(labels: Any, about: Any = None) -> bytes:
    rows = [{"bytes": png(image), "path": None} for image in pixels(4, 1, 8)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(rows, kind), "label": pa.array(labels)})
    if about is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


ABOUT = {"info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}}}
LABELS: tuple[Any, ...] = (
    [0, 1, 0, 1], [0, 1, 2, 10**9], [0, 0, 0, 2**62], [-1, 0, 1, 0], [0.5] * 4, ["a"] * 4, [None, 0, 1, 0], [[0]] * 4,
    [True, False] * 2, [b"x"] * 4, [{"a": 1}] * 4, [np.uint64(2**64 - 1)] * 4,
)  # fmt: skip


def test_parquet(place: Path, count: Count) -> None:
    folder = place / "set"
    folder.mkdir()

    def read(path: Path) -> None:
        shutil.rmtree(place / "cache", ignore_errors=True)
        if ends_pyarrow(path):
            ended.append(path)
            return
        found = Folder(str(folder)).load(None)
        assert found.train.images.dtype == np.uint8
        assert 0 <= int(found.train.labels.min()) <= int(found.train.labels.max()) < found.num_classes <= 10**6

    whole = table_of([0, 1, 0, 1], ABOUT)
    wrong = wrong_values((ABOUT,)).map(lambda about: table_of([0, 1, 0, 1], about))
    some = damaged((whole,)) | wrong | st.sampled_from(LABELS).map(table_of)
    ended: list[Path] = []  # see below
    drill("parquet", some, to_file(folder / "train.parquet", read), place, times(100, 300), count)
    if ended:
        count("parquet files that end pyarrow itself", len(ended))


ABORTS = zlib.decompress(base64.b85decode(  # pyarrow 26.0.1 ends the process that looks at its columns
    'c-jka3^EjD5pCcUea7Y^$|1@i#K3TXC8mdgfuS?N&z+Y`iVMi(_4IHF0@56eER3ul3K<@zJPZeNgFRgwLn`JldN6GN&v^6H{llDlI6pGzTv+z9'
    'VfK$*Or^VDvK=?w?8bCB;Gbm8D_tE%v16L8T^9NunF6){Onn#6ZOL+Ln%aEfkn_4M3PJ`hh8tO?elV8T^$uOX8)!U(r>mdKI;VuD9)?pB7(PTi'
    'a4J$!Sa<6^V~&80w*K9jml@YQTQ8XQ;N?{ou^qzw3EykvSiCsBKPe}7ykR)?K!k5~*d#R;p~)AYy?ko)oN4P9sdT$Lx7)j(DQ34Byv;?}a1CgB'
    'G{ZBWXKNlCANt6oCb%bmejei=rWoPtH#gk#tY`Q%FY@24Pb{U3SKllbe<QQGpHVpcUJ3JeGbRRoS;bvH-md=6aGzQ3uITT}U%5<_tCP>$&qDUV'
    'xebg!3u4q-e#AXay2NPZaP!5=mtiMa_W5X<9XZL&#ITX;!fw5}4eShWclfi2A5v>(c=pyspziv7L55`!mU;KTtMoI;yy7_@_C|PB*ID^>NxxH#'
    'ku4Bq5ET)X&;drEfGC?Nn~WKQMh_#l2n1mefi((g7QhKj5~Mqamf<BR2;^|7FoEo6Vq$*60L%jnqD($O0+a)Qq$r=L5K?%89LX*LR?i4htRSl5'
    '1JVOjEMUU`1&mM{s9Q)>453?s112NE0aGi+pn*jc>@H3Ph&_zVT%s(JF{TU>Y{khLskw=wEDWYx60DiIiRr08wkVG(lLTv0Wl3r=gw0ZrSdyX2'
    ';3ETa0}DtpCow5Che3=(Qby87jX_3~N79smO+ZouVg^L7D3ch6*gQV54j#2Wb~TRCv_m-UNa{e+3n-=qfRv5c0}e?xNi&G6FasJKG2n0x5sOk='
    '$D=lZ2b82RjbQ+r0`?Wi6c&gn(0BwJaE4Lr3ZvR8UbR;|q@^ni%QV>})xcJX?Gq5=P~#BW#s^d+!JSc>o}QVPo|c%LDxp%Xl$n>7uVkfAt(2CU'
    'SW;S)S`6lZy#-_$)YjHANbooY1^I_tK~ky28)khFFiLlFbaV`KgaB_xM-xY<bVoNw$8<;Mbg-C{6N-E}h<1g`yE{VpFjK(to*>!@OoI(E02>4%'
    'oI#45%sq2+N~3ZuGW|0_?5Lc`h#<q{+^{Ooto-!UO0R;XaJRguU{5no7bnZK2(WfXXOPkE8HQ0tDFsQnDY=p1emP((ASOdd4;P@PEI>|j20O|b'
    '$$elD3Q}1d8Sa&n1m>qZx_}KyhAIUCH!xWk05l3@XP`kO)Kf4|I>StIbP9xPNDMd3h%y3+I;Vq!7Op=OtjHaqAIZH=87c0NfUX3ouK*hcv?|ik'
    'soc>Q>UfwYCntzkli~W292}XKV-OXA(1Ijy%OIgpkXTe$np&cpTu`8!SX7i>u27a*RGgWgr(k5JXP{>&X#*^gAc)}-3j;#{u+aek&|qS?'
))  # fmt: skip


def test_arrow(place: Path, count: Count) -> None:
    """What save_to_disk() of Hugging Face datasets writes: pyarrow goes where the numbers in it say."""

    def stream(texts: Any, labels: Any, about: Any = None) -> bytes:
        table = pa.table({"text": texts, "label": labels}).replace_schema_metadata(about)
        out = io.BytesIO()
        with pa.ipc.new_stream(out, table.schema) as file:
            file.write_table(table, max_chunksize=5)
        return out.getvalue()

    names = {"huggingface": json.dumps({"info": {"features": {"label": {"names": ["a", "b"]}}}})}
    numbered = pa.array(["hello world", "and more"] * 6).dictionary_encode()
    valid = (
        stream(["hello world"] * 12, [0, 1] * 6),
        stream(numbered, pa.array([0, 1] * 6, pa.int8())),
        stream(pa.array(["hello world", None] * 6, pa.large_string()), [-1, 0, 1] * 4, names),
    )
    (place / "train").mkdir()

    def read(_: Path) -> None:
        found = data.load(f"folder:path={place}")
        assert len(found.train) + len(found.test) >= 1

    drill("arrow", damaged(valid), to_file(place / "train" / "data-0.arrow", read), place, times(100, 1_000), count)


def ends_pyarrow(path: Path) -> bool:
    """Whether pyarrow ends the process that looks at a file's columns: tried in another one."""
    WATCH.on = False
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(BaseException):
            about = pq.ParquetFile(path).metadata
            [about.row_group(i).column(j) for i in range(about.num_row_groups) for j in range(about.num_columns)]
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    WATCH.on = True
    return os.WIFSIGNALED(status)


def test_a_parquet_file_that_ends_pyarrow_is_one_line_of_a_command(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(ABORTS)
    assert ends_pyarrow(path), "pyarrow is mended: leave this out, and the words about it in docs/reliability.md"
    command = [sys.executable, "-P", "-m", "gradveil", "audit", "--dataset", "folder:path=.", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode not in (0, -6), done.stderr[-300:]
    assert done.stderr.splitlines()[-1].startswith("gradveil: "), done.stderr[-600:]


def test_tables(place: Path, count: Count) -> None:
    text = "age,sex,outcome\n" + "".join(f"{i},{'fm'[i % 2]},{i % 2}\n" for i in range(20))
    path = place / "patients.csv"

    def read(_: Path) -> None:
        read_table(path)
        found = data.load(f"table:path={path},target=outcome")
        assert len(found.train) + len(found.test) >= 1

    drill("CSV tables", damaged((text.encode(),)), to_file(path, read), place, times(60, 300), count)


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def test_idx(place: Path, count: Count) -> None:
    images, labels = idx(pixels(4, 1, 4)[:, 0]), idx(np.arange(4, dtype=np.uint8))
    for suffix, pack in (("", bytes), (".gz", gzip.compress)):
        path, others = place / f"images{suffix}", place / f"labels{suffix}"
        others.write_bytes(pack(labels))

        def read(where: Path, beside: Path = others) -> None:
            (found, named), _ = Mnist().read((where, beside, where, beside))
            assert found.ndim == 4
            assert found.dtype == np.uint8
            assert named.dtype == np.int64

        valid = (pack(images), pack(labels))
        drill(f"idx{suffix}", damaged(valid), to_file(path, read), place, times(80, 600), count)


NAMES = ("numpy.f2py.__main__ main", "os abort", "builtins eval", "builtins exec", "subprocess run", "posix system")
ARRAYS = ("_reconstruct", "ndarray", "dtype")


class Harm:
    """What a pickle must not do."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def test_batches_of_cifar(place: Path, count: Count) -> None:
    flat = pixels(2, 3, 32).reshape(2, -1)
    batch = {b"data": flat, b"labels": [1, 2]}
    valid = tuple(pickle.dumps(batch, protocol=p) for p in range(6))
    names = st.sampled_from([*NAMES, *(f"numpy.{a} {b}" for a in ("f2py.__main__", "testing", "lib") for b in ARRAYS)])
    calls = names.map(lambda name: b"\x80\x02}U\x04datac%s\n)RsU\x06labels]s." % name.replace(" ", "\n").encode())
    evil = [
        pickle.dumps(Harm()),
        pickle.dumps({b"data": Harm(), b"labels": [0]}),
        pickle.dumps({b"data": np.array([Harm()], object), b"labels": [0]}),
        b"K\x01r\xff\xff\xff\x7f.",  # kept under the number 2^31
        b"\x80\x05\x96" + b"\xff" * 8,  # 2^64 bytes are said to follow
    ]

    def read(path: Path) -> None:
        (images, labels), _ = Cifar10().read((path,) * 6)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64

    before = set(sys.modules)
    some = damaged(valid) | st.sampled_from(evil) | calls
    drill("CIFAR-10 pickles", some, to_file(place / "data_batch_1", read), place, times(100, 1_500), count)
    assert not (place / "harm").exists()
    assert not {name for name in set(sys.modules) - before if name.startswith("numpy.f2py")}
    rows = np.concatenate([np.zeros((2, 1), np.uint8), flat], axis=1).tobytes()
    read_rows = to_file(place / "data_batch_1.bin", read)
    drill("CIFAR-10 rows", damaged((rows,)), read_rows, place, times(30, 100), count)


def test_what_was_decoded_before(place: Path, count: Count) -> None:
    """A damaged cache is made again."""
    for path in (place / "set" / label / f"{i}.png" for label in "ab" for i in range(3)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels(1, 1, 8)[0]))
    source = Folder(str(place / "set"))
    right = source.load(None)
    (kept,) = (place / "cache").glob("folder-*")
    files = sorted(kept.iterdir())
    valid = {path.name: path.read_bytes() for path in files}
    which = st.sampled_from(sorted(valid)).flatmap(lambda name: st.tuples(st.just(name), damaged((valid[name],))))

    def read(case: tuple[str, bytes]) -> None:
        name, content = case
        kept.mkdir(exist_ok=True)
        for other, whole in valid.items():
            (kept / other).write_bytes(content if other == name else whole)
        found = source.load(None)
        assert found.input_shape == right.input_shape or name.endswith("images.npy")
        assert len(found.class_names) >= 1

    drill("caches", which, read, place, times(40, 100), count)


# ---- messages


def test_flower_messages(place: Path, count: Count) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    from gradveil.integrations.flower.checks import CheckedGrid
    from gradveil.integrations.flower.mods import check_reply, update_of
    from gradveil.integrations.flower.records import arrays_of, params_of
    from integrations.flower_parts import Nodes, message

    model = network()
    state = dict(model.state_dict())
    arrays = {name: Array(value.numpy()) for name, value in state.items()}
    whole = tuple(a.data for a in arrays.values())
    finite = [w for w in WRONG if type(w) in (int, float) and -(2**63) <= w < 2**63]
    values: list[Any] = [*finite, [1.0, 2.0], float("nan"), float("inf")]
    metrics = st.dictionaries(
        st.sampled_from(["num-examples", "num-steps", "leak-psnr", "x"]), st.sampled_from(values), max_size=3
    )
    words = st.sampled_from(["lr", "batch-size", "optimizer", "momentum", "proximal-mu", "clip", "weight-decay"])
    config = st.dictionaries(
        words, st.sampled_from([v for v in values if not isinstance(v, list)] + ["x", "", b"x"]), max_size=3
    )
    array = st.builds(
        Array,
        st.sampled_from(["float32", "float64", "int64", "object", "x", ""]),
        st.sampled_from([(5, 16), (5,), (2**62,), (-1,), (), (0, 5)]),
        st.sampled_from(["numpy.ndarray", "torch", ""]),
        damaged(whole),
    )
    record = st.dictionaries(st.sampled_from([*arrays, "x"]), array, max_size=3).map(lambda more: arrays | more)

    def read(case: Any) -> None:
        named, numbers, said = case
        sent = message(model)
        sent.content["config"] = ConfigRecord(said)
        content = RecordDict({"arrays": ArrayRecord(named), "metrics": MetricRecord(numbers)})
        reply = Message(content, reply_to=sent)
        grid = CheckedGrid(Nodes({}))
        answer = grid.received(sent, reply)
        before, after = params_of(arrays_of(sent)[1]), params_of(arrays_of(reply)[1])
        check_reply(before, after)
        update = update_of(sent, before, reply, after)
        if not answer.has_error():
            assert all(bool(v.isfinite().all()) for v in after.values())
        assert update.num_examples >= 1

    drill("Flower messages", st.tuples(record, metrics, config), read, place, times(100, 2_000), count)


def test_run_settings_on_a_node(place: Path, count: Count) -> None:
    """Whatever a run says: settings of registered names, or one line; no file is read, and no code is run."""
    pytest.importorskip("flwr")
    from gradveil.integrations.flower.settings import FlowerSettings
    from gradveil.integrations.flower.site import REGISTRIES, check_spec, said_outward, taken

    secret = place / "secret.csv"
    secret.write_text("root:x:0:0\n")
    keys = [*FlowerSettings().to_config(), "evil", "partition-id"]
    theirs = ["os:abort", "own:make", "secret.csv", str(secret), "decoy:prior=secret.csv", "mlp+os:abort"]
    theirs += [f"{kind}:path={secret},target=x" for kind in ("table", "text", "folder")]
    names = [name for kind in ("dataset", "model", "defense", "loss", "partition") for name, _ in registry(kind)]
    word = st.sampled_from([*names, *theirs, *TEXTS])
    plain = st.sampled_from([w for w in WRONG if not isinstance(w, dict | list)])
    runs = st.dictionaries(st.sampled_from(keys), word | plain | st.builds("{}:{}".format, word, word), max_size=4)

    def read(run: dict[str, Any]) -> None:
        found = said_outward(lambda: FlowerSettings.from_config(taken(run, {})))
        assert found.data == ""
        for kind in REGISTRIES.keys() - {"require_defense"}:
            check_spec(kind, getattr(found, kind))

    drill("run settings on a node", runs, read, place, times(300, 20_000), count)


def test_values_of_the_command_line(place: Path, count: Count) -> None:
    kinds = (int, float, bool, str, tuple[float, ...], int | None)
    some = st.tuples(st.sampled_from(kinds), st.sampled_from(TEXTS) | st.text(max_size=8))

    def read(case: Any) -> None:
        kind, text = case
        read_setting(text, kind, "--setting")

    drill("values", some, read, place, times(100, 5_000), count)
