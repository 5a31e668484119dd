"""``sublet run``: runs a command under a lease, and releases the lease afterwards."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated, Any

from sublet.cli.command_lease import CommandLease, take
from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import ENDED, print_error
from sublet.cli.guest_command import (
    CommandNotStarted,
    CommandWords,
    Env,
    Grace,
    GuestName,
    NoTty,
    Tty,
    per_device_spec,
    spec_of,
    start,
    wants_terminal,
    with_what_was_lost,
)
from sublet.cli.parsing import (
    FOREVER,
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
from sublet.cli.show import visible
from sublet.client.home import home_text
from sublet.errors import Disconnected, LeaseNotActive, SubletError
from sublet.values import Exclusivity, Kind, RenewMode, Tier

if TYPE_CHECKING:
    from sublet.cli.attach import Attendance


def run(
    *,
    gpu: Annotated[
        int | None, Opt("--gpu", "--vram", metavar="SIZE", parse=vram, help="GPU with this much memory, such as 8GiB.")
    ] = None,
    gpus: Annotated[
        int | None, Opt("--gpus", metavar="N", parse=count, help="Number of GPUs, all on one machine (default: 1).")
    ] = None,
    per_device: Annotated[
        bool, Opt("--per-device", help="Run COMMAND once for each of the --gpus, as torchrun would.")
    ] = False,
    cpu: Annotated[
        int | None,
        Opt("--cpu", metavar="N", parse=count, help="Number of CPU cores (default: 1 if nothing else is asked for)."),
    ] = None,
    memory: Annotated[int | None, Opt("--memory", metavar="SIZE", parse=size, help="Host memory.")] = None,
    block: Annotated[int | None, Opt("--block", metavar="SIZE", parse=size, help="Storage in a volume.")] = None,
    smaller_ok: Annotated[bool, Opt("--smaller-ok", help="Accept less if no more is free.")] = False,
    model: Model = None,
    or_model: OrModel = None,
    shared: Annotated[bool, Opt("--shared", help="Share the GPU with your other leases.")] = False,
    exclusive: Annotated[bool, Opt("--exclusive", help="Reserve the GPU whole (default).")] = False,
    ttl: Annotated[
        float | None,
        Opt(
            "--ttl",
            metavar="DURATION",
            parse=duration,
            help="Time to live between renewals (default: 5m for a GPU, 2m for cores).",
        ),
    ] = None,
    renew: Annotated[
        str | None,
        Opt(
            "--renew",
            choices=[mode.value for mode in RenewMode],
            help="Renewal of the lease (default: while-busy, as long as the command runs).",
        ),
    ] = None,
    tier: Annotated[
        str | None, Opt("--tier", choices=[t.value for t in Tier], help="Scheduling tier (default: interactive).")
    ] = None,
    spot: Annotated[
        bool, Opt("--spot", help="Short for --tier spot: lowest priority, preempted at short notice.")
    ] = False,
    pay_priority: PayPriority = False,
    waiting: Annotated[
        float | None,
        Opt("--wait", metavar="DURATION", parse=wait, help="Longest wait in the queue (default: no limit)."),
    ] = None,
    no_wait: Annotated[bool, Opt("--no-wait", help="Fail immediately if nothing is free.")] = False,
    env: Env = [],  # noqa: B006 - never changed; both parsers make their own
    python: Annotated[
        str | None,
        Opt("--python", metavar="PATH", help="Python interpreter for COMMAND, which is then a script or `-m module`."),
    ] = None,
    name: GuestName = None,
    grace: Grace = None,
    label_pairs: Annotated[
        list[tuple[str, str]],
        Opt("--label", metavar="KEY=VALUE", parse=label, help="Label for bills and listings. Repeatable."),
    ] = [],  # noqa: B006
    tty: Tty = False,
    no_tty: NoTty = False,
    command: CommandWords,
) -> int:
    """Run a command under a lease and release the lease when the command exits.

    The command inherits your working folder, environment, stdio and terminal. Put resource options before it; without
    any it gets one core. It waits in the queue until the hardware is free, and the lease is renewed while it runs.
    Processes that it leaves behind are ended with the lease.

    With --gpus N --per-device the command runs N times at once. Each process finds RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, and its own GPU as number LOCAL_RANK. When one of them fails, the others are ended, and
    its exit status is that of all; rank 0 alone reads stdin.

    Ctrl-C is sent to the command; pressed twice within two seconds, it ends the command and all its processes.

    Exit status: the command's own (128 + n if signal n ended it), 126 or 127 if it could not be run or found, 75 if the
    lease was not granted, 76 if the lease ended while the command ran.
    """
    terminal = wants_terminal(tty, no_tty)
    words = list(command)
    if python is not None:
        from sublet.cli.python import interpreter

        try:
            python = interpreter(python)
        except CommandNotStarted as failed:
            print_error(failed, as_json=False)
            return failed.exit_code
        words = [python, *words]
    if shared and exclusive:
        raise UsageError("--shared and --exclusive contradict each other", do="Give one of them.")
    if shared and gpu is None and gpus is None:
        raise UsageError("--shared needs --gpu SIZE as well", do="Say how much memory: --gpu 8GiB --shared.")
    if per_device and gpus is None:
        raise UsageError("--per-device needs --gpus N as well", do="Say how many: --gpus 2 --gpu 8GiB --per-device.")
    mine = _configured()
    if gpus is not None and gpu is None:
        gpu = mine.get("vram")
    request = {
        "request_id": f"cli-{os.urandom(12).hex()}",
        "wants": _wants(
            *(gpu, gpus, cpu, memory, block),
            smaller_ok=smaller_ok or (gpu is not None and mine.get("smaller_ok", False)),
            shared=shared or (mine.get("shared", False) and not exclusive),
            model=model,
            or_model=or_model,
        ),
        "ttl": mine.get("ttl") if ttl is None else ttl,
        "tier": _tier(tier, spot=spot) or mine.get("tier"),
        "wait": _patience(mine.get("wait") if waiting is None and not no_wait else waiting, no_wait=no_wait),
        "renew": renew or RenewMode.WHILE_BUSY.value,
        "name": None if name is None else valid(name),
        "labels": labels(label_pairs),
        "holder": f"sublet run on {socket.gethostname()} (pid {os.getpid()})",
        "holder_pid": os.getpid(),
        **({"pay_priority": True} if pay_priority else {}),  # which an office of the version before would not know
    }
    with take(request) as lease:
        spec = spec_of(words, tenant=lease.tenant, env=env, name=name, grace=grace, terminal=terminal)
        spec["python"] = python or ""
        if per_device:
            spec = per_device_spec(spec, tenant=lease.tenant)
        try:
            conversation, attendance = start(lease.direct, lease.token, spec, on_host=lease.is_on_host)
        except CommandNotStarted as failed:
            print_error(failed, as_json=False)
            return failed.exit_code
        with conversation:
            attendance.run(on_lasting=lease.keep, on_exited=lease.try_release)
            return _status(lease, attendance)


def _status(lease: CommandLease, attendance: Attendance) -> int:
    """What it came to, said in a sentence where it was not the command's own doing."""
    if attendance.lost is not None:
        lease.is_lost = isinstance(attendance.lost, LeaseNotActive)
        _print_error(*_why_lost(lease, attendance.lost))
        return ENDED
    code = 0 if attendance.exit_code is None else attendance.exit_code
    lease.try_release()
    reason = attendance.reason or attendance.grace_reason
    code = with_what_was_lost(attendance, code)
    if reason is None:
        if code and lease.is_on_host:
            _hint_host_device(attendance)
        return code
    if reason == "out_of_memory":
        _print_error("the command used more memory than its lease has, and was ended", "Ask for more with --memory.")
        return code
    if lease.end is None and not lease.is_silent and attendance.grace_reason is None:
        return code  # it was stopped alone, and the lease was ours until now
    end = lease.end or {"reason": reason, "detail": ""}
    detail = f", {end['detail']}" if end["detail"] else ""
    _print_error(f"lease {lease.id} ended under the command: {end['reason']}{detail}", _what_now(end["reason"]))
    return ENDED


def _hint_host_device(attendance: Attendance) -> None:
    """A program that failed for want of a GPU is told that there is none here, below its own last words."""
    from sublet.devices.no_gpu import HOST_DEVICE_HINT, misses_a_gpu

    if misses_a_gpu(attendance.last_words.decode("utf-8", "replace")):
        _print_error("the command found no GPU", HOST_DEVICE_HINT)


def _why_lost(lease: CommandLease, lost: SubletError) -> tuple[str, str]:
    if lease.is_lost:
        return f"the command lost its lease: {lost.message}", lost.do
    if isinstance(lost, Disconnected) or not lost.do:
        return (
            f"the supervisor of lease {lease.id} has ended, and the command with it",
            "Run it again; `sublet doctor` says what state this machine is in.",
        )
    return f"the connection to the command was cut: {lost.message}", lost.do


def _what_now(reason: str) -> str:
    match reason:
        case "expired" | "idle":
            return "It was not renewed in time. Ask for a longer --ttl, or leave --renew as it is."
        case "preempted" | "fair_share":
            return "Others were waiting for the hardware. Run it again, and it waits in line."
        case "node_lost" | "device_lost":
            return "The hardware is gone. Run it again, and it is placed elsewhere."
        case _:
            return "Run it again when the hardware is free; `sublet status` says so."


def _print_error(sentence: str, do: str) -> None:
    sys.stderr.write(f"sublet: {visible(sentence)}\n")
    if do:
        sys.stderr.write(f"  {visible(do)}\n")


def _configured() -> dict[str, Any]:
    """What `sublet config` set, as the options would mean it. --python is for cells: here it says what runs."""
    if not os.path.exists(f"{home_text()}/config.toml"):  # nothing is loaded to see that nothing is set
        return {}
    from sublet.client.config import read_config

    found: dict[str, Any] = {name: setting.value for name, setting in read_config().items()}
    for name, parse in (("vram", vram), ("ttl", duration), ("wait", wait)):
        if name in found:
            found[name] = parse(found[name])
    return found


def _tier(tier: str | None, *, spot: bool) -> str | None:
    if spot and tier not in (None, Tier.SPOT):
        raise UsageError(f"--spot and --tier {tier} contradict each other", do="Give one of them.")
    return Tier.SPOT.value if spot else tier


def _patience(waiting: float | None, *, no_wait: bool) -> float | None:
    if no_wait and waiting is not None:
        raise UsageError("--wait and --no-wait contradict each other", do="Give one of them.")
    if no_wait:
        return 0.0
    return None if waiting in (None, FOREVER) else waiting


def _wants(
    gpu: int | None,
    gpus: int | None,
    cpu: int | None,
    memory: int | None,
    block: int | None,
    *,
    smaller_ok: bool,
    shared: bool,
    model: str | None,
    or_model: str | None,
) -> list[dict[str, Any]]:
    if gpus is not None and gpu is None:
        raise UsageError(
            "--gpus needs --gpu SIZE as well", do="Say how much memory each GPU has, such as --gpus 2 --gpu 8GiB."
        )
    if (model is not None and gpu is None) or (or_model is not None and model is None):
        raise UsageError(
            "--model needs --gpu SIZE as well, and --or-model needs --model",
            do="Say how much memory: --gpu 8GiB --model A100 --or-model any.",
        )
    if (gpu, cpu, memory, block) == (None, None, None, None):
        cpu = 1
    amounts = ((Kind.GPU, gpu), (Kind.CPU, cpu), (Kind.MEMORY, memory), (Kind.BLOCK, block))
    wants: list[dict[str, Any]] = [
        {"kind": kind.value, "amount": number} for kind, number in amounts if number is not None
    ]
    for want in wants:
        want["count"] = gpus or 1 if want["kind"] == Kind.GPU else 1
        if shared and want["kind"] == Kind.GPU:
            want["exclusivity"] = Exclusivity.SHARED.value
        if model is not None and want["kind"] == Kind.GPU:
            want["model"] = model
        if or_model is not None and want["kind"] == Kind.GPU:
            want["or_model"] = other_model(or_model)
        if smaller_ok:
            want["least"] = 1
    return wants
