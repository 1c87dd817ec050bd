"""A cost model of attention over many hosts, and the tables and the picture of docs/scaling.md.

Not installed: scripts in bench/ import it as `cluster`. The measurement is `levelhead cluster-bench`; its JSON is the
input here. load (work per rank) · scaling_model, fit, simulate (the model, its constants, and a simulation it is
compared with) · winners, winners_plot (which plan wins where) · tables, paper_tables.
"""
