"""What watching leaves: tallies per head, records, runs, and the files they are stored in.

NumPy alone, except where a file format needs its package. Nothing here sees a model, judges or draws.
"""
