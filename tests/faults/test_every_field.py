"""Every field of a message exchanged for values of every type: Flower's real client and server apps, NVFlare's filters.

Written apart from ``test_messages``: single changes are gone through one by one, then several at once are drawn. An app
answers soundly, or with one error of ours that repeats nothing of what the node holds.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faults.conftest import Count, times
from gradveil.errors import GradveilError
from gradveil.privacy.accountant import Account
from gradveil.tree import Params

Change = Callable[[dict[str, Any]], None]  # of a draft: {"kind": ..., "records": {name: (class, {key: value})}}

NUMBERS: list[Any] = [
    0, 1, -1, 2, 7, 2**31, 2**63 - 1, -(2**63), 0.0, -0.0, 0.5, 5e-324, 1e-12, 1e300, -1e300, math.nan, math.inf,
    -math.inf, True, False,
]  # fmt: skip
WORDS: list[Any] = ["", "1", "nan", "sgd", "none", "os:abort", "/etc/passwd", "\x1b[2J", "é" * 5000, b"", b"\x00" * 99]
LISTS: list[Any] = [[], [1], [1.5, math.nan], ["a"], [b"x"], [True], [0] * 10_000]
VALUES = [*NUMBERS, *WORDS, *LISTS]
KEYS = [
    "lr", "server-round", "batch-size", "epochs", "momentum", "weight-decay", "proximal-mu", "clip", "optimizer",
    "public-clip", "public-map", "num-examples", "num-steps", "defended-steps", "leak-psnr", "leak-floor",
    "leak-checked", "update-change", "noise", "defense", "settings", "from-site", "steps", "examples", "spent", "limit",
    "allows", "account", "partition-id", "data", "stage", "sample_num", "threshold", "x", "", "../x", "k" * 1000,
]  # fmt: skip
TYPES = ["", "float32", "float64", "int64", "complex64", "object", "<f4", "V4", "U5", "no type", "f" * 1000]
SHAPES = [(), (0,), (1,), (2**62,), (-1,), (10, 64), (64, 10), (1,) * 40]
DTYPES = ["f2", "f8", ">f4", "i1", "i8", "u8", "?", "c8", "c16", "S3", "U2", "M8[s]", "O", "f4,i4"]


def raw(value: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, value)
    return file.getvalue()


def arrays(like: np.ndarray, draws: random.Random) -> Iterator[tuple[str, tuple[int, ...], str, bytes]]:
    """Yield what an array can be on the wire: (dtype, shape, kind, bytes)."""
    whole, shape = raw(like), like.shape
    yield from ((kind, shape, "numpy.ndarray", whole) for kind in TYPES)
    yield from (("float32", other, "numpy.ndarray", whole) for other in SHAPES)
    yield from (("float32", shape, kind, whole) for kind in ("", "torch", "pickle", "x" * 1000))
    for kind in DTYPES:
        made = np.zeros(shape, kind) if kind in ("f4,i4", "O") else like.astype(kind)
        yield "float32", shape, "numpy.ndarray", raw(made)
    for value in (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0):
        for part in (like.size, 1):
            made = like.copy()
            made.reshape(-1)[:part] = value
            yield "float32", shape, "numpy.ndarray", raw(made)
    for made in (
        np.asfortranarray(like),
        like.reshape(-1),
        like[:1],
        like[:0],
        np.float32(1),
        np.ones((2,) * 20, "f4"),
    ):
        yield str(made.dtype), made.shape, "numpy.ndarray", raw(made)
    for length in (0, 6, 10, 64, len(whole) // 2, len(whole) - 1):
        yield "float32", shape, "numpy.ndarray", whole[:length]
    yield "float32", shape, "numpy.ndarray", whole + whole
    for _ in range(40):
        bent = bytearray(whole)
        for _ in range(draws.randint(1, 4)):
            bent[draws.randrange(min(len(bent), 160))] = draws.randrange(256)
        yield "float32", shape, "numpy.ndarray", bytes(bent)


def changes(names: list[str], like: dict[str, np.ndarray], draws: random.Random) -> list[Change]:
    """Return every single change of a draft."""
    found: list[Change] = []

    def add(change: Change) -> None:
        found.append(change)

    for record, key, value in itertools.product(("config", "metrics", "gradveil-defense", "more"), KEYS, VALUES):
        add(lambda m, r=record, k=key, v=value: m["records"].setdefault(r, ("config", {}))[1].update({k: v}))
    for name in names:
        for array in arrays(like[name], draws):
            add(lambda m, n=name, a=array: _in_arrays(m).update({n: a}))
        add(lambda m, n=name: _in_arrays(m).pop(n, None))
        for other in ("", "x", "..", "é" * 500, f"{name}.x", name.upper()):
            add(lambda m, n=name, o=other: _in_arrays(m).update({o: _in_arrays(m).pop(n, None)}))
            add(lambda m, n=name, o=other: _in_arrays(m).update({o: _in_arrays(m).get(n)}))
    for record, other in itertools.product(
        ("arrays", "config", "metrics", "gradveil-defense"), ("", "x", "arrays", "é")
    ):
        add(lambda m, r=record, o=other: m["records"].update({o: m["records"].pop(r, ("config", {}))}))
        add(lambda m, r=record, o=other: m["records"].update({o: m["records"].get(r, ("config", {}))}))
    for record, kind in itertools.product(("arrays", "config", "metrics"), ("arrays", "config", "metrics")):
        add(lambda m, r=record, k=kind: m["records"].update({r: (k, {})}))
        add(lambda m, r=record: m["records"].pop(r, None))
    for kind in ("train", "train.x", "evaluate", "evaluate.x", "query", "query.x"):
        add(lambda m, k=kind: m.update(kind=k))
    return found


def _in_arrays(draft: dict[str, Any]) -> dict[str, Any]:
    kind, inside = draft["records"].get("arrays", ("config", {}))
    return inside if kind == "arrays" else {}


def drafts(number: int, all_changes: list[Change], draws: random.Random) -> Iterator[list[Change]]:
    """Yield changes to make together: half of them single ones, in an order by chance, then two to four at a time."""
    alone = draws.sample(all_changes, min(len(all_changes), number // 2))
    yield from ([one] for one in alone)
    for _ in range(number - len(alone)):
        yield draws.choices(all_changes, k=draws.randint(2, 4))


def content_of(draft: dict[str, Any]) -> Any:
    """Return Flower's records of a draft, or as much of it as they hold."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    content = RecordDict()
    for name, (kind, inside) in draft["records"].items():
        record = {"arrays": ArrayRecord, "config": ConfigRecord, "metrics": MetricRecord}[kind]()
        for key, value in inside.items():
            if value is None:
                continue
            try:
                record[key] = Array(*value) if kind == "arrays" else value
            except (TypeError, ValueError):  # Flower's own records do not hold it: neither does its wire
                continue
        content[name] = record
    return content


def draft_of(state: Params, config: dict[str, Any], metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    inside = {n: (str(v.numpy().dtype), tuple(v.shape), "numpy.ndarray", raw(v.numpy())) for n, v in state.items()}
    records: dict[str, Any] = {"arrays": ("arrays", inside), "config": ("config", config)}
    return {"kind": "train", "records": records | ({"metrics": ("metrics", metrics)} if metrics else {})}


def tried(work: Callable[[], Any], *kinds: type[Exception]) -> tuple[Any, Exception | None]:
    """Return what it gives, or the error of one of these kinds."""
    try:
        return work(), None
    except kinds as error:
        return None, error


def check_answer(out: Any, state: Params, metrics: set[str]) -> None:
    """An answer holds the model's arrays, numbers that may leave, and a statement."""
    assert {*out.content} <= {"arrays", "metrics", "gradveil-defense"}
    got = {name: torch.from_numpy(array.numpy()) for name, array in out.content["arrays"].items()}
    assert got.keys() == state.keys()
    assert {*out.content["metrics"]} <= metrics
    for name, value in got.items():
        assert value.shape == state[name].shape, name
        assert value.dtype.is_floating_point, name
        assert bool(value.isfinite().all()), name


RUN: dict[str, Any] = {
    "partition": "iid:devices=3,per_device=6", "clients": 3, "rounds": 9, "model": "logistic", "batch-size": 0,
    "defense": "veil:z=100,quantile=0.9",
}  # fmt: skip
SECRET = "root:x:0:0"


def flower_state() -> tuple[Params, dict[str, np.ndarray]]:
    from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data

    settings = FlowerSettings.from_config(RUN)
    state = build_model(settings, load_data("digits", "", settings.partition, 0)[0]).state_dict()
    return state, {name: value.numpy() for name, value in state.items()}


def test_the_ready_client_answers_soundly_or_with_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Messages, and with some of them run configs: what is answered is paid for, and errors say nothing of the node."""
    pytest.importorskip("flwr")
    from flwr.app import Message

    from gradveil.integrations.flower.app import make_client_app
    from gradveil.integrations.flower.site import NodeError, RunRefused
    from integrations.flower_parts import context

    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path))
    (tmp_path / "secret.csv").write_text(f"{SECRET}\n")
    state, like = flower_state()
    draws, app = random.Random(1), make_client_app()
    number, answered, refused = times(400, 10_000), 0, 0
    for together in drafts(number, changes([*state], like, draws), draws):
        draft, run = draft_of(state, {"lr": 0.1, "server-round": 1, "public-clip": 1.0}), dict(RUN)
        if draws.random() < 0.2:
            key = draws.choice([*RUN, "dataset", "loss", "schedule", "lr", "data", "require-defense", "x"])
            run[key] = draws.choice([v for v in VALUES if not isinstance(v, list)] + [str(tmp_path / "secret.csv")])
        for change in together:
            change(draft)
        sent = Message(content_of(draft), dst_node_id=7, message_type=draft["kind"])
        file = tmp_path / "0.json"
        before = Account.read(file, "0").spent if file.exists() else 0.0
        kinds = (RunRefused, NodeError, ValueError)
        out, error = tried(lambda m=sent, r=run: app(m, context({"partition-id": 0}, r)), *kinds)
        if out is None:
            flowers = "registered with name" in str(error)  # no function of the app's is called
            assert SECRET not in str(error)
            assert flowers or isinstance(error, (RunRefused, NodeError)), together
            refused += 1
            continue
        if out.has_error():
            assert SECRET not in str(out.error.reason)
            refused += 1
        elif "node" not in out.content.config_records:
            check_answer(out, state, {"num-examples", "num-steps"})
            answered += 1
            if str(run.get("defense", "")).startswith("veil"):
                assert Account.read(file, "0").spent > before
    assert min(answered, refused) > number / 20
    count("Flower messages and run configs, field by field, to the ready client", number)


def test_mods_around_a_users_app_answer_soundly_or_withhold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Message

    from gradveil.integrations.flower import guard_mod, secure_mod, weights_guard
    from gradveil.types import Batch
    from integrations.flower_parts import SIMULATED, client_app, context, linear_model

    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path))
    state = linear_model().state_dict()
    like = {name: value.numpy() for name, value in state.items()}
    batch = Batch(torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(3))
    around = [
        [guard_mod("veil:z=100", settings={"slots": 3, "records": 3})], [guard_mod("pruning:share=0.5,on=update")],
        [weights_guard(linear_model), guard_mod("gaussian:scale=0.01")], [secure_mod()],
    ]  # fmt: skip
    apps = [client_app(linear_model, batch, mods) for mods in around]
    draws, answered, number = random.Random(2), 0, times(240, 5_000)
    for together in drafts(number, changes([*state], like, draws), draws):
        which = draws.randrange(len(apps))
        draft = draft_of(state, {"lr": 0.1})
        for change in together:
            change(draft)
        sent = Message(content_of(draft), dst_node_id=7, message_type=draft["kind"])
        site = context(SIMULATED if which else {})
        out, error = tried(
            lambda m=sent, w=which, s=site: apps[w](m, s), RuntimeError, ValueError, KeyError, TypeError
        )  # of the user's own function, or Flower's
        if out is None:
            assert not isinstance(error, GradveilError), together
            assert which or "registered with name" in str(error), "what fails under a defence of records does not leave"
            continue
        if out.has_error() or not sent.metadata.message_type.startswith("train"):
            continue
        answered += 1
        check_answer(out, state, {"num-examples", "num-steps", "defended-steps", "update-change"})
    assert answered > number / 10
    count("Flower messages, field by field, to an app of one's own under mods", number)


def test_the_server_never_averages_what_is_unsound_and_goes_on(count: Count) -> None:
    """One node of four answers with changed replies, to training and to the question which device it is."""
    pytest.importorskip("flwr")
    from flwr.app import Message

    from gradveil.integrations.flower.app import serve
    from gradveil.integrations.flower.settings import FlowerSettings
    from integrations.flower_parts import Nodes

    settings = FlowerSettings.from_config(RUN | {
        "rounds": times(100, 5_000), "clients": 4, "partition": "iid:devices=4,per_device=6", "defense": "none",
        "min-replies": 1, "deadline": 1.0,
    })  # fmt: skip
    state, like = flower_state()
    draws = random.Random(3)
    queue = drafts(2 * settings.rounds, changes([*state], like, draws), draws)
    seen: list[Params] = []
    length = 0.1 * math.sqrt(sum(v.numel() for v in state.values()))

    def answer(device: int) -> Callable[[Message], Message]:
        def reply(msg: Any) -> Any:
            if msg.metadata.message_type.startswith("query"):
                draft = {"kind": "query", "records": {"node": ("config", {"partition-id": device})}}
                if device == 3 and len(seen) > 1:
                    next(queue)[0](draft)
                return Message(content_of(draft), reply_to=msg)
            got: Params = msg.content["arrays"].to_torch_state_dict()
            if device == 0:
                seen.append(got)
            draft = draft_of({n: v + 0.1 for n, v in got.items()}, {}, {"num-examples": 6, "num-steps": 1})
            del draft["records"]["config"]
            if device == 3:
                for change in next(queue):
                    change(draft)
            return Message(content_of(draft), reply_to=msg)

        return reply

    outcome = serve(Nodes({device + 1: answer(device) for device in range(4)}), settings)
    assert len(outcome.rounds) == settings.rounds
    assert all(row["accepted"] >= 3 for row in outcome.rounds)
    turned_away = sum(row["accepted"] == 3 for row in outcome.rounds)
    assert 0.2 * settings.rounds < turned_away < settings.rounds
    for before, after in itertools.pairwise(seen):
        assert all(bool(v.isfinite().all()) and v.shape == state[n].shape for n, v in after.items())
        moved = math.sqrt(sum(float((after[n] - before[n]).double().square().sum()) for n in after))
        assert moved <= settings.max_change * length * (1 + 1e-3)
    count("Flower replies, field by field, to the ready server", settings.rounds)


@pytest.mark.parametrize("answer", [{}, {"partition-id": "x"}, {"partition-id": [1]}, {"partition-id": 1e300}, None])
def test_a_node_that_does_not_say_which_device_it_is_is_left_out(answer: dict[str, Any] | None) -> None:
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, Message, RecordDict

    from gradveil.integrations.flower.app import serve
    from gradveil.integrations.flower.settings import FlowerSettings
    from integrations.flower_parts import Nodes, reply

    def odd(msg: Message) -> Message:
        return Message(RecordDict({} if answer is None else {"node": ConfigRecord(answer)}), reply_to=msg)

    def sound(device: int) -> Callable[[Message], Message]:
        def one(msg: Message) -> Message:
            if msg.metadata.message_type == "query":
                return Message(RecordDict({"node": ConfigRecord({"partition-id": device})}), reply_to=msg)
            return reply(msg, {n: v + 0.1 for n, v in msg.content["arrays"].to_torch_state_dict().items()}, 6)

        return one

    settings = FlowerSettings.from_config(RUN | {"defense": "none", "rounds": 1, "min-replies": 1, "deadline": 0.1})
    outcome = serve(Nodes({1: sound(0), 2: sound(1), 3: odd}), settings)
    assert outcome.rounds[0]["clients"] == [0, 1]
    assert outcome.rounds[0]["rejected"] == {"not connected": 1}


SENT = {"fc.weight": np.ones((2, 3), np.float32), "fc.bias": np.ones(2, np.float32)}
META = {"defended-steps": 4, "spent": 1e-4, "NUM_STEPS_CURRENT_ROUND": 4}
Field = tuple[str, Any, Callable[[], Any]]  # place, key, what makes the value


def nvflare_fields() -> list[Field]:
    """Return every single change of a result."""
    objects: list[Any] = [None, {}, {"a": 1}, {1}, object(), lambda: 0, (1, 2), np.array([{}], object), torch.ones(2)]
    kinds = ["WEIGHTS", "WEIGHT_DIFF", "METRICS", "MODEL", "COLLECTION", "", "x"]
    keys = {
        "meta": [*META, "noise", "x", "", "processed_keys", *KEYS[:8]], "data": [*SENT, "x", "", 7, None],
        "header": ["rc", "task_name", "x"], "shareable": ["DXO", "data", "data_kind", "meta", "x"],
    }  # fmt: skip
    values = [*VALUES, *objects, 10**400]
    found: list[Field] = [(place, k, lambda v=v: v) for place, ks in keys.items() for k in ks for v in values]
    found += [("kind", "", lambda k=k: k) for k in kinds]
    found += [("task", "", lambda t=t: t) for t in ("train", "validate", "submit_model", "", None, 7)]
    for name, one in SENT.items():
        found += [("data", name, lambda o=one, k=k: o.astype(k)) for k in DTYPES[:-1]]
        found += [("data", name, lambda o=one, b=b: o * b) for b in (math.nan, math.inf, 3e38)]
        found += [("data", name, lambda o=one, b=b: torch.tensor(o * b)) for b in (math.nan, math.inf, 3e38)]
    return found


def result_of(fields: list[Field]) -> tuple[Any, Any, dict[Any, Any]]:
    """Return a result with these changes, the context that it is sent in, and its data."""
    from nvflare.apis.dxo import DXO
    from nvflare.apis.fl_constant import FilterKey, FLContextKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable

    draft: dict[str, dict[Any, Any]] = {
        "meta": dict(META), "data": {name: value.copy() for name, value in SENT.items()}, "header": {}, "shareable": {},
        "kind": {"": "WEIGHT_DIFF"}, "task": {"": "train"},
    }  # fmt: skip
    for place, key, value in fields:
        draft[place][key] = value()
    try:
        sent = DXO(draft["kind"][""], draft["data"], draft["meta"]).to_shareable()
        for key, one in draft["header"].items():
            sent.set_header(key, one)
    except (TypeError, ValueError, AttributeError):  # NVFlare itself does not make it
        sent = Shareable()
    sent.update(draft["shareable"])
    context = FLContext()
    context.set_prop(FLContextKey.TASK_NAME, draft["task"][""], private=True, sticky=False)
    context.set_prop(FLContextKey.FILTER_DIRECTION, FilterKey.OUT, private=True, sticky=False)
    return sent, context, draft["data"]


@pytest.mark.parametrize("which", ["RecordsFilter", "UpdateFilter"])
def test_nvflare_results_leave_soundly_or_not_at_all(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    """Every field of a result's DXO, of its meta and of the shareable around it, through the real classes."""
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import from_shareable
    from nvflare.apis.filter import ContentBlockedException

    from gradveil.integrations.nvflare import RecordsFilter, UpdateFilter

    monkeypatch.setenv("GRADVEIL_ACCOUNTS", str(tmp_path))
    own = RecordsFilter("veil:z=100") if which == "RecordsFilter" else UpdateFilter("gaussian:scale=0.1,on=update")
    fields, draws, number, left = nvflare_fields(), random.Random(4), times(400, 6_000), 0
    singles = draws.sample(fields, min(len(fields), number // 2))
    for together in [[f] for f in singles] + [draws.choices(fields, k=3) for _ in range(number - len(singles))]:
        sent, context, data = result_of(together)
        file = tmp_path / "site.json"
        before = Account.read(file, "site").spent if file.exists() else 0.0
        out, error = tried(lambda s=sent, c=context: own.process(s, c), ContentBlockedException)
        if out is None:
            assert str(error).startswith("Update withheld")
            continue
        if out.get_return_code() != "OK":
            assert which == "UpdateFilter" or not {*out} - {"__headers__"}, together
            continue
        found = from_shareable(out)
        if found.data_kind == "METRICS":
            assert which == "UpdateFilter"
            continue
        left += 1
        assert all(np.isfinite(np.asarray(one, dtype=np.float64)).all() for one in found.data.values()), together
        if which == "RecordsFilter":
            assert {*found.meta} <= {"defended-steps", "NUM_STEPS_CURRENT_ROUND", "gradveil-spent", "filter_history"}, (
                together
            )
            assert Account.read(file, "site").spent > before
        else:
            assert any(not np.array_equal(found.data[n], data[n]) for n in found.data), together
    assert left > number / 20
    count(f"NVFlare results, field by field, through {which}", number)
