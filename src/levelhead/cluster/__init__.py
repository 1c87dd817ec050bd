"""The measurement behind `levelhead cluster-bench`: attention over ranks, under torchrun.

problem, traffic (an attention problem, and the bytes that each plan moves) · cases, measure, session, report. Only
`measure` imports torch at the top. The cost model for many hosts is in bench/cluster, which is not installed.
"""
