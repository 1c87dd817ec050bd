"""Watches an unmodified model while it trains: every head, and findings about its health."""

import torch

import levelhead as lh

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, wanted = torch.randn(2, 8, 32, 64)

with lh.watch(model, every=5, gradients=True) as w:
    for _ in range(20):
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        w.step()

print(w)
print(lh.diagnose(w) or "nothing to worry about")
