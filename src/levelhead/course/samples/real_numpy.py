import numpy as np

tokens = ["[CLS]", "The", "dog", "chased", "the", "ball", "because", "it", "was", "fast", ".", "[SEP]"]
# q·k of "it" with every token in layer 5, head 11 of all-MiniLM-L6-v2, without a division
s = np.array([15.5468, -0.6039, 23.4488, 5.3702, 0.5169, 13.8558, -5.9302, 1.6958, -4.6742, 0.9523, 1.2235, 0.9285])
for name, divisor in [("divided", np.sqrt(32)), ("undivided", 1)]:
    p = np.exp(s / divisor - s.max() / divisor)
    p /= p.sum()
    assert tokens[p.argmax()] == "dog"  # the order stays
    print(f"top_{name}", p.max())
    print(f"left_{name}", 1 - (p**2).sum())
    print(f"ratio_{name}", p[2] / p[0])  # dog over [CLS], the second
