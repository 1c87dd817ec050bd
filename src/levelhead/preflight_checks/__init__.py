"""`lh.preflight`: changes one thing of a model's input or inside at a time, and says what moved that must not."""

from __future__ import annotations

from levelhead.extras import command, missing

if _error := missing("levelhead.preflight", "torch", install=command("watch")):
    raise _error
