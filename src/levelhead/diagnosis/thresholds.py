"""Where a number starts to mean something, and who says so.

Constants only. None of them is a verdict by itself: a healthy model has saturated heads, sinks and logits in the
hundreds; `diagnose` combines them. arXiv numbers name the source; "own" is a choice of this project, with its reason.
"""

from __future__ import annotations

# ---- the largest |logit| of a head, after the scale
ORDINARY = 30.0  # Grok-1 caps here, and clipping here costs no loss (2507.20534, App. D)
CLIPPED = 100.0  # the τ of QK-Clip; an unclipped run "quickly exceeds 1000" (2507.20534, 2.1)
DETERIORATES = 1e3  # the loss suffers from here on (2309.14322, 3.3); healthy: 318 (2410.05258)
DIVERGES = 1e4  # "all points with attention logits above 1e4 diverged" (2309.14322, 3.3)

# ---- growth of it
POINTS = 8  # own: fewer cannot be told from luck at SIGNIFICANT
SIGNIFICANT = 3.0  # own: Mann-Kendall z, and of a random walk's rise; p = 0.0013: a watch looks at hundreds of heads
AHEAD = 4.0  # own: a pace is trusted for four times as long as it was seen
HALVES = 2.0  # own: the factor over half the watch is trusted for two more halves
QUARTERS = 3.0  # own: and that over its last quarter for three more quarters; more alarmed in healthy trainings
CLEAR = 4.0  # own: a rise over 16 points or more, in standard deviations around its line
MISSED = 0.05  # own: less likely than this, samples would not have had a row in all the steps since
GROWN = 1.5  # own: half as much again is more than the noise of a maximum over batches

# ---- learning
# A healthy head of all-MiniLM-L6-v2 has one-hot weights (mean top-1 0.9996) and still gets 0.003 of
# the median gradient that the model's other heads get. A frozen one is far below that.
NO_GRADIENT = 1e-4
STEADY = 3  # own: the last so many observations must agree, where there are as many

# ---- the scale
SCALE_TOLERANCE = 1.1  # own: a factor; √2, two heads for one, is the closest mistake to tell apart
SCALE_EXACT = 1.02  # own: for mistakes whose numbers YaRN's factors come near to; bfloat16 rounds by 1.004
SCALE_CONFIGURED = 1.05  # own: a configuration gives one number, and no mistake has to be told from another
SCALE_INITIAL = 1.005  # own: a learned scale this close to a known mistake starts there; trained ones pass by
SCALE_FAR = 2.0  # own: long-context factors that are meant stay below, 1.8 for YaRN's 32
SCALE_ROUNDED = 1.005  # bfloat16 rounds by 1.004: a factor this close below a bound counts as the bound

# ---- what a head attends to
SINK = 0.3  # mean weight on the first key (2410.10781, 2603.05498)
SINK_KEYS = 16  # own: over fewer keys any head seems to favour the first
SINK_OVER_UNIFORM = 2.0  # own: and twice what equal weights would put there

# ---- number formats and caps
FLOAT16_MAX = 65504.0  # the largest float16
FLOAT16_NEAR = FLOAT16_MAX / 4  # own: two doublings away
CAP_MEAN = 0.9  # own: tanh' is 0.19 here; where a typical row's maximum sits, the cap holds it back
CAP_ALL = 0.95  # own: the root mean square of all logits; tanh' is 0.1 here
CAP_ROUNDED = 1.001  # own: logits up to here are within the cap but for rounding
CAP_MAX = 0.99  # own: tanh' is 0.02 here
