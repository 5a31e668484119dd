"""``sublet lease acquire``: acquires a lease, waits in the queue or takes a smaller offer if told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import to_builtins

from sublet.cli.call import CommandOffice
from sublet.cli.declare import Opt, UsageError
from sublet.cli.lease import print_lease
from sublet.cli.parsing import (
    FOREVER,
    AsJson,
    Model,
    OrModel,
    PayPriority,
    count,
    duration,
    label,
    labels,
    other_model,
    size,
    vram,
    wait,
)
from sublet.cli.parsing import name as valid
from sublet.cli.progress_line import LiveLine
from sublet.cli.show import Json, amount, epoch, seconds, where
from sublet.client.model import Offer, Place
from sublet.client.operations import Hooks, OfficeOperations, new_request_id
from sublet.clock import SystemClock
from sublet.invocation import typed
from sublet.values import Exclusivity, Kind, Tier
from sublet.wire.http import AcquireRequest, WantBody


def acquire(
    *,
    gpu: Annotated[
        int | None, Opt("--gpu", "--vram", metavar="SIZE", parse=vram, help="GPU with this much memory, such as 8GiB.")
    ] = None,
    gpus: Annotated[
        int | None, Opt("--gpus", metavar="N", parse=count, help="Number of GPUs, all on one machine (default: 1).")
    ] = None,
    cpu: Annotated[int | None, Opt("--cpu", metavar="N", parse=count, help="Number of CPU cores.")] = None,
    memory: Annotated[int | None, Opt("--memory", metavar="SIZE", parse=size, help="Host memory.")] = None,
    block: Annotated[int | None, Opt("--block", metavar="SIZE", parse=size, help="Storage in a volume.")] = None,
    ttl: Annotated[
        float | None,
        Opt("--ttl", metavar="DURATION", parse=duration, help="Time to live (default: 5m for a GPU, 2m for cores)."),
    ] = None,
    waiting: Annotated[
        float,
        Opt(
            "--wait",
            metavar="DURATION",
            parse=wait,
            help="Longest wait in the queue, or `forever` (default: 0, no wait).",
        ),
    ] = 0.0,
    smaller_ok: Annotated[bool, Opt("--smaller-ok", help="Accept less if no more is free.")] = False,
    at_least: Annotated[
        int | None, Opt("--at-least", metavar="SIZE", parse=size, help="With --smaller-ok: least GPU memory to accept.")
    ] = None,
    tier: Annotated[
        str | None, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: interactive).")
    ] = None,
    spot: Annotated[
        bool, Opt("--spot", help="Short for --tier spot: lowest priority, preempted at short notice.")
    ] = False,
    pay_priority: PayPriority = False,
    exclusivity: Annotated[
        str | None,
        Opt("--exclusivity", choices=[e.value for e in Exclusivity], help="How the GPU is shared (default: session)."),
    ] = None,
    model: Model = None,
    or_model: OrModel = None,
    resume: Annotated[
        str | None, Opt("--resume", metavar="LEASE[@EPOCH]", help="Parked lease to resume; amounts are left out.")
    ] = None,
    name: Annotated[str | None, Opt("--name", metavar="NAME", parse=valid, help="Name in listings.")] = None,
    label_pairs: Annotated[
        list[tuple[str, str]],
        Opt("--label", metavar="KEY=VALUE", parse=label, help="Label for bills and listings. Repeatable."),
    ] = [],  # noqa: B006 - never changed; both parsers make their own
    as_json: AsJson = False,
) -> int:
    """Acquire a lease and keep it until it ends or is released.

    Give at least one of --gpu, --cpu, --memory and --block; several are granted together, on one machine. A lease that
    was acquired here is not renewed: set --ttl to the time you need, or use `sublet lease renew`.

    Exit status 75: refused, or not granted within the wait.
    """
    if spot and tier not in (None, Tier.SPOT):
        raise UsageError(f"--spot and --tier {tier} contradict each other", do="Give one of them.")
    amounts = (gpu, gpus, cpu, memory, block, exclusivity, model, or_model)
    if resume is not None and any(given is not None for given in amounts):
        raise UsageError("--resume takes its resources from the parked lease", do="Leave the amounts out.")
    wants: list[WantBody] = []
    if resume is None:
        wants = _wants(
            gpu, gpus, cpu, memory, block, exclusivity, model, or_model, smaller_ok=smaller_ok, at_least=at_least
        )
    request = AcquireRequest(
        request_id=new_request_id(),
        wants=wants,
        ttl=ttl,
        tier=tier,
        spot=spot,
        pay_priority=pay_priority,
        wait=None if waiting == FOREVER else waiting,
        name=name,
        labels=labels(label_pairs),
        holder="sublet lease acquire",
        resume=resume,
    )
    office = CommandOffice.reach()
    with LiveLine() as line:
        grant = office.run(OfficeOperations(SystemClock()).acquire(request, _hooks(line, as_json=as_json)))
    view: Json = to_builtins(grant.view)
    return print_lease(view, _granted_sentence(view), as_json=as_json)


def _wants(
    gpu: int | None,
    gpus: int | None,
    cpu: int | None,
    memory: int | None,
    block: int | None,
    exclusivity: str | None,
    model: str | None,
    or_model: str | None,
    *,
    smaller_ok: bool,
    at_least: int | None,
) -> list[WantBody]:
    """The resources of the request; contradictions are refused before anything is sent."""
    if gpu is None:
        for option, given in (
            ("--gpus", gpus),
            ("--exclusivity", exclusivity),
            ("--model", model),
            ("--at-least", at_least),
        ):
            if given is not None:
                raise UsageError(
                    f"{option} needs --gpu SIZE as well", do=f"Say how much memory each GPU has: --gpu 8GiB {option} …"
                )
    if or_model is not None and model is None:
        raise UsageError("--or-model needs --model as well", do="Say which is wanted: --model A100 --or-model any.")
    if at_least is not None and not smaller_ok:
        raise UsageError("--at-least needs --smaller-ok", do="Give both, or neither.")
    if at_least is not None and gpu is not None and at_least > gpu:
        raise UsageError("--at-least is more than --gpu", do="Make it at most the same.")
    least = 1 if smaller_ok else None
    wants = [
        WantBody(kind=kind, amount=number, least=least)
        for kind, number in ((Kind.CPU, cpu), (Kind.MEMORY, memory), (Kind.BLOCK, block))
        if number is not None
    ]
    if gpu is not None:
        want = WantBody(kind=Kind.GPU, amount=gpu, count=gpus or 1, exclusivity=exclusivity, model=model)
        want.or_model = other_model(or_model)
        want.least = least if at_least is None else at_least
        wants.insert(0, want)
    if not wants:
        raise UsageError("no resource was given", do="Give at least one of --gpu, --cpu, --memory and --block.")
    return wants


def _hooks(line: LiveLine, *, as_json: bool) -> Hooks:
    """What is shown of the queue. With --json nothing, except on a terminal: stderr is for what went wrong."""
    if as_json and not line.live:
        return Hooks()
    return Hooks(on_place=lambda place: line.set(position_text(place)), on_offer=lambda offer: offered(line, offer))


def position_text(place: Place, error_s: float | None = None) -> Callable[[float], str]:
    """``error_s``: within how many seconds nine tenths of the office's estimates were right."""

    def text(waited: float) -> str:
        estimate = place.estimate
        about = "" if estimate is None else f", about {seconds(round(max(0.0, estimate - waited)))} to go"
        if estimate is not None and error_s is not None:
            about += f" (nine tenths of such estimates were within {seconds(round(error_s))})"
        return f"queued, place {place.position}{about}: {place.reason} (Ctrl-C leaves the queue)"

    return text


def offered(line: LiveLine, offer: Offer) -> bool:
    line.print_above(f"offered {offer}, and accepted")
    return True


def _granted_sentence(view: Json) -> str:
    parts = " and ".join(f"{amount(part['kind'], part['amount'])} of {where(part)}" for part in view["parts"])
    return (
        f"Lease {view['id']} was granted for {seconds(view['remaining'])}: {parts} (epoch {epoch(view['epoch'])}).\n"
        f"  Renew it: {typed('sublet lease renew')} {view['id']}\n"
        f"  Release it: {typed('sublet lease release')} {view['id']}"
    )
