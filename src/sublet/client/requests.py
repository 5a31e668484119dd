"""Checks arguments (``min_vram="2GiB", ttl="5m"``) and builds the request that travels. Pure.

What can be seen to be wrong is refused here, in one sentence and before anything is sent. The office checks again: it
must not trust its clients.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Generic, Literal, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec

from sublet.client.address import Address
from sublet.client.handle import LeaseFacts
from sublet.client.model import Offer, Place
from sublet.client.operations import new_request_id
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.lease.policy import RenewalPolicy
from sublet.values import (
    BLOCK_BYTES,
    BYTES_MAX,
    CORES_MAX,
    NS_PER_S,
    Exclusivity,
    Kind,
    RenewMode,
    Tier,
    format_size,
    parse_duration_ns,
    parse_memory,
    parse_size,
    shown,
    valid_labels,
    valid_name,
)
from sublet.wire.http import AcquireRequest, AcquisitionRequest, WantBody

Size: TypeAlias = int | str
"""Bytes, or a text such as ``"2GiB"``."""
Duration: TypeAlias = float | str
"""Seconds, or a text such as ``"5m"``."""
TierText: TypeAlias = Tier | Literal["interactive", "batch", "spot"]
ExclusivityText: TypeAlias = Exclusivity | Literal["shared", "session", "device", "partition"]
RenewText: TypeAlias = RenewMode | Literal["while-busy", "always", "never"]

COUNT_MAX: Final = 1024
MANY_MAX: Final = 1024
"""Leases in one request."""
_E = TypeVar("_E", Tier, Exclusivity, RenewMode)
L = TypeVar("L")
M = TypeVar("M")

ANY_MODEL = "*"
"""On the wire."""


class LeaseOptions(TypedDict, total=False):
    """What every kind of lease may be asked with, whatever it is a lease of."""

    ttl: Duration | None
    """How long it lives if it is not renewed; by default that of its kind."""
    tier: TierText | None
    spot: bool
    """Short for ``tier="spot"``: cheaper in the queue's eyes, and taken back at short notice."""
    pay_priority: bool
    """Go before the requests of the tier that do not pay. It costs the office's rate for priority, where it has one."""
    wait: Duration | None
    """How long to wait in the queue: 0 tries once, None (the default) waits without bound."""
    expect: Duration | None
    """How long it will probably be used. A quota of GPU-seconds must have room for that, and not for the time to live;
    what is charged is the time it was held."""
    name: str | None
    labels: dict[str, str] | None
    """For people, and for bills (``fabric.bill(by="label:course")``)."""
    selector: dict[str, str] | None
    """Labels the machine must have."""
    renew: RenewText
    """While something runs under it (the default), always, or never."""
    renew_every: Duration | None
    """Renew this often, instead of at 70 % of the time to live."""
    max_hold: Duration | None
    """Never hold it longer than this."""
    on_place: Callable[[Place], object] | None
    """Told the place in the queue, at first and whenever it changes."""
    replaces: LeaseFacts | None
    """A lease of this program that the new one takes the place of. What it has counts as free for this request. It is
    given back when the new one is there; while the request waits, and if it is refused, it stays and is renewed."""
    request_id: str | None
    """What makes a repeated request one request: sent again after a crash, it has one effect, and the answer is what
    came of it. The same id with other content is refused. None: an id of its own."""
    bound: bool | None
    """Whether the lease ends when this process ends, however it ends. None: as `connect` was told, which is True where
    nothing else was said. Over TCP no lease is bound to a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """A request that is ready to go, and how its lease will be renewed."""

    request: AcquireRequest
    policy: RenewalPolicy
    on_place: Callable[[Place], object] | None
    bound: bool | None = None
    replaces: LeaseFacts | None = None


def ask_gpu(
    terms: LeaseOptions,
    *,
    min_vram: Size,
    count: int,
    exclusivity: ExclusivityText | None,
    model: str | None,
    or_smaller: bool | Size = False,
    or_model: bool | str = False,
) -> LeaseRequest:
    """``fabric.gpu(...)``."""
    amount = parse_memory(min_vram, "min_vram")
    least = _least(or_smaller, amount)
    want = WantBody(
        kind=Kind.GPU,
        amount=amount,
        count=_whole(count, "count", COUNT_MAX),
        exclusivity=None if exclusivity is None else _member(Exclusivity, exclusivity, "an exclusivity class").value,
        model=_text(model, "model"),
        least=least,
        or_model=_other_model(or_model, model),
    )
    return _spec(want, terms)


def _other_model(or_model: bool | str, model: str | None) -> str | None:
    if or_model is False:
        return None
    if model is None:
        raise InvalidRequest("or_model needs a model", do='Write model="A100", or_model=True.')
    return ANY_MODEL if or_model is True else _text(or_model, "or_model")


def ask_resume(terms: LeaseOptions, *, resume: str) -> LeaseRequest:
    """``fabric.gpu(resume=...)``: it takes its resources from the parked lease."""
    spec = _spec(None, terms)
    return replace(spec, request=msgspec.structs.replace(spec.request, resume=resume))


def parked_at(resume: LeaseFacts | str, *, alone: bool) -> str:
    """The id of the parked lease that ``resume=`` means: a lease, or an id."""
    if not alone:
        raise InvalidRequest(
            "resume= takes its resources from the parked lease", do="Leave min_vram and the other amounts out."
        )
    if isinstance(resume, str):
        return resume
    if resume.end is None or not resume.end.parked:
        raise InvalidRequest(
            f"nothing of lease {resume.id} is parked", do="See `lease.end`: its way is `suspend` where something is."
        )
    return resume.end.parked


def ask_many(spec: LeaseRequest, count: int, at_least: int) -> AcquisitionRequest:
    """``fabric.many(count, at_least=...)``: so many of what is asked for."""
    request = spec.request
    if request.replaces is not None:
        raise InvalidRequest("replaces= is for one lease", do="Leave it out, or ask for one lease.")
    if at_least > 1:
        if request.wait:
            raise InvalidRequest(
                f"at_least={at_least} does not wait in the queue",
                do="Leave wait= out and ask again later, or use at_least=1.",
            )
        request = msgspec.structs.replace(request, wait=0.0)
    return AcquisitionRequest(request=request, count=count, at_least=at_least)


def check_many(count: object, at_least: object) -> None:
    """Refuse numbers of leases that no request can have."""
    _whole(count, "count", MANY_MAX)
    _whole(at_least, "at_least", MANY_MAX)
    if at_least > count:  # type: ignore[operator]
        raise InvalidRequest(f"at_least={at_least} is more than the {count} leases asked for", do="Give at most that.")


def ask_cpu(terms: LeaseOptions, *, cores: int, or_smaller: bool | int, memory: Size | None = None) -> LeaseRequest:
    """``fabric.cpu(...)``: cores, and memory under the same lease."""
    _whole(cores, "cores", CORES_MAX)
    least: int | None = None
    if or_smaller is not False:
        least = 1 if or_smaller is True else _whole(or_smaller, "or_smaller", CORES_MAX)
        if least > cores:
            raise InvalidRequest(
                f"or_smaller={least} is more than the {cores} cores asked for", do="Give at most that many."
            )
    spec = _spec(WantBody(kind=Kind.CPU, amount=cores, least=least), terms)
    if memory is None:
        return spec
    wants = [*spec.request.wants, WantBody(kind=Kind.MEMORY, amount=parse_memory(memory, "memory"))]
    return replace(spec, request=msgspec.structs.replace(spec.request, wants=wants))


def ask_memory(terms: LeaseOptions, *, size: Size, or_smaller: bool | Size) -> LeaseRequest:
    """``fabric.memory(...)``."""
    amount = parse_memory(size)
    return _spec(WantBody(kind=Kind.MEMORY, amount=amount, least=_least(or_smaller, amount)), terms)


def ask_block(
    terms: LeaseOptions, *, size: Size | None, min_blocks: int | None, retain: Duration | None = None
) -> LeaseRequest:
    """``fabric.block(...)``: by size, or by number of 4 KiB blocks; with a name alone, what its volume has."""
    named = terms.get("name") is not None
    if (size is not None and min_blocks is not None) or (size is None and min_blocks is None and not named):
        raise InvalidRequest(
            "a block lease needs a size or min_blocks, and not both",
            do='Write block("2GiB") or block(min_blocks=512); block(name="ckpt") goes on with the volume of that name.',
        )
    if retain is not None and not named:
        raise InvalidRequest("what has no name is not kept", do="Give it a name, or leave retain= out.")
    if size is None and min_blocks is None:
        amount = 0
    elif size is not None:
        amount = parse_size(size)
        if isinstance(size, int) and size < BLOCK_BYTES:
            raise InvalidRequest(
                f"the size {size} is {size} bytes, less than one block",
                do=f'Write block(min_blocks={size}) for blocks of 4 KiB, or "{size}MiB" or "{size}GiB".',
            )
    else:
        amount = parse_size(_whole(min_blocks, "min_blocks", BYTES_MAX // BLOCK_BYTES) * BLOCK_BYTES)
    spec = _spec(WantBody(kind=Kind.BLOCK, amount=amount), terms)
    if retain is None:
        return spec
    seconds = parse_duration_ns(retain, "retain", zero_ok=True) / NS_PER_S
    return replace(spec, request=msgspec.structs.replace(spec.request, retain=seconds))


class LeaseRequests(Generic[L, M]):
    """The part of a fabric that asks for leases. ``L`` is a lease and ``M`` are many, awaitable in ``sublet.aio``."""

    def _acquire(
        self, spec: LeaseRequest, on_offer: Callable[[Offer], bool] | None, goes_on: LeaseFacts | str | None = None
    ) -> L:
        raise NotImplementedError

    def _acquire_many(self, spec: LeaseRequest, count: int, at_least: int) -> M:
        raise NotImplementedError

    def gpu(
        self,
        *,
        min_vram: Size | None = None,
        count: int = 1,
        exclusivity: ExclusivityText | None = None,
        model: str | None = None,
        or_smaller: bool | Size = False,
        or_model: bool | str = False,
        on_offer: Callable[[Offer], bool] | None = None,
        resume: LeaseFacts | str | None = None,
        **terms: Unpack[LeaseOptions],
    ) -> L:
        """Acquire GPU memory on ``count`` devices of one machine, all or nothing.

        It waits in the queue until it is granted; ``wait=0`` tries once and ``wait="10m"`` bounds the waiting, and then
        `CapacityExceeded` says what would fit. With ``or_smaller`` less may be given: any amount (True) or at least
        that much. With ``or_model`` another model may be given where none of ``model`` is free: any (True) or those
        named, ``"T4|L4"``. Such an offer says what it is, when what was asked may be had and at what price, and
        ``on_offer`` may still decline it. Models of which each is as good need no offer: ``model="H200|A100"``.
        Further: ``ttl= tier= spot= pay_priority= wait= name= labels= selector= renew= renew_every= max_hold= on_place=
        bound=``, each described at `LeaseOptions`.

        ``resume`` goes on with what was taken off its device and is parked: a lease that ended so, or its
        ``end.parked``. Leave the amounts out then: the parked lease has them.
        """
        if resume is not None:
            alone = (min_vram, exclusivity, model) == (None, None, None) and count == 1 and not (or_smaller or or_model)
            spec = ask_resume(terms, resume=parked_at(resume, alone=alone))
            return self._acquire(spec, on_offer, goes_on=resume)
        if min_vram is None:
            raise InvalidRequest("a GPU lease needs min_vram", do='Write gpu(min_vram="2GiB"), or gpu(resume=...).')
        spec = ask_gpu(
            terms,
            min_vram=min_vram,
            count=count,
            exclusivity=exclusivity,
            model=model,
            or_smaller=or_smaller,
            or_model=or_model,
        )
        return self._acquire(spec, on_offer)

    def cpu(
        self,
        cores: int = 1,
        *,
        memory: Size | None = None,
        or_smaller: bool | int = False,
        on_offer: Callable[[Offer], bool] | None = None,
        **terms: Unpack[LeaseOptions],
    ) -> L:
        """Acquire whole cores of one machine; with ``memory``, host memory there under the same lease."""
        return self._acquire(ask_cpu(terms, cores=cores, or_smaller=or_smaller, memory=memory), on_offer)

    def memory(
        self,
        size: Size,
        *,
        or_smaller: bool | Size = False,
        on_offer: Callable[[Offer], bool] | None = None,
        **terms: Unpack[LeaseOptions],
    ) -> L:
        """Acquire host memory."""
        return self._acquire(ask_memory(terms, size=size, or_smaller=or_smaller), on_offer)

    def block(
        self,
        size: Size | None = None,
        *,
        min_blocks: int | None = None,
        retain: Duration | None = None,
        **terms: Unpack[LeaseOptions],
    ) -> L:
        """Acquire space on disk: by ``size``, or as a number of 4 KiB blocks.

        With ``name`` what is written there outlives the lease: it stays as a *volume*, for ``retain`` (by
        default 7 days), and the next ``block(name=...)`` goes on with it, whatever its size.
        """
        return self._acquire(ask_block(terms, size=size, min_blocks=min_blocks, retain=retain), None)

    def many(self, count: int, *, at_least: int = 1) -> Many[M]:
        """Ask for up to ``count`` leases that are alike in one request: ``fabric.many(64).cpu(2)``.

        Each has its own id, epoch and end. As many are granted as there are now, and none if those are fewer than
        ``at_least`` (``CapacityExceeded``; with ``at_least=count`` it is all or nothing). Where there is none, a
        request with ``at_least=1`` waits in the queue for one, as ``wait=`` says.
        """
        check_many(count, at_least)
        return Many(self._acquire_many, count, at_least)


class Many(Generic[M]):
    """Many leases in one request; made by ``fabric.many()``. In asyncio, await or enter what its methods return."""

    def __init__(self, acquire: Callable[[LeaseRequest, int, int], M], count: int, at_least: int) -> None:
        self._acquire_many = acquire
        self._count = count
        self._at_least = at_least

    def cpu(self, cores: int = 1, *, memory: Size | None = None, **terms: Unpack[LeaseOptions]) -> M:
        """Acquire leases with whole cores of one machine each; with ``memory`` under the same lease."""
        return self._acquire(ask_cpu(terms, cores=cores, or_smaller=False, memory=memory))

    def gpu(
        self,
        *,
        min_vram: Size,
        count: int = 1,
        exclusivity: ExclusivityText | None = None,
        model: str | None = None,
        **terms: Unpack[LeaseOptions],
    ) -> M:
        """Acquire leases with GPU memory on ``count`` devices each; see `sublet.Fabric.gpu`."""
        return self._acquire(ask_gpu(terms, min_vram=min_vram, count=count, exclusivity=exclusivity, model=model))

    def memory(self, size: Size, **terms: Unpack[LeaseOptions]) -> M:
        """Acquire leases with host memory."""
        return self._acquire(ask_memory(terms, size=size, or_smaller=False))

    def _acquire(self, spec: LeaseRequest) -> M:
        return self._acquire_many(spec, self._count, self._at_least)


def holder_name() -> str:
    """What this process says of itself in ``sublet lease ls``: shown, never trusted."""
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    host = socket.gethostname()
    name = f"{program}[{os.getpid()}]@{host}"
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:128]


def _spec(want: WantBody | None, terms: LeaseOptions) -> LeaseRequest:
    unknown = sorted(terms.keys() - LeaseOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r}; there are {', '.join(LeaseOptions.__annotations__)}")
    tier = None if terms.get("tier") is None else _member(Tier, terms.get("tier"), "a tier")
    bound = terms.get("bound")
    if bound not in (True, False, None):
        raise InvalidRequest(
            f"bound={shown(bound)} is neither True nor False", do="Write bound=False, or leave it out."
        )
    spot, pay_priority = terms.get("spot", False), terms.get("pay_priority", False)
    for switch, value in (("spot", spot), ("pay_priority", pay_priority)):
        if value not in (True, False):
            raise InvalidRequest(
                f"{switch}={shown(value)} is neither True nor False", do=f"Write {switch}=True, or leave it out."
            )
    if spot and tier not in (None, Tier.SPOT):
        raise InvalidRequest(
            f'tier="{tier}" and spot=True contradict each other',
            do='Leave one out; spot=True is short for tier="spot".',
        )
    replaces = terms.get("replaces")
    if replaces is not None and not hasattr(replaces, "epoch"):
        raise InvalidRequest(f"replaces={shown(replaces)} is not a lease", do="Give a lease of this program.")
    name, ttl = terms.get("name"), terms.get("ttl")
    policy = policy_of(terms.get("renew", RenewMode.WHILE_BUSY), terms.get("renew_every"), terms.get("max_hold"))
    ttl_ns = None if ttl is None else parse_duration_ns(ttl, "ttl")
    if ttl_ns is not None:
        policy.check(ttl_ns)
    request = AcquireRequest(
        request_id=_text(terms.get("request_id"), "request_id", "Give 1 to 128 characters.") or new_request_id(),
        wants=[] if want is None else [want],
        ttl=None if ttl_ns is None else ttl_ns / NS_PER_S,
        tier=None if tier is None else tier.value,
        spot=spot,
        pay_priority=pay_priority,
        wait=_wait(terms.get("wait")),
        expect=None if terms.get("expect") is None else parse_duration_ns(terms["expect"] or 0, "expect") / NS_PER_S,
        selector=valid_labels(terms.get("selector") or {}),
        renew=policy.mode.value,
        name=None if name is None else valid_name(name, "name"),
        labels=valid_labels(terms.get("labels") or {}),
        holder=holder_name(),
        replaces=None if replaces is None else f"{replaces.id}@{replaces.epoch}",
    )
    return LeaseRequest(request=request, policy=policy, on_place=terms.get("on_place"), bound=bound, replaces=replaces)


def holder_pid(address: Address, bound: bool) -> int | None:
    """What a request says of this process so that the lease is bound to it; None where it is not to be, or the office
    is elsewhere."""
    return os.getpid() if bound and address.socket is not None else None


def policy_of(renew: RenewText, every: Duration | None, max_hold: Duration | None = None) -> RenewalPolicy:
    """How it will be renewed."""
    mode = _member(RenewMode, renew, "a way to renew")
    if mode is RenewMode.NEVER and every is not None:
        raise InvalidRequest('renew="never" and renew_every= contradict each other', do="Leave one out.")
    return RenewalPolicy(mode=mode, every=every, max_hold=max_hold)


def _wait(wait: Duration | None) -> float | None:
    """0 tries once, None waits without bound; so does infinity."""
    if wait is None or (isinstance(wait, float) and wait == math.inf):
        return None
    return parse_duration_ns(wait, "wait", zero_ok=True) / NS_PER_S


def _least(or_smaller: bool | Size, amount: int) -> int | None:
    if or_smaller is False:
        return None
    if or_smaller is True:
        return 1
    least = parse_memory(or_smaller, "or_smaller")
    if least > amount:
        raise InvalidRequest(
            f"or_smaller={format_size(least)} is more than the {format_size(amount)} asked for",
            do="Give the smallest size that would do, or True for any.",
        )
    return least


def _whole(value: object, what: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidRequest(f"{what} must be a whole number from 1 on, not {shown(value)}", do=f"The most is {most}.")
    return value


def _text(value: object, what: str, do: str = "Write it as `sublet status` shows it.") -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= 128 or not value.isprintable():
        raise InvalidRequest(f"{what} {shown(value)} is not a name", do=do)
    return value


def _member(choices: type[_E], value: object, what: str) -> _E:
    try:
        return choices(value)  # type: ignore[arg-type]
    except ValueError:
        names = ", ".join(member.value for member in choices)
        raise InvalidRequest(f"{shown(value)} is not {what}", do=f"Use one of: {names}.") from None
