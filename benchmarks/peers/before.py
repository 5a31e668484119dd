"""Sublet at two commits: the package of each in an environment of its own, and a program in it that times one thing.

The libraries are those of our own environment, linked, so that two sides differ in the package alone. The package is
installed, not found by a path, because guests of tenants are shown an interpreter with what is installed in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Final

from benchmarks.procs import Child

__all__ = ["Side", "environment"]

ROOT: Final = Path(__file__).resolve().parents[2]
_HEAVY: Final = ("torch*", "nvidia*", "triton*", "functorch*", "ray*", "warp*", "pyarrow*", "playwright*")
"""What nothing here imports."""
_PROGRAM: Final = """
import json, os, sys, time
import sublet
home, token = sys.argv[1:]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
fabric = sublet.connect(home=home, **({"token": token} if token else {}))
owner = sublet.connect(home=home)  # who is asked very often: a tenant has a rate

def command(lease, *argv):
    return lease.start(argv, cwd="/", env={"PATH": "/usr/bin:/bin"})

kept = fabric.memory("256MiB", ttl="1h")

def start():
    began = time.perf_counter()
    guest = command(kept, "/bin/echo", "here")
    next(iter(guest.output()))
    took = time.perf_counter() - began
    guest.wait()
    return took

def teardown():
    lease = fabric.memory("32MiB", ttl="1m")
    command(lease, "/bin/sleep", "1000")
    began = time.perf_counter()
    lease.release()
    while any(one.id == lease.id for one in owner.leases()):
        pass
    return time.perf_counter() - began

block = fabric.block("256MiB", ttl="1h")
value = {"a": os.urandom(16 << 20), "n": 0}
durable = sublet.Durable(value, block)

def save():
    value["n"] += 1
    value["a"] = os.urandom(16 << 20)
    began = time.perf_counter()
    durable.checkpoint()
    return time.perf_counter() - began

shell = None

def cell():
    global shell
    from IPython.utils.capture import capture_output
    if shell is None:
        from IPython.core.interactiveshell import InteractiveShell
        os.environ.update({"SUBLET_HOME": home, **({"SUBLET_TOKEN": token} if token else {})})
        shell = InteractiveShell.instance()
        shell.run_cell("%load_ext sublet").raise_error()
    began = time.perf_counter()
    with capture_output():
        shell.run_cell("%%gpu --vram 64MiB --ttl 5m\\npass").raise_error()
    return time.perf_counter() - began

ways = {"start": start, "teardown": teardown, "cell": cell, "save": save}
for line in sys.stdin:
    print(json.dumps(ways[line.strip()]() * 1e3), file=answers, flush=True)
owner.close()
fabric.close()
"""


def environment(folder: Path, commit: str = "") -> Path:
    """An interpreter with the package as it was at this commit, or as it lies here. Raises ``RuntimeError`` where git
    has no such commit."""
    packages = Path(sysconfig.get_path("purelib"))
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    shutil.copytree(
        packages,
        there,
        ignore=shutil.ignore_patterns(*_HEAVY, "*.pth", "sublet", "pip*", "setuptools*"),
        copy_function=_linked,
        dirs_exist_ok=True,
    )
    if commit:
        packed = subprocess.run(["git", "archive", commit, "src/sublet"], cwd=ROOT, capture_output=True, check=False)
        if packed.returncode:
            raise RuntimeError(f"git has no {commit} here: {packed.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "--strip-components=1", "-C", str(there)], input=packed.stdout, check=True)
    else:
        shutil.copytree(ROOT / "src" / "sublet", there / "sublet", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([str(python), "-m", "compileall", "-q", "-j0", str(there / "sublet")], check=True)
    return python


class Side:
    """The program: one user of one office, the owner or the tenant whose token it has."""

    def __init__(self, python: Path, home: Path, token: str = "") -> None:
        self._home = home
        env = {**os.environ, "SUBLET_AS_TENANT": "1", "XDG_STATE_HOME": str(home.parent / "state")}
        for name in ("SUBLET_HOME", "SUBLET_URL", "SUBLET_TOKEN", "PYTHONPATH"):
            env.pop(name, None)
        self._child = Child([str(python), "-c", _PROGRAM, str(home), token], name="side", env=env, pipes=True)

    def ms(self, what: str) -> float:
        """How long it takes there: ``start``, ``teardown``, ``cell`` or ``save``."""
        said = self._child.ask(what)
        if not said:
            raise RuntimeError(f"{what} in {self._home.name} failed: {self._child.complaint()}")
        return float(json.loads(said))

    def end(self) -> None:
        self._child.end()


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
