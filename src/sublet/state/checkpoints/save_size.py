"""Computes how much room a save needs before anything is written.

First what it may take at the most, which costs nothing to know. Only where that does not fit is it looked at closely:
chunks that the base has, or that are there twice, are written once or not at all, and some shrink.
"""

from __future__ import annotations

from typing import Final

from sublet.state.checkpoints.format import HASH_BYTES
from sublet.state.checkpoints.packs import Pressing
from sublet.state.checkpoints.writer import HEAD_CHUNK_BYTES, Base, Capture, SavedBuffer
from sublet.state.transfer.changes import chunk_count, chunk_hash

FIXED_BYTES: Final = 4096
RECORD_BYTES: Final = 64
CHUNK_COST: Final = 64
"""What of packs and manifests is not content, generously: in all, for each record, and for each chunk."""


def needed_bytes(capture: Capture, base: Base, room: int) -> int:
    """What writing it takes: at the most, if that is no more than ``room``; else nearly to the byte. Older packs are
    moved together only if there is more room than that (``Saver.write``)."""
    around = _around(capture)
    most = around + sum(_most(piece) for _, _, pieces in capture.records for piece in pieces)
    most += sum(len(head) for _, head, _ in capture.records)
    return most if most <= room else around + _closely(capture, base)


def _around(capture: Capture) -> int:
    total = FIXED_BYTES
    for names, _, pieces in capture.records:
        total += sum(RECORD_BYTES + 4 * len(name) for name in names)
        for piece in pieces:
            chunks = 0 if piece.look is None else chunk_count(piece.length, piece.look.chunk_bytes)
            total += RECORD_BYTES + chunks * HASH_BYTES + (len(piece.inline) if piece.inline is not None else 0)
    return total


def _most(piece: SavedBuffer) -> int:
    look = piece.look
    if look is None or not look.candidates:
        return 0
    has_last = look.candidates[-1] == look.count - 1
    short = look.count * look.chunk_bytes - look.length if has_last else 0  # the last chunk has what is left
    return len(look.candidates) * (look.chunk_bytes + CHUNK_COST) - short


def _closely(capture: Capture, base: Base) -> int:
    pressing, seen, total = Pressing(), set[bytes](), 0

    def add(chunk: memoryview, *, shrink: bool) -> int:
        digest = chunk_hash(chunk)
        if digest in base.where or digest in seen:
            return 0
        seen.add(digest)
        small = pressing.compress(chunk) if shrink else None
        return CHUNK_COST + (chunk.nbytes if small is None else len(small))

    for _, head, pieces in capture.records:
        view = memoryview(head)
        for at in range(0, len(head), HEAD_CHUNK_BYTES):
            part = view[at : at + HEAD_CHUNK_BYTES]
            total += add(part, shrink=pressing.is_worthwhile(part))
        for piece in pieces:
            look = piece.look
            if look is not None and look.candidates:
                shrink = pressing.is_worthwhile(look.chunk(look.candidates[0]))
                total += sum(add(look.chunk(n), shrink=shrink) for n in look.candidates)
    return total
