"""An interpreter on a file system that never answers delays the guest it is for, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.client.guests import start_spec
from sublet.errors import SubletError
from sublet.wire.guests import GuestSpec
from tests.security.conftest import Place
from tests.traces import until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system that never answers"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="there is no FUSE here"),
]


@contextlib.contextmanager
def never_answers() -> Iterator[tuple[Path, int]]:
    """A folder of a file system whose server reads no request, and the server's end."""
    with tempfile.TemporaryDirectory(prefix="sublet-hangs-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        point = Path(folder) / "there"
        point.mkdir()
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"sublet-test", os.fsencode(point), b"fuse", 0, options) != 0:
            os.close(server)
            pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield point, server
        finally:
            os.close(server)  # who waits is told that there is nobody
            libc.umount2(os.fsencode(point), 2)


def ended_at_its_deadline(place: Place) -> bool:
    """Whether it came to have a guest, which on a machine that stands still may be after the end of the lease."""
    with place.ana.block("1B", ttl="8s", renew="never") as brief:
        try:
            guest = brief.start(["sleep", "100"], cwd="/")
        except SubletError:
            return False
        return guest.wait(timeout=60) != 0


def test_other_tenants_and_deadlines_do_not_wait_for_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.client.guests.PATIENCE_S", 250.0)  # it waits for as long as the others take
    failed: list[SubletError] = []
    with place.ben.block("1B") as slow, place.ana.block("1B") as lease:  # no cores, of which there may be one
        with never_answers() as (hangs, server):

            def start() -> None:
                try:
                    start_spec(slow, GuestSpec(argv=("true",), cwd="/", python=str(hangs / "bin" / "python3")))
                except SubletError as error:
                    failed.append(error)

            thread = threading.Thread(target=start)
            thread.start()
            until("somebody who asks the file system", lambda: select.select([server], [], [], 0)[0])
            assert lease.start(["true"], cwd="/").wait(timeout=60) == 0
            until("a guest whose deadline is kept", lambda: ended_at_its_deadline(place))
            assert not failed, "all of it while the other one waits"
        thread.join(250)
        assert failed, "once the file system is gone, so is the interpreter"
