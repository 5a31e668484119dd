"""etcd, as Debian packages it (``apt-get install etcd-server``), spoken to through its JSON gateway.

One member, every write on disk before its answer (the default, which nothing here changes). The gateway translates JSON
to gRPC inside etcd, so a gRPC client would have less to wait for; it is what a plain HTTP client gets, as with ours.

A lease alone says nothing about who has what, so the cycle that compares with acquire and release is: grant a lease,
put a record under it, revoke it (which removes the record). Those are three durable writes and three requests. Ours is
two requests: the record is part of the grant.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.load.http1 import Address, BadAnswer, Request, Step, ask
from benchmarks.procs import Child, free_port, wait_until

__all__ = ["Etcd", "encoded"]

_RECORD: Final = json.dumps(
    {"tenant": "local", "holder": "benchmark", "wants": [{"kind": "memory", "amount": 1 << 20}], "tier": "interactive"}
)


class Etcd:
    """A member of its own in ``folder``, on loopback ports that were free."""

    name: Final = "etcd"

    def __init__(self, folder: Path) -> None:
        self.version()
        client, peer = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self.address = Address(port=int(client.rpartition(":")[2]))
        command = [
            "etcd",
            "--name",
            "bench",
            "--data-dir",
            str(folder / "etcd"),
            "--logger",
            "zap",
            "--log-level",
            "error",
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"bench={peer}",
        ]
        self.child = Child(command, name=self.name, folder=folder)
        try:
            wait_until(self._healthy, within_s=20, what="etcd did not become healthy")
        except BaseException:
            self.child.end()
            raise

    @staticmethod
    def version() -> str:
        """What is installed; raises where nothing is."""
        if shutil.which("etcd") is None:
            raise FileNotFoundError("etcd is not installed; `apt-get install etcd-server` brings it.")
        said = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
        match = re.search(r"etcd Version: (\S+)", said)
        return match[1] if match else "unknown"

    def cycle(self) -> list[Step]:
        """Lease grant, put under the lease, revoke."""
        return [
            Step(path="/v3/lease/grant", body='{"TTL":60}', expect='"TTL":"60"', take={"id": ('"ID":"', '"')}),
            Step(path="/v3/kv/put", body='{"key":"<<key>>","value":"<<value>>","lease":"<<id>>"}', expect='"revision"'),
            Step(path="/v3/lease/revoke", body='{"ID":"<<id>>"}', expect='"revision"'),
        ]

    def client(self, number: int) -> Mapping[str, str]:
        """Each client has a slot of its own, as each of our leases has."""
        return {"key": encoded(f"slot/{number}"), "value": encoded(_RECORD)}

    def _healthy(self) -> bool:
        if not self.child.alive:
            raise RuntimeError(f"etcd ended at once: {self.child.complaint()}")
        try:
            answer = ask(self.address, Request(method="GET", path="/health", body=""), timeout_s=1.0)
        except (OSError, BadAnswer):
            return False
        return b'"health":"true"' in answer.body

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.end()


def encoded(text: str) -> str:
    """As the gateway wants bytes."""
    return base64.b64encode(text.encode()).decode()
