import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Generator, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing import assert_close

from defenses.loops import REPRESENTATION, by_step_gradient, hooks_of, train, weights_of
from gradveil.protection.protect import attachment_of, guard_of, protect
from gradveil.types import Batch


@pytest.mark.parametrize("spec", [REPRESENTATION, "pruning:share=0.5"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_guarded_model_is_guarded_by_itself(how: str, spec: str, model: nn.Module, batch: Batch) -> None:
    reference = copy.deepcopy(model)
    with protect(model, spec) as guard:
        model(batch.inputs)  # what is private in a pass must not travel
        if how == "deepcopy":
            other = copy.deepcopy(model)
        elif how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            torch.save(model, stream := io.BytesIO())
            other = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    assert hooks_of(model) == 0
    theirs = guard_of(other)
    assert theirs is not None
    assert theirs.report.steps == 0

    train(other, other, batch)

    by_step_gradient(reference, batch, spec, Generator())
    for name, w in weights_of(reference).items():
        assert_close(weights_of(other)[name], w)
    assert theirs.report.steps == 3
    assert guard.report.steps <= 1
    theirs.remove()
    assert hooks_of(other) == 0
    assert not _global_optimizer_pre_hooks


def test_a_copy_never_repeats_the_noise_of_a_guard_without_a_seed(model: nn.Module, batch: Batch) -> None:
    with protect(model, "gaussian:scale=1"):
        other = copy.deepcopy(model)
        before = weights_of(model)
        train(model, model, batch, steps=1)
        train(other, other, batch, steps=1)
        a, b = weights_of(model), weights_of(other)
        assert not torch.allclose(a["5.weight"] - before["5.weight"], b["5.weight"] - before["5.weight"])
        guard_of(other).remove()  # type: ignore[union-attr]


def test_what_is_pickled_of_a_guard_in_the_middle_of_a_pass_holds_no_examples(model: nn.Module, batch: Batch) -> None:
    seen: list[dict[str, Any]] = []
    with protect(model, REPRESENTATION):
        attachment = attachment_of(model)
        assert attachment is not None

        def look(*_: Any) -> None:
            assert attachment.current is not None
            seen.append(attachment.__getstate__())

        model[3].register_forward_hook(look)  # type: ignore[index]
        model(batch.inputs)
    assert seen
    assert all("current" not in state for state in seen)
