"""levelhead against its peers on the machine at hand: `levelhead bench`.

cases, bars (the cells and what they must reach) · problems, inputs, additive, models (arrays and the truth) · peers
(implementations) · measure, memory, limits · judge (verdicts) · run (all of it in order) · report, plot.
"""
