"""What a tenant's guest writes cannot work the terminal of an operator who reads its log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence

import sublet
from tests.security.conftest import Place

WORDS = ["printf", r"\033[31mred\033[0m \033]0;owned\007 \033[2Jend\n"]


def on_a_terminal(place: Place, words: Sequence[str]) -> bytes:
    master, slave = pty.openpty()
    env = {**os.environ, "SUBLET_HOME": str(place.home)}
    child = subprocess.Popen([sys.executable, "-m", "sublet", *words], stdout=slave, stderr=slave, env=env, cwd="/")
    os.close(slave)
    found = b""
    try:
        while piece := os.read(master, 4096):
            found += piece
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert child.wait(timeout=60) == 0, found
    return found


def written_by(fabric: sublet.Fabric) -> str:
    with fabric.cpu(1) as lease:
        guest = lease.start(WORDS, cwd="/")
        assert guest.wait(timeout=60) == 0
    return guest.id


def test_logs_of_a_tenant_on_a_terminal_are_text_and_colours(place: Place) -> None:
    guest = written_by(place.ben)
    found = on_a_terminal(place, ["logs", guest])
    assert b"\x1b[31mred\x1b[0m" in found
    assert b"end" in found
    assert found.count(b"\x1b") == 2
    assert b"\x07" not in found
    done = subprocess.run(
        [sys.executable, "-m", "sublet", "logs", guest],
        env={**os.environ, "SUBLET_HOME": str(place.home)},
        capture_output=True,
    )
    assert done.stdout.count(b"\x1b") == 4, "into a file it goes as it is"


def test_ones_own_are_shown_as_they_are(place: Place) -> None:
    assert on_a_terminal(place, ["logs", written_by(place.owner)]).count(b"\x1b") == 4
