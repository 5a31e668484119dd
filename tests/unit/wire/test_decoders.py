"""Decoders are made one at a time, since msgspec crashes the process otherwise."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

import sublet
from sublet.wire.decoders import convert_to, decode_as, decoder

SOURCE: Final = Path(sublet.__file__).parent
TYPED: Final = re.compile(
    r"\bmsgspec(\.\w+)*\.(Decoder|convert|decode)\b|from msgspec\S* import .*\b(Decoder|convert|decode|json)\b"
)
AT_ONCE: Final = """
import sys, threading
from typing import Literal
import msgspec
from sublet.wire.decoders import convert_to, decode_as
sys.setswitchinterval(1e-6)
MAKE = {make}
for i in range(15):
    fields = [(f"f{{k}}", Literal[f"a{{k}}", f"b{{i}}"] | None, None) for k in range(30)]
    inner = msgspec.defstruct(f"Inner{{i}}", fields)
    outer = msgspec.defstruct(f"Outer{{i}}", [("x", list[inner])])
    ready = threading.Barrier(4)
    def decode():
        ready.wait()
        MAKE(outer)
    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    "make", ["""lambda t: decode_as(b'{"x": [{"f1": "a1"}]}', t)""", 'lambda t: convert_to({"x": [{"f1": "a1"}]}, t)']
)
def test_threads_that_need_the_same_decoder_at_once_all_get_it(make: str) -> None:
    """A program died of SIGSEGV when its last release was answered to two threads."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE.format(make=make)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_decoder_is_made_once() -> None:
    assert decoder(list[int]) is decoder(list[int])
    assert decode_as(b"[1, 2]", list[int]) == [1, 2]


@pytest.mark.parametrize("bad", [b"", b"[", b'["a"]', b"{}"])
def test_what_is_no_such_json_is_refused(bad: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_as(bad, list[int])


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        convert_to({"a": 1}, list[int])


def test_no_other_module_makes_a_typed_decoder() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {made.group()}"
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "wire" / "decoders.py"
        for made in TYPED.finditer(path.read_text())
    ]
    assert not found, f"take them from sublet.wire.decoders: {', '.join(found)}"
