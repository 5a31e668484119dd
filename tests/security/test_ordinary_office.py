"""What tenants cannot do in root's office they cannot do in an ordinary user's: the same tests, run by such a user.

What cannot be tried there is named below with its reason, and a file that is in neither table fails.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.security.other_users import ROOT, User, closed_folder
from tests.traces import end_office

pytestmark = [
    pytest.mark.needs("setpriv"),
    pytest.mark.needs("unshare"),
    pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root"),
    pytest.mark.skipif(closed_folder(ROOT) is not None, reason="other users cannot enter this checkout"),
    pytest.mark.xdist_group("ordinary_office"),
]
ADA: Final = 64_011
HERE: Final = Path(__file__).parent
TRIED: Final = (
    "test_given_paths.py",
    "test_hidden_groups.py",
    "test_home.py",
    "test_hostile_bytes.py",
    "test_inside.py",
    "test_operator_files.py",
    "test_ordinary_programs.py",
    "test_out_of_memory_order.py",
    "test_rotation.py",
    "test_silent_connections.py",
    "test_tenant_limits.py",
    "test_terminal.py",
    "test_told_of_the_office.py",
    "test_unleased.py",
)
IN_SOAK: Final = ("test_saves_of_others.py", "test_warm_secrets.py")
"""Tried where the whole counts are asked for: they take as long as all the others together."""
SAME_FOR_BOTH: Final = (
    "test_a_changed_file_holds_without_a_restart",
    "test_a_file_with_a_mistake_is_said_with_its_line_and_keeps_an_office_from_starting",
    "test_a_tenant_with_nothing_left_is_removed_and_its_bill_stays",
    "test_groups_reservations_and_budgets_of_the_file_hold_as_a_whole",
    "test_which_limits_hold_is_said_with_where_each_is_from",
    "test_an_operators_token_makes_backups_in_one_folder_and_no_other_file",
    "test_the_operator_is_answered_beside_4300_silent_connections",
)
"""The same there: many commands, or the office's own server, of which none asks whose office it is."""
NOT_TRIED: Final = {
    "test_canary.py": "only root has a privileged part",
    "test_client_peer.py": "a client looks at owners the same way whoever it is",
    "test_copied_office.py": "the same for both, with a lock of each user's own",
    "test_descriptors_leave.py": "only root has guests that are another user's",
    "test_descriptors_outlive.py": "only root may mount an image",
    "test_doctor_strict.py": "it says of an ordinary user's office that it would not hold",
    "test_findings.py": "it reads the docs",
    "test_full_disk.py": "it runs both itself",
    "test_hanging_interpreter.py": "only root may mount a file system that never answers",
    "test_held_memory.py": "where no control group caps all guests together there is nothing to use up",
    "test_no_links.py": "only root copies mounts outside of a namespace of its own",
    "test_no_paths.py": "it reads the source",
    "test_ordinary_office.py": "this one",
    "test_parent_folders.py": "the other user is played by root",
    "test_port_peer.py": "a client looks at owners the same way whoever it is",
    "test_program_files.py": "asked of root alone",
    "test_races.py": "the other user is played by root",
    "test_root_devices.py": "it plays both itself",
    "test_shared_socket.py": "it runs both itself",
    "test_signed_checkpoints.py": "it has no office",
    "test_system_calls.py": "it reads tables",
    "test_system_programs.py": "it runs both itself",
}
PASSED_ON: Final = ("SUBLET_COLD", "SUBLET_FOLLOWERS", "SUBLET_FRAMES", "SUBLET_TOKENS")
LEFT_OUT: Final = {
    "test_two_offices_give_different_user_numbers": "only root's office gives tenants a user number",
    "test_each_kind_of_lease_has_caps": "this user has no control groups, where systemd gave it none",
    "test_all_guests_of_the_office_together_have_caps": "the same",
    "test_one_user_keeps_neither_the_operator_nor_another_user_out": "the other user would have to be played by root",
}
"""Of the files that are tried."""


@pytest.fixture
def ada() -> Iterator[User]:
    with tempfile.TemporaryDirectory(prefix="sublet-ada-", dir="/tmp", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        folder.chmod(0o755)
        env = {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": f"{folder}/ada"}
        found = User(ADA, folder / "ada", "", env=env, patience_s=3000)
        yield found
        for runtime in found.folder.glob("**/run"):
            end_office(runtime)
        shutil.rmtree(found.folder, ignore_errors=True)


@pytest.mark.timeout(1500)  # a whole run of other tests, which beside others takes minutes
def test_what_holds_in_roots_office_holds_in_an_ordinary_users(ada: User) -> None:
    whole = "SUBLET_FRAMES" in os.environ
    done = ada.run(
        *(sys.executable, "-m", "pytest", "-q"),
        *(word for plugin in ("cacheprovider", "xdist", "hypothesispytest") for word in ("-p", f"no:{plugin}")),
        *(f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", f"--basetemp={ada.folder}/tests"),
        *("-k", " and ".join(f"not {name}" for name in ("torch", *(() if whole else SAME_FOR_BOTH)))),
        *(str(HERE / name) for name in (*TRIED, *(IN_SOAK if whole else ()))),
        **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    line = next((line for line in done.stdout.splitlines() if "for a reason of their own" in line), "")
    assert set(re.findall(r"::(\w+)", line)) <= LEFT_OUT.keys(), line


def test_every_file_is_tried_or_has_its_reason() -> None:
    assert {path.name for path in HERE.glob("test_*.py")} == {*TRIED, *IN_SOAK, *NOT_TRIED}
    sources = "".join((HERE / name).read_text() for name in TRIED)
    assert [name for name in SAME_FOR_BOTH if f"def {name}(" not in sources] == []
