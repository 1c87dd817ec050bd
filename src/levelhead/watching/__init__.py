"""`lh.watch`: hooks on a model's modules, interception of its attention calls, statistics per head and step.

`watch` is the entry, `intercept` catches calls, `measure` computes their statistics, `step_tallies` adds them up.
`doctor` watches a model over a text and diagnoses it.
"""
