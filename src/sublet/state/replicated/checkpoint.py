"""Checkpoints on a quorum: saved by compare-and-swap, fenced by a lease's epoch, verified when read.

Each name is one register. Its record holds the last few saves; small ones lie in the record itself, large ones in packs
beside it, and a replica takes a record only when its packs are durable there. So a checkpoint is whole or it is not
there, on each replica by itself.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from blake3 import blake3

from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, OutOfMemory, StaleEpoch, VersionConflict
from sublet.state.replicated.arguments import checked_bytes, checked_effect, checked_epoch, checked_version
from sublet.state.replicated.ballot import Garbled
from sublet.state.replicated.cell import KEY_MAX, VALUE_MAX
from sublet.state.replicated.checkpoint_record import Effect, Save, SaveHistory
from sublet.state.replicated.group import ReplicaGroup, nonce
from sublet.state.replicated.policy import ReplicaPolicy
from sublet.state.replicated.register import (
    CasOperation,
    OpenOperation,
    OperationDone,
    OperationRefused,
    OperationUnknown,
    OutcomeReason,
    ReadOperation,
    Result,
    Tenure,
)
from sublet.state.replicated.replica import PackName, Replica, ReplicaSilent, pack_of
from sublet.state.replicated.results import NOT_SAVED, raise_for
from sublet.state.replicated.signing import SigningKey
from sublet.state.replicated.state import RegisterState
from sublet.state.transfer.codec import encode
from sublet.state.transfer.loading import decode
from sublet.values import Epoch, format_size

INLINE_MAX: Final = 4 << 10
"""A save up to this size lies in the record."""
PACK_BYTES: Final = 16 << 20
"""A larger one is cut into packs of this size, so that what did not change need not be sent again."""
RETAIN_MAX: Final = 8
DROPPED_MAX: Final = 64
RECORD_ROOM: Final = 1024
"""Kept free in a record for its head."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A save with its bytes."""

    save: Save
    data: bytes

    @property
    def version(self) -> int:
        """Rises by one with every save of a name."""
        return self.save.version

    @property
    def effect(self) -> Effect | None:
        """What it is the effect of, if its writer said so."""
        return self.save.effect

    def value(self) -> Any:
        """The Python value that was saved with ``save``. Loading it runs code of the program that saved it."""
        try:
            return load_value(self.data)
        except MemoryError:
            raise _no_memory_for(self.save) from None


@dataclass(slots=True)
class _Open:
    """What this program knows of a name that it has opened for writing."""

    tenure: Tenure
    session: str
    dropped: list[str] = field(default_factory=list)
    """Packs that our saves let go; a replica that was late then is told again."""


class ReplicatedCheckpoint:
    """Saves and loads by name. ``epoch`` is that of the lease under which it writes; reading needs none.

    Opening a name for writing (``open``, or the first save) fences every older epoch, before anything is read.

    With a ``key`` each save is signed, and only what it or one of the ``older_keys`` has signed is loaded. Where others
    may write to a replica (a bucket, a folder of another user) it is refused without one. ``unsigned``: load also what
    was saved without any, such as saves of before there was a key.
    """

    def __init__(
        self,
        name: str,
        *,
        schema: str,
        replicas: ReplicaGroup | Sequence[Replica | str | os.PathLike[str]],
        epoch: Epoch | None = None,
        policy: ReplicaPolicy | None = None,
        policy_hash: bytes | None = None,
        office: str = "local",
        retain: int = 3,
        key: SigningKey | None = None,
        older_keys: Sequence[SigningKey] = (),
        unsigned: bool = False,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not 1 <= retain <= RETAIN_MAX:
            raise InvalidRequest(f"retain={retain} is outside what a record holds", do=f"Say 1 to {RETAIN_MAX}.")
        self.name, self.schema, self.epoch = name, schema, epoch
        self.retain = retain
        self.group = as_group(replicas, policy, office)
        self._made_group = self.group is not replicas
        self._policy = (policy_hash if policy_hash is not None else self.group.policy.digest).hex()
        self._wall_ns = wall_ns
        self._key_of_saves = key
        self._keys = () if key is None else (key, *older_keys)
        self._unsigned = unsigned
        self._open: dict[str, _Open] = {}
        try:
            self._check_key()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the replicas that were opened here; a group that was given is its maker's to close. Harmless twice."""
        if self._made_group:
            self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- writing ----

    def open(self, name: str, *, epoch: Epoch | None = None, adopt: bool = False) -> Save | None:
        """Fence every older epoch, and tell what was saved last. ``adopt``: even from another office."""
        opened = self._tenure(name, epoch)
        result = self.group.run(self._key(name), OpenOperation(self.group.view, opened.tenure, adopt=adopt))
        if not isinstance(result, OperationDone):
            raise_for(result, self._what(name))
        history = self._history(name, result.state)
        self._sweep_older(name, opened.tenure)
        return history.latest

    def save_bytes(
        self,
        name: str,
        data: bytes,
        *,
        expected: int | None = None,
        epoch: Epoch | None = None,
        effect: Effect | tuple[str, str, int] | None = None,
    ) -> Save:
        """Save, if the last version is the expected one (0: nothing was saved yet; None: whatever it is).

        A save whose effect is there already is not done again: the one that is there is returned. Whatever is raised,
        what was saved before is unharmed.
        """
        of, expected, data = checked_effect(effect), checked_version(expected), checked_bytes(data)
        tenure = self._tenure(name, epoch)
        if tenure.tenure.ballot is None:
            self.open(name, epoch=epoch)
        for again in range(3):
            state = tenure.tenure.state
            history = self._history(name, state)
            earlier = history.admits(of) if of is not None else None
            if earlier is not None:
                self._check_signature(name, earlier)
                return self._confirmed(name, earlier)
            if expected is not None and expected != state.version:
                # What is remembered may be out of date, and a history must follow from what it replaces.
                if again:
                    raise self._conflict(name, expected, state.version)
                self.open(name, epoch=epoch)
                continue
            saved = self._try(name, tenure, history, state.version, data, of)
            if saved is not None:
                return saved
        raise CheckpointFailed(
            f"others keep writing {self._what(name)}",
            do="Let one writer at a time save under a name.",
            reason=NOT_SAVED,
        )

    def save(
        self,
        name: str,
        value: object,
        *,
        expected: int | None = None,
        epoch: Epoch | None = None,
        effect: Effect | tuple[str, str, int] | None = None,
    ) -> Save:
        """As ``save_bytes``, of a Python value: arrays and tensors keep what they share. ``load(name).value()``."""
        try:
            data = dump_value(value)
        except MemoryError:
            raise _no_memory(self._what(name)) from None
        return self.save_bytes(name, data, expected=expected, epoch=epoch, effect=effect)

    def _try(
        self, name: str, opened: _Open, history: SaveHistory, expected: int, data: bytes, effect: Effect | None
    ) -> Save | None:
        """One comparison; None if the version was another."""
        tenure = opened.tenure
        try:
            save, packs = self._staged(name, opened, history, expected + 1, data, effect)
        except MemoryError:
            raise _no_memory(self._what(name)) from None
        after = history.then(save, self.retain)
        while len(after.pack()) > VALUE_MAX - RECORD_ROOM and len(after.saves) > 1:
            after = SaveHistory(after.saves[:-1])
        body, write = after.pack(), nonce()
        if len(body) > VALUE_MAX - RECORD_ROOM:
            raise InvalidRequest(
                f"{len(data)} bytes need {len(after.packs)} packs, more than a record can name",
                do="Save less under one name.",
            )
        operation = CasOperation(self.group.view, tenure, expected=expected, write=write, body=body, packs=after.packs)
        result = self.group.run(self._key(name), operation, supply=packs)
        if isinstance(result, OperationUnknown):
            result = self._resolve_unknown(name, result, write, expected + 1)
        if isinstance(result, OperationRefused) and result.why is OutcomeReason.VERSION:
            return None
        if not isinstance(result, OperationDone):
            raise_for(result, self._what(name))
        opened.dropped += [pack for pack in history.packs if pack not in after.packs]
        del opened.dropped[:-DROPPED_MAX]
        self._sweep(name, tenure, opened.dropped)
        return save

    def _resolve_unknown(self, name: str, doubt: OperationUnknown, write: bytes, version: int) -> Result:
        """After an unknown outcome, the record may tell."""
        found = self.group.run(self._key(name), ReadOperation(self.group.view))
        if isinstance(found, OperationDone):
            mine = found.state.wrote(write, version)
            if mine:
                return found
            if mine is False:
                return OperationRefused(OutcomeReason.VERSION, found.state)
        return doubt

    def _confirmed(self, name: str, saved: Save) -> Save:
        """That the effect is there was remembered; before it is said, a quorum says so."""
        found = self._read(name).find(saved.version)
        if found is None or found.effect != saved.effect:
            raise StaleEpoch(f"others have written {self._what(name)} since it was opened", reason=NOT_SAVED)
        return found

    def _staged(
        self, name: str, opened: _Open, history: SaveHistory, version: int, data: bytes, effect: Effect | None
    ) -> tuple[Save, dict[str, bytes]]:
        """The save, with its packs on a write quorum. Packs that the history has already are not sent again."""
        tenure = opened.tenure
        save = Save(
            version=version,
            size=len(data),
            hash=blake3(data).hexdigest(),
            schema=self.schema,
            policy=self._policy,
            epoch=tenure.epoch,
            wall_ns=self._wall_ns(),
            effect=effect,
        )
        if len(data) <= INLINE_MAX:
            return self._signed(name, _with(save, inline=bytes(data))), {}
        known = {pack_of(pack).digest: pack for pack in history.packs}
        view, names, packs = memoryview(data), list[str](), dict[str, bytes]()
        for at in range(0, len(data), PACK_BYTES):
            piece = view[at : at + PACK_BYTES]
            digest = blake3(piece).hexdigest()[:32]
            pack = known.get(digest)
            if pack is None:
                epoch = tenure.epoch
                pack = str(PackName(tenure.reign, epoch.incarnation, epoch.n, opened.session, digest))
                known[digest] = pack
                packs[pack] = bytes(piece)
                self.group.put_pack(self._key(name), pack, packs[pack])
            names.append(pack)
        return self._signed(name, _with(save, packs=tuple(names))), packs

    def _signed(self, name: str, save: Save) -> Save:
        key = self._key_of_saves
        return save if key is None else replace(save, signature=key.sign(save.signed_part(self._key(name))))

    def _check_key(self) -> None:
        """See that nothing is taken for ours where others write as well."""
        if self._keys or self._unsigned or not (why := self.group.who_else_writes()):
            return
        raise InvalidRequest(
            f"others may write to {why}, and loading what they saved would run their code",
            do="Give key= (`training_records(..., fabric=fabric)` has the office's); or, if you trust all who can "
            "write there, unsigned=True.",
        )

    def _check_signature(self, name: str, save: Save) -> None:
        """Refuse a wrong signature before a byte of the save is read."""
        self._check_key()  # a replica may have come since
        if not self._keys or (not save.signature and self._unsigned):
            return
        what = f"version {save.version} of {self._what(name)}"
        if not save.signature:
            raise CheckpointFailed(
                f"{what} has no signature, and with a key only signed saves are loaded; nothing of it was read",
                do="If you know who wrote it, open the checkpoint with unsigned=True, load it, and save it again.",
            )
        signed = save.signed_part(self._key(name))
        if not any(key.fits(save.signature, signed) for key in self._keys):
            raise CheckpointFailed(
                f"the signature of {what} does not fit your key: it was written or changed without it, or with an "
                "older key; nothing of it was read",
                do="If it is of an older key of yours, give that one in older_keys=; else load an older version, "
                "and see who may write to the replicas.",
            )

    # ---- reading ----

    def load(self, name: str, version: int | None = None) -> Checkpoint | None:
        """The last save, or that of a version, checked to the last bit; None if there is none."""
        for _ in range(3):
            history = self._read(name)
            save = history.latest if version is None else history.find(version)
            if save is None:
                return None
            self._check_signature(name, save)
            try:
                data = self._bytes(name, save)
            except MemoryError:
                raise _no_memory_for(save) from None
            if data is not None:
                return Checkpoint(save, data)
            # A writer may have collected it while it was being read; then the record names something newer by now.
        raise CheckpointFailed(
            f"what was asked of {self._what(name)} is damaged or incomplete on every replica that answers",
            do="Load an older version (`versions` lists them), and look at the replicas with `verify()`.",
        )

    def versions(self, name: str) -> list[Save]:
        """The saves that are kept, newest first."""
        return list(self._read(name).saves)

    def find(self, name: str, effect: str) -> Save | None:
        """The save that is the effect of this key, if it is kept: it decides after a crash before `complete`."""
        found = self._read(name).with_effect(effect)
        if found is not None:
            self._check_signature(name, found)
        return found

    def _read(self, name: str) -> SaveHistory:
        result = self.group.run(self._key(name), ReadOperation(self.group.view))
        if not isinstance(result, OperationDone):
            raise_for(result, self._what(name), reading=True)
        return self._history(name, result.state)

    def _bytes(self, name: str, save: Save) -> bytes | None:
        if not save.packs:
            data: bytes | None = save.inline
        else:
            pieces = [self.group.read_pack(self._key(name), pack) for pack in save.packs]
            data = b"".join(piece for piece in pieces if piece is not None)
        whole = data is not None and len(data) == save.size and blake3(data).hexdigest() == save.hash
        return data if whole else None

    # ---- collecting ----

    def _sweep(self, name: str, tenure: Tenure, names: Sequence[str]) -> None:
        """Remove packs that the record has let go. Only what our own session or an older epoch staged: a writer that
        might still name it is fenced."""
        accepted = tenure.accepted
        if accepted is None or not names:
            return
        for replica in self.group.replicas():
            try:
                replica.sweep(self._key(name), accepted.stamp, names)
            except ReplicaSilent:
                continue  # the next opening sweeps again

    def _sweep_older(self, name: str, tenure: Tenure) -> None:
        """Remove what older epochs staged and never saved."""
        accepted = tenure.accepted
        if accepted is None:
            return
        ours = (tenure.reign, *tenure.epoch)
        for replica in self.group.replicas():
            try:
                packs = replica.packs(self._key(name))
                old = [pack for pack in packs if pack not in accepted.packs and _older(pack, ours)]
                if old:
                    replica.sweep(self._key(name), accepted.stamp, old)
            except ReplicaSilent:
                continue

    # ---- inside ----

    def _tenure(self, name: str, epoch: Epoch | None) -> _Open:
        wanted = checked_epoch(epoch if epoch is not None else self.epoch, "writing a checkpoint")
        opened = self._open.get(name)
        if opened is not None and wanted < opened.tenure.epoch:
            raise StaleEpoch(
                f"{self._what(name)} was opened with epoch {opened.tenure.epoch}, and {wanted} is older",
                reason=NOT_SAVED,
            )
        if opened is None or wanted > opened.tenure.epoch:
            tenure = Tenure(office=self.group.office, epoch=wanted, nonce=nonce)
            opened = self._open[name] = _Open(tenure, nonce().hex())
        return opened

    def _history(self, name: str, state: RegisterState) -> SaveHistory:
        try:
            history = SaveHistory.unpack(state.body)
        except Garbled as error:
            raise CheckpointFailed(f"{self._what(name)} holds something else ({error})") from error
        history.check(self.schema, self._policy, self._what(name))
        return history

    def _conflict(self, name: str, expected: int, found: int) -> VersionConflict:
        future = " which is not written yet" if expected > found else ""
        return VersionConflict(
            f"{self._what(name)} has version {found}, not {expected}{future}",
            do="Load it, and save what follows from what is there.",
            reason=NOT_SAVED,
        )

    def _key(self, name: str) -> str:
        key = f"c/{self.name}/{name}"
        if len(key.encode()) > KEY_MAX or not key.isprintable() or not name:
            raise InvalidRequest(
                f"{name[:60]!r} cannot be the name of a checkpoint",
                do=f"Use printable text; with the name of the store at most {KEY_MAX - 3} bytes.",
            )
        return key

    def _what(self, name: str) -> str:
        return f"the checkpoint {name!r}"


def _no_memory(what: str) -> CheckpointFailed:
    """A save holds the bytes twice: as they are, and in packs."""
    return CheckpointFailed(
        f"there is not enough memory to save {what}; nothing was written",
        do="Free some, save in smaller parts, or save into a volume (`Durable`), which copies nothing.",
        reason=NOT_SAVED,
    )


def _no_memory_for(save: Save) -> OutOfMemory:
    return OutOfMemory(
        f"there is no memory for {format_size(save.size)} of version {save.version}",
        do="Load it where there is more; nothing is lost.",
    )


def as_group(
    replicas: ReplicaGroup | Sequence[Replica | str | os.PathLike[str]], policy: ReplicaPolicy | None, office: str
) -> ReplicaGroup:
    """A group as it is, or one of these replicas."""
    if isinstance(replicas, ReplicaGroup):
        if policy is not None and policy != replicas.policy:
            raise InvalidRequest("the group has a policy already", do="Give the policy where the group is made.")
        if office not in ("local", replicas.office):
            raise InvalidRequest(f"the group trusts {replicas.office!r} already", do="Give office= when it is created.")
        return replicas
    return ReplicaGroup(replicas, policy, office=office)


def _with(save: Save, *, inline: bytes = b"", packs: tuple[str, ...] = ()) -> Save:
    return replace(save, inline=inline, packs=packs)


def _older(pack: str, ours: tuple[int, int, int]) -> bool:
    try:
        name = pack_of(pack)
    except Garbled:
        return False
    return (name.reign, name.incarnation, name.n) < ours


# ---- Python values as the bytes of a save: what the codec makes of them (docs/format.md), one part after the other
#     offset  size  field
#     0       4     magic "SBLV"
#     4       2     version, 1
#     6       2     zero
#     8       4     number of parts: the head, then its buffers
#     12      4     crc32 of these 16 bytes (this field as zero) and the lengths
#     16      8×n   length of each part
#     …             the parts, each at the next multiple of 4096
#
# Parts begin on pages, so that a head which grew by a few bytes does not move what follows it, and the packs that hold
# it need not be sent again.

MAGIC: Final = b"SBLV"
VERSION: Final = 1
PAGE: Final = 4096
_FIXED: Final = struct.Struct("<4sHHII")


def dump_value(value: object) -> bytes:
    """A copy of the value as it is now. Raises ``Unpicklable``, with the path to what cannot be saved."""
    encoded = encode(value)
    parts = [memoryview(encoded.head), *encoded.views]
    lengths = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
    places = _places([part.nbytes for part in parts])
    data = bytearray(places[-1])
    check = zlib.crc32(_FIXED.pack(MAGIC, VERSION, 0, len(parts), 0) + lengths)
    data[: _FIXED.size] = _FIXED.pack(MAGIC, VERSION, 0, len(parts), check)
    data[_FIXED.size : _FIXED.size + len(lengths)] = lengths
    for place, part in zip(places, parts, strict=False):
        data[place : place + part.nbytes] = part.cast("B") if part.nbytes else b""
    return bytes(data)


def load_value(data: bytes) -> Any:
    """The value again, its arrays on memory of their own. Runs code of the program that saved it."""
    view = memoryview(data)
    if data[:4] != MAGIC:
        raise InvalidRequest("this was saved as bytes, not as a value", do="Take `.data`.")
    lengths = _lengths(view)
    places = _places(lengths)
    if places[-1] != len(data):
        raise CheckpointDamaged(f"a saved value of {places[-1]} bytes came with {len(data)}")
    head, *buffers = (view[place : place + length] for place, length in zip(places, lengths, strict=False))
    return decode(bytes(head), buffers)


def _lengths(view: memoryview) -> list[int]:
    try:
        magic, version, zero, count, check = _FIXED.unpack_from(view)
        lengths = struct.unpack_from(f"<{count}Q", view, _FIXED.size) if count <= len(view) // 8 else ()
    except struct.error:
        raise CheckpointDamaged("a saved value is cut off") from None
    if version != VERSION and not zero:
        raise CheckpointDamaged(
            f"a saved value is of version {version}, and this program knows {VERSION}", do="Use a newer Sublet."
        )
    front = _FIXED.pack(magic, version, zero, count, 0) + bytes(view[_FIXED.size : _FIXED.size + 8 * count])
    if zero or not lengths or check != zlib.crc32(front):
        raise CheckpointDamaged("a saved value does not begin as one")
    return list(lengths)


def _places(lengths: list[int]) -> list[int]:
    found = [_up(_FIXED.size + 8 * len(lengths))]
    for length in lengths:
        found.append(_up(found[-1] + length))
    return found


def _up(at: int) -> int:
    return -(-at // PAGE) * PAGE
