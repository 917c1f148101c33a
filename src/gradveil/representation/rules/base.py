"""What a rule is: the linear map that an operation is at a point, and the step that it is everywhere.

Every map is applied to many vectors at once. A stack of vectors is (K, B, ...): K vectors for each of the B
examples of a tensor (B, ...); B may be 1 where all examples share the vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gradveil.representation.rules.arithmetic import Scale

Shape = tuple[int, ...]


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in at least single precision: half precision is too coarse for products of slopes."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Operator(ABC):
    """A linear map A, one block per example."""

    @abstractmethod
    def push(self, t: Tensor) -> Tensor:
        """Return A t."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Return Aᵀ g."""

    @abstractmethod
    def entrywise(self, f: Callable[[Any], Any]) -> "Operator":
        """Return the map with f, which keeps 0 and 1 as they are, applied to every entry of A."""

    def spread(self, s: Tensor) -> Tensor:
        """Return (A∘A) s: the same map with every entry of A squared."""
        return self.entrywise(lambda entries: entries * entries).push(s)

    def shared(self) -> "Operator | None":
        """Return the map for any number of examples; None where it mixes examples or differs between them."""
        return self if self.separate else None

    @property
    def separate(self) -> bool:
        """Whether the first dimension counts the examples before and after."""
        return True

    def pull_any(self, g: Tensor) -> Tensor:
        """Return the entries of Aᵀ g in any order and with any zeros between them: enough for a norm."""
        return self.pull(g)

    def pull_scaled(self, g: Tensor, scale: "Scale") -> Tensor:
        """Return S Aᵀ g for the scaling S of the input: fused where that saves a pass over memory."""
        return scale.pull(self.pull(g))

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Follow output entries to the one input entry each is a multiple of; None where there is no such one.

        ``index`` (n, L) holds flat positions within one example, ``factor`` (n, L) the multiples so far; n is 1 or N.
        """
        return None

    def rows(self, index: Tensor) -> Tensor | None:
        """Return the rows of A (K, n, *in) at flat output positions (K, n), where that beats pulling unit vectors."""
        return None

    @property
    def cost(self) -> int:
        """Multiplications that one vector of one example takes; 0 where they do not count."""
        return 0


@dataclass(frozen=True)
class Step(ABC):
    """An operation as it is everywhere; shapes are those of one example, every tensor has a batch in front."""

    in_shape: Shape
    out_shape: Shape

    @property
    def in_size(self) -> int:
        return prod(self.in_shape)

    @property
    def out_size(self) -> int:
        return prod(self.out_shape)

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Apply the step to x (N, *in_shape)."""


@dataclass(frozen=True)
class Affine(Step):
    """x -> A x + offset."""

    operator: Operator  # A
    offset: Tensor  # broadcasts to out_shape
    terms: Tensor | None = None  # sizes of the terms whose sum the offset is, added up; None: it is one term
    joined: int = 0  # how many diagonal maps were folded into this one

    @property
    def offset_size(self) -> Tensor:
        return self.offset.abs() if self.terms is None else self.terms

    def linear(self, x: Tensor, absolute: bool = False) -> Tensor:
        """Return A x, or |A| x with the absolute value of every entry of A."""
        return (self._absolute if absolute else self.operator).push(x[None])[0]

    def transposed(self, y: Tensor, absolute: bool = False) -> Tensor:
        return (self._absolute if absolute else self.operator).pull(y[None])[0]

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.offset

    @cached_property
    def _absolute(self) -> Operator:
        return self.operator.entrywise(abs)


@dataclass(frozen=True)
class Call:
    """One operation of a forward pass, as it was called."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: tuple[Any, ...]
    depends: Callable[[Any], bool]  # on the model's input
    at: int = 0  # which output is meant

    @property
    def x(self) -> Any:
        return self.args[0]

    @property
    def out(self) -> Tensor:
        """The output that is meant, which is the first but for rules of several."""
        meant: Tensor = self.outs[self.at]
        return meant

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of one example, of the first argument and of the output."""
        return tuple(self.x.shape[1:]), tuple(self.out.shape[1:])

    def arg(self, place: int, name: str, default: Any) -> Any:
        """Return an argument given by place or by name, or its default."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Edges = list[tuple[Tensor, Operator]]  # an input that matters, and the map from its changes to the output's
StepOf = Callable[[Call, Edges], Step | None]


@dataclass(frozen=True)
class Rule:
    """What is known of an operation."""

    edges: Callable[[Call], Edges | None]  # its linear maps at the point; None: not known for this call
    step: StepOf | None  # what it is everywhere, where that is known
    several: bool = False  # whether every output has its maps, not the first alone


RULES: dict[str, Rule] = {}


F = TypeVar("F", bound=Callable[..., Any])


def rule(*names: str, step: StepOf | None = None, several: bool = False) -> Callable[[F], F]:
    """Make a rule known for operations of these names; the same rule serves an operation that works in place.

    ``step`` says what the operation is everywhere, for certificates: ``affine`` where the maps do not depend on the
    point. Without it the rule serves scores alone. ``several``: the rule is asked for each output of the operation.
    """

    def remember(edges: F) -> F:
        RULES.update(dict.fromkeys(names, Rule(edges, step, several)))
        return edges

    return remember


def affine(call: Call, edges: Edges) -> Affine | None:
    """Return the step of an operation that is the same linear map everywhere, plus what it makes of zero."""
    ((x, operator),) = edges
    shared = operator.shared()
    if shared is None or x.shape[0] != call.out.shape[0]:
        return None
    out = call.function(*_zeroed(call.args, x), **call.kwargs)
    offset: Tensor = out[0] if isinstance(out, tuple) else out
    if not bool((offset == offset[:1]).all()):
        return None  # examples differ
    return Affine(tuple(x.shape[1:]), tuple(call.out.shape[1:]), shared, offset[0])


def _zeroed(args: Sequence[Any], x: Tensor) -> list[Any]:
    return [torch.zeros_like(a) if a is x else _zeroed(a, x) if isinstance(a, list | tuple) else a for a in args]


Walked = tuple[Tensor, Operator]  # a layer's output, and its linear map at the input
PLAIN: dict[type[nn.Module], tuple[Callable[..., Walked], Callable[[Any], bool]]] = {}


def plain(*kinds: type[nn.Module], when: Callable[[Any], bool] = lambda layer: True) -> Callable[[F], F]:
    """Make known how a layer of these types is run on x without a recorder; ``when`` it is one that can be."""

    def remember(run: F) -> F:
        PLAIN.update(dict.fromkeys(kinds, (run, when)))
        return run

    return remember
