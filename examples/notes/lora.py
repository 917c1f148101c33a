"""A text classifier with LoRA (peft) and Hugging Face's Trainer under a promise, ending in a dossier.

Six sites hold short notes, made up here, and learn which ones speak of pain. ``python lora.py --out runs/notes``

The base is a small BERT that is trained here on public notes and another question, so that nothing is
downloaded; put ``AutoModelForSequenceClassification.from_pretrained(FOLDER)`` in its place. A site takes one step on
all its notes in a round, and the server sees the sum of the sites' updates: with little noise a client that is what
keeps the promise cheap.
"""

import argparse
import os
import random
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradveil

HOME = Path(__file__).resolve().parent
SITES, NOTES, ROUNDS, LR, LENGTH = 6, 100, 10, 0.3, 12
RUN = gradveil.PlannedRun(records=NOTES, batch_size=None, epochs=1, rounds=ROUNDS, participations=ROUNDS, cohort=SITES)
DEFENSE = "veil:epsilon=8,clip=2,tier=aggregate"
PAIN = ("strong pain in the", "sharp ache of the", "it hurts around the", "sore and tender the")
CALM = ("no complaints of the", "well healed the", "moves freely the", "without findings the")
PLACES = ("left knee", "right hip", "left shoulder", "right wrist", "left foot", "right hand")
MORE = ("since monday", "after sports", "in the morning", "as last year", "at night", "at rest")


def write_notes(path: Path, seed: int, count: int, question: str = "pain") -> Path:
    """Write lines of a label, a tab and a note: does it speak of pain, or what is its first word?"""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        is_pain, place = rng.randrange(2), rng.choice(PLACES)
        words = rng.choice((CALM, PAIN)[is_pain])
        label = ("calm", "pain")[is_pain] if question == "pain" else words.split()[0]
        lines.append(f"{label}\t{words} {place} {rng.choice(MORE)}")
    path.write_text("\n".join(lines) + "\n")
    return path


@cache
def base_weights(words: int) -> dict[str, Tensor]:
    """Train the stand-in for a pretrained base on public notes, once: other commands read its file."""
    kept = Path(os.environ.get("NOTES_BASE", "base.safetensors"))
    if kept.exists():
        return load_file(kept)
    with tempfile.TemporaryDirectory() as folder:
        data = load(write_notes(Path(folder) / "public.txt", 7, 600, "first word"))
    model, rows = bert(words, data.num_classes), data.train.batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows.inputs.long()).logits, rows.labels).backward()
        optimizer.step()
    found = {name: value for name, value in model.state_dict().items() if not name.startswith("classifier")}
    save_file(found, kept)
    return found


def load(path: Path) -> gradveil.Dataset:
    """Return a file of notes as ids and labels."""
    return gradveil.dataset(f"text:path={path},length={LENGTH}")


def bert(words: int, classes: int = 2) -> nn.Module:
    """Return a small BERT with a head, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(
        **sizes, vocab_size=words, max_position_embeddings=LENGTH, num_labels=classes,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(config)
    return model


class Notes(nn.Module):
    """The base with LoRA's factors and a new head, which alone are trained: ids in, logits out."""

    def __init__(self, words: int = 64) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = bert(words)
            base.load_state_dict(base_weights(words), strict=False)
            lora = LoraConfig(
                r=4, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
            )
            self.bert = get_peft_model(base, lora)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Return the logits, with their loss where Trainer asks for it."""
        logits: Tensor = self.bert(input_ids=input_ids.long()).logits
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_site(
    model: nn.Module, notes: list[dict[str, Tensor]], account: gradveil.Account | None
) -> tuple[dict[str, Tensor], gradveil.Account, str]:
    """Take one round of one site: ordinary use of Trainer, with one callback; return what is sent."""
    import transformers

    from gradveil.integrations.transformers import GuardCallback

    settings = transformers.TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=NOTES, learning_rate=LR,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    guard = GuardCallback(DEFENSE, run=RUN, account=account)
    transformers.Trainer(model, settings, train_dataset=notes, callbacks=[guard]).train()
    sent = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return sent, guard.account, guard.report.noise


def main() -> None:
    """Train with the promise and without, look for leaks, and file the dossier."""
    sys.path[:0] = [str(HOME), str(HOME.parent)]
    from evidence import file_dossier, scores, train_unprotected

    from gradveil.integrations.monitor import MonitorSettings, NodeReport, RunMonitor

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/notes")
    parser.add_argument("--minutes", default="2", help="of the audit")
    given = parser.parse_args()
    out = Path(given.out).resolve()
    out.mkdir(parents=True)
    os.environ["NOTES_BASE"] = str(out / "base.safetensors")
    data = load(write_notes(out / "notes.txt", 1, 900))
    partition = f"iid:devices={SITES},per_device={NOTES}"
    model = Notes()
    accounts: list[gradveil.Account | None] = [None] * SITES  # a real site keeps its own in a file: account.save(path)
    monitor = RunMonitor(out / "protected", MonitorSettings("Hugging Face", DEFENSE), say=print)
    sites = gradveil.partition(data.train.labels, partition)
    for number in range(1, ROUNDS + 1):
        start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for site, own in enumerate(sites):
            model.load_state_dict(start, strict=False)
            rows = data.train.batch(own)
            notes = [{"input_ids": x, "labels": y} for x, y in zip(rows.inputs.long(), rows.labels, strict=True)]
            sent, account, noise = train_site(model, notes, accounts[site])
            accounts[site] = account
            total = {name: total[name] + value / SITES for name, value in sent.items()}  # stands for a secure sum
            about = {"defense": DEFENSE, "noise": noise, "spent": account.spent}
            monitor.add(number, NodeReport(f"site-{site}", True, examples=len(rows), **about))
        model.load_state_dict(total, strict=False)
        monitor.end(number, **scores(model, data))
    monitor.close()
    print(gradveil.write_report(out / "protected"))

    training = gradveil.Training(rounds=ROUNDS, clients=SITES, batch_size=None, lr=0.05)  # the best rate without noise
    train_unprotected(out / "unprotected", data, Notes(), partition, training)
    what = ["--model", "lora:Notes", "--dataset", f"text:path={out / 'notes.txt'},length={LENGTH}"]
    rounds = ["--rounds", str(ROUNDS)]
    local = ["--clients", str(SITES), "--partition", partition, "--batch-size", "0", "--lr", str(LR)]
    limits = ["--images", "4", "--trained", "--minutes", given.minutes]
    page = file_dossier(
        out,
        HOME,
        audit=[*what, *rounds, *local, "--defense", DEFENSE, *limits],
        plan=[*rounds, "--cohort", str(SITES), "--records", str(NOTES), "--epsilon", "8", "--tier", "aggregate"],
        verify=[*what, *rounds, "--defense", "veil:z=2,clip=2", "--engine", "protect"],
    )
    print(page)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
