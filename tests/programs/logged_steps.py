"""A training step and an inference, by a program that knows the backend by its name alone."""

import torch
from torch import nn

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 8)
compiled = torch.compile(model, backend="evt", options={"evt.place": "always"})
compiled(x).sum().backward()
with torch.no_grad():
    compiled(x)
