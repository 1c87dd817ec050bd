"""Exact attention over a sequence that is spread over ranks of torch.distributed.

Importing this imports torch; `import levelhead` does not. The ranks, their addresses and their launcher are
torch.distributed's: nothing here starts a process or opens a port.
"""

from __future__ import annotations

from levelhead.extras import command, missing

if _error := missing("levelhead.distributed", "torch", install=command("torch")):
    raise _error

from levelhead.distributed.attention import attention, observe
from levelhead.distributed.split import Split
from levelhead.distributed.trace import Event, Trace
from levelhead.distributed.whole import gather
from levelhead.distributed.wire import LostRankError

__all__ = ["Event", "LostRankError", "Split", "Trace", "attention", "gather", "observe"]
