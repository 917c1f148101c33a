"""A dossier for a privacy officer: the evidence of audits, plans and training runs in one folder and one page.

Every field says which clauses it answers (``clauses.toml``); what no input says stands there as missing. All files are
hashed into a manifest, which an Ed25519 key of the user's own can sign.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from gradveil.auditing.gate import left_out
from gradveil.auditing.run_folder import CONFIG, ROUNDS, ROWS, VERSIONS, Row, RunFolder, read_rows
from gradveil.countermeasures import TIERS
from gradveil.errors import GradveilError, SpecError
from gradveil.files import is_leftover, read_whole, wrap_parse_errors, write_atomically
from gradveil.integrations.monitor import NODES
from gradveil.report.page import fill
from gradveil.report.plain import in_plain_words, name_of
from gradveil.report.rounds import DELTA, round_row
from gradveil.threats.rows import best_floor, is_listed, modality_of, read
from gradveil.threats.verdict import UNDETECTABLE, WHO, Verdict, badges, verdicts

DATA, PAGE, MANIFEST, SIGNATURE, EVIDENCE = "dossier.json", "dossier.html", "manifest.json", "manifest.sig", "evidence"
LARGEST = 2**26  # bytes of one input

TABLE = tomllib.loads((files("gradveil.report") / "clauses.toml").read_text("utf-8"))
AGAIN = (
    "the model, its size or what of it is trained changes",
    "local training changes: records, batch size, epochs, optimizer",
    "more rounds are run, or a client takes part more often, than is planned here",
    "the defence, its settings or the aggregation change",
    "a new version of gradveil adds attacks",
)
ABOUT = (files("gradveil.report") / "about.toml").read_text("utf-8")  # asked once: what no file of a run can say


class DossierError(GradveilError):
    """A dossier or one of its inputs that cannot be used."""


Field = dict[str, Any]


def _field(name: str, rows: Sequence[Sequence[str]] = (), text: str | None = None, missing: str = "") -> Field:
    """Return a field of the table with what the inputs say; ``text``: in place of its own, which goes with rows."""
    known = {"text": "", "head": [], "missing": "", **TABLE["fields"][name]}
    said = known["text"] if text is None and rows else text or ""
    own = {"name": name, "text": said, "rows": rows, "missing": missing or known["missing"]}
    return known | own | {"is_missing": not said and not rows}


@dataclass
class Inputs:
    """What the inputs are, by kind."""

    about: Mapping[str, Any] = field(default_factory=dict)
    audits: list[RunFolder] = field(default_factory=list)
    trainings: list[RunFolder] = field(default_factory=list)
    plans: list[Mapping[str, Any]] = field(default_factory=list)
    verified: list[Mapping[str, Any]] = field(default_factory=list)
    evidence: dict[str, bytes] = field(default_factory=dict)  # path in the dossier -> what it holds


def dossier(inputs: Sequence[Path], out: Path, about: Path | None = None, key: Path | None = None) -> dict[str, Any]:
    """Write a dossier of run folders and of the JSON of ``plan`` and ``verify``; return what ``dossier.json`` holds."""
    if out.exists() and any(not is_leftover(path) for path in out.iterdir()):
        raise DossierError(f"{out} is not empty. Give another --out: a dossier is not written over.")
    signer = None if key is None else _private_key(key)
    found = _read(inputs, about)
    public = None if signer is None else signer.public_key().public_bytes_raw().hex()
    with wrap_parse_errors(
        "What is in the inputs", DossierError, "Give them as plan, verify and a new --about wrote them."
    ):
        made = _content(found) | {"signed_by": public}
        held = {DATA: (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode(), **found.evidence}
        held[PAGE] = fill("dossier.html", made).encode()
    out.mkdir(parents=True, exist_ok=True)
    for path, data in held.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out / path, data)
    hashes = {path: hashlib.sha256(data).hexdigest() for path, data in sorted(held.items())}
    manifest = json.dumps({"made": made["made"], "files": hashes, "public_key": public}, indent=2).encode()
    write_atomically(out / MANIFEST, manifest)
    if signer is not None:
        write_atomically(out / SIGNATURE, signer.sign(manifest))
    return made


def check(folder: Path, key: Path | None = None) -> dict[str, Any]:
    """Return whether a dossier is as it was made: files changed, missing or added, and whose signature it bears.

    ``key``: the public key that must have signed it. Without one a signature only shows that nobody without the key
    in the manifest changed it since.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    with wrap_parse_errors(folder / MANIFEST, DossierError, "Give the folder of a dossier as it was made."):
        manifest = read_whole(folder / MANIFEST, LARGEST)
        told = json.loads(manifest)
        hashes: dict[str, str] = dict(told["files"])
        public = told["public_key"] and bytes.fromhex(told["public_key"])
    there = {
        str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    there = {name: path for name, path in there.items() if name not in (MANIFEST, SIGNATURE)}
    changed = [n for n in sorted(there.keys() & hashes.keys()) if _hash(there[n]) != hashes[n]]
    signature = "none"
    if public or key is not None:
        expected = public if key is None else _public_key(key)
        try:
            Ed25519PublicKey.from_public_bytes(expected).verify(read_whole(folder / SIGNATURE, 1024), manifest)
            signature = "valid" if key is not None else "valid, by the key that the manifest names"
        except (InvalidSignature, OSError, ValueError):
            signature = "invalid"
    found: dict[str, Any] = {"changed": changed, "missing": sorted(hashes.keys() - there.keys())}
    found |= {"added": sorted(there.keys() - hashes.keys()), "signature": signature, "key": public and public.hex()}
    intact = not any(found[k] for k in ("changed", "missing", "added")) and signature != "invalid"
    return found | {"intact": intact and (key is None or signature == "valid")}


def _hash(path: Path) -> str | None:
    """Return the hash of a file; None where it is no plain file, or larger than one of a dossier."""
    try:
        return None if path.is_symlink() else hashlib.sha256(read_whole(path, LARGEST)).hexdigest()
    except (OSError, ValueError):
        return None


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    hint = "Make one: openssl genpkey -algorithm ed25519 -out key.pem."
    with wrap_parse_errors(path, DossierError, hint):
        try:
            found = load_pem_private_key(read_whole(path, 2**16), None)
        except TypeError:
            raise DossierError(f"{path} is encrypted. Give a key without a pass phrase.") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise DossierError(f"{path} is no Ed25519 key. {hint}")
    return found


def _public_key(path: Path) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    hint = "Give the public key: openssl pkey -in key.pem -pubout -out key.pub."
    with wrap_parse_errors(path, DossierError, hint):
        found = load_pem_public_key(read_whole(path, 2**16))
    if not isinstance(found, Ed25519PublicKey):
        raise DossierError(f"{path} is no Ed25519 key. {hint}")
    return found.public_bytes_raw()


def _read(inputs: Sequence[Path], about: Path | None) -> Inputs:
    """Return the inputs by kind, with the files that are kept as evidence."""
    found = Inputs()
    for number, path in enumerate(inputs, 1):
        place = f"{EVIDENCE}/{number}-{path.resolve().name}"
        if path.is_dir():
            run = RunFolder.open(path)
            kind = found.audits if run.rows else found.trainings if (path / ROUNDS).exists() else None
            if kind is None:
                raise DossierError(f"{path} is neither an audit nor a training run. Give the folder of a finished run.")
            kind.append(run)
            for name in (CONFIG, VERSIONS, ROWS, ROUNDS, NODES):
                if (path / name).is_file():
                    found.evidence[f"{place}/{name}"] = read_whole(path / name, LARGEST)
            continue
        with wrap_parse_errors(path, DossierError, "Give a run folder, or what plan or verify printed with --json."):
            found.evidence[place] = read_whole(path, LARGEST)
            told = json.loads(found.evidence[place])
        if not isinstance(told, dict) or not {"mu_proved", "whole_run"} & told.keys():
            raise DossierError(f"{path} is not what plan or verify print with --json. Give that, or a run folder.")
        (found.verified if "mu_proved" in told else found.plans).append(told)
    if about is not None:
        with wrap_parse_errors(
            about, DossierError, "Write one: gradveil dossier --about FILE makes it with its questions."
        ):
            text = read_whole(about, 2**20)
            found.about = tomllib.loads(text.decode())
        if unknown := found.about.keys() - tomllib.loads(ABOUT).keys():
            raise SpecError(
                f"{about} has no use for {', '.join(sorted(unknown))}. Known: {', '.join(tomllib.loads(ABOUT))}."
            )
        found.evidence[f"{EVIDENCE}/about.toml"] = text
    return found


def _content(found: Inputs) -> dict[str, Any]:
    """Return the whole dossier as plain data."""
    fields = [*_of_system(found), *_of_audits(found), *_of_proofs(found), *_of_measures(found), *_of_end(found)]
    name = found.about.get("name") or "a federated learning system"
    return {
        "title": f"Resistance to extraction: {name}",
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "short": _short(found, fields),
        "missing": [one["title"] for one in fields if one["is_missing"]],
        "fields": fields,
        "clauses": TABLE["clauses"],
        "inputs": {path: hashlib.sha256(data).hexdigest() for path, data in found.evidence.items()},
        "note": "This is evidence of tests and proofs. It is no finding that data or model are anonymous.",
    }


def _short(found: Inputs, fields: Sequence[Field]) -> list[tuple[str, str]]:
    """Return the four answers that everybody asks for first."""
    got = []
    for run in found.audits:
        for v in verdicts(run.rows):
            if v.defense != "none":
                badge = badges(modality_of(run.rows))[v.found]
                open_ = [WHO[t.tier].lower() for t in v.tiers if t.outcome in ("void", "not_run")]
                left = f"; not shown either way for the {', '.join(open_)}" if open_ else ""
                got.append(f"{badge}{left} ({name_of(v.defense)})")
    by_name = {one["name"]: one for one in fields}
    simulated = "simulated" in by_name["generator"]["text"].partition(".")[0]
    mu, costs = _mu(found), by_name["measures"]["rows"]
    promise = "Nothing is on file." if mu is None else in_plain_words(mu)
    promise += " In these runs the noise was simulated: the promise is that of the same run with secret noise." * (
        simulated and mu is not None
    )
    cost = next((f"{row[2]} in place of {row[1]} ({row[0]})" for row in costs if "not given" not in row[1:3]), "")
    return [
        ("What attackers got", ". ".join(got) or "No audit was given."),
        ("What is promised to one person", promise),
        ("What it costs in accuracy", cost or "No runs with and without are on file."),
        ("What is missing", "; ".join(one["title"] for one in fields if one["is_missing"]) or "Nothing."),
    ]


def _of_system(found: Inputs) -> list[Field]:
    said = found.about
    system = [(k.capitalize(), str(said[k])) for k in ("name", "purpose", "controller", "roles") if said.get(k)]
    data = [("Categories", said["data_categories"])] if said.get("data_categories") else []
    data += [("People", f"{said['people']:,}")] if said.get("people") else []
    runs = [*found.audits, *found.trainings]
    data += [("Audited as", str(run.settings["dataset"])) for run in runs[:1] if run.settings.get("dataset")]
    keys = ("model", "partition", "rounds", "clients", "epochs", "batch_size", "lr", "optimizer", "loss", "weights")
    training = [(k.replace("_", " "), str(runs[0].settings[k])) for k in keys if runs and runs[0].settings.get(k)]
    sees = said.get("sees") or TABLE["fields"]["sees"]["text"]
    return [_field("system", system), _field("data", data), _field("sees", text=sees), _field("training", training)]


def _of_audits(found: Inputs) -> list[Field]:
    """Return what attacks found: by tier, what was not tried, controls, worst and typical record."""
    tried: list[list[str]] = []
    left: dict[str, list[str]] = {}  # why -> what
    controls: list[list[str]] = []
    records: list[list[str]] = []
    for run in found.audits:
        rows, floor = run.rows, best_floor(run.rows)
        for v in verdicts(rows):
            if v.defense != "none":
                tried += _tier_rows(v, rows)
                out = [tier for tier in TIERS if tier not in {t.tier for t in v.tiers if t.outcome != "not_run"}]
                for tier in out:
                    left.setdefault("not run in this audit", []).append(f"{WHO[tier]} on {name_of(v.defense)}")
            control = [t for t in v.tiers if v.defense == "none" and t.line is not None]
            controls += [["No defence", WHO[t.tier], _sentence(t.text)] for t in control]
        for what, why in left_out(rows):
            left.setdefault(why, []).append(what)
        if floor is not None:
            error = f"error {floor.error.mean:.3g} [{floor.error.low:.3g}, {floor.error.high:.3g}]"
            controls.append([f"Blind guess ({floor.guess})", "-", error])
        best: dict[str, dict[int, float]] = {}
        for m in read(rows, "attack"):
            if m.known and m.defense != "none" and not is_listed(m.attack):
                mine = best.setdefault(m.defense, {})
                mine[m.example] = min(m.error, mine.get(m.example, m.error))
        for defense, errors in best.items():
            blind, kind = "-" if floor is None else f"{floor.error.mean:.3g}", modality_of(rows)
            count = f"{len(errors)} {kind.one if len(errors) == 1 else kind.many}"
            cells = [f"{min(errors.values()):.3g}", f"{median(errors.values()):.3g}", blind, count]
            records.append([name_of(defense), *cells])
    too_short = "give an audit more minutes: no attack on a defended record came to an end" if found.audits else ""
    versions = [
        [run.path.name, *(str(run.versions.get(name, "-")) for name in ("date", "gradveil", "torch", "python"))]
        for run in (*found.audits, *found.trainings)
    ]
    return [
        _field("adversaries", tried),
        _field(
            "not_tried",
            [[_sentence(why), "; ".join(what)] for why, what in left.items()],
            "" if left or not found.audits else "All that was planned was run.",
        ),
        _field("controls", controls),
        _field("records", records, missing=too_short),
        _field("versions", versions),
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _tier_rows(v: Verdict, rows: Sequence[Row]) -> list[list[str]]:
    """Return a row for each tier, those that were not run among them, with about the time that its attacks took."""
    ran = {t.tier: t for t in v.tiers}
    cost = {row["attack"]: float(row["seconds"]) for row in rows if row["kind"] == "cost"}
    table = []
    for tier in TIERS:
        one = ran.get(tier)
        mine = [m.attack for m in read(rows, "attack") if (m.tier, m.defense) == (tier, v.defense)]
        seconds = sum(cost.get(attack, 0.0) for attack in mine)
        by = "-" if one is None or one.line is None else one.line.attack.partition(":")[0]
        by += (
            f"; {len(mine)} {'try' if len(mine) == 1 else 'tries'}"
            + (f", about {seconds:.0f} s" if seconds >= 1 else "")
            if mine
            else ""
        )
        result = _sentence("not run" if one is None else one.text)
        table.append([name_of(v.defense), f"{WHO[tier]}. {TABLE['means'][tier]}", result, by])
    return table


def _of_proofs(found: Inputs) -> list[Field]:
    """Return what is proved with its unit and conditions, the whole run, the generator, and what was measured."""
    proofs = [(v, v.proved) for run in found.audits for v in verdicts(run.rows) if v.defense != "none"]
    held = [[name_of(v.defense), _sentence(p.text)] for v, p in proofs]
    held += [["As planned", _whole(plan)] for plan in found.plans]
    conditions = [text for _, p in proofs for text in p.conditions]
    conditions += [str(text) for plan in found.plans for text in (plan["theorem"], *plan["assumptions"])]
    spent = [
        [name_of(row["defense"]), f"{row['rounds']} rounds", f"μ = {row['mu']:.3g}, ε = {row['epsilon']:.3g}", "spent"]
        for row in map(_end_of, found.trainings)
        if row["mu"] is not None
    ]
    spent += [["plan", f"{plan['run']['rounds']} rounds", _whole(plan), "planned"] for plan in found.plans]
    told = [row for run in found.audits for row in run.rows]
    told += [row for run in found.trainings for row in (*run.rounds, *read_rows(run.path / NODES, {"round": int}))]
    said = sorted({str(row["noise"]) for row in told if row.get("noise")})
    measured = [
        [str(v.get("defense") or v.get("trainer")), f"{v['mu_proved']:.3g}",
         f"{v['mu_measured']:.3g} [{v['low']:.3g}, {v['high']:.3g}]", str(v["verdict"])]
        for v in found.verified
    ]  # fmt: skip
    mu = _mu(found)
    unit = TABLE["texts"]["unit"] if any(p.holds for _, p in proofs) or found.plans else ""
    noise = TABLE["texts"]["noise"].format(", ".join(said)) if said else ""
    return [
        _field("proved", held, unit),
        _field("conditions", [[text] for text in dict.fromkeys(conditions)]),
        _field("composition", spent, "" if mu is None else in_plain_words(mu)),
        _field("generator", text=noise),
        _field("measured", measured),
    ]


def _whole(plan: Mapping[str, Any]) -> str:
    whole = plan["whole_run"]
    return (
        f"μ = {whole['mu']:.3g}, ε = {whole['epsilon']:.3g} at δ = {whole['delta']:g}; a blind guess of "
        f"{whole['blind_guess']:g} becomes at most {whole['guess']:.2g}."
    )


def _mu(found: Inputs) -> float | None:
    """Return the most that a record loses over a run, by account or else by plan."""
    spent = [row["mu"] for row in map(_end_of, found.trainings) if row["mu"] is not None]
    return max(spent or [float(plan["whole_run"]["mu"]) for plan in found.plans], default=None)


def _end_of(run: RunFolder) -> Row:
    """Return what a training run came to."""
    rows = [round_row(row, float(run.settings.get("delta", DELTA))) for row in run.rounds]
    scored = [row for row in rows if row["accuracy"] is not None]
    nodes = read_rows(run.path / NODES, {"round": int})
    stated = next((str(row["defense"]) for row in reversed(nodes) if row.get("defense")), "none")
    named = run.settings.get("defense") or run.settings.get("required") or stated
    last = rows[-1] if rows else round_row({"round": 0}, DELTA)
    best = scored[-1] if scored else last
    return last | {name: best[name] for name in ("accuracy", "majority")} | {"defense": named, "rounds": len(rows)}


def _of_measures(found: Inputs) -> list[Field]:
    """Return what each defence costs in accuracy."""
    cost = []
    ends = [_end_of(run) for run in found.trainings]
    plain = next((row for row in ends if row["defense"] == "none"), None)
    for row in ends:
        if row is not plain:
            figures = (plain and plain["accuracy"], row["accuracy"], row["majority"])
            cost.append([name_of(row["defense"]), *("not given" if x is None else f"{x:.3f}" for x in figures), "run"])
    for run in found.audits:
        for v in verdicts(run.rows):
            if v.defense != "none" and v.accuracy is not None and v.baseline is not None:
                both = [f"{x:.3f}" for x in (v.baseline, v.accuracy)]
                cost.append([name_of(v.defense), *both, "not given", f"audit, {v.scored_by}"])
    return [_field("measures", cost)]


def _of_end(found: Inputs) -> list[Field]:
    said = found.about
    judged = [(v, modality_of(run.rows)) for run in found.audits for v in verdicts(run.rows) if v.defense != "none"]
    remains = [[name_of(v.defense), badges(kind)[v.found], v.proved.said] for v, kind in judged]
    text = str(said.get("residual_risk") or "")
    text += (" " if text else "") + UNDETECTABLE if judged or text else ""
    likely = [["How likely attackers are", str(said["likely"]), ""]] if said.get("likely") else []
    again = [[f"When {why}."] for why in AGAIN] + ([[f"On {said['next_test']}."]] if said.get("next_test") else [])
    signers = [[str(who), "", ""] for who in said.get("signers", ())] or [["", "", ""]]
    return [_field("residual", [*likely, *remains], text), _field("again", again), _field("sign_off", signers)]
