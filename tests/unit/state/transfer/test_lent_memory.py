"""Memory that is lent to a pickle does not end the process when an error keeps the pickler's frames in a cycle."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, gc, sys, threading
from sublet.state.transfer.codec import encode
from sublet.state.transfer.memory import Lent, memory_at
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.guest.cargo import encode as packed
from sublet.notebook.parcels import Parcel

KEPT = (ctypes.c_ubyte * 100_000)()

class Result:
    pass

def view():
    return memory_at(ctypes.addressof(KEPT), len(KEPT))

def parcel():
    return Parcel(names=("a",), head=b"", buffers=(view(), view()), own=0, known={})

def attempt(how):
    result = Result()
    try:
        if how == "encode":
            encode([view(), view(), threading.Lock()])
        elif how == "roots":
            encode_roots({"a": view(), "b": [view(), threading.Lock()]})
        elif how == "call":
            packed([parcel(), Lent(view()), threading.Lock()], "it")
        elif how == "sent":
            group, sent = encode_roots({"a": view()}), packed([parcel(), Lent(view())], "it")
            raise ValueError
    except Exception as error:
        result.error = error

for n in range(800):
    attempt(("encode", "roots", "call", "sent")[n // 200])
    if n % 20 == 0:
        gc.collect()
gc.collect()
"""


def test_a_cycle_with_lent_memory_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
