"""A session of the studio started, and resumed with a GiB of state, against JupyterHub starting a server and a kernel.

A person asks the studio for a session and runs the first `%%gpu` cell of a notebook in it: until that cell has its
answer, the lease was granted, recorded, handed over to the notebook's kernel, and the cell ran under it on the device.
For the second figure the kernel is started as well. The peer is what a person of a JupyterHub waits for: the user's
server, a kernel in it, and the answer of a first cell.

Resumed: the session rested, its device was free for others, and its state (an array of a GiB, kept on the device) was
saved in its volume. A person resumes it and runs the next cell, which reads the state. Its peers are the same start in
JupyterHub, without any state, and one whose second cell reads an array of a GiB from a file.
"""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Row, figure
from benchmarks.load.http1 import Address, take_answer
from benchmarks.load.http1 import connect as connect_to
from benchmarks.notebooks import DISTRIBUTIONS as NOTEBOOK
from benchmarks.notebooks import Kernel
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers import jupyterhub
from benchmarks.peers.jupyterhub import JupyterHub
from benchmarks.procs import wait_until
from benchmarks.rows.studio_500 import running_studio

STATE: Final = 1 << 30
PAIRS: Final = 10
PATIENCE_S: Final = 120.0
FIRST_CELL: Final = "1 + 1"
GPU: Final = "%%gpu --vram {mib}MiB --ttl 10m --stay-over 1MiB\n"

START: Final = "a session started, to the answer of its first cell"
START_KERNEL: Final = "the same, its kernel started as well"
RESUME: Final = "a session resumed with 1 GiB, to a cell that reads it, against a start without state"
RESUME_READ: Final = "the same, against a start and 1 GiB read from a file"


class Person:
    """The owner of the office, who uses the studio as a program does; the notebook beside it has the same sessions."""

    def __init__(self, office: Office, port: int) -> None:
        from sublet.studio.people import OWNER_TENANT, People

        people = People(Path(office.env["SUBLET_HOME"]) / "studio", wall_ns=time.time_ns, random=secrets.token_bytes)
        people.add("ana", OWNER_TENANT)
        self._token, self._address = people.new_token("ana"), Address(port=port)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        raw = json.dumps(body or {}).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._token}\r\n"
        with connect_to(self._address, timeout_s=PATIENCE_S) as sock:
            sock.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            data = b""
            while (answer := take_answer(data)) is None:
                more = sock.recv(1 << 16)
                if not more:
                    raise RuntimeError(f"the studio hung up after {data[:200]!r}")
                data += more
        if answer.status != 200:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {answer.body[:500]!r}")
        return json.loads(answer.body)

    def started(self, name: str, vram: int) -> str:
        """The id of a new session, for which the lease is asked."""
        return str(self.ask("POST", "/v1/sessions", {"name": name, "vram": vram, "ttl": 600})["id"])

    def end(self, session: str) -> None:
        self.ask("POST", f"/v1/sessions/{session}/end", {"now": True})

    def rest(self, session: str) -> None:
        """Returns when its lease is over."""
        self.ask("POST", f"/v1/sessions/{session}/rest", {"now": True})

        def rests() -> bool:
            return bool(self.ask("GET", f"/v1/sessions/{session}")["state"] == "resting")

        wait_until(rests, within_s=PATIENCE_S, what="the session did not rest")


def measure(bench: Bench) -> list[Figure]:
    size = bench.either(STATE, STATE // 16)
    vram = 2 * size
    cell = GPU.format(mib=vram >> 20)
    read = f"import numpy as np\nstate = np.load({str(bench.folder / 'state.npy')!r})\nassert state[-1] == 1"
    with (
        Office(bench.folder, "--host-gpus", "1x4GiB") as office,
        running_studio(office) as (_, port),
        JupyterHub(bench.folder) as hub,
    ):
        bench.versions["jupyterhub"] = hub.version
        person = Person(office, port)
        number = 0

        def started_ms() -> tuple[float, float]:
            """From the request for a session to the answer of its first cell; and the start of its kernel."""
            nonlocal number
            number += 1
            name, began = f"start-{number}", time.perf_counter()
            with Kernel(bench.folder / "notebook", {**office.env, "SUBLET_SESSION": name}) as kernel:
                kernel.run("%load_ext sublet")
                kernel_ms = (time.perf_counter() - began) * 1e3
                began = time.perf_counter()
                session = person.started(name, vram)
                kernel.run(cell + FIRST_CELL)
                took_ms = (time.perf_counter() - began) * 1e3
                person.end(session)
            return took_ms, kernel_ms

        def hub_ms(*cells: str) -> list[float]:
            found = hub.first_cell_ms(*cells)
            hub.stop_server()
            return found

        pairs = bench.either(PAIRS, 2)
        a, b = bench.pairs(
            START,
            started_ms,
            lambda: hub_ms(FIRST_CELL)[0],
            pairs=pairs,
            show=lambda a, b: f"{a[0]:.0f} ms, a kernel {a[1]:.0f} ms; JupyterHub {b:.0f} ms",
        )
        with Kernel(bench.folder / "notebook", {**office.env, "SUBLET_SESSION": "resumed"}) as kernel:
            kernel.run("%load_ext sublet")
            kernel.run("%gpu name resumed 6GiB")
            session = person.started("resumed", vram)
            kernel.run(cell + f"import numpy as np\nstate = np.ones({size // 8})")
            kernel.run(f"import numpy as np\nnp.save({str(bench.folder / 'state.npy')!r}, np.ones({size // 8}))")
            person.rest(session)

            def resumed_ms() -> float:
                began = time.perf_counter()
                person.ask("POST", f"/v1/sessions/{session}/resume")
                kernel.run(cell + "assert state[-1] == 1")
                took_ms = (time.perf_counter() - began) * 1e3
                person.rest(session)
                return took_ms

            c, d = bench.pairs(
                RESUME,
                resumed_ms,
                lambda: hub_ms(FIRST_CELL, read),
                pairs=pairs,
                show=lambda c, d: f"{c:.0f} ms; JupyterHub {d[0]:.0f} ms, with the state {d[1]:.0f} ms",
            )
            person.end(session)
    bench.note(
        f"The state has {size >> 20} MiB. Office, studio and hub are up, and each side has run before; a host device. "
        "The hub's spawner changes no user. The peer's file is in the page cache, and so is our checkpoint."
    )
    peer = "server and kernel of JupyterHub"
    return [
        figure(START, "ms", [one for one, _ in a], b, peer_name=peer),
        figure(START_KERNEL, "ms", [sum(one) for one in a], b, peer_name=peer),
        figure(RESUME, "ms", c, [one for one, _ in d], peer_name=peer),
        figure(RESUME_READ, "ms", c, [one for _, one in d], peer_name="the same, and np.load"),
    ]


ROW: Final = Row(
    name="studio_session",
    title="a session started, and resumed with a GiB of state, against a server and a kernel of JupyterHub",
    goals=[],
    measure=measure,
    limit_s=900,
    distributions=tuple(dict.fromkeys((*DISTRIBUTIONS, *NOTEBOOK, *jupyterhub.DISTRIBUTIONS))),
)
