"""The public calls with everything that somebody might hand them by mistake: told in a sentence, never a raw error of
Python from the inside, and nothing is held afterwards."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.errors import SubletError

pytestmark = pytest.mark.warm("warp", "numpy")

LONG = "x" * 100_000
WRONG: dict[str, Any] = {
    "None": None,
    "a float": 1.5,
    "not a number": math.nan,
    "infinity": math.inf,
    "below zero": -1,
    "zero": 0,
    "huge": 10**30,
    "True": True,
    "nothing": "",
    "a space": " ",
    "a long text": LONG,
    "a zero byte": "a\0b",
    "half a character": "\ud800",
    "a text": "größe",
    "bytes": b"x",
    "an empty list": [],
    "a list": [1],
    "a list of texts": ["x", "y"],
    "an empty dict": {},
    "a dict": {1: 2},
    "an object": object(),
    "a class": int,
}

Call = Callable[[sublet.Fabric, sublet.Lease, sublet.GpuSession, Any], object]


def nothing(*_: object, **__: object) -> None:
    return None


def acquired(**terms: Any) -> Call:
    """Each of these arguments takes the wrong value in turn."""
    (name, kind) = next((key, value) for key, value in terms.items() if key != "with_")
    more = terms.get("with_", {})
    return lambda fabric, lease, gpu, wrong: getattr(fabric, kind)(**{"wait": 0, **more, name: wrong})


def named(call: Callable[..., object], name: str) -> Call:
    """The same with the wrong value under this name."""
    return lambda fabric, lease, gpu, wrong: call(fabric, lease, **{name: wrong})


GPU = {"min_vram": "1MiB"}
CPU: dict[str, Any] = {}
CALLS: dict[str, Call] = {
    "connect(home)": lambda fabric, lease, gpu, wrong: sublet.connect(home=wrong, start=False) if wrong else None,
    "connect(url)": lambda fabric, lease, gpu, wrong: sublet.connect(wrong, start=False) if wrong else None,
    **{
        f"gpu({name})": acquired(**{name: "gpu", "with_": GPU})
        for name in (
            "min_vram",
            "count",
            "exclusivity",
            "model",
            "or_smaller",
            "on_offer",
            "ttl",
            "tier",
            "spot",
            "expect",
            "name",
            "labels",
            "selector",
            "renew",
            "renew_every",
            "max_hold",
            "on_place",
            "resume",
        )
    },
    "gpu(wait)": lambda fabric, lease, gpu, wrong: (
        fabric.gpu(min_vram="1MiB", wait=wrong) if wrong not in (None, math.inf) else None
    ),
    **{f"cpu({name})": acquired(**{name: "cpu"}) for name in ("cores", "or_smaller", "on_offer")},
    **{f"memory({name})": acquired(**{name: "memory", "with_": {"size": "1MiB"}}) for name in ("size", "or_smaller")},
    "block(size)": acquired(size="block"),
    "block(min_blocks)": acquired(min_blocks="block"),
    "block(name)": acquired(name="block", with_={"size": "1MiB"}),
    "block(retain)": acquired(retain="block", with_={"size": "1MiB", "name": "kept"}),
    "remove_volume": lambda fabric, lease, gpu, wrong: fabric.remove_volume(wrong),
    "attach": lambda fabric, lease, gpu, wrong: fabric.attach(wrong),
    "attach(renew)": lambda fabric, lease, gpu, wrong: fabric.attach("l-none", renew=wrong),
    "attach(renew_every)": lambda fabric, lease, gpu, wrong: fabric.attach("l-none", renew_every=wrong),
    "leases(tenant)": lambda fabric, lease, gpu, wrong: fabric.leases(tenant=wrong),
    "lease": lambda fabric, lease, gpu, wrong: fabric.lease(wrong),
    "guests": lambda fabric, lease, gpu, wrong: fabric.guests(wrong),
    **{
        f"bill({name})": named(lambda fabric, lease, **wrong: fabric.bill(**wrong), name)
        for name in ("by", "since", "until")
    },
    "bill_csv(by)": lambda fabric, lease, gpu, wrong: fabric.bill_csv(by=wrong),
    "close": lambda fabric, lease, gpu, wrong: sublet.connect(home=fabric.address.home, start=False).close(wrong),
    # ---- a lease
    "lease.renew": lambda fabric, lease, gpu, wrong: lease.renew(wrong),
    "lease.check": lambda fabric, lease, gpu, wrong: lease.check(wrong),
    "lease.use": lambda fabric, lease, gpu, wrong: lease.use(wrong),
    "lease.on_notice": lambda fabric, lease, gpu, wrong: lease.on_notice(wrong),
    "lease.on_end": lambda fabric, lease, gpu, wrong: lease.on_end(wrong),
    "lease.start(argv)": lambda fabric, lease, gpu, wrong: lease.start(wrong),
    "lease.start(word)": lambda fabric, lease, gpu, wrong: lease.start(["/bin/true", wrong]),
    **{
        f"lease.start({name})": named(lambda fabric, lease, **wrong: lease.start(["/bin/true"], **wrong), name)
        for name in ("env", "cwd", "stdio", "rows", "cols", "name", "grace")
    },
    "lease.run": lambda fabric, lease, gpu, wrong: lease.run(wrong),
    "lease.submit": lambda fabric, lease, gpu, wrong: lease.submit(wrong).result(120),
    "lease.map(function)": lambda fabric, lease, gpu, wrong: list(lease.map(wrong, [1])),
    "lease.map(items)": lambda fabric, lease, gpu, wrong: list(lease.map(nothing, wrong)),
    **{
        f"lease.options({name})": named(lambda fabric, lease, **wrong: lease.options(**wrong), name)
        for name in ("timeout", "python", "env", "cwd", "name")
    },
    # ---- decorated functions
    **{
        f"@gpu({name})": named(
            lambda fabric, lease, **wrong: sublet.gpu(**{"min_vram": "1MiB", "fabric": fabric, "wait": 0, **wrong})(
                nothing
            )(),
            name,
        )
        for name in ("min_vram", "ttl", "expect", "timeout")
    },
    "@gpu(fabric)": lambda fabric, lease, gpu, wrong: (
        sublet.gpu(min_vram="1MiB", fabric=wrong)(nothing)() if wrong is not None else None
    ),
    "@gpu(function)": lambda fabric, lease, gpu, wrong: sublet.gpu(min_vram="1MiB")(wrong),
    # ---- a session
    "GpuSession(lease)": lambda fabric, lease, gpu, wrong: sublet.GpuSession(wrong),
    "GpuSession(device)": lambda fabric, lease, gpu, wrong: sublet.GpuSession(lease, wrong).close(),
    "mem_alloc": lambda fabric, lease, gpu, wrong: gpu.mem_free(gpu.mem_alloc(wrong)),
    "mem_free": lambda fabric, lease, gpu, wrong: gpu.mem_free(wrong),
    "mem_write(buffer)": lambda fabric, lease, gpu, wrong: gpu.mem_write(wrong, 0, b"x"),
    "mem_write(offset)": lambda fabric, lease, gpu, wrong: gpu.mem_write(one(gpu), wrong, b"x"),
    "mem_write(data)": lambda fabric, lease, gpu, wrong: gpu.mem_write(one(gpu), 0, wrong),
    "mem_read(buffer)": lambda fabric, lease, gpu, wrong: gpu.mem_read(wrong),
    "mem_read(offset)": lambda fabric, lease, gpu, wrong: gpu.mem_read(one(gpu), wrong),
    "mem_read(length)": lambda fabric, lease, gpu, wrong: gpu.mem_read(one(gpu), 0, wrong),
    "module_load": lambda fabric, lease, gpu, wrong: gpu.module_load(wrong),
    "module_load(kind)": lambda fabric, lease, gpu, wrong: gpu.module_load(KERNEL, kind=wrong),
    "module_unload": lambda fabric, lease, gpu, wrong: gpu.module_unload(wrong),
    "launch(module)": lambda fabric, lease, gpu, wrong: gpu.launch(wrong, "add", 1, 1, []),
    "launch(kernel)": lambda fabric, lease, gpu, wrong: gpu.launch(module(gpu), wrong, 1, 1, [one(gpu)]),
    "launch(grid)": lambda fabric, lease, gpu, wrong: gpu.launch(module(gpu), "add", wrong, 1, [one(gpu)]),
    "launch(block)": lambda fabric, lease, gpu, wrong: gpu.launch(module(gpu), "add", 1, wrong, [one(gpu)]),
    "launch(args)": lambda fabric, lease, gpu, wrong: gpu.launch(module(gpu), "add", 1, 1, wrong),
    "launch(arg)": lambda fabric, lease, gpu, wrong: gpu.launch(module(gpu), "add", 1, 1, [wrong]),
    **{
        f"{name}()": named(lambda fabric, lease, **wrong: getattr(sublet, *wrong)(*wrong.values()), name)
        for name in ("u32", "u64", "i32", "i64", "f32", "f64")
    },
    "RenewalPolicy": lambda fabric, lease, gpu, wrong: sublet.RenewalPolicy(renew_at_fraction=wrong),
    "RenewalPolicy(mode)": lambda fabric, lease, gpu, wrong: sublet.RenewalPolicy(mode=wrong),
    "RenewalPolicy(every)": lambda fabric, lease, gpu, wrong: sublet.RenewalPolicy(every=wrong),
    "RenewalPolicy(max_hold)": lambda fabric, lease, gpu, wrong: sublet.RenewalPolicy(max_hold=wrong),
    "Epoch.parse": lambda fabric, lease, gpu, wrong: sublet.Epoch.parse(wrong),
}
KERNEL = """
import warp as wp
@wp.kernel
def add(x: wp.array(dtype=wp.float32)):
    x[wp.tid()] = x[wp.tid()] + 1.0
"""


def one(gpu: sublet.GpuSession) -> Any:
    made = KEPT.get("buffer")
    if made is None:
        made = KEPT["buffer"] = gpu.mem_alloc(64)
    return made


def module(gpu: sublet.GpuSession) -> Any:
    if "module" not in KEPT:
        KEPT["module"] = gpu.module_load(KERNEL, kind="warp")
    return KEPT["module"]


KEPT: dict[str, Any] = {}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[sublet.Fabric, sublet.Lease, sublet.GpuSession]]:
    home = tmp_path_factory.mktemp("home")
    ensure_office(home, words=("up", "--host-gpus", "2x64MiB", "--foreground"))
    with sublet.connect(home=home, start=False) as fabric:
        try:
            with (
                fabric.gpu(min_vram="16MiB", ttl="5m", renew="always") as lease,
                lease.activity(),  # or it would be taken for one that waits
                sublet.GpuSession(lease) as gpu,
            ):
                yield fabric, lease, gpu
        finally:
            KEPT.clear()
            fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)


def give_back(made: object) -> None:
    """Some of it is right after all."""
    for name in ("release", "stop", "close"):
        if hasattr(made, name) and not inspect.isclass(made):
            with contextlib.suppress(SubletError):
                getattr(made, name)()


@pytest.mark.parametrize("call", CALLS)
def test_what_is_wrong_is_told_in_a_sentence(
    call: str, world: tuple[sublet.Fabric, sublet.Lease, sublet.GpuSession]
) -> None:
    raw = {}
    for what, wrong in WRONG.items():
        try:
            made = CALLS[call](*world, wrong)
        except SubletError as error:
            if not str(error) or len(str(error)) > 2000:
                raw[what] = f"a message of {len(str(error))} characters"
        except BaseException as error:
            raw[what] = f"{type(error).__name__}: {error}"
        else:
            give_back(made)
        with contextlib.suppress(SubletError):
            world[2].sync()  # what was taken at first is told here
    assert not raw


def test_a_working_folder_that_is_gone_is_named(
    world: tuple[sublet.Fabric, sublet.Lease, sublet.GpuSession], tmp_path: Path
) -> None:
    _, lease, _ = world
    here = os.getcwd()
    fresh = lease.options(env={**os.environ, "FRESH": "1"})
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    try:
        gone.rmdir()
        for call in (lambda: lease.start(["/bin/true"]), lambda: fresh.run(len, "abc")):
            with pytest.raises(sublet.InvalidRequest, match="folder"):
                call()
        with pytest.raises(sublet.InvalidRequest, match="folder"):
            lease.start(["/bin/true"], cwd="here")
    finally:
        os.chdir(here)
    with pytest.raises(SubletError, match="working folder"):
        lease.start(["/bin/true"], cwd=gone).wait()


def test_two_devices_that_are_not_there_are_counted(
    world: tuple[sublet.Fabric, sublet.Lease, sublet.GpuSession],
) -> None:
    fabric, _, _ = world
    with pytest.raises(SubletError) as told:
        fabric.gpu(min_vram="1MiB", count=3, wait=0)
    assert "3 GPUs are more than any node has (the largest has 2 with 64MiB each)" in str(told.value)
    assert "at most 2" in told.value.do
