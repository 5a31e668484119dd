"""The process that keeps a job in the background, as the program sees it that has started it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.notebook.batch import detached


def test_it_is_left_alone_and_put_away_once_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing complains of it when the program ends, and a program that goes on keeps no dead process for each job."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    left: list[Any] = []
    monkeypatch.setattr(detached, "sys", SimpleNamespace(executable=str(program)))
    monkeypatch.setattr(detached, "_left_alone", left)
    job: Any = SimpleNamespace(folder=tmp_path, log=tmp_path / "log", runner=7)
    try:
        assert detached.launch(job) == 7
        [first] = left
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert detached.launch(job) == 7
        assert first not in left
        assert not Path(f"/proc/{first}").exists()
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
