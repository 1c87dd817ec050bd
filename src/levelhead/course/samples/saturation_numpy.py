import numpy as np

p = 1 / (1 + np.exp(-6))  # two keys, a gap of 6
print("p", p)
print("slope", p * (1 - p))

s = np.array([2.0, 0.0, -1.0])
p = np.exp(s) / np.exp(s).sum()
J = np.diag(p) - np.outer(p, p)  # line i: how weight i moves when each score moves
print("j_11", J[0, 0])
print("j_12", J[0, 1])
print("j_sum", np.trace(J))  # the same as 1 - (p**2).sum()
