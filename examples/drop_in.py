"""Torch code that calls F.scaled_dot_product_attention runs on levelhead, gradients included."""

import torch
from torch.nn import functional

import levelhead as lh

torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 128, 64, requires_grad=True) for _ in range(3))
theirs = functional.scaled_dot_product_attention(q, k, v, is_causal=True)

with lh.torch.patch():
    ours = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours.square().sum().backward()

print(f"largest difference {(ours - theirs).abs().max():.0e}, |dq| {q.grad.norm():.3f}")
