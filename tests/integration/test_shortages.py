"""Descriptors run out in an office and in a program that holds leases, by real limits, and come back."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.line import connect_data
from sublet.client.office import ensure_office
from tests.integration.test_client import end_office, run
from tests.traces import until

WAIT_S = 60.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("short") / "home"
    ensure_office(folder, words=("up", "--foreground", "--host-gpus", "1x4GiB"))
    yield folder
    end_office(folder)


def test_an_office_without_descriptors_is_whole_again_when_it_has_some(home: Path) -> None:
    """Its limit is lowered below what it has open. Who comes to the data door waits, and is welcomed in the end."""
    with sublet.connect(home=home) as fabric:
        pid = fabric.status().pid
        welcomed: list[bool] = []

        def come() -> None:
            with connect_data(fabric.address, ""):
                welcomed.append(True)

        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # Those are always open. Below a higher limit it may close one, and have room for another, at any moment.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        try:
            threads = [threading.Thread(target=come) for _ in range(3)]
            for thread in threads:
                thread.start()
            until(
                "a refusal in the log",
                lambda: "data_door: OSError: [Errno 24]" in (home / "office.log").read_text(),
                WAIT_S,
            )
            assert not welcomed, "the limit does not bind"
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        for thread in threads:
            thread.join(WAIT_S)
        assert len(welcomed) == 3
        with fabric.memory("64MiB") as lease:
            lease.check()
        [trouble] = [
            one
            for one in fabric.request("GET", "/v1/troubles", shape=list[dict[str, object]])
            if one["loop"] == "data_door"
        ]
        assert trouble["part"] == "office"
        assert trouble["shortages"]
        assert not trouble["errors"]
        assert not trouble["failing"]
    log = (home / "office.log").read_text()
    assert log.count("data_door: OSError: [Errno 24]") == 1, "once, and not for every repetition"


PROGRAM = """
import os, resource, sublet, time

with sublet.connect() as fabric:
    first = fabric.memory("64MiB", ttl=ttl_s, renew="always", renew_every=ttl_s / 8)
    while fabric._keeper._news is None or not fabric._transport._idle:
        time.sleep(0.01)  # until it listens for news, and has a connection for renewals
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        print(error.errno)
    time.sleep(1.5 * ttl_s)
    print(first.status)
    for fd in held:
        os.close(fd)
    second = fabric.memory("64MiB", ttl=ttl_s, renew="always", renew_every=ttl_s / 8)
    time.sleep(1.25 * ttl_s)
    print(first.status, second.status)
"""


def test_a_program_without_descriptors_keeps_its_leases(home: Path) -> None:
    done = None
    for ttl_s in (2.0, 12.0):  # a program that gets no processor for a second has missed a renewal of the short one
        done = run(f"ttl_s = {ttl_s}\n{PROGRAM}", home)
        if done.stdout.split() == ["24", "active", "active", "active"]:
            break
    assert done is not None
    assert done.stdout.split() == ["24", "active", "active", "active"], done.stderr
