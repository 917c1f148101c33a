"""The loop: leaving, starting anew, and that nobody's rows are mixed up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.search.minimise import LBFGS, Decision, Stepper, Stopping, View, minimise


@dataclass(frozen=True)
class Bowls:
    """Problem i is a bowl around (i, ..., i); below the floor it has no value."""

    centre: Tensor
    floor: float = -1e9

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        offset = z - self.centre[:, None]
        value = offset.square().sum(1) + 0.1 * offset.pow(4).sum(1)
        return value.masked_fill(z.min(1).values < self.floor, torch.nan), 2 * offset + 0.4 * offset.pow(3)

    def take(self, rows: Tensor) -> "Bowls":
        return Bowls(self.centre[rows], self.floor)


def never(view: View) -> Decision:
    nobody = torch.zeros(len(view.rows), dtype=torch.bool)
    return Decision(nobody, nobody)


def test_every_problem_ends_at_its_own_minimum_whoever_leaves_when() -> None:
    centres = torch.arange(6, dtype=torch.double)

    def look(view: View) -> Decision:
        leave = (view.rows % 3 == 1) if view.steps == 2 else view.rows == 0 if view.steps == 4 else view.rows < 0
        return Decision(leave, torch.zeros_like(leave))

    out = minimise(Bowls(centres), LBFGS(10), torch.zeros(6, 4).double(), 60, look, lambda i: torch.zeros(4), every=2)
    stayed = [2, 3, 5]
    torch.testing.assert_close(out.best[stayed], centres[stayed, None].expand(3, 4), rtol=0, atol=1e-6)
    torch.testing.assert_close(out.values, Bowls(centres)(out.best)[0])
    assert out.evaluations.tolist() == [4, 2, 60, 60, 2, 60]


def test_a_dead_problem_starts_anew_from_its_own_draw_and_the_others_do_not_notice() -> None:
    start = torch.tensor([[-9.0, 0.0], [0.0, 0.0], [-9.0, -9.0]]).double()
    drawn: list[int] = []

    def redraw(i: int) -> Tensor:
        drawn.append(i)
        return torch.full((2,), float(i))

    stopping = Stopping(torch.arange(3), torch.full((3,), -torch.inf), patience=1000)
    out = minimise(Bowls(torch.arange(3).double(), -5.0), LBFGS(10), start, 60, stopping, redraw, every=10)
    assert drawn == [0, 2]
    assert out.redraws.tolist() == [1, 0, 1]
    torch.testing.assert_close(out.best, torch.arange(3).double()[:, None].expand(3, 2), rtol=0, atol=1e-6)


def test_the_number_of_ticks_is_a_limit() -> None:
    out = minimise(Bowls(torch.zeros(2)), LBFGS(), torch.ones(2, 3), 7, never, lambda i: torch.zeros(3), every=3)
    assert out.evaluations.tolist() == [7, 7]


def view(steps: int, values: list[float], **flags: list[bool]) -> View:
    no = [False] * len(values)
    return View(
        steps, torch.arange(len(values)), torch.tensor(values),
        torch.tensor(flags.get("dead", no)), torch.tensor(flags.get("stuck", no)),
    )  # fmt: skip


def test_an_image_is_done_when_one_of_its_starts_has_matched() -> None:
    stopping = Stopping(torch.tensor([0, 0, 1, 1]), torch.full((4,), 0.1), patience=100)
    assert stopping(view(50, [0.5, 0.05, 0.5, 0.5])).leave.tolist() == [True, True, False, False]


def test_a_start_that_makes_no_progress_leaves_and_is_noted() -> None:
    stopping = Stopping(torch.tensor([0, 1]), torch.zeros(2), patience=100, progress=0.01)
    assert not stopping(view(50, [1.0, 1.0])).leave.any()
    assert not stopping(view(100, [0.999, 0.7])).leave.any()
    assert stopping(view(150, [0.998, 0.5])).leave.tolist() == [True, False]
    assert stopping.stalled.tolist() == [True, False]


def test_the_slower_half_of_an_images_starts_leaves_at_a_cut() -> None:
    stopping = Stopping(torch.tensor([0, 0, 0, 1, 1]), torch.zeros(5), patience=1000, cuts=(100,))
    assert not stopping(view(50, [3.0, 1.0, 2.0, 9.0, 8.0])).leave.any()
    assert stopping(view(100, [3.0, 1.0, 2.0, 9.0, 8.0])).leave.tolist() == [True, False, False, True, False]
    assert not stopping(view(150, [3.0, 1.0, 2.0, 9.0, 8.0])).leave.any()


def test_the_dead_start_anew_and_the_stuck_leave() -> None:
    stopping = Stopping(torch.tensor([0, 1, 2]), torch.zeros(3), patience=1000)
    verdict = stopping(view(50, [torch.inf, 1.0, 1.0], dead=[True, False, False], stuck=[False, True, False]))
    assert verdict.redraw.tolist() == [True, False, False]
    assert verdict.leave.tolist() == [False, True, False]


def test_a_state_kept_in_place_for_a_graph_goes_the_same_way() -> None:
    objective, start = Bowls(torch.arange(3).double()), torch.full((3, 4), 7.0).double()
    plain, still = (Stepper(objective, LBFGS(5), LBFGS(5).start(start.clone())) for _ in range(2))
    still.graphs, still.eager = True, -1000  # as on a GPU, and never warm enough to capture
    still.state = {n: v.clone() for n, v in still.state.items()}
    places = {n: v.data_ptr() for n, v in still.state.items()}
    for k in range(25):
        plain.step(k)
        still.step(k)
    assert {n: v.data_ptr() for n, v in still.state.items()} == places
    for n, v in plain.state.items():
        torch.testing.assert_close(still.state[n], v, msg=n)
