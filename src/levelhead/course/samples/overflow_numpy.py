import numpy as np

largest = float(np.finfo(np.float16).max)
print("largest_half", largest)
print("limit_half", np.log(largest))  # above this score exp is infinite in float16

s = np.array([30, 2, -3], np.float16)  # an undivided head reaches such scores
with np.errstate(over="ignore", invalid="ignore"):
    naive = np.exp(s) / np.exp(s).sum()  # inf / inf
shifted = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
print("nan_naive", int(np.isnan(naive).sum()))  # weights that are no number
print("nan_shifted", int(np.isnan(shifted).sum()))
