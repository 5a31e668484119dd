"""``python -m tests.security.users_office HOME``: run by another user, tries everything in guests of his tenant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sublet
from sublet.client.office import ensure_office
from tests.security.test_inside import PYTHON, SYSTEMS, in_command, in_worker, is_everybodys


def main(home: Path) -> None:
    ensure_office(home, words=("up", "--foreground"))
    with sublet.connect(home=home) as owner:
        try:
            token = owner.request("POST", "/v1/tenants", {"id": "ben"}, shape=dict)["token"]
            with sublet.connect(home=home, token=token, as_tenant=True) as ben:
                python = PYTHON if is_everybodys(PYTHON) else SYSTEMS
                found = {
                    "command": in_command(ben, python),
                    "worker": in_worker(ben, warm=False, python=python),
                }
                if python == PYTHON:
                    found["warm worker"] = in_worker(ben, warm=True)
        finally:
            owner.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
