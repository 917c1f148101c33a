"""Which of the candidates does the client have? The one under which what was sent is most likely.

The server of Hayes et al. 2023 ("Bounding training data reconstruction in DP-SGD") knows every other record of the
client and a list of which one entry is the missing one. With y_t what was sent in round t and m_t(x) the mean of what a
client with record x would send, under noise of variance v it picks the x with the largest

    Σ_t log p(y_t | x) = -½ Σ_t Σ_entries (y_t - m_t(x))² / v + log 2πv.

Where all m_t(x) are equally long, that is the largest Σ_t ⟨y_t - known, m_t(x) - known⟩ / v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Generator, Tensor

from gradveil import pace
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_seen, differentiating
from gradveil.attacks.rounds import SentRounds, by_weights, flat
from gradveil.errors import AttackError
from gradveil.gradients.functional import trial_gradients, trial_updates
from gradveil.ranges import Range, Whole
from gradveil.types import Batch, Observation, Reconstruction

SAME = 1e-3  # relative distance of updates that count as the same
OFFSETS = 32  # runs of the client on one candidate, where what the defence adds is the same for all
FEW = 8  # of them, where few candidates are run at all
PAIR = 2  # candidates whose gradients are worked out together, where one takes long
MEMORY = 2e9  # bytes for the candidates' updates
RUNS = 8  # candidates that the client is run on before the clock is looked at
Score = Callable[[Tensor], Tensor]  # positions of candidates (m,) -> log likelihoods (m,)


@ATTACKS.register("candidates")
@dataclass(frozen=True)
class Candidates(Attack):
    """Pick the candidate that makes all that was sent, over all rounds, most likely (Hayes et al. 2023).

    Each candidate is put in the missing place beside the client's other records, which must be known. Where the server
    can run the client, the noise law is that of its runs with draws of its own: one candidate's where the defence adds
    the same to all, else the mean of every candidate's and the covariance of some. Else it is the declared one. Where
    no variance is known, that of each tensor is the one that suits a candidate best. For large networks, the last
    tensors alone (``entries``) tell the candidates apart, and the client is run on the likeliest alone (``shortlist``).
    """

    kind = "list"
    applies_to = (AppliesTo(("image", "table", "tokens"), tier="informed"),)

    draws: Annotated[int, Range(2)] = 4  # of the client per candidate, where the defence is no addition
    entries: Whole = 0  # of the update that are looked at, whole tensors from its end; 0: all
    shortlist: Whole = 0  # candidates that the client is run on: those that are likeliest without it; 0: all

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        kept: Kept = {}
        return [self._one(s, kept) for s in seen]

    def _one(self, seen: Observation, kept: "Kept") -> Reconstruction:
        listed = _listed(seen)
        seen = replace(self._last(seen), rounds=tuple(map(self._last, seen.rounds)))
        check_seen((seen, *seen.rounds), for_ids=True)
        device = next(seen.model.parameters()).device
        with differentiating(seen.model), torch.no_grad():
            trials = Trials(listed.to(device), None if seen.others is None else seen.others.to(device))
            scores = torch.stack([self._scores(same, trials, kept) for same in _by_client(seen)]).sum(0)
        chosen = scores.argmax()[None].cpu()
        best = scores.topk(min(2, len(listed))).values
        late = bool(scores.isneginf().any())
        details = {"candidates": float(len(listed)), "rounds": float(1 + len(seen.rounds))}
        details |= {"margin": float(best[0] - best[-1])} | ({"out_of_time": 1.0} if late else {})
        inputs, labels = listed.inputs[chosen], listed.labels[chosen]
        finite = bool(best[0].isfinite()) and not late
        return Reconstruction(inputs.clamp(*seen.bounds), labels, -float(best[0]), finite, details)

    def _last(self, seen: Observation) -> Observation:
        """Return the observation with the tensors at the update's end, of so many entries together; at least one."""
        kept, total = dict[str, Tensor](), 0
        for name in reversed(seen.visible):
            total += seen.update.gradient[name].numel()
            if self.entries and kept and total > self.entries:
                break
            kept[name] = seen.update.gradient[name]
        shown = {name: kept[name] for name in reversed(kept)}
        return seen if len(shown) == len(seen.visible) else replace(seen, update=replace(seen.update, gradient=shown))

    def _scores(self, rounds: list[Observation], trials: "Trials", kept: "Kept") -> Tensor:
        """Return the log likelihood (M,) of rounds that were made at the same weights; -inf: there was no time.

        Of those that are not on the shortlist, it is below that of all that are.
        """
        bare = [replace(s, client=None) for s in rounds]
        if not 0 < self.shortlist < len(trials) or rounds[0].client is None:
            return self._each(rounds, trials, kept)
        scores = self._each(bare, trials, kept)
        best = scores.topk(self.shortlist).indices
        if bool(scores.isneginf().any()):
            return scores
        told = self._each(rounds, trials.of(best.cpu()), kept)
        scores = scores - scores.max() + told.min() - 1
        scores[best] = told
        return scores

    def _each(self, rounds: list[Observation], trials: "Trials", kept: "Kept") -> Tensor:
        sent = SentRounds.of(rounds)
        scores = torch.full((len(trials),), -torch.inf, dtype=torch.float64, device=sent.seen.device)
        score, at_once = self._law(rounds[0], sent, trials, kept)
        pace.step(0, len(trials))
        for part in torch.arange(len(trials)).split(at_once):
            scores[part] = score(part)
            if pace.step(int(part[-1]) + 1, len(trials)):
                break
        return scores

    def _law(self, seen: Observation, sent: SentRounds, trials: "Trials", kept: "Kept") -> tuple[Score, int]:
        """Return how likely what was sent is for each candidate, and how many of them to score at once."""
        most = MEMORY / 8 / sent.seen.shape[1]
        many = max(1, min(PAIR if self.shortlist else len(trials), int(MEMORY / 80 / sent.seen.shape[1])))
        mean = trials.means(seen, sent, kept if len(trials) < most else None)
        offsets = FEW if self.shortlist else OFFSETS
        if seen.client is None:
            return (lambda part: sent.likelihood(mean(part), sent.noise)), many
        run = trials.runs(seen, sent, kept if len(trials) * self.draws < most else {})
        sizes = torch.cat([mean(part).norm(dim=1) for part in torch.arange(len(trials)).split(many)])
        ends = torch.stack([sizes.argmin(), sizes.argmax()]).cpu()  # what is cut off by size shows between them
        expected, first, again = mean(ends), run(ends, 0), run(ends, 1)
        fixed = _close(first[0] - again[0], first[0])  # the draws change nothing
        none, step = torch.zeros_like(sent.noise[:1]), expected[1] - expected[0]
        if all(_close(both[1] - both[0] - step, step) for both in (first, again)):
            added = (first[:1] if fixed else torch.cat([run(ends[:1], k) for k in range(offsets)])) - expected[:1]
            variance = none if fixed else sent.by_tensor(added.var(0, keepdim=True)) * (1 + 1 / offsets)
            return (lambda part: sent.likelihood(mean(part) + added.mean(0), variance)), many
        if fixed:
            return (lambda part: sent.likelihood(run(part, 0), none)), RUNS
        drawn = torch.stack([run(ends, k) for k in range(offsets // 2)])
        centred = (drawn - drawn.mean(0)).flatten(0, 1)  # (offsets, R)

        def score(part: Tensor) -> Tensor:
            return sent.drawn_likelihood(torch.stack([run(part, k) for k in range(self.draws)]).mean(0), centred)

        return score, RUNS


Kept = dict[tuple[object, ...], Tensor]  # client, tensors, draw and records -> what was sent


@dataclass(frozen=True)
class Trials:
    """The client's records with each of M candidates in the missing place."""

    candidates: Batch
    others: Batch | None

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, part: Tensor) -> Batch:
        """Return inputs (m, N, *shape) and labels (m, N, ...)."""
        one = self.candidates
        x, y = one.inputs[part][:, None], one.labels[part][:, None]
        if self.others is None:
            return Batch(x, y)
        rest = (self.others.inputs, self.others.labels)
        known = [value.expand(len(part), *value.shape) for value in rest]
        return Batch(*(torch.cat(both, 1) for both in zip(known, (x, y), strict=True)))

    def of(self, part: Tensor) -> "Trials":
        chosen = part.to(self.candidates.inputs.device)
        return Trials(Batch(self.candidates.inputs[chosen], self.candidates.labels[chosen]), self.others)

    def means(self, seen: Observation, sent: SentRounds, kept: "Kept | None" = None) -> Callable[[Tensor], Tensor]:
        """Return positions (m,) -> what clients with these candidates send, by the server's own gradients (m, R).

        What was worked out before, at the same weights, is looked up in ``kept``.
        """
        like, plain = next(seen.model.parameters()), not seen.needs_all_gradients
        trial = trial_gradients(seen.model, sent.names, loss=seen.loss) if plain else trial_updates(seen, sent.names)

        def of(part: Tensor) -> Tensor:
            batch = self[part.to(like.device)]
            rows = torch.stack([seen.loss.rows(y, seen.num_classes) for y in batch.labels])
            found = trial(batch.inputs.to(like), rows.to(like))
            return torch.cat([found[n].flatten(1) for n in sent.names], 1).double()

        rule = (id(seen.model), id(seen.simulate), seen.simulate_on, seen.update.num_steps, sent.names)

        def looked_up(part: Tensor) -> Tensor:
            assert kept is not None
            batch = self[part.to(self.candidates.inputs.device)]
            keys = [(*rule, *_bytes(x, y)) for x, y in zip(batch.inputs, batch.labels, strict=True)]
            missing = [i for i, key in enumerate(keys) if key not in kept]
            if missing:
                fresh = of(part[torch.tensor(missing)])
                kept.update({keys[i]: row[None] for i, row in zip(missing, fresh, strict=True)})
            return torch.cat([kept[key] for key in keys])

        return of if kept is None else looked_up

    def runs(self, seen: Observation, sent: SentRounds, kept: "Kept") -> Callable[[Tensor, int], Tensor]:
        """Return positions (m,), the number of a draw -> what the defended client sends, (m, R).

        The draws are the server's own, the same for every update; what was run before is looked up.
        """
        client, like = seen.client, next(seen.model.parameters())
        assert client is not None

        def of(part: Tensor, draw: int) -> Tensor:
            batch = self[part.to(self.candidates.inputs.device)]
            each = []
            for x, y in zip(batch.inputs, batch.labels, strict=True):
                key = (id(client), sent.names, draw, *_bytes(x, y))
                if key not in kept:
                    with torch.enable_grad():
                        found = client(Batch(x.to(like), y), torch.Generator().manual_seed(draw))
                    kept[key] = flat({n: found[n].detach() for n in sent.names})
                each.append(kept[key])
            return torch.stack(each).to(sent.seen.device)

        return of


def _listed(seen: Observation) -> Batch:
    listed, n = seen.candidates, seen.num_examples
    if listed is None or not len(listed):
        raise AttackError("candidates needs a list of examples, one of which the client has (candidates=).")
    if not listed.labelled:
        raise AttackError("candidates needs the label of every candidate.")
    known = 0 if seen.others is None else len(seen.others)
    if known != n - 1:
        raise AttackError(f"The update is of {n} examples, and {known} others are given: it must be {n - 1} (others=).")
    return listed


def _by_client(seen: Observation) -> list[list[Observation]]:
    """Return the rounds by weights, and by what the server can run."""
    groups: dict[tuple[int, int], list[Observation]] = {}
    for number, same in enumerate(by_weights(seen)):
        for s in same:
            groups.setdefault((number, id(s.client)), []).append(s)
    return list(groups.values())


def _bytes(x: Tensor, y: Tensor) -> tuple[bytes, bytes]:
    return x.double().cpu().numpy().tobytes(), y.double().cpu().numpy().tobytes()


def _close(apart: Tensor, like: Tensor) -> bool:
    return bool(apart.norm() <= SAME * like.norm())
