"""Whatever is done to an audit chain, walking along it tells."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.office.journal.audit import BEGAN, GENESIS, RESTORED, Anchor, AuditRecord, Walk, link, verify

ID: Final = "0" * 31 + "1"
OTHER: Final = "0" * 31 + "2"


def chain(*kinds: str, journal: str = ID) -> list[AuditRecord]:
    """A chain of a journal, with a gap in its numbers after each record."""
    began = json.dumps({"journal": journal, "incarnation": 1}).encode()
    return extended([], (BEGAN, began), *((kind, b'{"n":%d}' % n) for n, kind in enumerate(kinds)))


def extended(records: list[AuditRecord], *more: tuple[str, bytes]) -> list[AuditRecord]:
    records = list(records)
    for kind, body in more:
        prev, seq = (records[-1].hash, records[-1].seq + 2) if records else (GENESIS, 1)
        hashed = link(prev, seq, seq * 10, seq * 100, kind, body)
        records.append(AuditRecord(seq, seq * 10, seq * 100, kind, body, hashed))
    return records


def anchor_of(records: list[AuditRecord], journal: str = ID) -> Anchor:
    return Anchor(journal, records[-1].seq, records[-1].seq, records[-1].hash)


WHOLE: Final = chain("queued", "granted", "claimed", "ending", "torn_down", "ended")


def test_a_chain_as_it_was_written_holds() -> None:
    verdict = verify(WHOLE, [anchor_of(WHOLE)], last_seq=WHOLE[-1].seq)
    assert (verdict.ok, verdict.records, verdict.head, verdict.notes) == (True, 7, WHOLE[-1].hash, ())


def test_the_format_is_the_one_that_is_written_down() -> None:
    """Computed here from docs/audit.md, without the code under test."""
    prev = GENESIS
    for record in WHOLE:
        text = b"sublet-audit-1\0" + prev + struct.pack(">qqq", record.seq, record.ns, record.wall_ns)
        kind = record.kind.encode()
        text += struct.pack(">HI", len(kind), len(record.body)) + kind + record.body
        assert hashlib.sha256(text).digest() == record.hash
        prev = record.hash


@pytest.mark.parametrize("at", range(len(WHOLE)))
@pytest.mark.parametrize("field", AuditRecord._fields)
def test_an_edited_record_is_noticed(at: int, field: str) -> None:
    """Each field of each record."""
    old = getattr(WHOLE[at], field)
    new: Any = old + 1 if isinstance(old, int) else old + (b" " if isinstance(old, bytes) else "x")
    records = [*WHOLE[:at], WHOLE[at]._replace(**{field: new}), *WHOLE[at + 1 :]]
    assert not verify(records).ok


def test_a_record_edited_with_its_hash_is_noticed_by_the_next() -> None:
    """Only somebody who computes all later hashes anew gets past that, and the anchor stops him."""
    record = WHOLE[3]
    hashed = link(WHOLE[2].hash, record.seq, record.ns, record.wall_ns, record.kind, b'{"n":9}')
    forged = record._replace(body=b'{"n":9}', hash=hashed)
    assert not verify([*WHOLE[:3], forged, *WHOLE[4:]]).ok
    rewritten = extended([*WHOLE[:3], forged], *((r.kind, r.body) for r in WHOLE[4:]))
    assert verify(rewritten).ok
    verdict = verify(rewritten, [anchor_of(WHOLE)])
    assert verdict.problem is not None
    assert "rewritten" in verdict.problem


@pytest.mark.parametrize("at", range(len(WHOLE)))
def test_a_record_that_was_taken_out_is_noticed(at: int) -> None:
    """The last one only against the anchor: a chain does not know its own end."""
    records = WHOLE[:at] + WHOLE[at + 1 :]
    assert not verify(records, [anchor_of(WHOLE)]).ok
    assert verify(records).ok is (at == len(WHOLE) - 1)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_chain_that_was_cut_off_is_noticed(length: int) -> None:
    verdict = verify(WHOLE[:length], [anchor_of(WHOLE)])
    assert verdict.problem is not None
    assert "cut off" in verdict.problem or "empty" in verdict.problem


def test_a_cut_among_entries_that_are_not_audited_is_noticed() -> None:
    """Renewals after the last record are no part of the chain, but the anchor counts them."""
    anchor = anchor_of(WHOLE)._replace(seq=WHOLE[-1].seq + 3)
    assert verify(WHOLE, [anchor], last_seq=WHOLE[-1].seq + 3).ok
    assert not verify(WHOLE, [anchor], last_seq=WHOLE[-1].seq + 2).ok


@pytest.mark.parametrize("at", range(len(WHOLE) + 1))
def test_a_record_that_was_put_in_is_noticed(at: int) -> None:
    """Also one whose own link is right."""
    prev = WHOLE[at - 1] if at else AuditRecord(-1, 0, 0, "", b"", GENESIS)
    seq = prev.seq + 1
    new = AuditRecord(seq, 1, 1, "granted", b"{}", link(prev.hash, seq, 1, 1, "granted", b"{}"))
    verdict = verify([*WHOLE[:at], new, *WHOLE[at:]], [anchor_of(WHOLE)])
    assert verdict.ok is (at == len(WHOLE)), "what is added at the end is the office's own next record"


def test_numbers_never_fall_even_where_every_link_is_right() -> None:
    """Bills read the chain in parts, by number: a record below one that was read would never be seen."""
    last = WHOLE[-1]
    for seq in (last.seq, last.seq - 1):
        late = AuditRecord(seq, 1, 1, "granted", b"{}", link(last.hash, seq, 1, 1, "granted", b"{}"))
        assert not verify([*WHOLE, late]).ok


@given(st.permutations(range(len(WHOLE))))
def test_records_that_were_moved_are_noticed(order: list[int]) -> None:
    assert verify([WHOLE[n] for n in order]).ok is (order == sorted(order))


def test_a_hundred_thousand_edits_are_all_noticed() -> None:
    """One random change each, of a bit, a number, or the order."""
    chance = random.Random(11)
    long = chain(*(chance.choice(("queued", "granted", "ended")) for _ in range(8)))
    anchor = anchor_of(long)
    for n in range(100_000):
        records = list(long)
        at = chance.randrange(len(records))
        record = records[at]
        match n % 5:
            case 0:
                body = bytearray(record.body)
                body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
                records[at] = record._replace(body=bytes(body))
            case 1:
                hashed = bytearray(record.hash)
                hashed[chance.randrange(32)] ^= 1 << chance.randrange(8)
                records[at] = record._replace(hash=bytes(hashed))
            case 2:
                field = chance.choice(("seq", "ns", "wall_ns"))
                records[at] = record._replace(**{field: getattr(record, field) ^ 1 << chance.randrange(40)})
            case 3:
                del records[at]
            case _:
                other = (at + 1 + chance.randrange(len(records) - 1)) % len(records)
                records[at], records[other] = records[other], records[at]
        assert not verify(records, [anchor], last_seq=anchor.seq).ok, f"edit {n} of seed 11"


def test_two_records_never_have_the_same_bytes() -> None:
    """Moving a letter from the kind to the body changes the hash: lengths stand before the texts."""
    assert link(GENESIS, 1, 2, 3, "ab", b"c") != link(GENESIS, 1, 2, 3, "a", b"bc")


# ---- anchors and restores ----


def test_another_journal_at_the_same_place_is_noticed() -> None:
    """A journal replaced as a whole is a perfect chain; the anchor of the one before tells."""
    new = chain("queued", journal=OTHER)
    verdict = verify(new, [anchor_of(WHOLE), anchor_of(new, OTHER)])
    assert verdict.problem is not None
    assert "replaced" in verdict.problem


def test_a_restore_on_record_explains_the_other_journal() -> None:
    """It names exactly the head that was given up; a later one is not explained by it."""
    old = anchor_of(WHOLE)
    body = json.dumps({"journal": OTHER, "incarnation": 2, "replaced": [old.text]}).encode()
    restored = extended(WHOLE[:3], (RESTORED, body), ("queued", b"{}"))
    assert verify(restored, [old, anchor_of(restored, OTHER)]).ok
    assert not verify(restored, [old._replace(seq=old.seq + 1), anchor_of(restored, OTHER)]).ok


def test_without_an_anchor_the_verdict_says_what_was_not_checked() -> None:
    verdict = verify(WHOLE)
    assert verdict.ok
    assert "cut off at its end could not be told" in verdict.notes[0]


def test_an_anchor_is_read_as_it_was_written_or_not_at_all() -> None:
    """Every cut and every flipped bit."""
    anchor = anchor_of(WHOLE)
    line = anchor.text.encode() + b"\n"
    assert Anchor.parse(line.ljust(256)) == anchor
    for length in range(len(line)):
        assert Anchor.parse(line[:length]) is None
    for bit in range(len(line) * 8):
        torn = bytearray(line)
        torn[bit // 8] ^= 1 << bit % 8
        assert Anchor.parse(bytes(torn)) is None, bit


def test_a_walk_can_be_taken_in_parts() -> None:
    """As bills are: what is new since the last time."""
    walk = Walk()
    assert [walk.step(record) for record in WHOLE[:4]] == [None] * 4
    assert [walk.step(record) for record in WHOLE[4:]] == [None] * 3
    assert walk.head == WHOLE[-1].hash
    assert walk.step(WHOLE[-1]) is not None
