"""Which parameters clients train and send: all, a head, batch norm alone, or those that are named."""

from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import ModelError
from gradveil.modules import find_layer
from gradveil.tree import named, parameters

ALL, HEAD, NORMS = "all", "head", "batch_norm"


def only_trained(model: nn.Module, trains: str) -> nn.Module:
    """Freeze all of a model but ``trains``: all, head (the last linear layer), batch_norm, or names (``fc*,conv1.*``).

    What was frozen before stays so. The model itself is changed, and returned.
    """
    if trains == ALL:
        return model
    known = parameters(model)
    if trains == HEAD:
        patterns = [named(find_layer(model), "*")]
    elif trains == NORMS:
        patterns = [named(path, "*") for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    else:
        patterns = [part.strip() for part in trains.split(",")]
    kept = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not kept:
        raise ModelError(
            f"trains={trains} leaves nothing of {type(model).__name__} to train. Give all, head, batch_norm or names "
            f"of parameters (fc*). It has: {', '.join(known)}."
        )
    for name, p in model.named_parameters():
        p.requires_grad_(name in kept)
    return model


def said_of_trained(model: nn.Module) -> str:
    """Return a part of a sentence on what is trained and so in an update; nothing where it is the whole model."""
    trained, every = list(parameters(model)), dict(model.named_parameters())
    if len(trained) == len(every):
        return ""
    part, whole = (sum(every[name].numel() for name in names) for names in (trained, every))
    shown = ", ".join(trained[:6]) + (f" and {len(trained) - 6} more" if len(trained) > 6 else "")
    return f"; only {part:,} of {whole:,} numbers are trained and in the update: {shown}"
