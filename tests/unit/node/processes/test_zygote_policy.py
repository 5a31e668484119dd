"""Which zygotes there are: a bounded number, one for each kind, the least recently used given up first."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from sublet.errors import InvalidRequest
from sublet.node.processes.zygote_policy import (
    ASSUMED_BYTES,
    BACKOFF_MAX_NS,
    DEATHS_MAX,
    DISCARDED_NS,
    HARMLESS,
    REMEMBERED_MAX,
    TENANT_IDLE_NS,
    TENANT_ZYGOTES_MAX,
    ZygoteKey,
    ZygoteRegistry,
    ZygoteState,
    arguments_of,
    is_python,
    walled_key,
    without,
)
from sublet.values import MIB, NS_PER_S
from sublet.wire.jupyter import KERNEL_IMPORTS
from sublet.wire.zygote import LATER, TENANT_WARM_VARIABLE, Stamp, fingerprint, tenant_warm_bytes

A, B, C, D = (ZygoteKey(f"/usr/bin/python{name}") for name in "abcd")


def shelf_of(*keys: ZygoteKey, zygotes_max: int = 2) -> ZygoteRegistry:
    """These, ready, made one second apart."""
    shelf = ZygoteRegistry(zygotes_max)
    for second, key in enumerate(keys):
        assert shelf.want(key, second * NS_PER_S) == (True, ())
        shelf.proved(key, ())
    return shelf


def test_one_of_a_kind_is_started_once() -> None:
    shelf = ZygoteRegistry()
    assert shelf.want(A, 0) == (True, ())
    assert shelf.want(A, 1) == (False, ())
    assert not shelf.is_ready(A)
    shelf.proved(A, (Stamp(path="/x", mtime_ns=5),))
    assert shelf.is_ready(A)
    assert shelf.stamps(A) == (Stamp(path="/x", mtime_ns=5),)
    assert shelf.want(A, 2) == (False, ())


def test_the_least_recently_used_goes_when_there_are_too_many() -> None:
    shelf = shelf_of(A, B)
    shelf.used(A, 10 * NS_PER_S)
    assert shelf.want(C, 11 * NS_PER_S) == (True, (B,))
    assert not shelf.is_ready(B)
    assert shelf.is_ready(A)


def test_what_is_just_being_made_is_not_thrown_away() -> None:
    shelf = ZygoteRegistry(1)
    assert shelf.want(A, 0) == (True, ())
    assert shelf.want(B, 1) == (False, ())
    shelf.proved(A, ())
    assert shelf.want(B, 2) == (True, (A,))


def test_one_that_died_comes_back_after_growing_pauses() -> None:
    shelf, now_ns, pauses = shelf_of(A), 0, []
    for _ in range(9):
        shelf.died(A, "killed", now_ns)
        assert shelf.want(A, now_ns) == (False, ())
        pauses.append((shelf.entries[A].again_ns - now_ns) // NS_PER_S)
        now_ns = shelf.entries[A].again_ns
        assert shelf.want(A, now_ns) == (True, ())
        shelf.entries[A].state = ZygoteState.READY  # it came to be ready, and dies again without having been of use
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert max(pauses) * NS_PER_S == BACKOFF_MAX_NS


def test_one_that_dies_before_it_is_ready_is_given_up_for_long() -> None:
    shelf, now_ns, last_ns = ZygoteRegistry(), 0, 0
    for _ in range(DEATHS_MAX):
        assert shelf.want(A, now_ns) == (True, ())
        shelf.died(A, "no such file", now_ns)
        last_ns, now_ns = now_ns, shelf.entries[A].again_ns
    assert shelf.entries[A].state is ZygoteState.DISCARDED
    assert now_ns == last_ns + DISCARDED_NS
    assert shelf.lines() == ("/usr/bin/pythona: discarded (no such file)",)


def test_one_that_failed_its_proof_is_tried_again_only_after_long() -> None:
    shelf = shelf_of(A)
    shelf.discarded(A, "an import opened /dev/nvidia0", 0)
    assert shelf.want(A, DISCARDED_NS - 1) == (False, ())
    assert shelf.want(A, DISCARDED_NS) == (True, ())


def test_one_out_of_date_is_made_anew_at_once() -> None:
    shelf = shelf_of(A)
    shelf.drop(A)
    assert not shelf.is_ready(A)
    assert shelf.want(A, 1) == (True, ())


def test_dead_kinds_do_not_count_and_are_not_remembered_for_ever() -> None:
    shelf = ZygoteRegistry(2)
    for n in range(2 * REMEMBERED_MAX):
        key = ZygoteKey(f"/{n}")
        assert shelf.want(key, n) == (True, ())
        shelf.discarded(key, "no", n)
    assert len(shelf.entries) <= REMEMBERED_MAX + 1


def test_word_of_one_that_is_not_there_any_more_changes_nothing() -> None:
    shelf = ZygoteRegistry()
    shelf.proved(A, ())
    shelf.died(A, "x", 0)
    shelf.discarded(A, "x", 0)
    shelf.used(A, 0)
    assert shelf.entries == {}
    assert shelf.stamps(A) == ()


def test_the_fingerprint_is_what_an_interpreter_reads_once() -> None:
    env = {
        "PYTHONPATH": "/x", "LD_LIBRARY_PATH": "/y", "VIRTUAL_ENV": "/v", "OMP_NUM_THREADS": "4", "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "0", "COLOUR": "blue", "SUBLET_LEASE": "l-7", "PATH": "/bin", "TERM": "xterm",
    }  # fmt: skip
    kept = dict(fingerprint(env))
    assert set(env) - set(kept) == {"COLOUR", "SUBLET_LEASE", "PATH", "TERM"}
    assert fingerprint(dict(reversed(env.items()))) == fingerprint(env)


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["python", "train.py", "--lr", "1"], ("train.py", "--lr", "1")),
        (["python3", "-m", "pkg.mod", "-x"], ("-m", "pkg.mod", "-x")),
        (["python", "-c", "print(1)"], ("-c", "print(1)")),
        (["python"], None),
        (["python", "-"], None),
        (["python", ""], None),
        (["python", "-m"], None),
        (["python", "-u", "train.py"], None),
        (["python", "-mpkg"], None),
        (["python", "-O", "-c", "1"], None),
        (["python", "--version"], None),
    ],
)
def test_only_what_a_fork_can_be_is_asked_of_a_zygote(argv: list[str], arguments: tuple[str, ...] | None) -> None:
    assert arguments_of(argv) == arguments


@pytest.mark.parametrize(
    ("program", "answer"),
    [("python", True), ("/usr/bin/python3.11", True), ("./venv/bin/python3", True), ("python2", False),
     ("ipython", False), ("pythonw", False), ("bash", False), ("python3-config", False)],
)  # fmt: skip
def test_an_interpreter_is_known_by_its_name(program: str, answer: bool) -> None:
    assert is_python(program) is answer


def test_what_is_to_stay_cold_is_left_out_unless_somebody_must_have_it() -> None:
    asked = ("numpy?", "torch?", "torch.utils.data?", "torch", "torchvision?", LATER, "warp?")
    assert without(asked, frozenset({"torch", "warp"})) == ("numpy?", "torch", "torchvision?", LATER)
    assert without(asked, frozenset({""})) == asked


# ---- for tenants: it stands outside of all walls, with the supervisor's rights


def test_what_our_own_programs_import_is_imported_beforehand_for_tenants_too() -> None:
    from sublet.compute.session_line import IMPORTS as SESSIONS
    from sublet.compute.worker_guest import IMPORTS as WORKERS
    from sublet.training.running import IMPORTS as TRAINING

    assert HARMLESS.issuperset({*KERNEL_IMPORTS, *SESSIONS, *WORKERS, *TRAINING})


@pytest.mark.parametrize(
    ("entry", "python", "imports", "env"),
    [
        ("a:b", "/srv/mallory/bin/python", ("numpy?",), {}),
        ("a:b", "", ("antigravity",), {}),
        ("a:b", "", ("numpy?", "torch.__main__"), {}),
        ("a:b", "", ("numpy?",), {"LD_PRELOAD": "/tmp/mine.so"}),
        ("a:b", "", ("numpy?",), {"PYTHONPATH": "/tmp/mine"}),
        ("a:b", "", ("numpy?",), {"OMP_NUM_THREADS": "3"}),
        ("", "", ("numpy?",), {}),
    ],
)
def test_nothing_in_it_is_the_tenants_choice(
    entry: str, python: str, imports: tuple[str, ...], env: dict[str, str]
) -> None:
    assert walled_key(entry, python, imports, env) is None


WALLED = ZygoteKey("/usr/bin/python", ("numpy?",), walled=True)
MINUTE_NS = 60 * NS_PER_S


def owned(shelf: ZygoteRegistry, tenant: str, now_ns: int, *, mib: int = 0, key: ZygoteKey = WALLED) -> ZygoteKey:
    """What this tenant is given; if that is its own, it is made and measured."""
    found = shelf.of_tenant(key, tenant, now_ns)
    if found.tenant:
        shelf.want(found, now_ns)
        shelf.proved(found, (), mib * MIB)
        shelf.used(found, now_ns)
    return found


def test_a_tenant_has_one_of_its_own_while_memory_lasts_and_shares_one_afterwards() -> None:
    shelf = ZygoteRegistry(tenant_bytes=100 * MIB)
    keys = [owned(shelf, tenant, n, mib=30) for n, tenant in enumerate(("ana", "ben", "cleo", "dan"))]
    assert [key.tenant for key in keys] == ["ana", "ben", "cleo", ""]
    assert keys[3] == WALLED
    assert shelf.of_tenant(WALLED, "ana", 9) == keys[0], "who has one keeps it"
    assert len({key.description for key in keys}) == 4


def test_before_one_was_measured_it_is_assumed_to_be_large() -> None:
    shelf = ZygoteRegistry(tenant_bytes=2 * ASSUMED_BYTES)
    own = shelf.of_tenant(WALLED, "ana", 0)
    assert shelf.want(own, 0) == (True, ())
    assert shelf.want(shelf.of_tenant(WALLED, "ben", 0), 0) == (True, ())
    assert shelf.of_tenant(WALLED, "cleo", 0) == WALLED
    shelf.proved(own, (), 10 * MIB)
    assert shelf.of_tenant(WALLED, "cleo", 0).tenant == "cleo", "the next one will take no more"


def test_what_a_tenant_has_not_used_for_long_makes_way_for_another_tenants() -> None:
    shelf = ZygoteRegistry(tenant_bytes=70 * MIB)
    ana, ben = owned(shelf, "ana", 0, mib=30), owned(shelf, "ben", MINUTE_NS, mib=30)
    assert shelf.of_tenant(WALLED, "cleo", TENANT_IDLE_NS - 1) == WALLED
    cleo = shelf.of_tenant(WALLED, "cleo", TENANT_IDLE_NS)
    assert cleo.tenant == "cleo"
    assert shelf.want(cleo, TENANT_IDLE_NS) == (True, (ana,))
    assert shelf.is_ready(ben)
    large = replace(WALLED, imports=("torch?",))
    assert shelf.of_tenant(large, "dan", 9 * TENANT_IDLE_NS) == large, "one that is being made is not thrown away"


def test_there_is_a_number_of_them_too() -> None:
    shelf = ZygoteRegistry(tenant_bytes=1 << 60)
    for n in range(TENANT_ZYGOTES_MAX):
        assert owned(shelf, f"t{n}", n, mib=1).tenant
    assert shelf.of_tenant(WALLED, "one more", 99) == WALLED


def test_those_of_single_tenants_and_all_others_do_not_displace_one_another() -> None:
    shelf = ZygoteRegistry(1, tenant_bytes=100 * MIB)
    ana = owned(shelf, "ana", 0, mib=30)
    assert shelf.want(A, 9 * TENANT_IDLE_NS) == (True, ())
    shelf.proved(A, ())
    assert shelf.is_ready(ana)
    assert owned(shelf, "ben", 9 * TENANT_IDLE_NS, mib=30).tenant == "ben"
    assert shelf.is_ready(A)


def test_without_memory_for_them_all_tenants_share() -> None:
    assert ZygoteRegistry().of_tenant(WALLED, "ana", 0) == WALLED


def test_only_an_interpreter_outside_of_walls_reads_nothing_but_its_installation() -> None:
    key = walled_key("a:b", "", (), {})
    assert key is not None
    assert key.options == ("-I",)
    assert A.options == (), "it is to be what its user's fresh interpreter would be"


@pytest.mark.parametrize(
    ("text", "bound"), [("no", 0), ("512MiB", 512 * MIB), ("1GB", 1_000_000_000)]
)  # fmt: skip
def test_an_operator_says_how_much_they_may_take(text: str, bound: int) -> None:
    assert tenant_warm_bytes(text) == bound


@pytest.mark.parametrize("text", ["much", "512", "-1GiB", "0", "no ", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=TENANT_WARM_VARIABLE):
        tenant_warm_bytes(text)


def test_it_is_one_for_all_tenants_and_no_other_guest_comes_from_it() -> None:
    key = walled_key("a:b", "", ("numpy?",), {"HOME": "/srv/ada", "MINE": "1"})
    assert key == walled_key("c:d", sys.executable, ("numpy?",), {"HOME": "/srv/ben"})
    assert key is not None
    assert key != ZygoteKey(sys.executable, ("numpy?",), ())
    assert dict(key.env)["HOME"] == "/nonexistent"
