"""The lab: every claim about √d_k as an experiment, and the figures of the page."""

from levelhead.lab.figures import figure  # after the module of this name, whose place it takes

__all__ = ["figure"]
