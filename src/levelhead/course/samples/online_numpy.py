import numpy as np

scores = np.array([1.0, 2, 0, 1, 4, 2, 3, -1]).reshape(4, 2)  # four tiles of two keys
values = np.array([3.0, 1, 4, 1, 5, 9, 2, 6]).reshape(4, 2)
m, total, a, b = -np.inf, 0.0, 0.0, 0.0  # total is the l of the text
for tile, (s, v) in enumerate(zip(scores, values)):
    new = max(m, s.max())
    factor, e = np.exp(m - new), np.exp(s - new)
    if tile == 2:  # the maximum grows from 2 to 4
        print("factor", factor)
        print("l_rescaled", factor * total)
    m, total, a, b = new, factor * total + e.sum(), factor * a + e @ v, factor * b + e @ s
print("output", a / total)
print("entropy", m + np.log(total) - b / total)
