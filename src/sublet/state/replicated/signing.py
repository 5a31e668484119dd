"""Signs checkpoints: a writer to a replica can damage a save, but not forge one.

A save from a bucket or from another user's folder is loaded as Python objects, and loading them runs code of their
writer. The hashes in the record say that the bytes belong to the record, and nothing of the writer. So with a key
each save carries a keyed BLAKE3 of all that its record says of it, under the name that it was saved under: a save that
was moved to another name, or changed, or put together from two, does not fit, and is refused before a byte of it is
read.

The key is symmetric. The tenant that loads checkpoints is the one that saves them, on this or another machine, so no
party should be able to verify and not to sign; and it needs nothing that is not here for the hashes anyway.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from sublet.errors import InvalidRequest

KEY_BYTES: Final = 32
_FORM: Final = "sublet-checkpoint-key/"
_TEXT: Final = re.compile(re.escape(_FORM) + r"([0-9a-f]{64})")
_CONTEXT: Final = b"sublet checkpoint signature 1\0"


class SigningKey:
    """A secret of 32 bytes. It lies in a file that only its owner can read; its text is for carrying it elsewhere."""

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise InvalidRequest(
                f"a key of {len(secret)} bytes", do=f"Give {KEY_BYTES} random bytes, or use SigningKey.open(PATH)."
            )
        self._secret = secret
        self.id = blake3(b"id of " + secret).hexdigest()[:16]
        """Says which key it is, and nothing of what it is."""

    def __repr__(self) -> str:
        return f"<SigningKey {self.id}>"

    @classmethod
    def new(cls) -> Self:
        """A fresh one, from chance."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The key in this file; the first time one is made. To another machine the file is brought as an SSH key is."""
        file = Path(path)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            made = cls.new()
            beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
            if not file.exists():
                handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    with os.fdopen(handle, "w", encoding="ascii") as out:
                        out.write(made.text() + "\n")
                        out.flush()
                        os.fsync(out.fileno())
                    os.link(beside, file)  # the first of two who try it wins
                finally:
                    beside.unlink()
        return cls.parse(_read(file))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From its text."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise InvalidRequest(
                "that is no key for checkpoints", do=f"Give the text of one, which begins with {_FORM}."
            )
        return cls(bytes.fromhex(found.group(1)))

    def text(self) -> str:
        """To be carried to another machine, over a way that may see it."""
        return _FORM + self._secret.hex()

    def sign(self, what: bytes) -> str:
        """``ID:SIGNATURE``, of these bytes under this key."""
        return f"{self.id}:{blake3(_CONTEXT + what, key=self._secret).hexdigest()}"

    def fits(self, signature: str, what: bytes) -> bool:
        """Whether it is what this key says of these bytes."""
        return hmac.compare_digest(signature.encode(), self.sign(what).encode())


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise InvalidRequest(
                f"the key {path} is not yours alone",
                do="Where others may have read it make a new one, and give this one in older_keys=; else `chmod 600`.",
            )
        return file.read(256)
