"""An office that was killed comes back as `sublet up` started it, whoever starts it, until `sublet down`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.client.home import runtime_dir, socket_path
from tests.crash.office_process import Line
from tests.integration.office_stage import asked
from tests.integration.test_cli import Shell
from tests.traces import PATIENCE_S
from tests.traces import until as wait_until

CONNECT: Final = """
import sublet
with sublet.connect() as fabric:
    with fabric.gpu(min_vram="4GiB", wait=0) as lease:
        print(lease.devices[0].id)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "home")
    yield made
    made.end()


def kill(shell: Shell) -> None:
    """SIGKILL, and it is gone."""
    pid = shell("status", "--json").json["pid"]
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/fd").exists() and time.monotonic() < until:
        try:
            os.listdir(f"/proc/{pid}/fd")
        except OSError:
            break
        time.sleep(0.01)
    os.close(handle)


def give_back(shell: Shell, lease: str) -> None:
    """It lives until its device is seen to be free, and an office that has a lease is not ended by `down`."""
    assert shell("lease", "release", lease).status == 0
    with contextlib.closing(Line(socket_path(shell.home.resolve()))) as line:
        wait_until("the end of the lease", lambda: not asked(line, "GET", "/v1/leases").doc)


def gpus(view: Any) -> list[tuple[str, str, str]]:
    from sublet.values import format_size

    return [
        (device["id"].rpartition("/")[2], format_size(device["capacity"]), device["state"])
        for device in view["devices"]
        if device["kind"] == "gpu"
    ]


FOUR: Final = [(f"gpu{number}", "4GiB", "free") for number in range(4)]


def test_a_killed_office_has_its_devices_again_and_stays(shell: Shell) -> None:
    """Whoever starts it: a command, a program, the notebook's head start, `up` with the same settings or with none. A
    lease goes on where it was."""
    assert shell("up", "--host-gpus", "4x4GiB").status == 0
    lease = shell("lease", "acquire", "--gpu", "4GiB", "--ttl", "5m", "--json").json

    kill(shell)
    assert shell("status").status == 1, "status starts nothing"
    refused = shell("up", "--host-gpus", "2x1GiB")
    assert refused.status == 1
    assert "--host-gpus 4x4GiB" in refused.err
    assert "--host-gpus 2x1GiB" in refused.err
    assert "down`" in refused.err
    assert shell("status").status == 1, "and a refusal starts nothing"

    assert shell("lease", "show", lease["id"], "--json").json["status"] == "active"
    view = shell("status", "--json").json
    assert gpus(view) == FOUR
    assert view["embedded"] is False
    assert [device["leases"] for device in view["devices"]][:2] == [[lease["id"]], []]

    kill(shell)
    program = subprocess.run([sys.executable, "-c", CONNECT], env=shell.env, capture_output=True, text=True, timeout=60)
    assert program.stdout.strip() in {f"local/gpu{number}" for number in range(1, 4)}, program.stderr
    view = shell("status", "--json").json
    assert (gpus(view), view["embedded"]) == (FOUR, False)

    kill(shell)
    begun = "from sublet.notebook.warming import begin; begin().join()"
    subprocess.run([sys.executable, "-c", begun], env=shell.env, check=True, timeout=60)
    view = shell("status", "--json").json
    assert (gpus(view), view["embedded"]) == (FOUR, False)

    for words in (["up"], ["up", "--host-gpus", "4x4GiB"]):
        kill(shell)
        assert shell(*words).status == 0
        view = shell("status", "--json").json
        assert (gpus(view), view["embedded"]) == (FOUR, False)
    other = shell("up", "--host-gpus", "2x1GiB")
    assert other.status == 1
    assert "--host-gpus 4x4GiB" in other.err
    assert "down`" in other.err


def test_an_end_that_was_asked_for_forgets_and_any_other_does_not(shell: Shell) -> None:
    def comes_back(*, embedded: bool) -> None:
        lease = shell("lease", "acquire", "--gpu", "16MiB", "--ttl", "5m", "--json").json["id"]
        view = shell("status", "--json").json
        assert view["embedded"] is embedded
        assert (view["host_gpus"] == "") is embedded
        give_back(shell, lease)

    assert shell("up", "--host-gpus", "2x64MiB").status == 0
    pid = shell("status", "--json").json["pid"]
    os.kill(pid, signal.SIGTERM)  # a service manager, a reboot
    until = time.monotonic() + PATIENCE_S
    while shell("status").status == 0 and time.monotonic() < until:
        time.sleep(0.05)
    comes_back(embedded=False)
    assert shell("down", "--keep").status == 0
    comes_back(embedded=False)
    assert shell("down").status == 0
    comes_back(embedded=True)
    view = shell("status", "--json").json
    assert [device["state"] for device in view["devices"] if device["kind"] == "gpu"] == ["free", "lost"]
    assert shell("down").status == 0

    assert shell("up", "--host-gpus", "2x64MiB").status == 0
    lease = shell("lease", "acquire", "--gpu", "16MiB", "--ttl", "5m", "--json").json["id"]
    kill(shell)
    in_use = shell("down")  # leases live on, so it is an ordinary end of an office that has some
    assert in_use.status == 1
    assert "1 lease lives" in in_use.err
    give_back(shell, lease)
    kill(shell)
    assert shell("down").status == 0
    assert shell("up", "--host-gpus", "1x32MiB").status == 0, "nothing was remembered"


def test_a_damaged_file_is_an_error_with_a_remedy_that_works(shell: Shell) -> None:
    assert shell("up", "--host-gpus", "2x64MiB").status == 0
    kill(shell)
    path = shell.home / "started-with"
    path.write_bytes(path.read_bytes()[:-3])
    for words in (["lease", "acquire", "--gpu", "16MiB"], ["up"], ["up", "--host-gpus", "2x64MiB"]):
        done = shell(*words)
        assert done.status == 1
        assert "is damaged" in done.err
        assert "down` removes it" in done.err
    assert shell("status").status == 1, "no office was started that has something else"
    assert shell("down").status == 0
    assert shell("up", "--host-gpus", "1x64MiB").status == 0


def test_a_start_that_failed_is_not_remembered(shell: Shell) -> None:
    shell.home.mkdir(mode=0o700)
    (shell.home / "rates.toml").write_text("gpu = no number")
    assert shell("up", "--host-gpus", "2x64MiB").status == 1
    (shell.home / "rates.toml").unlink()
    assert shell("up", "--host-gpus", "1x64MiB").status == 0


def test_the_runtime_folder_may_be_gone_as_after_a_reboot(shell: Shell) -> None:
    import shutil

    assert shell("up", "--host-gpus", "2x64MiB").status == 0
    kill(shell)
    shutil.rmtree(runtime_dir(shell.home.resolve()))
    lease = shell("lease", "acquire", "--gpu", "16MiB", "--ttl", "1m", "--json").json
    view = shell("status", "--json").json
    assert view["embedded"] is False
    assert [device["id"] for device in view["devices"] if device["kind"] == "gpu"] == ["local/gpu0", "local/gpu1"]
    assert shell("lease", "release", lease["id"]).status == 0
