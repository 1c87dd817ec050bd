"""The core in NumPy, for the wheel that needs no compiler: `_core`'s functions from `reference`'s formulas.

The pure wheel carries this room, with `core.py` as `levelhead._core`; a compiled wheel does not have it. Which of the
two a wheel is, is fixed when it is built.
"""
