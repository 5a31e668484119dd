"""Runs `sublet` commands, offices and supervisors in forks of processes that have loaded what these load.

Each is a process of its own, with its own environment, folder, descriptors, arguments and exit status, which ends as
any interpreter does; what is saved is the start, most of what a short command and a test's office cost. A test that is
about the start has it by the mark ``anew``. Where several processes run tests, the same two fork for all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import selectors
import shlex
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import sublet
from sublet.cli import main
from sublet.client import office as starting_offices
from sublet.errors import SubletError
from sublet.node.agent import starting as starting_supervisors
from sublet.wire.program_files import check_program
from tests.forked import Forked, Order, can_be_shown, fits, fork, listening, name_of, order_for, serve

__all__ = [
    "Ended",
    "Process",
    "anew",
    "command_file",
    "fork_for_all",
    "fork_offices",
    "fork_where",
    "forked_supervisor",
    "run_program",
    "run_sublet",
    "start_piped",
    "start_program",
    "start_sublet",
]

ROOT: Final = Path(__file__).parents[1]
PIECE: Final = 1 << 16
AT_START: Final = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_")
"""Variables that a command with a start of its own would begin with: where they differ from ours, it has one."""
TAKEN_ON: Final = ("PYTHONPATH", "PYTHONWARNINGS")
"""But these, where they say no more than that the package is this one, and what becomes of warnings."""
WARNINGS: Final = frozenset(("", "error", "default", "always", "ignore"))
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(sublet.__file__)))


class Anew:
    """Whether every command, office and supervisor is to have a start of its own just now."""

    wanted = False


anew: Final = Anew()
_SHARED: Final = "SUBLET_TESTS_FORK"
_shared: Final = os.environ.pop(_SHARED, "")
"""From the process that hands out tests to this one: those that fork for all."""
_FIRST: Final = dict(os.environ)
"""Before any test has changed it."""
Process = Forked | subprocess.Popen[bytes]


class Ended(NamedTuple):
    """What a shell gets."""

    status: int
    """Negative for a signal."""
    out: bytes
    err: bytes


def run_sublet(
    *words: str,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    umask: int = -1,
    given: bytes = b"",
    timeout: float = 200.0,
) -> Ended:
    """Run ``sublet WORDS`` to its end. ``umask``: another than ours; ``given``: what it can read."""
    return _run_to_end([sys.executable, "-m", "sublet", *words], env, cwd, umask, given, timeout)


def command_file(path: Path, env: Mapping[str, str]) -> None:
    """Make a program of this name that is `sublet`, for the scripts of a test: it has what it is told forked, where an
    environment like this one allows that, and ends as the fork does."""
    words = [sys.executable, "-m", "sublet"]
    if _order(words, env) is None:
        text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
    else:
        server = _servers_of(env).commands
        text = _COMMAND.format(python=sys.executable, root=str(ROOT), words=words, server=server)
    path.write_text(text)
    path.chmod(0o755)


_COMMAND: Final = """#!{python} -IS
import os, sys
sys.path.insert(0, {root!r})
from tests.forked import fork, order_for
order = order_for([*{words!r}, *sys.argv[1:]], os.environ, os.getcwd())
status = fork({server!r}, order, (0, 1, 2)).wait()
sys.exit(status if status >= 0 else 128 - status)
"""


def run_program(text: str, *words: str, env: Mapping[str, str], timeout: float = 200.0) -> Ended:
    """Run ``python -c TEXT WORDS`` to its end. It finds all that an office loads loaded."""
    return _run_to_end([sys.executable, "-c", text, *words], env, None, -1, b"", timeout)


def _run_to_end(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None,
    umask: int,
    given: bytes,
    timeout: float,
) -> Ended:
    order = _order(command, env, cwd, umask)
    if given or order is None:
        done = subprocess.run(command, env=env, cwd=cwd, umask=umask, input=given, capture_output=True, timeout=timeout)
        return Ended(done.returncode, done.stdout, done.stderr)
    with contextlib.ExitStack() as stack:
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        ours = [stack.enter_context(open(fd, "rb", buffering=0)) for fd in (out, err)]
        nothing = stack.enter_context(open(os.devnull, "rb"))
        try:
            process = fork(_servers_of(env).commands, order, (nothing.fileno(), to_out, to_err))
        finally:
            os.close(to_out)
            os.close(to_err)
        until_s = time.monotonic() + timeout
        try:
            said = _heard(ours[0].fileno(), ours[1].fileno(), until_s)
            return Ended(process.wait(until_s - time.monotonic()), *said)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            process.kill()
            raise subprocess.TimeoutExpired(list(command), timeout) from error


def start_sublet(*words: str, env: Mapping[str, str], said: IO[bytes]) -> Process:
    """Start ``sublet WORDS``, which says all that it says to this file."""
    return _start([sys.executable, "-m", "sublet", *words], env, said, said)


def start_program(text: str, *words: str, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    """Start ``python -c TEXT WORDS``, which finds all that an office loads loaded."""
    return _start([sys.executable, "-c", text, *words], env, out, err)


def _start(command: Sequence[str], env: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    order = _order(command, env)
    if order is None:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    with open(os.devnull, "rb") as nothing:
        return fork(_servers_of(env).commands, order, (nothing.fileno(), out.fileno(), err.fileno()))


def start_piped(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start such a command as ``subprocess.Popen`` does, with pipes of its own, and talk to it in the same way."""
    order = _order(command, env)
    if order is None:
        return subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    return _Piped(command, order, _servers_of(env).commands, (stdin, stdout, stderr))


class _Piped(subprocess.Popen[bytes]):
    """Only its start and its end are others: it is no child of this process."""

    def __init__(
        self, command: Sequence[str], order: Order, server: str, streams: tuple[int | None, int | None, int | None]
    ) -> None:
        self._how = order, server
        stdin, stdout, stderr = streams
        super().__init__(command, stdin=stdin, stdout=stdout, stderr=stderr)

    def _execute_child(self, *given: Any) -> None:
        """``given``: what ``subprocess`` would start it with, the ends of its pipes among it."""
        stdin, to_stdin, from_stdout, stdout, from_stderr, stderr = given[10:16]
        order, server = self._how
        theirs = [own if fd < 0 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        self._forked = fork(server, order, theirs)
        self.pid = self._forked.pid
        self._close_pipe_fds(  # type: ignore[attr-defined]
            stdin, to_stdin, from_stdout, stdout, from_stderr, stderr
        )

    def poll(self) -> int | None:
        self.returncode = self._forked.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._forked.wait(timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._forked.send_signal(sig)


def _order(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    umask: int = -1,
    *,
    alone: bool = False,
) -> Order | None:
    """None for a process that is to have a start of its own."""
    order = order_for(command, env, os.getcwd() if cwd is None else os.fspath(cwd), umask=umask, alone=alone)
    starts_alike = _for_start(env) == _servers_of(env).begins and _is_taken_on(env)
    return order if _can_fork(order, env, starts_alike) else None


def _can_fork(order: Order, env: Mapping[str, str], starts_alike: bool) -> bool:
    has_files = _files() == _servers_of(env).files
    return starts_alike and not anew.wanted and fits(order) and has_files and can_be_shown()


def _for_start(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter, its C library and the loader of its libraries read when they start, and never again."""
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name not in TAKEN_ON}


def _is_taken_on(env: Mapping[str, str]) -> bool:
    return env.get("PYTHONPATH", "") in ("", _PACKAGE) and env.get("PYTHONWARNINGS", "") in WARNINGS


def _files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _heard(out: int, err: int, until_s: float) -> tuple[bytes, bytes]:
    """All that is said until the last process has closed it."""
    heard = {out: bytearray(), err: bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in heard:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(left_s):
                piece = os.read(key.fd, PIECE)
                heard[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    return bytes(heard[out]), bytes(heard[err])


# --------------------------------------------------------------------------------------------- offices and supervisors


_detach: Final = starting_offices._detach


def fork_offices() -> None:
    """From now on this process forks the offices and supervisors that it starts."""
    starting_offices._detach = _forked_office
    starting_supervisors._Process = _Supervisor  # type: ignore[misc]


def _forked_office(command: Sequence[str], env: Mapping[str, str], log: int) -> int:
    order = _order(command, {**env, "PWD": "/"}, "/", alone=True)
    if order is None:
        return _detach(command, env, log)
    with open(os.devnull, "rb") as nothing:
        return fork(_servers_of(env).commands, order, (nothing.fileno(), log, log)).pid


class _Supervisor(starting_supervisors._Process):
    def __init__(self, argv: list[str], log: int, stdin: int, env: Mapping[str, str]) -> None:
        has = {**starting_supervisors.supervisor_environment(), **env}
        self._forked = forked_supervisor(argv, has, log, stdin)
        if self._forked is None:
            super().__init__(argv, log, stdin, env)

    def poll(self) -> int | None:
        return super().poll() if self._forked is None else self._forked.poll()

    def kill(self) -> None:
        if self._forked is None:
            super().kill()
        else:
            self._forked.kill()
            self._forked.wait()


def forked_supervisor(argv: list[str], env: Mapping[str, str], log: int, stdin: int = -1) -> Forked | None:
    """None for one that is to have a start of its own, as one with another program has."""
    begins, own = _servers_of(env).begins, _for_start(env)
    libraries = ("LD_", "MALLOC_", "GLIBC_")  # it is started without the variables of Python
    alike = all(own.get(name) == begins.get(name) for name in {*own, *begins} if name.startswith(libraries))
    order = order_for(argv, env, os.getcwd(), session=True)
    plain = [sys.executable, "-I", "-S", "-c", starting_supervisors._CODE, _PACKAGE]
    if not (_can_fork(order, env, alike) and argv[:-1] == plain):
        return None
    with open(os.devnull, "rb") as nothing:
        return fork(_servers_of(env).supervisors, order, (nothing.fileno() if stdin < 0 else stdin, log, log))


# ------------------------------------------------------------------------------------------------- who forks for others


class _Servers(NamedTuple):
    """The names of their sockets, and what their forks begin with."""

    commands: str
    supervisors: str
    begins: Mapping[str, str]
    files: tuple[int, int]


_SUPERVISORS: Final = (
    "import sys; sys.path[:0] = sys.argv[1:3]; from tests import forked; del sys.path[1]; "
    "forked.serve_supervisors(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])"
)


_Variables = frozenset[tuple[str, str]]


class _Loaded(NamedTuple):
    """Modules that processes forked where these variables are find loaded, beside what they load in any case."""

    commands: Sequence[str] = ()
    jobs: Sequence[str] = ()
    """Those that supervisors fork, to whom these belong as they do to the jobs."""


_NOTHING: Final = _Loaded()
_others: Final[dict[_Variables, _Loaded]] = {}


def fork_where(*, commands_load: Sequence[str] = (), jobs_load: Sequence[str] = (), **variables: str) -> None:
    """From now on this process also forks what is started with these variables, which the loader or a library that it
    loads reads at a start, from processes of their own. What they name is there when the first of them is forked, and
    may be another thing each time. ``commands_load``: modules that commands, programs and offices find loaded there;
    ``jobs_load``: that supervisors do, whose forked jobs import them."""
    _others[frozenset(variables.items())] = _Loaded(commands_load, jobs_load)


def _servers_of(env: Mapping[str, str]) -> _Servers:
    return _servers(next((variables for variables in _others if variables <= env.items()), _Variables()))


@functools.cache
def _servers(variables: _Variables) -> _Servers:
    """Two processes for this one, which end with it; or those that fork for all."""
    if _shared and not variables:
        commands_name, supervisors_name, begins, files = json.loads(_shared)
        return _Servers(commands_name, supervisors_name, begins, tuple(files))
    env = _first_environment() | dict(variables)
    with listening() as commands, listening() as supervisors:
        made = _Servers(name_of(commands), name_of(supervisors), _for_start(env), _files())
        _start_servers(commands, supervisors, env, _others.get(variables, _NOTHING))
    return made


def fork_for_all() -> None:
    """For the process that hands out tests: those that run them share two processes that fork for them. They are
    started when the first is asked for anything."""
    env, commands, supervisors = _first_environment(), listening(), listening()
    os.environ[_SHARED] = json.dumps([name_of(commands), name_of(supervisors), _for_start(env), _files()])

    def start_when_asked() -> None:
        with commands, supervisors:
            select.select([commands, supervisors], [], [])
            _start_servers(commands, supervisors, env, _NOTHING)

    threading.Thread(target=start_when_asked, name="forks for all", daemon=True).start()


def _first_environment() -> dict[str, str]:
    return {name: value for name, value in _FIRST.items() if name not in TAKEN_ON}


def _start_servers(
    commands: socket.socket, supervisors: socket.socket, env: Mapping[str, str], loaded: _Loaded
) -> None:
    alive, ours = os.pipe()
    _kept_open.append(ours)
    for orders, words, modules in (
        (supervisors, ["-I", "-S", "-c", _SUPERVISORS, _PACKAGE, str(ROOT)], loaded.jobs),
        (commands, ["-m", "tests.commands", name_of(commands), name_of(supervisors)], loaded.commands),
    ):
        fds = [orders.fileno(), alive]
        argv = [sys.executable, *words, *map(str, fds), *modules]
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=fds)
        process.returncode = 0  # it ends with this process: nobody waits for it
    os.close(alive)


_kept_open: Final[list[int]] = []


# ------------------------------------------------------------------------------------------- in the process that forks


def _become(order: Order) -> Callable[[], int]:
    """As an interpreter begins that was started with this command; what it is to run."""
    env, (_, option, program, *words) = order["env"], order["argv"]
    package = [env["PYTHONPATH"]] if env.get("PYTHONPATH") else []
    here = order["cwd"] if option == "-m" else ""
    sys.path[:] = [here, *package, *(path for path in sys.path[1:] if path not in package)]
    if action := env.get("PYTHONWARNINGS"):
        sys.warnoptions.append(action)
        warnings.simplefilter(action)
    if option == "-c":
        sys.argv = ["-c", *words]
        return functools.partial(_run, program)
    sys.argv = [str(Path(sublet.__file__).with_name("__main__.py")), *words]
    return main


def _run(text: str) -> int:
    """The exit status of a program."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(text, "<string>", "exec"), module.__dict__)  # noqa: S102 - a test's own program
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """As an interpreter ends, but that it is not taken apart, which takes longer than most commands."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _load() -> None:
    """What an office or a studio loads; and any command, its help, or what is said of one that there is not. Files
    that root's offices look at before they begin have been looked at, too."""
    import anyio._backends._asyncio  # noqa: F401
    import uvicorn.lifespan.off
    import uvicorn.loops.uvloop
    import uvicorn.protocols.http.h11_impl  # noqa: F401

    from sublet.engines import local, start_settings  # noqa: F401
    from sublet.studio import connections, service, web  # noqa: F401

    with contextlib.suppress(SubletError):  # each office says it itself
        check_program()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for words in (["no-such-command"], ["run", "--help"]):
            main(words)


def _main() -> None:
    commands, supervisors, orders, alive, *modules = sys.argv[1:]
    _load()
    for module in modules:
        importlib.import_module(module)
    made = _Servers(commands, supervisors, _for_start(os.environ), _files())
    globals()["_servers"] = lambda variables: made
    fork_offices()
    gc.collect()
    gc.freeze()  # what is loaded by now is no garbage of any command's
    run = _become(serve(socket.socket(fileno=int(orders)), int(alive)))
    _end(run())


if __name__ == "__main__":
    _main()
