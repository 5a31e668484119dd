"""A training script of a tenant other than ``local``: the guest sees no file of this machine's, so the script's text
travels with the request, and lies in the home of the guest when it runs. Whatever else it reads must be where tenants'
guests see it: in the interpreter's installation, in the system's folders, in its volume."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sublet.errors import InvalidRequest
from sublet.wire.guests import GuestSpec

ENTRY: Final = "sublet.training.script:main"
ARGS_MAX: Final = 120 * 1024
"""Letters of the text and its arguments, as they travel."""


def for_tenant(spec: GuestSpec, cwd: str | None) -> GuestSpec:
    """The same command, begun where the tenant's guests begin unless a folder is named, and with its script along. What
    is no script (``-m``, ``-c``) is run as it stands."""
    interpreter, *words = spec.argv
    plain = replace(spec, cwd=cwd or "", python=interpreter)
    if not words or words[0].startswith("-"):
        return plain
    path = os.path.join(spec.cwd, words[0])
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InvalidRequest(f"{words[0]} cannot be read: {why}", do="Name a Python script.") from None
    args = json.dumps({"name": os.path.basename(path), "source": source, "argv": words[1:]})
    if len(args) > ARGS_MAX:
        raise InvalidRequest(
            f"{words[0]} has {len(source)} letters, and less than {ARGS_MAX} reach the guest of a tenant",
            do="Put most of it into a package that is installed with the interpreter (--python).",
        )
    return replace(plain, argv=(), entry=ENTRY, args=args)


def main(name: str, source: str, argv: Sequence[str]) -> None:
    """In the guest: as ``python NAME ARGV...`` in its home."""
    path = os.path.join(os.environ.get("HOME", os.getcwd()), os.path.basename(name))
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    module = sys.modules["__main__"]
    module.__file__ = path
    sys.argv[:] = [path, *argv]
    sys.path.insert(0, os.path.dirname(path))
    exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - the program whose guest this is
