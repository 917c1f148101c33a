"""A tape as the compiled kernel takes it: convolutions and max pooling one after the other, slopes merged into them."""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from gradveil.scores.convolution import Convolution
from gradveil.scores.operators import Dense, Operator, Reshape, Scale
from gradveil.scores.pooling import Choose
from gradveil.scores.tape import Tape

Image = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Piece:
    """One convolution or max pooling, with the slopes that follow it on the way back; channels last throughout."""

    above: Image  # that cotangents come from
    below: Image  # that they go to
    weight: Tensor | None  # (out, in, kh, kw); None: max pooling
    geometry: tuple[int, ...]  # kernel, stride, padding, dilation, each for rows and columns
    index: Tensor | None = None  # max pooling: (N, oh, ow, c)
    scale: Tensor | None = None  # (n, h, w, c)


def pieces_of(tape: Tape, start: int) -> list[Piece] | None:
    """Return the maps from a node back to the input, or None where they are no chain that the kernel knows."""
    found: list[Piece] = []
    at, image = start, _image(tape.nodes[start].shape)
    while at:
        if len(tape.nodes[at].edges) != 1 or image is None:
            return None
        (edge,) = tape.nodes[at].edges
        at, operator = edge.source, edge.operator
        if isinstance(operator, Scale):
            if not found or operator.source != operator.target:
                return None
            found[-1] = _scaled(found[-1], operator)
        elif isinstance(operator, Reshape):
            image = _reshaped(found, operator, image)
        else:
            piece = _piece(operator, image)
            if piece is None:
                return None
            found.append(piece)
            image = piece.below
    return found


def _image(shape: tuple[int, ...]) -> Image | None:
    if len(shape) == 4:
        return shape[1], shape[2], shape[3]
    return (shape[1], 1, 1) if len(shape) == 2 else None


def _reshaped(found: list[Piece], operator: Reshape, image: Image) -> Image | None:
    """Take a flattened image up again: the last matrix writes to it with channels last."""
    target = _image(operator.source)
    if target is None or operator.source[0] != operator.target[0]:
        return None
    if target == image:
        return target
    if not found or image[1:] != (1, 1) or found[-1].weight is None:
        return None
    last, weight = found[-1], found[-1].weight
    order = torch.arange(prod(target)).view(target).permute(1, 2, 0).flatten()
    scale = None if last.scale is None else last.scale[..., order].contiguous()
    found[-1] = replace(last, weight=weight[:, order], scale=scale)
    return target


def _scaled(piece: Piece, operator: Scale) -> Piece:
    """Return the piece with these slopes after it."""
    c, h, w = piece.below
    by, shape = operator.by, operator.source
    if not isinstance(by, Tensor):
        by = torch.full((1,) * len(shape), float(by))
    whole = by.expand(by.shape[0] if by.ndim == len(shape) else 1, *shape[1:])
    last = (whole.permute(0, 2, 3, 1) if len(shape) == 4 else whole).reshape(-1, h, w, c)
    return replace(piece, scale=(last if piece.scale is None else last * piece.scale).float().contiguous())


def _piece(operator: Operator, image: Image) -> Piece | None:
    if isinstance(operator, Dense) and len(operator.batch_shape) == 1 and image[1:] == (1, 1):
        below = (operator.weight.shape[1], 1, 1)
        return Piece(image, below, operator.weight[:, :, None, None], (1, 1, 1, 1, 0, 0, 1, 1))
    if isinstance(operator, Convolution) and len(operator.stride) == 2 and operator.groups == 1:
        kernel = tuple(operator.weight.shape[2:])
        below = operator.source[1], operator.source[2], operator.source[3]
        geometry = (*kernel, *operator.stride, *operator.padding, *operator.dilation)
        return Piece(image, below, operator.weight, geometry) if max(kernel) <= 64 else None
    if isinstance(operator, Choose) and operator.window is not None:
        below = operator.source[1], operator.source[2], operator.source[3]
        return Piece(image, below, None, operator.window, operator.index.permute(0, 2, 3, 1).contiguous())
    return None
