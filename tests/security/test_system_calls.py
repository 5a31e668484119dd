"""What the list of system calls has in common with two profiles that much software runs under, and where it differs."""

from __future__ import annotations

from typing import Final

from sublet.node.sandbox.system_calls import names, refused_names
from tests.security.profiles import DOCKER, SYSTEMD

NOT_FROM_DOCKER: Final = {
    "it looks into other processes, or is looked into": "ptrace process_vm_readv process_vm_writev",
    "a handle of a file is of use only to who may open it by that, and tells of files that are not shown": (
        "name_to_handle_at"
    ),
    "its memory could be seen neither when the guest is suspended nor when it is measured": "memfd_secret",
    "nothing can be marked without fanotify_init, which needs rights": "fanotify_mark",
    "segments of memory are for 16-bit programs": "modify_ldt",
    "no kernel has them any more": "epoll_ctl_old epoll_wait_old",
}
BEYOND_DOCKER: Final = {
    "where in memory its own pages shall lie: libraries of linear algebra, MPI and CUDA ask": (
        "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"
    ),
    "what a RISC-V processor has": "riscv_hwprobe riscv_flush_icache",
}
NOT_FROM_SYSTEMD: Final = {
    "it looks into other processes": "kcmp process_madvise process_vm_readv process_vm_writev",
    "sockets could be made behind the filter's back": "io_uring_setup io_uring_enter io_uring_register",
    "no kernel has them any more": "epoll_ctl_old epoll_wait_old",
    "namespaces; new processes without them go by clone": "setns unshare clone3",
    "the kernel's keys, which belong to users and not to guests": "add_key keyctl request_key",
    "a handle of a file tells of files that are not shown": "name_to_handle_at",
    "faults of memory that a program answers itself have been part of many attacks on the kernel": "userfaultfd",
    "pages of other processes": "migrate_pages move_pages",
}
"""``personality``, ``clone``, ``socket``, ``socketpair`` and ``mknod`` are allowed for some arguments only; Docker does
the same with the first three."""


def spread(reasons: dict[str, str]) -> set[str]:
    found = [name for text in reasons.values() for name in text.split()]
    assert len(found) == len(set(found))
    return set(found)


def test_what_differs_from_dockers_default_profile_is_listed_with_its_reason() -> None:
    docker = set(DOCKER.split())
    assert docker - names() == spread(NOT_FROM_DOCKER)
    assert names() - docker == spread(BEYOND_DOCKER)


def test_of_systemds_system_service_only_what_is_listed_is_refused() -> None:
    """It is wider by design: it has what services of the system need. What we have beyond it, Docker has."""
    systemd = set(SYSTEMD.split()) & (names() | refused_names())
    assert systemd - names() == spread(NOT_FROM_SYSTEMD)
    assert names() - systemd <= set(DOCKER.split()) | spread(BEYOND_DOCKER)


def test_whatever_gives_rights_over_the_kernel_is_in_neither() -> None:
    never = {
        *("bpf", "perf_event_open", "mount", "umount2", "pivot_root", "open_tree", "init_module", "kexec_load"),
        *(
            "open_by_handle_at",
            "fanotify_init",
            "swapon",
            "acct",
            "iopl",
            "settimeofday",
            "syslog",
            "quotactl",
            "reboot",
        ),
    }
    assert not never & (names() | set(DOCKER.split()) | set(SYSTEMD.split()))
    assert never <= refused_names()
