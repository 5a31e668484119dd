"""The Grafana dashboard: each of its queries is answered by a real Prometheus that reads an office and a studio."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import pytest

from tests.integration.deploy_stage import DEPLOY, PATIENCE_S, Machine, machine_stage
from tests.traces import until

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus")]
WORK: Final = (
    (0, ["lease", "acquire", "--gpu", "1GiB", "--ttl", "1m", "--json"]),
    (75, ["lease", "acquire", "--gpu", "64GiB"]),
)


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with machine_stage() as made:
        made.start_office()
        made.start("sublet-studio", "--listen", "127.0.0.1:0")
        until("the studio is up", lambda: "The studio is up" in made.said("sublet-studio"), PATIENCE_S)
        until("the office answers", lambda: made.readiness() == (200, []), PATIENCE_S)
        yield made


@contextlib.contextmanager
def prometheus(machine: Machine, folder: Path) -> Iterator[str]:
    """As ``prometheus.yml`` says it, each second, with the places of this machine; its address. Ended by its pid."""
    config = (DEPLOY / "prometheus.yml").read_text()
    for there, here in (
        ("127.0.0.1:8320", urlsplit(machine.address).netloc),
        ("/etc/prometheus/sublet-token", str(folder / "token")),
        ("scrape_interval: 15s", "scrape_interval: 1s"),
    ):
        assert there in config
        config = config.replace(there, here)
    (folder / "prometheus.yml").write_text(config)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # it may listen there, and no other gets the port meanwhile
        at = f"127.0.0.1:{reserved.getsockname()[1]}"
        words = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={at}",
            "--log.level=error",
        ]
        with open(folder / "said", "wb") as said:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            yield f"http://{at}"
        finally:
            process.kill()
            process.wait()


def evaluated(address: str, query: str) -> list[Any]:
    """Its result; a query that Prometheus does not take fails the test, one that is not answered yet has none."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{urlencode({'query': query})}", timeout=PATIENCE_S) as got:
            found: list[Any] = json.load(got)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 503:  # it starts
                return []
            raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:  # it does not listen yet
        return []


def test_prometheus_answers_every_query_of_the_dashboard(machine: Machine, tmp_path: Path) -> None:
    """With a value each: a metric that is not there, or is called otherwise, would give none."""
    for name, said in (("add", ["--tenant", "local"]), ("set", ["--operator"])):
        assert machine.run("person", name, "olga", *said).returncode == 0
    made = machine.run("person", "token", "olga", "--label", "prometheus", "--read-only")
    (tmp_path / "token").write_text(made.stdout)

    def work() -> None:
        """Something of each kind that is counted."""
        for status, words in WORK:
            done = machine.run(*words)
            assert done.returncode == status, done
            if status == 0:
                assert machine.run("lease", "release", json.loads(done.stdout)["id"]).returncode == 0
        for path in ("/", "/v1/sessions"):
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{machine.address}{path}"):
                pass
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{machine.address}/sign-in", b""):
            pass

    work()
    with prometheus(machine, tmp_path) as address:
        left = sorted(set(queries()))
        assert len(left) > 25

        def are_answered() -> bool:
            while left and evaluated(address, left[-1]):
                left.pop()
            return not left

        try:
            until("a value for each query", are_answered, PATIENCE_S)
        except AssertionError:
            raise AssertionError(
                f"no value for {left[-1]}, {len(left) - 1} not asked for: {(tmp_path / 'said').read_text()}"
            ) from None
        for job in ("sublet-studio", "sublet-office"):
            assert evaluated(address, f'up{{job="{job}"}}')[0]["value"][1] == "1"
        assert not evaluated(address, "sublet_no_such_metric")


def test_the_offices_numbers_are_for_operators(machine: Machine) -> None:
    """Also behind the studio; to others there is nothing there."""
    assert machine.run("tenant", "add", "physics").returncode == 0  # the tenant of the office's owner has one person
    member = machine.run("person", "add", "ana", "--tenant", "physics")
    assert member.returncode == 0, member
    for token, status in ((member.stdout.strip(), 404), ("nothing", 401)):
        request = urllib.request.Request(
            f"{machine.address}/metrics/office", headers={"authorization": f"Bearer {token}"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        with caught.value:
            assert caught.value.code == status
