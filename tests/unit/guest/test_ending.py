"""How a guest that was forked from a warm interpreter ends: what is called at its exit, and what is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sublet.wire.zygote import LEASE_ENDED

ENDS = """
import atexit, ctypes, os, sys, weakref
from sublet.guest.ending import end_forked, keep_finalizers_back

def say(word, write=os.write): write(1, word + b" ")
class Thing: pass
things = Thing(), Thing()
weakref.finalize(things[0], say, b"finalizer-of-the-zygote")
keep_finalizers_back()  # as the zygote does; what follows is the guest's own
weakref.finalize(things[1], say, b"finalizer")
atexit.register(say, b"exit-function")
library = ctypes.PyDLL(None)
sys.at_exit = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(lambda status, _, say=say: say(b"library"))
library.on_exit(sys.at_exit, None)
library.printf(b"written-in-C ")
end_forked(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3, LEASE_ENDED])
def test_what_libraries_registered_is_called_unless_the_lease_has_ended(status: int) -> None:
    """What the C library was to write is written in any case."""
    done = subprocess.run([sys.executable, "-c", ENDS, str(status)], capture_output=True, text=True, timeout=60)
    words = ["exit-function", "finalizer", *(["library"] if status != LEASE_ENDED else []), "written-in-C"]
    assert (done.returncode, sorted(done.stdout.split())) == (status, sorted(words)), done.stderr
