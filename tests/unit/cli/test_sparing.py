"""An office starts without what it would never look at, and has it all the same if it does."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

PACKAGE: Final = "uvicorn"
LOOK: Final = f"""
import gc, sys
from sublet.cli.sparing import spare
spare()
assert not gc.isenabled()
import sublet.engines.local
package = sys.modules[{PACKAGE!r}]
assert "{PACKAGE}.protocols.http.httptools_impl" in sys.modules
print(*sorted({{"click", "{PACKAGE}.main", "multiprocessing"}} & set(sys.modules)), type(package).__name__)
assert not hasattr(package, "__all__")
from {PACKAGE} import Config, run
import {PACKAGE}.config
assert {PACKAGE} is package and Config is {PACKAGE}.config.Config and callable(run)
print(*sorted({{"click", "{PACKAGE}.main"}} & set(sys.modules)), type(package).__name__)
"""


def test_what_an_office_does_not_use_is_loaded_when_somebody_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Unread", f"click {PACKAGE}.main module"]
