"""What a strict guard does under every kind of defence, scenario by scenario: defended, refused, or not visible.

A spy notes what the defence made: representations, inputs, gradients, updates. *Defended* means that what is sent is
made of that and of nothing else, which linear algebra tells without asking the guard: the rows of a linear layer's
weight gradient lie in the span of the representations it was built from.
"""

from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from defenses.scenarios import LR, SCENARIOS, Arena, Scenario, Spy, make_model
from gradveil.errors import DefenseError
from gradveil.protection.defense import DEFENSES, build
from gradveil.protection.protect import protect
from gradveil.tree import Params
from gradveil.types import Batch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "defend-my-model.md"
# every kind of defence, and every place that one of several places can be
KINDS = {
    "none": "none",
    "compose": "representation:share=0.4+gaussian:scale=0.1",
    "representation": "representation:share=0.4",
    "representation_authors": "representation_authors:share=0.4",
    "representation_certified": "representation_certified:target_mse=1e-7,kind=global",
    "representation_direction": "representation_direction:share=0.4",
    "random_mask": "random_mask:share=0.4",
    "decoy": "decoy",
    "pruning": "pruning:share=0.5",
    "gaussian": "gaussian:scale=0.1",
    "veil": "veil:z=0.1",
    "laplace": "laplace:scale=0.1",
    "pruning of the update": "pruning:share=0.5,on=update",
    "noise on the update": "gaussian:scale=0.1,on=update",
    "noise on the weights": "laplace:scale=0.1,on=weights",
    "decoy and random_mask": "decoy+random_mask:share=0.4",
    "representation and the update": "representation:share=0.4+gaussian:scale=0.1,on=update",
}


def lies_in(vectors: Tensor, basis: Tensor, tolerance: float) -> bool:
    """Whether each row is a combination of the rows of a basis."""
    a, v = basis.double().T, vectors.double().T
    a = a / a.norm(dim=0).clamp_min(1e-30)
    rest = v - a @ torch.linalg.lstsq(a, v, driver="gelsd").solution
    return bool((rest.norm(dim=0) <= tolerance * v.norm(dim=0).max() + 1e-6).all())


def defended(s: Scenario, spy: Spy, arena: Arena, sent: Params) -> bool:
    """Whether what is sent is made of what the defence made, in each place where it acts."""
    change = {name: sent[name] - w for name, w in arena.before.items()}
    if s.look_at == "gradient":
        change = {name: p.grad for name, p in arena.model.named_parameters() if p.grad is not None}
    kept = {name: [arena.before[name], arena.weights()[name]] if s.penalty else [] for name in arena.before}
    places = spy.acts_on
    in_steps = "update" not in places
    ok = True
    if "update" in places:
        made = spy.updates[-1].gradient
        ok &= all(torch.allclose(sent[n], arena.before[n] - LR * made[n], atol=1e-6) for n in made)
        if s.look_at == "change":
            change = {name: arena.weights()[name] - w for name, w in arena.before.items()}
    if "records" in places:
        flat = lambda tree: torch.cat([tree.get(n, torch.zeros_like(w)).flatten() for n, w in arena.before.items()])  # noqa: E731
        decay = [torch.cat([w.flatten() for w in two]) for two in zip(*kept.values(), strict=True)]
        made = spy.gradients if "gradient" in places else spy.releases
        ok &= lies_in(flat(change)[None], torch.stack([*map(flat, made), *decay]), s.tolerance)
    elif "gradient" in places:
        flat = lambda tree: torch.cat([tree.get(n, torch.zeros_like(w)).flatten() for n, w in arena.before.items()])  # noqa: E731
        decay = [torch.cat([w.flatten() for w in two]) for two in zip(*kept.values(), strict=True)]
        ok &= lies_in(flat(change)[None], torch.stack([*map(flat, spy.gradients), *decay]), s.tolerance)
        change = {name: g for given in (spy.given[:1] if s.penalty else spy.given) for name, g in given.items()}
    if "representation" in places:
        basis = torch.cat([*spy.representations, *kept["3.weight"]])
        ok &= lies_in(change["3.weight"], basis, s.tolerance)
    if "batch" in places and in_steps:
        ok &= lies_in(change["1.weight"], torch.cat([*spy.inputs, *kept["1.weight"]]), s.tolerance)
    return bool(ok)


def run(s: Scenario, spec: str) -> tuple[Spy, Arena, Params]:
    """Run a scenario under a strict guard and return what is sent, or raise."""
    rng = Generator().manual_seed(0)
    batches = [Batch(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor(y)) for y in ([0, 3], [1, 2])]
    model, spy = make_model(), Spy(build(spec))
    torch.nn.functional.cross_entropy(model(batches[1].inputs), batches[1].labels).backward()
    old = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    slots = 4 if "records" in spy.acts_on else None  # room for both batches in one step
    with protect(model, spy, simulated=rng, slots=slots) as guard:
        arena = Arena(model, guard, batches, old)
        s.run(arena)
        sent = arena.guard.update(arena.before, arena.weights(), lr=LR)
        if arena.guard is not guard:
            arena.guard.close()
    return spy, arena, sent if arena.sent is None else arena.sent


CELLS = [(s, kind) for s in SCENARIOS for kind in KINDS]


@pytest.mark.parametrize(("s", "kind"), CELLS, ids=[f"{s.name}-{kind}" for s, kind in CELLS])
def test_each_scenario_is_defended_refused_or_not_visible(s: Scenario, kind: str) -> None:
    expected = s.outcome(build(KINDS[kind]).acts_on)
    if expected == "refused":
        with pytest.raises(DefenseError):
            run(s, KINDS[kind])
        return
    spy, arena, sent = run(s, KINDS[kind])
    if kind == "none":
        assert arena.guard.report.steps == 0
    else:
        assert defended(s, spy, arena, sent) == (expected == "defended")


ALIKE = ["veil:z=0.1+pruning:share=0.5", *(name for name in DEFENSES.names() if name not in KINDS)]


@pytest.mark.parametrize("spec", ALIKE)
def test_a_defence_that_is_not_in_the_table_acts_where_others_of_it_do(spec: str) -> None:
    acts_on = build(spec).acts_on
    assert acts_on <= {place for kind in KINDS.values() for place in build(kind).acts_on}
    loop, past = (next(s for s in SCENARIOS if s.name == name) for name in ("a plain loop", "training in eval mode"))
    if build(spec).spec_name in ("mixup", "concealed"):  # they make labels, which no guard sees
        with pytest.raises(DefenseError, match="labels"):
            run(loop, spec)
    else:
        assert defended(loop, *run(loop, spec))
    if past.outcome(acts_on) == "refused":
        with pytest.raises(DefenseError):
            run(past, spec)


def test_there_are_scenarios_enough() -> None:
    assert len({s.name for s in SCENARIOS}) == len(SCENARIOS) >= 40


def test_the_page_names_what_is_not_visible_and_nothing_else() -> None:
    text = PAGE.read_text()
    section = text[text.index("### What a guard cannot see") :].split("\n##", 1)[0]
    named = {line[2:].split(":")[0].strip("*") for line in section.splitlines() if line.startswith("- ")}
    assert named == {s.name for s in SCENARIOS if "not visible" in s.odd.values()}
