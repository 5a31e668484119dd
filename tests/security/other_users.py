"""Other users of the machine, as real processes of other user numbers, without any right beyond those.

An interpreter may lie where no other user may look (below /root, say). Then such a process has a mount namespace of its
own, in which that folder can be entered; a capability to read everything would make these tests prove nothing. Volumes
that are mounted just then are not kept by its copy of the mounts: a lease could not be put away meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 280.0
_ENTERABLE: Final = r"""
set -e
mount --make-rprivate /
while read -r device folder rest; do
    case "$device" in /dev/loop*) umount --lazy "$folder" 2> /dev/null || true ;; esac
done < /proc/self/mounts
mkdir -p "$KEPT"
mount --bind "$INTERPRETER" "$KEPT"
mount -t tmpfs -o mode=755,size=1m tmpfs "$CLOSED"
mkdir -p "$INTERPRETER"
mount --bind "$KEPT" "$INTERPRETER"
exec "$@"
"""
COMMANDS: Final = """
import contextlib, io, json, os, sys
from sublet.cli import main
found = []
for words, env in json.loads(sys.argv[1]):
    os.environ.update(env)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
"""A program that runs command lines, each as (words, environment), and says of each its status, stdout and stderr. To
start an interpreter for each takes longer than they do."""


def closed_folder(path: Path) -> Path | None:
    """The first folder on the way to this that other users cannot enter; None: they can enter all."""
    return next((one for one in [*reversed(path.parents), path] if not one.stat().st_mode & 0o001), None)


def places(kept: Path) -> dict[str, str]:
    """What ``enterable`` finds in its environment: where the interpreter lies, and a place of its own for it."""
    interpreter = Path(os.path.realpath(sys.executable)).parent.parent
    closed = closed_folder(interpreter)
    return {} if closed is None else {"INTERPRETER": str(interpreter), "CLOSED": str(closed), "KEPT": str(kept)}


def enterable(words: list[str]) -> list[str]:
    """A command of root's, for whose processes, whoever they are, the interpreter can be entered."""
    return ["unshare", "-m", "sh", "-c", _ENTERABLE, "sh", *words] if places(Path()) else words


@dataclass
class User:
    """One of them, with a folder of its own."""

    uid: int
    folder: Path
    url: str
    token: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o755)
        os.chown(self.folder, self.uid, self.uid)

    def run(self, *argv: str, said: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """A command of this user's, with nothing of our environment."""
        return subprocess.run(
            self._words(argv, more),
            input=said,
            cwd="/",
            env={**os.environ, **places(self._kept)},
            capture_output=True,
            text=True,
            timeout=self.patience_s,
            check=False,
        )

    @contextlib.contextmanager
    def running(self, source: str, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        """A program of this user's meanwhile: what it says and is told are lines."""
        process = subprocess.Popen(
            self._words((sys.executable, "-W", "ignore", "-c", source, *arguments), more),
            cwd="/",
            env={**os.environ, **places(self._kept)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def _words(self, argv: Sequence[str], more: dict[str, str]) -> list[str]:
        env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            **({"SUBLET_URL": self.url} if self.url else {}),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
            **({} if self.token is None else {"SUBLET_TOKEN": self.token}),
            **self.env,
            **more,
        }
        return self._as_user(["env", "-i", *(f"{name}={value}" for name, value in env.items()), *argv])

    def sublet(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command line."""
        return self.run(sys.executable, "-m", "sublet", *words, **more)

    def commands(self, *asked: list[str], tokens: Sequence[str] = ()) -> list[list[Any]]:
        """What came of these command lines, each with each of the tokens if some are given."""
        envs = [{"SUBLET_TOKEN": token} for token in tokens] or [{}]
        found: list[list[Any]] = self.program(COMMANDS, json.dumps([[words, env] for words in asked for env in envs]))
        return found

    def program(self, source: str, *arguments: str, **more: str) -> Any:
        """A program whose last line of output is a JSON document; that document."""
        done = self.run(sys.executable, "-W", "ignore", "-c", source, *arguments, **more)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    @property
    def _kept(self) -> Path:
        return Path(f"{self.folder}.interpreter")

    def _as_user(self, words: list[str]) -> list[str]:
        who = str(self.uid)
        return enterable(["setpriv", "--reuid", who, "--regid", who, "--clear-groups", *words])
