"""Options that several commands share: the same words wherever they stand."""

from typing import Annotated

import typer

OWN = "or module:function that makes your own."

Data = Annotated[str | None, typer.Option(help="Folder with the data sets (default: GRADVEIL_DATA).")]
Model = Annotated[str, typer.Option(help=f"A model spec, {OWN}")]
Seed = Annotated[int, typer.Option(help="One seed for everything.")]

# of a saved update
Weights = Annotated[str | None, typer.Option(help="Safetensors: the weights that the server sent.")]
Before = Annotated[str | None, typer.Option(help="Safetensors: the weights before, if --update has those after.")]
Kind = Annotated[str | None, typer.Option(help="gradient, difference or weights; default: as the file says.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate of the local steps.")]
InputShape = Annotated[str | None, typer.Option(help="E.g. 1x28x28, without --dataset.")]
Classes = Annotated[int, typer.Option(help="Number of classes, without --dataset.")]
