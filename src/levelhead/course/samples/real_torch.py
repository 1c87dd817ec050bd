import torch

# q·k of "it" with [CLS] The dog chased the ball because it was fast . [SEP]
# in layer 5, head 11 of all-MiniLM-L6-v2, without a division
s = torch.tensor([15.5468, -0.6039, 23.4488, 5.3702, 0.5169, 13.8558, -5.9302, 1.6958, -4.6742, 0.9523, 1.2235, 0.9285])
p = torch.softmax(s.double() / 32**0.5, 0)
undivided = p ** (32**0.5) / (p ** (32**0.5)).sum()  # powers of the divided weights
assert torch.allclose(undivided, s.double().softmax(0))
print("top_divided", p.max().item())
print("top_undivided", undivided.max().item())
print("left_divided", 1 - (p**2).sum().item())
print("ratio_undivided", (undivided[2] / undivided[0]).item())
