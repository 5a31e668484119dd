"""Which zygotes there are: a bounded number, one for each kind, the least recently used given up first."""

from __future__ import annotations

import sys

import pytest

from sublet.supervisor.zygote_policy import (
    BACKOFF_MAX_NS,
    DEATHS_MAX,
    DISCARDED_NS,
    HARMLESS,
    REMEMBERED_MAX,
    Shelf,
    State,
    ZygoteKey,
    arguments_of,
    is_python,
    walled_key,
    without,
)
from sublet.values import NS_PER_S
from sublet.wire.jupyter import KERNEL_IMPORTS
from sublet.wire.zygote import LATER, Stamp, fingerprint

A, B, C, D = (ZygoteKey(f"/usr/bin/python{name}") for name in "abcd")


def shelf_of(*keys: ZygoteKey, zygotes_max: int = 2) -> Shelf:
    """These, ready, made one second apart."""
    shelf = Shelf(zygotes_max)
    for second, key in enumerate(keys):
        assert shelf.want(key, second * NS_PER_S) == (True, ())
        shelf.proved(key, ())
    return shelf


def test_one_of_a_kind_is_started_once() -> None:
    shelf = Shelf()
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
    shelf = Shelf(1)
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
        shelf.entries[A].state = State.READY  # it came to be ready, and dies again without having been of use
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert max(pauses) * NS_PER_S == BACKOFF_MAX_NS


def test_one_that_dies_before_it_is_ready_is_given_up_for_long() -> None:
    shelf, now_ns, last_ns = Shelf(), 0, 0
    for _ in range(DEATHS_MAX):
        assert shelf.want(A, now_ns) == (True, ())
        shelf.died(A, "no such file", now_ns)
        last_ns, now_ns = now_ns, shelf.entries[A].again_ns
    assert shelf.entries[A].state is State.DISCARDED
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
    shelf = Shelf(2)
    for n in range(2 * REMEMBERED_MAX):
        key = ZygoteKey(f"/{n}")
        assert shelf.want(key, n) == (True, ())
        shelf.discarded(key, "no", n)
    assert len(shelf.entries) <= REMEMBERED_MAX + 1


def test_word_of_one_that_is_not_there_any_more_changes_nothing() -> None:
    shelf = Shelf()
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
    from sublet.compute.device_guests import IMPORTS as SESSIONS
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


def test_it_is_one_for_all_tenants_and_no_other_guest_comes_from_it() -> None:
    key = walled_key("a:b", "", ("numpy?",), {"HOME": "/srv/ada", "MINE": "1"})
    assert key == walled_key("c:d", sys.executable, ("numpy?",), {"HOME": "/srv/ben"})
    assert key is not None
    assert key != ZygoteKey(sys.executable, ("numpy?",), ())
    assert dict(key.env)["HOME"] == "/nonexistent"
