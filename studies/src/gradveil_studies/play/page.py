"""The playground's page: Gradio on this machine alone, nothing loaded from elsewhere and nothing told to anybody."""

import os
import threading
from collections.abc import Iterator
from html import escape
from tempfile import TemporaryDirectory
from typing import Any

from gradveil.errors import DataError, GradveilError, MissingExtraError
from gradveil.metrics import short
from gradveil.threats.setup import load_dataset
from gradveil.types import Batch
from gradveil_studies.play.cards import CSS, all_cards, table
from gradveil_studies.play.figures import certificate, cost, leak
from gradveil_studies.play.servers import CONTROL, MOST_ROUNDS, LiveRun, Rebuilt, blind_guess, trials
from gradveil_studies.play.stage import DATASETS, DIALS, MODELS, STRENGTHS, PlayStage, spec_of, stage
from gradveil_studies.play.visits import Visits

HOST = "127.0.0.1"
LARGEST = 10 * 2**20  # bytes of an upload
FIRST = 1  # number of the example that is shown first
KEPT = 12  # rows of what was tried
OWN = {"image": "Upload a picture", "tokens": "Type a sentence"}
CHOSEN = "An example of the data set"
HEADS = (
    "defence",
    "rounds",
    "no defence",
    "oblivious",
    "adaptive",
    "multi-round",
    "blind guess",
    "accuracy after training",
)
POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'"  # for the browser: nothing from elsewhere
ABOUT = (
    "A client trains one step on one private example and sends the update. Servers rebuild the example from it, here, "
    "live. All of it stays on this machine."
)
Tried = list[tuple[str, ...]]


def gradio(folder: str) -> Any:
    """Return Gradio, told to call nobody and to keep uploads in a folder; raise where it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        import gradio
    except ImportError as error:
        raise MissingExtraError("The playground", "play") from error
    return gradio


class Playground:
    """The page, and the runs under way in it, one for each visitor."""

    def __init__(self, dataset: str | None = None, model: str | None = None, data: str | None = None) -> None:
        self.folder = TemporaryDirectory(prefix="gradveil-play-")  # of uploads; removed when this ends
        self.gr, self.data = gradio(self.folder.name), data
        self.datasets = ({dataset: dataset} if dataset and dataset not in DATASETS else {}) | DATASETS
        self.first = dataset or next(iter(DATASETS))
        kind = load_dataset(self.first, data).modality.spec_name
        self.models = MODELS | ({kind: {model: model} | MODELS[kind]} if model else {})
        self.runs: dict[str, LiveRun] = {}
        self.page = self._built()

    def warm_up(self) -> None:
        """Rebuild one example before anybody waits for it: what torch sets up on first use takes seconds."""
        at = self._at(self.first, self._models(self.first)[0][1])
        for _ in LiveRun(at, trials(at, at.chosen(0), "none")).frames():
            pass

    def wait(self) -> None:
        try:
            threading.Event().wait()
        finally:
            self.close()

    def close(self) -> None:
        self.page.close(verbose=False)
        self.folder.cleanup()

    def launch(self, port: int | None = None) -> str:
        """Serve it on this machine's own address, in a thread, and return the address."""
        gr = self.gr
        look = gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"])
        try:
            _, address, _ = self.page.launch(
                server_name=HOST, server_port=port, share=False, quiet=True, prevent_thread_lock=True, inline=False,
                max_file_size=LARGEST, enable_monitoring=False, ssr_mode=False, pwa=False, mcp_server=False,
                footer_links=[], theme=look, css=CSS, show_error=True, app_kwargs={"middleware": [(Visits, (), {})]},
                head=f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            )  # fmt: skip
        except OSError as error:
            raise GradveilError(f"Port {port} cannot be used: {error}. Give another by --port.") from error
        return str(address)

    def _at(self, dataset: str, model: str) -> PlayStage:
        return stage(dataset, model, self.data)

    def _models(self, dataset: str) -> list[tuple[str, str]]:
        kind = load_dataset(dataset, self.data).modality.spec_name
        return [(name, spec) for spec, name in self.models[kind].items()]

    def _built(self) -> Any:
        gr, models = self.gr, self._models(self.first)
        first = self._at(self.first, models[0][1])
        with gr.Blocks(title="gradveil playground", analytics_enabled=False) as page:
            gr.HTML(f"<h1>What does one update give away?</h1><p>{ABOUT}</p>")
            with gr.Row():
                with gr.Column(scale=1, min_width=280):
                    data = gr.Dropdown([(n, s) for s, n in self.datasets.items()], value=self.first, label="Data")
                    source = gr.Radio(self._sources(first), value=CHOSEN, label="The client's example")
                    number = gr.Slider(0, len(first.dataset.train) - 1, FIRST, step=1, label="Number of the example")
                    upload = gr.File(label="Picture", visible=False, height=120)
                    label = gr.Dropdown(self._classes(first), value=0, label="Its class", visible=False)
                    text = gr.Textbox("the value of the attribute is a list", label="Sentence", visible=False)
                    model = gr.Dropdown(models, label="Network", value=models[0][1])
                    known = [("No defence", "none"), *((dial.name, name) for name, dial in DIALS.items())]
                    defense = gr.Dropdown(known, value="gaussian", label="Defence")
                    strength = gr.Slider(1, STRENGTHS, 3, step=1, label="Strength, weak to strong")
                    rounds = gr.Slider(1, MOST_ROUNDS, 1, step=1, label="Rounds that the server sees")
                    with gr.Row():
                        go = gr.Button("Rebuild it", variant="primary")
                        halt = gr.Button("Stop")
                with gr.Column(scale=3, min_width=300):
                    said = gr.HTML(_said("Press “Rebuild it”, or move the strength."))
                    shown, figures, tried = gr.HTML(), gr.HTML(), gr.HTML()
            past = gr.State([])

            def go_on(request: gr.Request, *wish: Any) -> Iterator[tuple[Any, ...]]:  # type: ignore[name-defined]
                yield from self.go(str(request.session_hash), *wish)

            def end(request: gr.Request) -> None:  # type: ignore[name-defined]
                self.stop(str(request.session_hash))

            wish = [data, source, number, upload, label, text, model, defense, strength, rounds]
            data.change(self.chosen, data, [source, number, upload, label, text, model], show_progress="hidden")
            source.change(self.sourced, source, [number, upload, label, text], show_progress="hidden")
            moved = [strength.input, rounds.input, defense.input]
            gr.on(moved, end, queue=False, show_progress="hidden")
            gr.on(
                [go.click, *moved], go_on, [*wish, past], [said, shown, figures, tried, past],
                trigger_mode="always_last", show_progress="hidden",
            )  # fmt: skip
            halt.click(end, queue=False, show_progress="hidden")
            page.unload(end)
        return page

    def _sources(self, at: PlayStage) -> list[str]:
        own = OWN.get(at.dataset.modality.spec_name)
        return [CHOSEN, own] if own else [CHOSEN]

    def _classes(self, at: PlayStage) -> list[tuple[str, int]]:
        return [(name, i) for i, name in enumerate(at.dataset.class_names)][:1000]

    def chosen(self, data: str) -> tuple[Any, ...]:
        gr = self.gr
        try:
            models = self._models(data)
            at = self._at(data, models[0][1])
        except GradveilError as error:
            raise gr.Error(str(error)) from None
        return (
            gr.update(choices=self._sources(at), value=CHOSEN),
            gr.update(maximum=len(at.dataset.train) - 1, value=FIRST),
            gr.update(value=None),
            gr.update(choices=self._classes(at), value=0),
            gr.update(),
            gr.update(choices=models, value=models[0][1]),
        )

    def sourced(self, source: str) -> tuple[Any, ...]:
        """Show what belongs to a way of giving an example."""
        picture, sentence = source == OWN["image"], source == OWN["tokens"]
        return tuple(self.gr.update(visible=v) for v in (not picture and not sentence, picture, picture, sentence))

    def _one(self, at: PlayStage, source: str, number: int, upload: str | None, label: int, text: str) -> Batch:
        if source == OWN["image"]:
            if not upload:
                raise DataError("No picture is there yet. Upload one, or choose an example of the data set.")
            return at.uploaded(upload, int(label))
        return at.typed(text) if source == OWN["tokens"] else at.chosen(int(number))

    def go(
        self, visitor: str, data: str, source: str, number: int, upload: str | None, label: int, text: str, model: str,
        defense: str, strength: int, rounds: int, past: Tried,
    ) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """Yield the parts of the page while the servers are at work: words, cards, figures, what was tried."""
        same, rounds = self.gr.skip(), int(rounds)
        self.stop(visitor)
        try:
            spec, at = spec_of(defense, int(strength)), self._at(data, model)
            one = self._one(at, source, number, upload, label, text)
            found, guess, kind = trials(at, one, spec, rounds), blind_guess(at, one), at.dataset.modality
            promised, price = certificate(at, one, spec, rounds), cost(data, model, spec)
            rows = [("Certificate", " ".join(promised)), ("Leak meter", leak(at, found)), ("Accuracy", price)]
        except GradveilError as error:
            yield _said(str(error), wrong=True), "", "", same, past
            return
        truth = kind.unit(one.inputs, (0.0, 1.0))[0]
        numbers = table((), rows, "What is promised, and what it costs")
        self.runs[visitor] = run = LiveRun(at, found)
        got: list[Rebuilt] = []
        for got in run.frames():
            cards = all_cards(kind, truth, guess, got, rounds)
            yield _said(f"{spec}: the servers are at work."), cards, numbers, same, past
        there = [
            ("no defence" if g.trial.about == CONTROL else g.trial.server.tier, g) for g in got if g.shown is not None
        ]
        best = [min((g.error for tier, g in there if tier == head), default=None) for head in HEADS[2:6]]
        told = tuple("–" if error is None else short(error) for error in best)
        past = [(spec, str(rounds), *told, short(guess[2]), price), *past][:KEPT]
        end = "stopped; each server shows what it had." if any(g.state == "stopped" for g in got) else "done."
        words = f"Tried so far, newest first; {kind.error_name}"
        cards = all_cards(kind, truth, guess, got, rounds)
        yield _said(f"{spec}: {end}"), cards, numbers, f"<h2>{words}</h2>{table(HEADS, past, words)}", past

    def stop(self, visitor: str) -> None:
        if (run := self.runs.pop(visitor, None)) is not None:
            run.stop()


def _said(words: str, wrong: bool = False) -> str:
    return f'<p class="gv-said" role="{"alert" if wrong else "status"}">{escape(words)}</p>'
