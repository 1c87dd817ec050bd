"""The one table of attention functions that `watch` understands: one file per library, an entry per function.

An entry (`known.Known`) says where a function lives, what its arguments mean and which of them are not described.
Torch's `scaled_dot_product_attention` and levelhead's own functions are wrapped in `intercept`, transformers' interface
in `intercept_transformers`, because remedies change those calls; their arguments are read here, too.
"""
