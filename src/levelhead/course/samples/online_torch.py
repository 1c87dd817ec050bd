import torch

scores = torch.tensor([1.0, 2, 0, 1, 4, 2, 3, -1], dtype=torch.float64)
values = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6], dtype=torch.float64)
m, total, a = torch.tensor(-torch.inf), 0.0, 0.0
for tile in torch.randperm(4):  # any order
    s, v = scores.view(4, 2)[tile], values.view(4, 2)[tile]
    new = torch.maximum(m, s.max())
    factor, e = (m - new).exp(), (s - new).exp()
    m, total, a = new, factor * total + e.sum(), factor * a + e @ v
print("output", (a / total).item())

p = scores.softmax(0)  # the whole row at once
print("output", (p @ values).item())
print("entropy", torch.distributions.Categorical(p).entropy().item())
