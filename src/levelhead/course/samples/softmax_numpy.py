import numpy as np


def softmax(s):
    e = np.exp(np.array(s, dtype=float) - max(s))  # only gaps to the largest logit are left
    return e / e.sum()


for letter, row in zip("abcd", [[7, 3], [4, 5], [1, 10], [25, 2, -3]]):
    for i, p in enumerate(softmax(row), 1):
        print(f"p_{letter}_{i}", p)
p = softmax([7 + 100, 3 + 100])
print("p_a_1", p[0])  # the same as without the 100
print("ratio_a", p[0] / p[1])  # e to the gap, 4
