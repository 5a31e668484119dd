"""The generator as a process: one JSON line in says what to do, each further line runs a window and is answered by one
JSON line. The end of its input is its end.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.load.closed import ClosedLoop
from benchmarks.load.http1 import Address, BadAnswer, Request, Step
from benchmarks.load.paced import Due, Paced


def main() -> int:
    first = sys.stdin.readline()
    if not first:
        return 0
    spec: dict[str, Any] = json.loads(first)
    load = _make(spec)
    gc.collect()
    gc.freeze()
    gc.disable()  # a window holds a bounded number of small lists; a collection in it would be measured as the server's
    _say({"ready": True})
    for line in sys.stdin:
        try:
            sample = load.run(**json.loads(line))
        except (BadAnswer, OSError, ValueError) as error:
            _say({"error": f"{type(error).__name__}: {error}"})
            return 1
        _say({"sample": asdict(sample)})
    load.close()
    return 0


def _make(spec: dict[str, Any]) -> ClosedLoop | Paced:
    address = Address(**spec["address"])
    if spec["kind"] == "closed":
        steps = [Step(**step) for step in spec["steps"]]
        return ClosedLoop(address, steps, spec["clients"])
    schedule = [Due(**{**due, "request": Request(**due["request"])}) for due in spec["schedule"]]
    return Paced(address, schedule, connections=spec["connections"])


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
