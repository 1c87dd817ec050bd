"""levelhead against its peers on the machine at hand: `levelhead bench`.

cases, bars (what) · problems (arrays and the truth) · peers (who) · measure, memory, limits (how) ·
judge (from numbers to verdicts) · run (all of it in order) · report, plot (for people).
"""
