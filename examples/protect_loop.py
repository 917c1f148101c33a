"""Protect a training loop of your own: clip each record's gradient, add noise, and stop at the budget.

python examples/protect_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradveil

rows = gradveil.dataset("breast_cancer")
batch, held_out = rows.train.batch(range(400)), rows.test
model = nn.Linear(30, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = gradveil.counted(DataLoader(TensorDataset(batch.inputs, batch.labels), batch_size=80, shuffle=True))

with gradveil.protect(model, "veil:z=4,clip=1,limit=1", slots=80, records=400) as guard:
    for _ in range(10):  # epochs
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

account = guard.account
print(guard.report)
print(f"spent mu = {account.mu:.2f}, epsilon = {account.epsilon(1e-5):.2f} at delta = 1e-5")
print(f"accuracy {gradveil.evaluate(model, held_out).accuracy:.3f}")
