"""Support of the example notebook: a second tenant that wants the device, and a picture."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Final

from sublet.errors import InvalidRequest

NAME: Final = "neighbour"
PATIENCE_S: Final = 60.0
SAVES_WITHIN: Final = 10
"""Times as long as the neighbour waits anyway: a guest that has saved nothing by then never will."""
COLOURS: Final = ((10, 18, 40), (24, 88, 130), (94, 190, 168), (246, 206, 112), (216, 88, 56), (96, 20, 44))


class Neighbour:
    """Another tenant, in another process: waits until a device is in use, then asks for it, and uses it briefly."""

    def __init__(self, after_s: float = 2.0, uses_s: float = 1.0) -> None:
        words = [sys.executable, "-m", "sublet.notebook.example", str(after_s), str(uses_s)]
        self._pipe, end = os.pipe()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.STDOUT)
        os.close(end)
        self._pid = process.pid
        process.returncode = 0  # it is waited for here: what a variable of a notebook holds must bear being saved
        self._said = self._read_until("\n")  # that it is here

    def story(self) -> str:
        """What became of it. Waits until it is over."""
        self._said += self._read_until("")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)
        return self._said.strip()

    def _read_until(self, last: str) -> str:
        """What it says until this, or until its end."""
        found, until = b"", time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                ready, _, _ = select.select([self._pipe], [], [], until - time.monotonic())
                part = os.read(self._pipe, 4096) if ready else b""
            except OSError:  # another kernel's, which is gone
                part = b""
            found += part
            if not part or (last and found.endswith(last.encode())):
                break
        return found.decode(errors="replace")


def main(after_s: float, uses_s: float) -> None:
    """Be the neighbour."""
    import sublet

    ours = sublet.connect(start=False)
    token = _token(ours)
    _print("the neighbour is here")
    lease = _the_one_in_use(ours, after_s)
    with sublet.connect(ours.address.url, token=token, as_tenant=True) as fabric:
        began = time.monotonic()
        _print(f"asks for the device that lease {lease} has")
        with fabric.gpu(min_vram="256MiB", ttl="20s", wait=PATIENCE_S, name="neighbour") as taken:
            _print(f"has it after {time.monotonic() - began:.1f} s: lease {taken.id}, epoch {taken.epoch}")
            with taken.activity("something urgent"):
                time.sleep(uses_s)
        _print("and has given it back")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _token(ours: Any) -> str:
    """The neighbour's program, which may have been here before."""
    try:
        answer = ours.request("POST", "/v1/tenants", {"id": NAME}, shape=dict)
    except InvalidRequest:
        answer = ours.request("PATCH", f"/v1/tenants/{NAME}", {"new_token": True}, shape=dict)
    return str(answer["token"])


def _the_one_in_use(fabric: Any, after_s: float) -> str:
    """A lease of a device that is being used, once it has been for a while, and something of it was saved: else there
    would be nothing to show, on a machine where all of it takes longer."""
    home, until = fabric.address.home, time.monotonic() + PATIENCE_S
    before = _saved(home)
    while time.monotonic() < until:
        for lease in fabric.leases():
            if lease.status == "active" and not lease.idle and any(want.kind == "gpu" for want in lease.wants):
                time.sleep(after_s)
                at_last = time.monotonic() + SAVES_WITHIN * after_s
                while home is not None and time.monotonic() < at_last and not _saved(home) - before:
                    time.sleep(0.05)
                return str(lease.id)
        time.sleep(0.1)
    raise SystemExit("no cell used a device")


def _saved(home: str | os.PathLike[str] | None) -> set[str]:
    """The checkpoints in the volumes of this office."""
    if home is None:
        return set()
    return {str(one) for one in Path(home).glob("blocks/named/*/*/*/checkpoints/*.manifest")}


def stripe_on_gpu(device: str, top: int, rows: int, width: int, height: int, turns: int) -> bytes:
    """The same as in the notebook, by Warp."""
    import warp

    wp: Any = warp
    kernel = _kernel()
    counts = wp.zeros((rows, width), dtype=wp.int32, device=device)
    wp.launch(kernel, dim=(rows, width), inputs=[top, width, height, turns, counts], device=device)
    return bytes(counts.numpy().astype("uint8").tobytes())


_made: list[Any] = []


def _kernel() -> Any:
    if not _made:
        import warp

        wp: Any = warp

        def escape(top: int, width: int, height: int, turns: int, counts: Any) -> None:
            y, x = wp.tid()
            re = 3.2 * float(x) / float(width) - 2.3
            im = 2.4 * float(y + top) / float(height) - 1.2
            a = re * 0.0  # a plain 0.0 would be a constant to Warp
            b = im * 0.0
            n = x * 0
            while n < turns and a * a + b * b < 4.0:
                t = a * a - b * b + re
                b = 2.0 * a * b + im
                a = t
                n += 1
            counts[y, x] = n

        numbers: dict[str, Any] = dict.fromkeys(("top", "width", "height", "turns"), int)
        escape.__annotations__ = {**numbers, "counts": wp.array2d(dtype=wp.int32)}
        _made.append(wp.kernel(escape))
    return _made[0]


def png(counts: bytes | bytearray, width: int, height: int) -> Any:
    """The picture, as notebooks show one."""
    from IPython import display

    shown: Any = display.Image
    return shown(data=_png(counts, width, height), width=2 * width)


def _png(counts: bytes | bytearray, width: int, height: int) -> bytes:
    most = max(counts, default=1)
    palette = b"".join(bytes(_colour(n, most)) for n in range(256))
    lines = b"".join(b"\0" + bytes(counts[y * width : (y + 1) * width]) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )


def _colour(count: int, most: int) -> tuple[int, int, int]:
    if count >= most:
        return (0, 0, 0)
    place = (count / most) ** 0.5 * (len(COLOURS) - 1)
    at = min(int(place), len(COLOURS) - 2)
    part = place - at
    low, high = COLOURS[at], COLOURS[at + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
