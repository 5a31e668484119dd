"""A replica in an S3-compatible store, by create-if-absent and replace-if-ETag-matches.

One object for each record. Its bytes carry a nonce of the write, so no two writes ever have the same bytes, nor the
same ETag; and after an answer that says nothing (a time-out) or too little (412, 409: perhaps to a request of ours that
was sent twice on the way) the object is read and its nonce compared. As long as it is still what it was before, the
write is sent again against the same ETag: of several such requests at most one can ever take effect.

Some stores accept conditions and ignore them. One that does would lose writes in silence, so the store is tried out
before anything is kept in it.
"""

from __future__ import annotations

import datetime as dt
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from sublet.errors import InvalidRequest, Unsupported
from sublet.invocation import installing
from sublet.state.replicated.ballot import NONCE_BYTES, Garbled, WriteStamp, take
from sublet.state.replicated.cell import (
    EMPTY,
    Accept,
    Answer,
    Behind,
    Install,
    Installed,
    Outdated,
    Prepare,
    Query,
    ReplicaCell,
    Request,
    answer,
)
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.replica import FailureDomain, ReplicaFaulty, ReplicaSilent, folder_of, seal, unseal

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAGIC: Final = b"SUBLETO1"
_HEAD: Final = struct.Struct(f">8s16sQ{NONCE_BYTES}sH")
_HASH: Final = 32
TRIES: Final = 12


class SealedObject:
    """The bytes of one object: whose replica, which generation, which write, which key, and the content."""

    def __init__(self, identity: str, generation: int, nonce: bytes, key: str, content: bytes) -> None:
        self.identity, self.generation, self.nonce, self.key, self.content = identity, generation, nonce, key, content

    def pack(self) -> bytes:
        """As docs/replicated.md draws it."""
        key = self.key.encode()
        head = _HEAD.pack(MAGIC, bytes.fromhex(self.identity), self.generation, self.nonce, len(key))
        data = head + key + self.content
        return data + blake3(data).digest()

    @classmethod
    def unpack(cls, data: bytes) -> SealedObject:
        """From an object; anything else is Garbled."""
        magic, identity, generation, nonce, length = _HEAD.unpack(take(data, 0, _HEAD.size))
        if magic != MAGIC:
            raise Garbled("this is not an object of a replica")
        if len(data) < _HEAD.size + length + _HASH or blake3(data[:-_HASH]).digest() != data[-_HASH:]:
            raise Garbled("the object is damaged")
        key = data[_HEAD.size : _HEAD.size + length].decode()
        return cls(identity.hex(), generation, nonce, key, data[_HEAD.size + length : -_HASH])


class S3Replica:
    """A replica under a prefix of a store. ``store`` is one of ``obstore.store``, made with ``max_retries`` 0.

    ``S3Replica.connect`` makes such a store from a bucket and an endpoint.
    """

    def __init__(self, store: ObjectStore, prefix: str = "", *, domain: FailureDomain | None = None) -> None:
        self._store = store
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.domain = domain if domain is not None else FailureDomain()
        self._lock = threading.RLock()
        self._known: ReplicaSet | None = None
        _refuse_retries(store)
        import obstore

        self._obstore = obstore
        self._probe()
        self.identity = self._identity()

    @classmethod
    def connect(
        cls,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        timeout: float = 10.0,
        domain: FailureDomain | None = None,
    ) -> S3Replica:
        """To a bucket that exists; what is not given is taken from the usual AWS_ variables."""
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise Unsupported(
                "replicas in object stores need the extra s3", do=f"Install it: `{installing('sublet[s3]')}`."
            ) from error
        given = {
            "endpoint": endpoint,
            "region": region,
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
        }
        config: Any = {name: value for name, value in given.items() if value is not None}
        plain = endpoint is not None and endpoint.startswith("http://")
        store = S3Store(
            bucket,
            config=config,
            client_options={"timeout": f"{timeout}s", "allow_http": plain},
            retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(seconds=timeout)},
        )
        return cls(store, prefix, domain=domain)

    def who_else_writes(self) -> str:
        """The owners of the keys to a store are not known here."""
        return f"the object store under {self._prefix or 'its top'}"

    # ---- what the protocol asks ----

    def ask(self, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        """Carry these out, one after the other."""
        with self._lock, self._mapped():
            return [self._one(key, request) for key, request in requests]

    def _one(self, key: str, request: Request) -> Answer:
        if isinstance(request, Install):
            self._install(request.replicas)
            if request.then is None:
                return Installed()
            request = request.then
        if self._known is None or self._known.generation < request.generation:
            self._refresh()
        for _ in range(TRIES):
            place = self._cell_place(key)
            sealed, tag = self._get(place)
            before = _cell(sealed)
            after, reply = answer(before, self._known, request, self._missing(key, request))
            if isinstance(reply, Behind | Outdated):
                return reply
            if after is not before and not self._swap(place, tag, key, request.generation, after.pack()):
                continue
            # The set may have changed while this was going on. The changing program lists the records only after that,
            # so either it sees this one, or we see its set here, and then this does not count.
            self._refresh()
            if self._known is not None and self._known.generation > request.generation:
                return Outdated(self._known)
            return reply
        raise ReplicaSilent(f"others keep writing the record of {key!r}")

    def known(self) -> ReplicaSet | None:
        """The latest set that was installed."""
        with self._lock, self._mapped():
            self._check_identity()
            self._refresh()
            return self._known

    def keys(self) -> list[str]:
        """Every key of which there is a record."""
        with self._lock, self._mapped():
            found = []
            for place in self._list("cells/"):
                sealed, _ = self._get(place)
                if sealed is not None:
                    found.append(sealed.key)
            return sorted(found)

    # ---- packs ----

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        """Keep these bytes; the store answers when it has them."""
        with self._mapped():
            self._obstore.put(self._store, self._pack_place(key, name), seal(data))

    def read_pack(self, key: str, name: str) -> bytes | None:
        """The bytes, checked; None if there is no such pack or it is damaged."""
        with self._mapped():
            try:
                return unseal(bytes(self._obstore.get(self._store, self._pack_place(key, name)).bytes()))
            except (FileNotFoundError, Garbled):
                return None

    def packs(self, key: str) -> list[str]:
        """The names there are."""
        with self._mapped():
            return sorted(place.rpartition("/")[2] for place in self._list(f"packs/{folder_of(key)}/"))

    def sweep(self, key: str, stamp: WriteStamp, names: Sequence[str]) -> int:
        """Remove these packs if the last write that was taken is this one and does not name them."""
        with self._lock, self._mapped():
            sealed, _ = self._get(self._cell_place(key))
            accepted = _cell(sealed).accepted
            if accepted is None or accepted.stamp != stamp:
                return 0
            gone = [name for name in names if name not in accepted.packs]
            for name in gone:
                self._remove(self._pack_place(key, name))
            return len(gone)

    # ---- looking after it ----

    def verify(self) -> list[str]:
        """Read everything and say what is damaged."""
        found = []
        try:
            with self._mapped():
                places = self._list("cells/")
        except ReplicaSilent as error:
            return [error.message]
        for place in places:
            try:
                with self._mapped():
                    sealed, _ = self._get(place)
            except ReplicaSilent as error:
                found.append(f"{place}: {error.message}")
                continue
            accepted = _cell(sealed).accepted
            if sealed is not None and accepted is not None:
                lost = [pack for pack in accepted.packs if self.read_pack(sealed.key, pack) is None]
                found += [f"{sealed.key}: the pack {pack} is missing or damaged" for pack in lost]
        return found

    def close(self) -> None:
        """Nothing to do."""

    def __repr__(self) -> str:
        return f"<S3Replica {self.identity[:8]} in {self._store!r}>"

    # ---- objects ----

    def _get(self, place: str) -> tuple[SealedObject | None, str | None]:
        try:
            got = self._obstore.get(self._store, place)
            data, tag = bytes(got.bytes()), got.meta["e_tag"]
        except FileNotFoundError:
            self._check_identity()
            return None, None
        if tag is None:
            raise ReplicaSilent("the store gave no ETag")
        try:
            sealed = SealedObject.unpack(data)
        except Garbled as error:
            raise ReplicaFaulty(f"{place} in the store is not what was written ({error})") from error
        if sealed.identity != self.identity:
            raise ReplicaFaulty(f"{place} in the store is another replica's")
        return sealed, tag

    def _swap(self, place: str, tag: str | None, key: str, generation: int, content: bytes) -> bool:
        """Put it if the object is still what it was; whether it is ours now."""
        nonce = os.urandom(NONCE_BYTES)
        data = SealedObject(self.identity, generation, nonce, key, content).pack()
        doubt = self._put_if(place, tag, data)
        if doubt is None:
            return True
        try:
            sealed, _ = self._get(place)
        except self._obstore.exceptions.BaseError as error:
            raise ReplicaSilent("the store did not say whether a write took effect") from error
        return sealed is not None and sealed.nonce == nonce

    def _put_if(self, place: str, tag: str | None, data: bytes) -> Exception | None:
        """None if it was done; else what was said, which may be wrong."""
        try:
            if tag is None:
                self._obstore.put(self._store, place, data, mode="create")
            else:
                self._obstore.put(self._store, place, data, mode={"e_tag": tag})
        except self._obstore.exceptions.BaseError as error:
            return error
        return None

    def _install(self, replicas: ReplicaSet) -> None:
        place = self._prefix + "set"
        for _ in range(TRIES):
            sealed, tag = self._get(place)
            known = ReplicaSet.unpack(sealed.content) if sealed is not None else None
            if known is not None and known.generation >= replicas.generation:
                self._known = known
                return
            if self._swap(place, tag, "", replicas.generation, replicas.pack()):
                self._known = replicas
                return
        raise ReplicaSilent("others keep installing sets")

    def _refresh(self) -> None:
        sealed, _ = self._get(self._prefix + "set")
        if sealed is not None:
            self._known = ReplicaSet.unpack(sealed.content)

    def _missing(self, key: str, request: Prepare | Accept | Query) -> tuple[str, ...]:
        if not isinstance(request, Accept) or not request.accepted.packs:
            return ()
        present = {place.rpartition("/")[2] for place in self._list(f"packs/{folder_of(key)}/")}
        return tuple(name for name in request.accepted.packs if name not in present)

    def _list(self, under: str) -> list[str]:
        return [meta["path"] for page in self._obstore.list(self._store, self._prefix + under) for meta in page]

    def _remove(self, place: str) -> None:
        try:
            self._obstore.delete(self._store, place)
        except FileNotFoundError:
            return

    def _cell_place(self, key: str) -> str:
        return f"{self._prefix}cells/{folder_of(key)}"

    def _pack_place(self, key: str, name: str) -> str:
        return f"{self._prefix}packs/{folder_of(key)}/{name}"

    # ---- the store itself ----

    def _probe(self) -> None:
        """Refuse a store that accepts conditions and ignores them."""
        place = f"{self._prefix}probe-{os.urandom(8).hex()}"
        try:
            self._probe_at(place)
        except FileNotFoundError as error:
            raise InvalidRequest(
                f"the store has no such bucket ({_first_line(error)})", do="Make the bucket first, or name another."
            ) from error
        except self._obstore.exceptions.BaseError as error:
            raise ReplicaSilent(f"the store did not answer ({_first_line(error)})") from error

    def _probe_at(self, place: str) -> None:
        put, store = self._obstore.put, self._store
        first = put(store, place, b"1", mode="create")
        try:
            if self._put_if(place, None, b"2") is None:
                raise _ignores("create-if-absent")
            if first["e_tag"] is None:
                raise _ignores("ETags")
            second = put(store, place, b"3", mode={"e_tag": first["e_tag"]})
            if self._put_if(place, first["e_tag"], b"4") is None:
                raise _ignores("compare-by-ETag")
            if bytes(self._obstore.get(store, place).bytes()) != b"3" or second["e_tag"] is None:
                raise _ignores("compare-by-ETag")
        finally:
            self._remove(place)

    def _identity(self) -> str:
        """Drawn when the prefix is first used."""
        place = self._prefix + "replica"
        self.identity = os.urandom(16).hex()
        data = SealedObject(self.identity, 0, os.urandom(NONCE_BYTES), "", b"").pack()
        with self._mapped():
            self._put_if(place, None, data)
            try:
                return SealedObject.unpack(bytes(self._obstore.get(self._store, place).bytes())).identity
            except Garbled as error:
                raise InvalidRequest(
                    f"{place} in the store is not a replica's ({error})", do="Give a prefix of its own to each replica."
                ) from error

    def _check_identity(self) -> None:
        """Something is missing: is this still the replica it was?"""
        try:
            data = bytes(self._obstore.get(self._store, self._prefix + "replica").bytes())
            found = SealedObject.unpack(data).identity
        except (FileNotFoundError, Garbled) as error:
            raise ReplicaFaulty("the replica's objects are gone from the store") from error
        if found != self.identity:
            raise ReplicaFaulty("there is another replica under the prefix now")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            raise ReplicaSilent(f"the store did not do as asked ({_first_line(error)})") from error
        except FileNotFoundError as error:
            raise ReplicaSilent(f"what is there was not found in the store ({_first_line(error)})") from error
        except Garbled as error:
            raise ReplicaFaulty(f"an object of the store is damaged ({error})") from error


def _cell(sealed: SealedObject | None) -> ReplicaCell:
    return ReplicaCell.unpack(sealed.content) if sealed is not None else EMPTY


def _ignores(what: str) -> Unsupported:
    return Unsupported(
        f"this store ignores {what}, so two writers would overwrite each other in silence",
        do="Use a store that honours conditional writes, or keep this replica in a folder.",
    )


def _refuse_retries(store: Any) -> None:
    config = getattr(store, "retry_config", None)
    if hasattr(store, "retry_config") and (config is None or config.get("max_retries") != 0):
        raise InvalidRequest(
            "the store's client repeats requests by itself, so an answer may be to another request than ours",
            do='Make it with retry_config={"max_retries": 0, ...}, or use S3Replica.connect.',
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
