import torch

largest = torch.finfo(torch.float16).max
print("largest_half", largest)
print("limit_half", torch.tensor(largest).double().log().item())

s = torch.tensor([30.0, 2.0, -3.0], dtype=torch.float16)
print("nan_naive", int((s.exp() / s.exp().sum()).isnan().sum()))  # inf / inf
print("nan_shifted", int(s.softmax(0).isnan().sum()))  # torch subtracts the maximum

p = s.double().softmax(0)
jacobian = p.diag() - p.outer(p)  # the gradient through the softmax
assert torch.linalg.matrix_norm(jacobian, 2) <= 0.5  # cannot explode, whatever the scores
