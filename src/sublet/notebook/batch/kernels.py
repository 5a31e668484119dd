"""The kernel of a job: an ordinary one beside the runner, or a guest in which all cells run under one lease.

Cells run through nbclient in both, so outputs, updating displays and widgets become what they become in any executed
notebook. Between cells the kernel is asked for things (``inside``): by name, with an answer in JSON.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from queue import Empty
from string import Template
from typing import TYPE_CHECKING, Any, Final, Protocol

from sublet.client.home import home_dir, make_private_dir, runtime_dir
from sublet.errors import CheckpointFailed, InvalidRequest, LeaseEnded, RemoteError, SubletError, Unsupported
from sublet.notebook.batch.guest_client import GuestClient, beside
from sublet.notebook.batch.job_options import JobLeaseOptions
from sublet.notebook.options import VRAM_DEFAULT, CellOptions
from sublet.notebook.ownership import KernelVolume, Owner
from sublet.notebook.resume import end_parked, is_parked, resume_parked
from sublet.notebook.status import Suspended, as_text
from sublet.values import NS_PER_S, Tier
from sublet.wire.unix import ADDRESS_BYTES_MAX

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.compute.kernel_guest import KernelGuest

Notebook = Any
STARTS_S: Final = 120
OUTPUT_S: Final = 60
"""How long after its reply a cell's last outputs may come. On a very busy machine nbclient's 4 s would lose them."""
_SOCKET_NAME_BYTES: Final = len("/k-5")
ASK_LOOK_S: Final = 1.0
END_PATIENCE_S: Final = 15.0
"""A kernel that is gone because its lease is ending knows why when the lease has ended."""
OURS: Final = (sys.executable, "python", "python3", f"python3.{sys.version_info.minor}")
"""What a kernelspec calls the interpreter that runs this, as Jupyter reads it."""
NATIVE: Final = "python3"
"""The kernel of a notebook that names none."""
IPYKERNELS: Final = ("ipykernel_launcher", "ipykernel", "sublet.notebook.kernel_mode")
INSIDE: Final = "__import__('importlib').import_module('sublet.notebook.batch.inside')"


class JobKernel(Protocol):
    """What the runner needs of one. Opened once, closed once; it may be lost when it is closed."""

    client: Any
    """nbclient's, which runs the cells."""

    async def open(self) -> None:
        """Start it. Raises ``SubletError`` if that cannot be."""

    def place(self, folder: str) -> str:
        """Where its variables are saved: in this folder, or (empty) in the volume that came with it."""

    async def ask(self, what: str, *arguments: object) -> Any:
        """Call a function of ``inside`` in it, between cells."""

    async def lost(self) -> SubletError | None:
        """After it died: why, where its lease is why; None where it died by itself."""

    async def interrupt(self) -> None:
        """Stop the cell that runs."""

    async def close(self, *, now: bool) -> None:
        """End it; ``now``: without waiting for what it might still want to say."""


class _Kernel:
    """What both have in common."""

    client: Any

    def place(self, folder: str) -> str:
        return folder

    async def ask(self, what: str, *arguments: object) -> Any:
        client = self.client.kc
        call = f"{INSIDE}.{what}({', '.join(map(repr, arguments))})"
        request = await _awaited(
            client.execute("", silent=True, store_history=False, user_expressions={"it": call}, allow_stdin=False)
        )
        while True:
            try:
                reply = await client.shell_channel.get_msg(timeout=ASK_LOOK_S)
            except Empty:
                if not await _awaited(client.is_alive()):
                    raise RemoteError("the notebook's kernel died between two cells") from None
                continue
            if reply["parent_header"].get("msg_id") == request:
                return _answer(reply["content"])


class OrdinaryKernel(_Kernel):
    """As Jupyter starts one, in the notebook's folder and our environment."""

    def __init__(self, notebook: Notebook, *, folder: str, kernel: str, env: Mapping[str, str], log: Path) -> None:
        from nbclient import NotebookClient

        named: dict[str, Any] = {"kernel_name": kernel} if kernel else {}
        resources = {"metadata": {"path": folder}}
        times: dict[str, Any] = {"timeout": None, "startup_timeout": STARTS_S, "iopub_timeout": OUTPUT_S}
        self.client = NotebookClient(notebook, resources=resources, **times, **named)
        self._env = {**os.environ, **env}
        self._log = log
        self._sockets = str(runtime_dir(home_dir()) / f"nb-{log.parent.name}")

    async def open(self) -> None:
        from jupyter_client.kernelspec import NoSuchKernel

        try:
            self.client.km = km = self.client.create_kernel_manager()
            # Sockets in a folder that is ours alone: a port could be reached by every user of this machine.
            self._make_folder()
            km.transport, km.ip = "ipc", f"{self._sockets}/k"
            with open(self._log, "ab") as log:  # noqa: ASYNC230 - what it says outside of cells is for no terminal
                await self.client.async_start_new_kernel(env=self._env, stdout=log, stderr=log)
        except NoSuchKernel as error:
            raise _no_kernel(error.name) from None
        try:
            await self.client.async_start_new_kernel_client()
        except (RuntimeError, TimeoutError) as error:
            raise Unsupported(
                f"the notebook's kernel did not start: {error}", do="Start it by hand to see why."
            ) from error

    def _make_folder(self) -> None:
        """Of the job, so that a runner that was killed leaves nothing that the next does not clean up."""
        if len(os.fsencode(self._sockets)) + _SOCKET_NAME_BYTES > ADDRESS_BYTES_MAX:
            raise InvalidRequest(
                f"the sockets of a kernel cannot have a path as long as {self._sockets}",
                do="Set SUBLET_HOME to a shorter path.",
            )
        make_private_dir(runtime_dir(home_dir()))
        shutil.rmtree(self._sockets, ignore_errors=True)
        os.mkdir(self._sockets, 0o700)

    async def lost(self) -> SubletError | None:
        return None

    async def interrupt(self) -> None:
        await self.client.km.interrupt_kernel()

    async def close(self, *, now: bool) -> None:
        client, km = self.client, self.client.km
        if km is None:
            return
        with contextlib.suppress(Exception):  # it may be gone; what is left of it ends with its parent
            await km.shutdown_kernel(now=now)
        with contextlib.suppress(Exception):
            await km.cleanup_resources()
        if client.kc is not None:
            client.kc.stop_channels()
            client.kc = None
        shutil.rmtree(self._sockets, ignore_errors=True)


def _no_kernel(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no kernel {name!r}", do="`jupyter kernelspec list` shows them; name one with --kernel."
    )


def python_of(name: str) -> tuple[str, dict[str, str]]:
    """The interpreter of the kernel that is installed under this name, empty for the one that runs this; and the
    variables that it is given. Raises ``InvalidRequest`` for one that is not started as ipykernel is."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec(name)
    except NoSuchKernel:
        raise _no_kernel(name) from None
    program, *words = spec.argv
    module = next((word for dash, word in pairwise(words) if dash == "-m"), "")
    if module not in IPYKERNELS:
        raise InvalidRequest(
            f"kernel {name!r} is not started by `python -m ipykernel_launcher`, as one lease for all cells needs",
            do="Give each cell a lease of its own (--lease cells), or name another kernel with --kernel.",
        )
    is_ours = program in OURS
    return ("" if is_ours else program), {
        n: Template(value).safe_substitute(os.environ) for n, value in spec.env.items()
    }


class WholeKernel(_Kernel):
    """A guest of one lease, in which every cell runs. It is renewed from the first cell to the last.

    A tenant's guest sees neither the notebook's folder nor the job's. It begins in its own, and its variables are saved
    in a volume, which has the name of the job's label.
    """

    def __init__(
        self,
        notebook: Notebook,
        *,
        folder: str,
        kernel: str,
        options: JobLeaseOptions,
        label: str,
        env: Mapping[str, str],
        connect: Callable[[], Fabric],
        note: Callable[[str], None],
    ) -> None:
        from nbclient import NotebookClient

        self.client = NotebookClient(notebook, timeout=None, iopub_timeout=OUTPUT_S)
        self.lease: Lease | None = None
        self._folder = folder
        self._name = kernel or notebook.metadata.get("kernelspec", {}).get("name") or NATIVE
        self._options = options
        self._labels = {"program": "notebook", "job": label}
        self._env = dict(env)
        self._connect = connect
        self._note = note
        self._guest: KernelGuest | None = None
        self._owner = Owner({}, {}, labels=self._labels)
        self._owner.rename(label)
        self._volume: KernelVolume | None = None
        self._busy = contextlib.ExitStack()

    async def open(self) -> None:
        self._python, given = await beside(lambda: python_of(self._name))
        self._env |= given
        self.lease = await beside(self._acquired)
        self._busy.enter_context(self.lease.activity("a notebook"))
        self._volume = await beside(self._own_volume)
        self._guest = await beside(self._started)
        self.client.km = self.client.kc = GuestClient(self._guest, self._resume_if_parked)

    def _acquired(self) -> Lease:
        options = self._options
        terms: dict[str, Any] = {} if options.ttl_ns is None else {"ttl": options.ttl_ns / NS_PER_S}
        return self._connect().gpu(
            min_vram=VRAM_DEFAULT if options.vram_bytes is None else options.vram_bytes,
            count=options.gpus or 1,
            tier=options.tier or Tier.INTERACTIVE,
            pay_priority=bool(options.pay_priority),
            wait=None if options.wait_ns is None else options.wait_ns / NS_PER_S,
            or_smaller=bool(options.smaller_ok),
            on_place=lambda place: self._note(f"waits in line, {place}"),
            labels=self._labels,
            **terms,
        )

    def _started(self) -> KernelGuest:
        from sublet.client.guests import environment
        from sublet.compute.kernel_guest import KernelGuest

        assert self.lease is not None
        volume = self._volume
        folder, place = (self._folder, None) if volume is None else ("", volume.lease)
        env = {**environment(self.lease, None), **self._env}
        return KernelGuest(self.lease, python=self._python, cwd=folder, env=env, name="notebook", volume=place)

    def _own_volume(self) -> KernelVolume | None:
        from sublet.compute.shown import sees_our_folders

        assert self.lease is not None
        if sees_our_folders(self.lease):
            return None
        volume = self._owner.take(self._connect())
        if volume is None:
            raise CheckpointFailed(
                f"the job has nowhere to save its variables: {self._owner.trouble}",
                do="Make room for blocks, or let each cell have a lease of its own, which needs none (--lease cells).",
            )
        if not volume.name:
            volume.release()
            raise CheckpointFailed(f"another program has {self._owner.name}, where the job saves", do="Try again.")
        return volume

    def place(self, folder: str) -> str:
        return folder if self._volume is None else ""

    def _resume_if_parked(self) -> None:
        """Its device was taken and it lives on without one: wait in line for another, and go on where it was."""
        lease, guest = self.lease, self._guest
        if lease is None or guest is None or not is_parked(lease):
            return
        given = self._options
        options = CellOptions(ttl_ns=given.ttl_ns, tier=given.tier, pay_priority=bool(given.pay_priority))
        self.lease = new = resume_parked(self._connect(), lease, guest, options, self._stands, self._labels)
        self._busy.enter_context(new.activity("a notebook"))

    def _stands(self, status: Suspended) -> None:
        self._note(as_text(status).removeprefix("sublet: ").removesuffix(" · interrupt to give it up"))

    async def lost(self) -> SubletError | None:
        lease, guest = self.lease, self._guest
        if lease is None or guest is None or is_parked(lease):
            return None
        if lease.end is None and lease.notice is None and not guest.is_lost:
            return None
        if lease.end is None:
            await beside(lambda: _ended(lease))
        error = guest.why_lost()
        return error if isinstance(error, LeaseEnded) else None

    async def interrupt(self) -> None:
        if isinstance(self.client.kc, GuestClient):
            self.client.kc.interrupt()

    async def close(self, *, now: bool) -> None:
        lease, self.lease = self.lease, None
        if isinstance(self.client.kc, GuestClient):
            await self.client.kc.stop()
        self._busy.close()
        if self._guest is not None:
            self._guest.close()
        if lease is not None:
            with contextlib.suppress(SubletError):
                await beside(lambda: end_parked(self._connect(), lease) if is_parked(lease) else lease.release())
        await beside(self._owner.release_volume)


async def _awaited(found: Any) -> Any:
    """jupyter_client answers some things at once."""
    return await found if inspect.isawaitable(found) else found


def _ended(lease: Lease) -> None:
    over = threading.Event()
    lease.on_end(lambda _end: over.set())
    if lease.end is None:
        over.wait(END_PATIENCE_S)


def _answer(content: Mapping[str, Any]) -> Any:
    """What the function said, or its error under its own name."""
    found = content.get("user_expressions", {}).get("it", content)
    if found.get("status") == "ok":
        text = ast.literal_eval(found["data"]["text/plain"])
        return json.loads(text)
    name, message = found.get("ename", "error"), found.get("evalue", "")
    if name in ("ModuleNotFoundError", "ImportError"):
        raise Unsupported(
            f"the notebook's kernel cannot be used for a job: {message}",
            do="Install `sublet[notebook]` where that kernel is, or choose another with --kernel.",
        )
    raise RemoteError(f"{message or name}", do="")
