"""What an attention call is: its options, their checks and their one normal form; the arrays it takes and returns.

`options` is the description that every front end shares. Nothing here computes attention.
"""
