"""A one-line hint below a plain cell whose result is puzzling because cells run in two processes."""

from __future__ import annotations

import re
from typing import Any, Final

from sublet.durable.rebuild import graph_hint
from sublet.notebook.front import say

LOOKS_AT_GPUS: Final = re.compile(r"\.(?:system|getoutput)\(\s*['\"]\s*(nvidia-smi|nvtop|gpustat|nvcc)\b")
"""What IPython makes of ``!nvidia-smi``."""
ON_A_DEVICE: Final = "run_cell_magic("


class Hints:
    """Of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        shell.events.register("post_run_cell", self._look)

    def _look(self, result: Any) -> None:
        python = str(getattr(result.info, "transformed_cell", None) or "")
        if ON_A_DEVICE in python:
            return
        if command := LOOKS_AT_GPUS.search(python):
            say(
                self._shell,
                f"{command[1]} ran beside the notebook, which has no lease and may not see a GPU; to see the leased "
                "device put %%gpu above it, or run %gpu",
            )
        error = result.error_in_exec
        if error is not None and (hint := graph_hint(error)):
            say(self._shell, hint)
