"""`python -m levelhead` is `levelhead`."""

from __future__ import annotations

import sys

from levelhead.cli.main import main

sys.exit(main())
