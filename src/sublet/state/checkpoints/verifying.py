"""``python -m sublet.state.checkpoints.verifying [FOLDER]``: verifies every checkpoint in a folder.

One JSON document on standard output, and exit status 0 if nothing is wrong, 1 if something is. It reads every byte and
loads no object. Without FOLDER it looks into the volume of the lease that it runs under, which is how
``sublet volume verify`` uses it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from sublet.errors import InvalidRequest, SubletError
from sublet.state.checkpoints.store import StoreVerdict, verify

_NOTHING: Final = StoreVerdict(problems=(), checkpoints=(), packs=0, read_bytes=0)
"""A folder without a save: other files have no checksums that could be wrong."""


def main(arguments: Sequence[str]) -> int:
    """Look, and say what was found."""
    folder = arguments[0] if arguments else os.environ.get("SUBLET_BLOCK", "")
    try:
        if not folder:
            raise InvalidRequest("there is no volume here", do="Name a folder, or run it under a lease of blocks.")
        found = verify(folder) if os.path.isdir(os.path.join(folder, "checkpoints")) else _NOTHING
    except SubletError as error:
        report = {"ok": False, "checkpoints": [], "packs": 0, "read_bytes": 0, "problems": [error.message]}
    else:
        report = {
            "ok": found.ok,
            "checkpoints": list(found.checkpoints),
            "packs": found.packs,
            "read_bytes": found.read_bytes,
            "problems": list(found.problems),
        }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
