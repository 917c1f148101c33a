"""Audit one update: what does a server rebuild from what a client sends, with and without a defence?

python examples/audit_update.py
"""

import torch

import gradveil
from gradveil import attacks

digits = gradveil.dataset("digits")
model = gradveil.model("lenet", digits.input_shape, digits.num_classes)
private = digits.train.batch([7])

for defense in ("none", "veil:z=1,clip=1"):
    rng = torch.Generator().manual_seed(0)
    update = gradveil.local_update(model, private, defense, lr=0.1, rng=rng)
    found = attacks.Newton(steps=8)(model, update, like=digits)
    error = float((found.inputs - private.inputs).square().mean())
    print(f"{defense:20} mean squared error {error:.1e}")
