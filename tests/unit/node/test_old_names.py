"""A supervisor of the version before lives on through an upgrade. What it starts by old names is there."""

from __future__ import annotations

import subprocess
import sys

from sublet.node.sandbox.carried import enter_carried
from sublet.supervisor.isolation.carried import enter_carried as by_its_old_name


def test_the_walls_of_a_tenants_guest_are_found_by_their_old_name() -> None:
    assert by_its_old_name is enter_carried


def test_the_program_that_cleans_a_card_is_started_by_its_old_name() -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    words = [
        [sys.executable, "-m", name, uuid, "--look"]
        for name in ("sublet.agent.clean_card", "sublet.node.agent.clean_card")
    ]
    before, now = (subprocess.run(one, capture_output=True, text=True, timeout=60) for one in words)
    assert (before.returncode, before.stdout) == (now.returncode, now.stdout)
    assert before.stderr.splitlines()[-1:] == now.stderr.splitlines()[-1:]
