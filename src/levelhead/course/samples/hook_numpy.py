import numpy as np

rng = np.random.default_rng(3)
q = rng.standard_normal(64)  # one query: the word "it"
k = rng.standard_normal((9, 64))  # one key per word

for name, divisor in [("undivided", 1), ("divided", np.sqrt(64))]:
    s = k @ q / divisor  # nine scores
    p = np.exp(s - s.max())
    p /= p.sum()  # softmax: nine weights
    print(f"top_{name}", p.max())
    print(f"left_{name}", 1 - (p**2).sum())  # how much of the weights can still move
