"""Messages between supervisor and zygote, and how an interpreter without Sublet runs our code.

A zygote is started with one end of a unix socket pair. It greets, imports, proves itself and says ``Ready`` or
``Discarded`` (events). From then on each call asks for one guest: it has no body, only descriptors; the answer is
``Forked`` or a refusal.

The descriptors of a call: stdin, stdout, stderr; ``go``, from which the guest reads one byte before it does anything,
so that it can be noted first; ``failure``, into which it writes what went wrong before its program began, and which
closes when it begins; ``request``, a sealed file in memory with a ``Fork``; then the ``cgroup.procs`` files to join,
open for writing. The kernel judges a join by who *opened* the file, so a guest of an ordinary user comes into a group
that only the supervisor may fill.

The zygote never reads a ``request``. All later guests are copies of its memory, and memory that was freed is not wiped:
whatever it had read, environment and arguments of one tenant, the guests of the next one could find. Only the process
that becomes the guest opens the ``Fork``.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.values import parse_size
from sublet.wire.codec import dumps, loads

FORK_FDS: Final = 6
"""stdin, stdout, stderr, go, failure, request."""
GO: Final = b"!"
LEASE_ENDED: Final = 76
"""Exit status of a program whose lease ended."""

OPTIONAL: Final = "?"
"""At the end of a module's name: it is imported where it is there."""
LATER: Final = "-"
"""Among the modules: what comes behind it is imported when guests can be made already, and for a while none is
requested."""

ROOM: Final = "SUBLET_ROOM"
"""A variable of a zygote that holds nothing but room, for the marks of the guest it becomes: /proc shows the
environment a process was *started* with, and that is where a new supervisor looks for unknown guests."""
ROOM_BYTES: Final = 512

WARM_VARIABLE: Final = "SUBLET_WARM"
"""A variable of an office (and its supervisor) started for a program that will soon want a guest: ``Warm``."""
COLD_VARIABLE: Final = "SUBLET_COLD"
"""A variable of an office: packages, with commas between, that its warm interpreters do not import beforehand."""
TENANT_WARM_VARIABLE: Final = "SUBLET_TENANT_WARM"
"""A variable of an office, and of its supervisor: how much memory the warm interpreters of single tenants may take;
``no``: there are none, and all tenants share."""
TENANT_MEMORY_PARTS: Final = 32
"""Where the office is told nothing: one part in so many of the memory that it may use."""
WARM_WITHIN_S: Final = 20.0
"""So long a guest that would rather wait waits for a warm interpreter that is being made; then it starts plainly."""

READ_AT_START: Final = re.compile(
    r"(?:PYTHON|LD_|LC_|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|BLIS_|NUMEXPR_|VECLIB_|TORCH|PYTORCH_|CUDA_|NVIDIA_|JAX_|XLA_"
    r"|TF_|MALLOC_|GLIBC_).*|LANG|LANGUAGE|TZ|HOME|VIRTUAL_ENV|CONDA_PREFIX|__PYVENV_LAUNCHER__"
)
"""Variables that are read once, by the loader, the interpreter or a library, and never again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """Have a warm interpreter ready for a guest of this kind."""

    python: str = ""
    """Empty: the one Sublet runs in."""
    imports: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """The part of the guest's environment that is read at a start (``fingerprint``); the rest comes with the guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit of one process, by the number of ``resource.RLIMIT_…``."""

    resource: int
    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """What a guest is to be; read by the guest alone."""

    argv: tuple[str, ...] = ()
    """What stands after ``python`` on its command line: a script, ``-m module`` or ``-c command``, and arguments."""
    entry: str = ""
    """Or a callable, as ``package.module:name``."""
    args: str = ""
    """Its arguments: a JSON object."""
    env: dict[str, str] = field(default_factory=dict)
    """The whole environment, with SUBLET_PAGE."""
    cwd: str = "/"
    umask: int = 0o022
    terminal: bool = False
    """Whether stdin is a terminal that it shall own."""
    limits: tuple[Limit, ...] = ()
    cpus: tuple[int, ...] = ()
    """It runs on these cores only; empty: wherever the zygote may."""
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()
    """User and groups that it takes; -1: those of the zygote. Only a zygote that imports nothing a user may write can
    be root's."""
    walls: str = ""
    """Behind what it is to live; empty: nothing. It goes, with the parent's pid, to ``enter``."""
    enter: str = ""
    """What builds them, as ``package.module:name``; the zygote has it loaded. It may come back in another process, and
    gives the pid of its parent."""
    mark: str = "SUBLET_"
    """Variables that begin so are shown in /proc/<pid>/environ, as far as there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """It is there and waits for ``go``. It is a child of the supervisor, or will be before it reads."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A file or folder that the zygote's imports came from, as it was before they did."""

    path: str
    mtime_ns: int
    """-1: it was not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The zygote has proved itself."""

    python: str
    """Its version."""
    modules: int
    took_ns: int
    private_bytes: int = 0
    """Memory that no file backs: what it costs to keep it; 0 by a version that does not say it."""
    stamps: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """The zygote failed its proof and ends. A plain start is needed."""

    reason: str


_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_request(fork: Fork) -> int:
    """The descriptor of a file in memory that holds this, and that can no longer be changed."""
    body = dumps(fork)
    made = os.memfd_create("sublet-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(made, "wb", closefd=False, buffering=0) as file:
            while body:
                body = body[file.write(body) or 0 :]
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(made)
        raise
    return made


def read_request(fd: int) -> Fork:
    """What ``sealed_request`` wrote. Raises ``SubletError`` for anything else."""
    return loads(Fork, os.pread(fd, os.fstat(fd).st_size, 0))


_STARTER: Final = """\
import sys
if sys.path and not sys.path[0]: del sys.path[0]
from importlib.util import module_from_spec as make, spec_from_file_location as at
spec = at("sublet", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["sublet"] = module = make(spec)
spec.loader.exec_module(module)
from importlib import import_module
import_module(sys.argv[2]).main(sys.argv[3:])
"""
"""Loads the very Sublet that the supervisor runs into an interpreter that may have none, or another one. Its folder is
*not* put on the search path: it may be full of packages that are not this interpreter's."""


def python_argv(python: str, module: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The command line that runs ``main(arguments)`` of one of our modules in any interpreter of a fitting version."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return (python, *options, "-c", _STARTER, folder, module, *arguments)


def run_here(module: str, arguments: Sequence[str], out: int, before: bytes = b"", *, needed: str) -> str:
    """What ``answer(arguments)`` of one of our modules says, in a fork that ends after it, of an interpreter that was
    started without ``site``: one that is started anew loads for three times as long. Where the package ``needed`` is
    not found so, the fork becomes the program after all, and its answer is what that writes to the descriptor ``out``,
    after ``before``."""
    if not finds_packages(needed):
        argv = python_argv(sys.executable, module, *arguments)
        os.dup2(out, 1)
        os.write(1, before)
        os.execv(argv[0], argv)
    answer: Callable[[Sequence[str]], str] = import_module(module).answer
    return answer(arguments)


def finds_packages(needed: str) -> bool:
    """Whether this package can be loaded, once the folders are searched that an interpreter with ``site`` searches."""
    if needed in sys.modules:  # a rehearsal has it from the start
        return True
    import site

    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    site.main()
    try:
        import_module(needed)
    except ImportError:
        return False
    return True


def fingerprint(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The part of an environment that an interpreter cannot take on later."""
    return tuple(sorted((name, value) for name, value in env.items() if READ_AT_START.fullmatch(name)))


def tenant_warm_bytes(text: str) -> int:
    """What ``TENANT_WARM_VARIABLE`` says. Raises ``InvalidRequest``."""
    return 0 if text == "no" else parse_size(text, f"size in {TENANT_WARM_VARIABLE}")


def zygote_env(env: dict[str, str]) -> dict[str, str]:
    """The environment to start a zygote with: what it was asked for, and room for marks."""
    return {**env, ROOM: " " * ROOM_BYTES}
