"""Attention over many hosts, measured here and carried further on paper: `levelhead cluster-bench`.

problem, traffic (what there is to compute and to move, exactly) · cases, measure, report (the
measurement, under torchrun) · scaling_model, fit, simulate (a cost model, its constants, and a
simulation it is held to) · winners, winners_plot (which plan wins where). Only `measure` meets
torch.
"""
