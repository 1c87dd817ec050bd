"""The lab: every claim about √d_k as an experiment, and the figures of the page."""
