"""Our side: an office in a folder of its own, started as a person starts one, and the requests it is sent."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.load.http1 import Address, BadAnswer, Request, Step, ask
from benchmarks.procs import Child, wait_until

__all__ = ["DISTRIBUTIONS", "Office", "sublet_command"]

DISTRIBUTIONS: Final = ("sublet", "msgspec", "starlette", "uvicorn", "uvloop", "httptools")
LEASE_BYTES: Final = 64 << 10
"""Small, so that ten thousand leases fit into any machine's memory. Nothing is allocated by it."""


class Office:
    """`sublet up --foreground` with a state folder of its own: the default journal, every answer durable."""

    name: Final = "sublet"

    def __init__(self, folder: Path, *more: str) -> None:
        """``more`` options of `sublet up`."""
        from sublet.client.home import home_dir, socket_path

        self._home = folder / "office"
        # The user's state folder is moved as well: the heads of the audit chain are kept there, outside the home.
        self.env = {**os.environ, "SUBLET_HOME": str(self._home), "XDG_STATE_HOME": str(folder / "state")}
        for name in ("SUBLET_URL", "SUBLET_TOKEN", "SUBLET_AS_TENANT"):
            self.env.pop(name, None)
        self.address = Address(unix=str(socket_path(home_dir(self._home, self.env))))
        self.child = Child([*sublet_command(), "up", "--foreground", *more], name=self.name, env=self.env)
        try:
            wait_until(self._answers, within_s=20, what="the office did not answer")
        except BaseException:
            self.child.end()
            raise

    @property
    def pid(self) -> int:
        return self.child.pid

    def cycle(self) -> list[Step]:
        """Acquire, release. What etcd needs a record under a lease for, the grant itself holds."""
        return [
            self.acquire(ttl_s=60),
            Step(path="/v1/leases/<<id>>/release", body='{"busy":0.0}', expect='"status":'),
        ]

    def nothing(self) -> list[Step]:
        """As many requests, and nothing to decide, to write or to order."""
        return [Step(method="GET", path="/v1/hello", expect='"wire":')] * 2

    def acquire(self, *, ttl_s: float) -> Step:
        """A grant is the only answer that counts."""
        return Step(
            path="/v1/leases",
            body=f'{{"request_id":"bench-<<n>>","wants":[{{"kind":"memory","amount":{LEASE_BYTES}}}],"ttl":{ttl_s:.1f},'
            '"wait":0.0,"holder":"benchmark"}',
            expect='"answer":"grant"',
            take={"id": ('"id":"', '"'), "epoch": ('"epoch":[', "]")},
        )

    def renewal(self, taken: Sequence[Mapping[str, str]]) -> Request:
        """The leases of one program in one message; a program with one lease has a route of its own."""
        if len(taken) == 1:
            (one,) = taken
            body = f'{{"epoch":[{one["epoch"]}],"active":true}}'
            return Request(method="POST", path=f"/v1/leases/{one['id']}/renew", body=body)
        items = ",".join(f'{{"lease":"{one["id"]}","epoch":[{one["epoch"]}],"active":true}}' for one in taken)
        return Request(method="POST", path="/v1/renewals", body=f'{{"items":[{items}]}}')

    def client(self, number: int) -> Mapping[str, str]:
        """No client needs a value of its own."""
        return {}

    def _answers(self) -> bool:
        if not self.child.alive:
            raise RuntimeError(f"the office ended at once: {self.child.complaint()}")
        try:
            return ask(self.address, Request(method="GET", path="/v1/status", body=""), timeout_s=1.0).status == 200
        except (OSError, BadAnswer):
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leases may still live, so it is not asked but told. Where that is not obeyed, its process is ended."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [*sublet_command(), "down", "--now"], env=self.env, capture_output=True, timeout=10, check=False
                )
        finally:
            self.child.end()


def sublet_command() -> list[str]:
    """The installed command beside this interpreter, which is what people run; else the module."""
    script = shutil.which("sublet", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-m", "sublet"]
