"""A tenant that asks as often as it can, whatever the answer: ``python -m benchmarks.load.flooding``.

Its first line says where and how; each further line begins a flood, or ends it and is answered with what came of it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from typing import Any, Final

from benchmarks.load.http1 import Address, connect, take_answer

__all__ = ["Caller"]

STUCK_AFTER_S: Final = 30.0


class Caller:
    """One connection of a tenant."""

    def __init__(self, address: Address, token: str) -> None:
        self._sock = connect(address, timeout_s=STUCK_AFTER_S)
        self._head = f"Host: localhost\r\nAuthorization: Bearer {token}\r\nSublet-As-Tenant: 1\r\n"

    def ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and document of the answer."""
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(text)}\r\n\r\n"
        self._sock.sendall(head.encode() + text)
        data = b""
        while (answer := take_answer(data)) is None:
            more = self._sock.recv(1 << 16)
            if not more:
                raise ConnectionError("the office closed a connection")
            data += more
        return answer.status, json.loads(answer.body)

    def lease(self, number: str, amount: int) -> tuple[int, str]:
        """A lease of so much memory, which is tried for once; its id, or nothing."""
        wants = [{"kind": "memory", "amount": amount}]
        status, doc = self.ask("/v1/leases", {"request_id": number, "wants": wants, "ttl": 60.0, "wait": 0.0})
        return status, doc["lease"]["id"] if 200 <= status < 300 and "lease" in doc else ""

    def release(self, lease: str) -> int:
        return self.ask(f"/v1/leases/{lease}/release", {"busy": 0.0})[0]

    def close(self) -> None:
        self._sock.close()


def _flood(address: Address, token: str, name: str, ended: threading.Event, counts: Counter[int]) -> None:
    caller, number = Caller(address, token), 0
    while not ended.is_set():
        number += 1
        status, lease = caller.lease(f"{name}-{time.time_ns()}-{number}", 64 << 10)
        counts[status] += 1
        if lease:
            counts[caller.release(lease)] += 1
    caller.close()


def main() -> int:
    said: dict[str, Any] = json.loads(sys.stdin.readline())
    address, connections = Address(**said["address"]), said["connections"]
    print(json.dumps({"ready": True}), flush=True)
    ended, threads, counts = threading.Event(), [], Counter[int]()
    for line in sys.stdin:
        if json.loads(line)["flood"]:
            ended.clear()
            counts.clear()
            threads = [
                threading.Thread(target=_flood, args=(address, said["token"], f"flood-{n}", ended, counts), daemon=True)
                for n in range(connections)
            ]
            for thread in threads:
                thread.start()
        else:
            ended.set()
            for thread in threads:
                thread.join()
        print(json.dumps({"counts": {str(status): count for status, count in counts.items()}}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
