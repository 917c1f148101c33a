"""`span` beside the authors' own code of DAGER (Petrov et al. 2024), on the same gradients.

    python studies/bench/dager.py CHECKOUT

CHECKOUT is a copy of github.com/insait-institute/dager-gradient-inversion (4383e25), which is not part of this project.
Its functions that tell tokens and sequences of a decoder are called as they are, with the settings of their scripts for
GPT-2 (those for noise under noise) and the rank tolerance that their page advises; their loader of pretrained models is
stood in for by one of ours around ``gpt_tiny``, as nothing is downloaded. Sequences that they return beyond a batch are
cut off, the worst first by their own score. The scenes are fixed here. Results go to studies/bench/results/dager.json.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.modalities.tokens import exact, wrong
from gradveil.protection.defense import build as build_defense
from gradveil.threats.setup import fitting_model
from gradveil.threats.trial import observe
from gradveil.types import Observation

FILE = Path(__file__).parent / "results" / "dager.json"
WIDTH, LENGTH, DRAWS = 256, 32, 2
SCENES = [(examples, defense) for examples in (1, 4) for defense in ("none", "gaussian:scale=1e-5")]
LAYERS = ("blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight")


class Tokenizer:
    """What DAGER asks of a tokenizer: how long a sequence is, and how many tokens there are."""

    model_max_length = LENGTH - 1

    def __len__(self) -> int:
        return 2048


class Stage:
    """What DAGER asks of a model: embeddings as the first attention sees them, and what the second sees."""

    eos_token, pad_token, start_token = -1, 0, None

    def __init__(self, model: nn.Module, args: Any) -> None:
        self.model: Any = model
        self.tokenizer, self.args = Tokenizer(), args

    def get_embeddings(self, pos: int) -> Tensor:
        """Return (1, vocabulary, width) at a place."""
        tokens = self.model.tokens
        seen: Tensor = self.model.blocks[0].norm1(tokens.words.weight + tokens.places.weight[pos])
        return seen[None]

    def get_layer_inputs(
        self, sentences: Tensor, attention_mask: Tensor | None = None, layers: int = 1
    ) -> list[Tensor]:
        """Return what the second attention sees of sentences, (N, L, width)."""
        kept: list[Tensor] = []
        handle = self.model.blocks[1].norm1.register_forward_hook(lambda m, x, y: kept.append(y))
        with torch.no_grad():
            self.model(sentences)
        handle.remove()
        return kept

    def is_bert(self) -> bool:
        """Return that it is not one."""
        return False

    has_rope = has_bos = is_bert


def their(checkout: str, examples: int, defense: str) -> tuple[ModuleType, ModuleType, ModuleType, Any]:
    """Return the authors' modules and their settings as their script for GPT-2 has them."""
    sys.path.insert(0, checkout)
    for name, needed in (("datasets", "load_metric"), ("utils.models", "ModelWrapper"), ("utils.data", "TextDataset")):
        stand_in = ModuleType(name)  # loads what is not here, and is not called
        setattr(stand_in, needed, None)
        sys.modules[name] = stand_in
    given = ["--dataset", "cola", "--task", "next_token_pred", "--split", "val", "--n_inputs", "1", "--device", "cpu"]
    sys.argv = ["attack.py", *given, "--l1_filter", "all", "--l2_filter", "non-overlap", "-b", str(examples)]
    if defense == "none":
        sys.argv += ["--rank_tol", "1e-7" if examples < 4 else "1e-8"]
    else:
        sys.argv += ["--n_incorrect", "0", "--defense_noise", defense.rpartition("=")[2]]
    import attack  # type: ignore[import-not-found]
    from args_factory import get_args  # type: ignore[import-not-found]
    from utils import filtering_decoder, functional  # type: ignore[import-not-found]

    return attack, filtering_decoder, functional, get_args()


def dager(checkout: str) -> Callable[[Observation, str], Tensor]:
    """Return DAGER as a function from an update and its defence to ids (N, L)."""

    def found(seen: Observation, defense: str) -> Tensor:
        attack, decoder, functional, args = their(checkout, seen.num_examples, defense)
        gradients = [seen.update.gradient[name] for name in LAYERS]
        rank = max(int(np.linalg.matrix_rank(g.numpy(), tol=args.rank_tol)) for g in gradients)
        rank = min(rank, WIDTH - args.rank_cutoff)
        spans = [functional.get_layer_decomp(g, B=rank, tol=args.rank_tol)[1] for g in gradients]
        stage = Stage(seen.model, args)
        ids = torch.zeros(seen.num_examples, LENGTH)
        with torch.no_grad():
            _, tokens, _, _ = attack.filter_l1(args, stage, spans)
            if not tokens:
                return ids
            whole, scores, rest, more = decoder.filter_decoder(args, stage, spans, tokens)
        best = sorted(zip([*scores, *more], [*whole, *rest], strict=True), key=lambda one: one[0])
        kept = list(dict.fromkeys(tuple(one) for _, one in best if one))[: len(ids)]
        for i, one in enumerate(kept):
            ids[i, : len(one)] = torch.tensor(one)
        return ids

    return found


def main() -> None:
    """Run every scene by both."""
    torch.manual_seed(0)  # their decomposition draws from the global state
    ways = {
        "dager": dager(sys.argv[1]),
        "span": lambda seen, _: build_attack("span").reconstruct(seen, torch.Generator().manual_seed(0)).inputs,
    }
    data, done = load(f"manual:length={LENGTH}"), {}
    loss = data.fitting_loss("cross_entropy")
    model = fitting_model(f"gpt_tiny:width={WIDTH},heads={WIDTH // 64}", data, loss, 0).eval()
    for examples, defense in SCENES:
        for draw in range(DRAWS):
            rng = torch.Generator().manual_seed(draw)
            batch = data.train.sample(examples, rng)
            width = data.outputs(loss)
            local = SimpleNamespace(loss=loss)
            seen = observe(model, batch, build_defense(defense), rng, width, local=local, modality=data.modality)  # type: ignore[arg-type]
            for name, way in ways.items():
                start = time.process_time()
                ids = way(seen, defense)
                ids = ids[data.modality.order(ids, batch.inputs)]
                row = {
                    "tokens": 1 - float(wrong(ids, batch.inputs).mean()),
                    "exact": float(exact(ids, batch.inputs).mean()),
                }
                row["cpu_seconds"] = round(time.process_time() - start, 1)
                key = f"{examples} sequences, {defense}, draw {draw}, {name}"
                done[key] = row
                print(key, row, flush=True)
    FILE.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
