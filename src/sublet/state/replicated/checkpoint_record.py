"""The value of a checkpoint's register: the last few saves, newest first. Pure; docs/replicated.md has the bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sublet.errors import IdempotencyConflict, InvalidRequest, VersionConflict
from sublet.state.replicated.ballot import Garbled, take
from sublet.values import Epoch

_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Effect:
    """What a save is the effect of: one step of one job, done once."""

    key: str
    fingerprint: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save, without its bytes."""

    version: int
    size: int
    hash: str
    """Of the bytes: BLAKE3 as hexadecimal digits."""
    schema: str
    policy: str
    epoch: Epoch
    wall_ns: int
    """When, for people."""
    effect: Effect | None = None
    signature: str = field(default="", repr=False)
    """Made with the tenant's key over the rest; empty where it was saved without one."""
    packs: tuple[str, ...] = ()
    """Where the bytes are, in order; empty if they are in the record."""
    inline: bytes = b""

    def signed_part(self, name: str) -> bytes:
        """What a signature is over: the name that it is saved under, and all that the record says of it. The bytes are
        in it by their hash."""
        return json.dumps([name, _shape(replace(self, signature=""))], sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """Newest first."""

    saves: tuple[Save, ...] = ()

    @property
    def latest(self) -> Save | None:
        """The last save, if there was any."""
        return self.saves[0] if self.saves else None

    @property
    def packs(self) -> tuple[str, ...]:
        """Every pack that a save of the history needs, each once."""
        return tuple(dict.fromkeys(name for save in self.saves for name in save.packs))

    def find(self, version: int) -> Save | None:
        """The save of that version, if it is still kept."""
        return next((save for save in self.saves if save.version == version), None)

    def with_effect(self, key: str) -> Save | None:
        """The save that is the effect of this key, if it is still kept."""
        return next((save for save in self.saves if save.effect is not None and save.effect.key == key), None)

    def then(self, save: Save, retain: int) -> SaveHistory:
        """After one more save."""
        return SaveHistory((save, *self.saves[: retain - 1]))

    def admits(self, effect: Effect) -> Save | None:
        """None if this effect may be saved; the save that is it already; or an error."""
        saved = self.with_effect(effect.key)
        if saved is not None and saved.effect is not None:
            if saved.effect.fingerprint != effect.fingerprint:
                raise IdempotencyConflict(
                    f"{effect.key} was saved with another fingerprint",
                    do="Give it what it was saved with, or another key if it is something else.",
                )
            return saved
        last = max((save.effect.step for save in self.saves if save.effect is not None), default=None)
        if last is not None and effect.step <= last:
            raise VersionConflict(
                f"step {effect.step} comes too late: step {last} is saved already",
                do="Load the checkpoint and go on from the step after it.",
            )
        return None

    def check(self, schema: str, policy: str, what: str) -> None:
        """Refuse what another program wrote."""
        latest = self.latest
        if latest is None:
            return
        if latest.schema != schema:
            raise InvalidRequest(
                f"{what} has the schema {latest.schema!r}, and this program writes {schema!r}",
                do="Open it with its own schema, or save under another name.",
            )
        if latest.policy != policy:
            raise InvalidRequest(
                f"{what} was written under another policy ({latest.policy[:16]}…)",
                do="Open it with the policy_hash it was written with, or save under another name.",
            )

    def pack(self) -> bytes:
        """A length, JSON, then the bytes of saves that lie in the record, in order."""
        shape = json.dumps([_shape(save) for save in self.saves], sort_keys=True, separators=(",", ":")).encode()
        return _LENGTH.pack(len(shape)) + shape + b"".join(save.inline for save in self.saves)

    @classmethod
    def unpack(cls, body: bytes) -> SaveHistory:
        """From the body of a state; anything else is Garbled."""
        if not body:
            return cls()
        (length,) = _LENGTH.unpack(take(body, 0, 4))
        at = 4 + length
        try:
            shapes = json.loads(take(body, 4, length))
            saves = []
            for shape in shapes:
                save = _save(shape)
                if not save.packs:
                    save, at = replace(save, inline=take(body, at, save.size)), at + save.size
                saves.append(save)
        except (ValueError, TypeError, KeyError, InvalidRequest) as error:
            raise Garbled(f"this is not the record of a checkpoint ({error})") from error
        if at != len(body):
            raise Garbled("bytes after the end of the record of a checkpoint")
        return cls(tuple(saves))


def _shape(save: Save) -> dict[str, object]:
    effect = save.effect
    shape: dict[str, object] = {
        "at": save.wall_ns,
        "effect": None if effect is None else [effect.key, effect.fingerprint, effect.step],
        "epoch": str(save.epoch),
        "hash": save.hash,
        "packs": list(save.packs),
        "policy": save.policy,
        "schema": save.schema,
        "size": save.size,
        "version": save.version,
    }
    return shape | {"signature": save.signature} if save.signature else shape  # as before where there is none


def _save(shape: dict[str, Any]) -> Save:
    effect = shape["effect"]
    return Save(
        version=int(shape["version"]),
        size=int(shape["size"]),
        hash=str(shape["hash"]),
        schema=str(shape["schema"]),
        policy=str(shape["policy"]),
        epoch=Epoch.parse(shape["epoch"]),
        wall_ns=int(shape["at"]),
        effect=None if effect is None else Effect(str(effect[0]), str(effect[1]), int(effect[2])),
        packs=tuple(str(name) for name in shape["packs"]),
        signature=str(shape.get("signature", "")),
    )
