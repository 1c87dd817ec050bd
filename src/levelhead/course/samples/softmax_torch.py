import torch

for letter, row in zip("abcd", [[7, 3], [4, 5], [1, 10], [25, 2, -3]]):
    for i, p in enumerate(torch.tensor(row, dtype=torch.float64).softmax(0), 1):
        print(f"p_{letter}_{i}", p.item())

s = torch.tensor([7.0, 3.0], dtype=torch.float64)
p = (s + 100).softmax(0)
print("p_a_1", p[0].item())  # the same as without the 100
print("ratio_a", (p[0] / p[1]).item())  # e to the gap, 4
