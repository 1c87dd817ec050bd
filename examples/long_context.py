"""One training step on a sequence that is spread over two processes, compared with one process.

torchrun --nproc-per-node 2 examples/long_context.py
"""

import os

import torch
import torch.distributed as dist

import levelhead as lh

if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
else:  # one process: a group of one
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

TOKENS, WIDTH, HEADS = 1001, 64, 4  # need not be divisible by the number of ranks
torch.manual_seed(0)  # every rank has the same weights
project, back = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
weights = [*project.parameters(), *back.parameters()]
x, wanted = torch.randn(2, TOKENS, WIDTH)


def loss(x, wanted, attend):
    q, k, v = project(x).reshape(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
    return (back(attend(q, k, v).transpose(0, 1).flatten(1)) - wanted).square().sum() / TOKENS


# Each rank has its tokens and the loss of its own rows. The balanced split gives equal work under a causal mask.
split = lh.distributed.Split.balanced(TOKENS, world)
mine = loss(
    split.shard(x, rank),
    split.shard(wanted, rank),
    lambda q, k, v: lh.distributed.attention(q, k, v, split=split, plan="ring", causal=True),
)
mine.backward()  # gradients of keys and values are sent to the ranks that own them
for weight in weights:
    dist.all_reduce(weight.grad)  # gradients of weights are summed, as usual
total = mine.detach().clone()
dist.all_reduce(total)
gradients = [weight.grad for weight in weights]

for weight in weights:
    weight.grad = None
alone = loss(x, wanted, lambda q, k, v: lh.attention(q, k, v, causal=True))
alone.backward()
torch.testing.assert_close(total, alone.detach())
for weight, gradient in zip(weights, gradients, strict=True):
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-6)
    weight.data -= 0.1 * gradient  # the step, the same on every rank
print(f"rank {rank} of {world}: {split.lengths[rank]} tokens, loss {total:.4f}, as in one process")
dist.destroy_process_group()
