import torch

s = torch.tensor([6.0, 0.0], dtype=torch.float64, requires_grad=True)
p = s.softmax(0)[0]
p.backward()
print("p", p.item())
print("slope", s.grad[0].item())

s = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
J = torch.autograd.functional.jacobian(lambda s: s.softmax(0), s)
print("j_11", J[0, 0].item())
print("j_12", J[0, 1].item())
print("j_sum", J.trace().item())
