"""The allow list of system calls for tenants' guests.

Namespaces and user numbers keep a guest from what it may not touch; this keeps it from most of the kernel's own code.
What a program needs that computes, reads, writes, starts processes and talks over sockets is allowed. What is refused
gives rights over the kernel, looks into other processes, or has no use behind the walls. The table is ours; the choice
follows two profiles that much software is known to run under: the default one of Docker (moby/profiles, seccomp/v0.2.3)
and ``@system-service`` of systemd 252. Where it differs from either, ``tests/security/test_system_calls.py`` says why.

A call that is refused fails with EPERM. ENOSYS, "there is no such call", is the answer where a library then takes the
older way: for ``clone3``, whose flags lie in memory where no filter sees them; for io_uring, by which sockets could be
made behind the filter's back; for calls that are newer than this table; and for those of another architecture, whose
numbers mean something else.

The filter is a program of the kernel's packet filter: a tree of comparisons over the numbers, so that a call takes
about eight of them, and at some leaves a look at the arguments (their lower halves: the kernel reads no more of these).
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from sublet.node.sandbox import syscalls

FAMILIES: Final = (int(socket.AF_UNIX), int(socket.AF_INET), int(socket.AF_INET6), 16)
"""The kinds of socket that may be made; the last is netlink, by which programs ask for their own addresses. A network
namespace does not part the others: a socket to the host of a virtual machine (AF_VSOCK) goes through it."""
PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux as it is, 32-bit Linux, each also with the version number of Linux 2.6; the last only asks."""
NAMESPACES: Final = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
"""Flags of ``clone`` that are refused."""
LAST: Final = 467
"""The highest number that was looked at. A later call is not there, as far as a guest can tell."""

# Each entry: name:number on x86-64/number on ARM and RISC-V, which count alike. "-": it has none there.

_ALLOWED: Final[Mapping[str, str]] = {
    "reading and writing": """
        read:0/63 write:1/64 pread64:17/67 pwrite64:18/68 readv:19/65 writev:20/66 preadv:295/69 pwritev:296/70
        preadv2:327/286 pwritev2:328/287 lseek:8/62 sendfile:40/71 splice:275/76 tee:276/77 vmsplice:278/75
        copy_file_range:326/285 readahead:187/213 fadvise64:221/223 sync:162/81 fsync:74/82 fdatasync:75/83
        syncfs:306/267 sync_file_range:277/84 fallocate:285/47 truncate:76/45 ftruncate:77/46 cachestat:451/451
        io_setup:206/0 io_destroy:207/1 io_submit:209/2 io_cancel:210/3 io_getevents:208/4 io_pgetevents:333/292
    """,
    "descriptors": """
        open:2/- openat:257/56 openat2:437/437 creat:85/- close:3/57 close_range:436/436 dup:32/23 dup2:33/-
        dup3:292/24 fcntl:72/25 flock:73/32 ioctl:16/29 pipe:22/- pipe2:293/59 memfd_create:319/279
    """,
    "files and folders": """
        access:21/- faccessat:269/48 faccessat2:439/439 stat:4/- fstat:5/80 lstat:6/- newfstatat:262/79 statx:332/291
        statfs:137/43 fstatfs:138/44 statmount:457/457 listmount:458/458 getdents:78/- getdents64:217/61 getcwd:79/17
        chdir:80/49 fchdir:81/50 mkdir:83/- mkdirat:258/34 rmdir:84/- link:86/- linkat:265/37 symlink:88/-
        symlinkat:266/36 unlink:87/- unlinkat:263/35 rename:82/- renameat:264/38 renameat2:316/276 readlink:89/-
        readlinkat:267/78 chmod:90/- fchmod:91/52 fchmodat:268/53 fchmodat2:452/452 chown:92/- fchown:93/55
        lchown:94/- fchownat:260/54 umask:95/166 utime:132/- utimes:235/- futimesat:261/- utimensat:280/88
        getxattr:191/8 lgetxattr:192/9 fgetxattr:193/10 getxattrat:464/464 setxattr:188/5 lsetxattr:189/6
        fsetxattr:190/7 setxattrat:463/463 listxattr:194/11 llistxattr:195/12 flistxattr:196/13 listxattrat:465/465
        removexattr:197/14 lremovexattr:198/15 fremovexattr:199/16 removexattrat:466/466 inotify_init:253/-
        inotify_init1:294/26 inotify_add_watch:254/27 inotify_rm_watch:255/28
    """,
    "waiting": """
        poll:7/- ppoll:271/73 select:23/- pselect6:270/72 epoll_create:213/- epoll_create1:291/20 epoll_ctl:233/21
        epoll_wait:232/- epoll_pwait:281/22 epoll_pwait2:441/441 eventfd:284/- eventfd2:290/19 signalfd:282/-
        signalfd4:289/74 timerfd_create:283/85 timerfd_settime:286/86 timerfd_gettime:287/87 futex:202/98
        futex_wait:455/455 futex_wake:454/454 futex_waitv:449/449 futex_requeue:456/456 restart_syscall:219/128
    """,
    "sockets, once they are made": """
        bind:49/200 connect:42/203 listen:50/201 accept:43/202 accept4:288/242 getsockname:51/204 getpeername:52/205
        getsockopt:55/209 setsockopt:54/208 sendto:44/206 sendmsg:46/211 sendmmsg:307/269 recvfrom:45/207
        recvmsg:47/212 recvmmsg:299/243 shutdown:48/210
    """,
    "memory": """
        brk:12/214 mmap:9/222 munmap:11/215 mremap:25/216 mprotect:10/226 madvise:28/233 mincore:27/232 msync:26/227
        mlock:149/228 mlock2:325/284 munlock:150/229 mlockall:151/230 munlockall:152/231 mseal:462/462
        membarrier:324/283 remap_file_pages:216/234 pkey_alloc:330/289 pkey_free:331/290 pkey_mprotect:329/288
        map_shadow_stack:453/453 mbind:237/235 get_mempolicy:239/236 set_mempolicy:238/237
        set_mempolicy_home_node:450/450
    """,
    "processes and threads": """
        fork:57/- vfork:58/- execve:59/221 execveat:322/281 exit:60/93 exit_group:231/94 wait4:61/260 waitid:247/95
        getpid:39/172 getppid:110/173 gettid:186/178 getpgid:121/155 getpgrp:111/- setpgid:109/154 getsid:124/156
        setsid:112/157 set_tid_address:218/96 set_robust_list:273/99 get_robust_list:274/100 rseq:334/293
        prctl:157/167 arch_prctl:158/- get_thread_area:211/- set_thread_area:205/- process_mrelease:448/448
        pidfd_open:434/434 pidfd_send_signal:424/424 uretprobe:335/- riscv_hwprobe:-/258 riscv_flush_icache:-/259
    """,
    "signals": """
        kill:62/129 tkill:200/130 tgkill:234/131 rt_sigaction:13/134 rt_sigprocmask:14/135 rt_sigpending:127/136
        rt_sigsuspend:130/133 rt_sigtimedwait:128/137 rt_sigqueueinfo:129/138 rt_tgsigqueueinfo:297/240
        rt_sigreturn:15/139 sigaltstack:131/132 pause:34/-
    """,
    "time": """
        time:201/- times:100/153 gettimeofday:96/169 clock_gettime:228/113 clock_getres:229/114
        clock_nanosleep:230/115 nanosleep:35/101 adjtimex:159/171 clock_adjtime:305/266 alarm:37/- getitimer:36/102
        setitimer:38/103 timer_create:222/107 timer_settime:223/110 timer_gettime:224/108 timer_getoverrun:225/109
        timer_delete:226/111
    """,
    "who one is, and what one may": """
        getuid:102/174 geteuid:107/175 getgid:104/176 getegid:108/177 getresuid:118/148 getresgid:120/150
        getgroups:115/158 setuid:105/146 setgid:106/144 setreuid:113/145 setregid:114/143 setresuid:117/147
        setresgid:119/149 setfsuid:122/151 setfsgid:123/152 setgroups:116/159 capget:125/90 capset:126/91
        seccomp:317/277 landlock_create_ruleset:444/444 landlock_add_rule:445/445 landlock_restrict_self:446/446
        getrlimit:97/163 setrlimit:160/164 prlimit64:302/261 getrusage:98/165
    """,
    "the processor": """
        sched_yield:24/124 getcpu:309/168 getpriority:140/141 setpriority:141/140 sched_getaffinity:204/123
        sched_setaffinity:203/122 sched_getattr:315/275 sched_setattr:314/274 sched_getparam:143/121
        sched_setparam:142/118 sched_getscheduler:145/120 sched_setscheduler:144/119 sched_get_priority_max:146/125
        sched_get_priority_min:147/126 sched_rr_get_interval:148/127 ioprio_get:252/31 ioprio_set:251/30
    """,
    "between processes": """
        shmget:29/194 shmat:30/196 shmdt:67/197 shmctl:31/195 semget:64/190 semop:65/193 semtimedop:220/192
        semctl:66/191 msgget:68/186 msgsnd:69/189 msgrcv:70/188 msgctl:71/187 mq_open:240/180 mq_unlink:241/181
        mq_timedsend:242/182 mq_timedreceive:243/183 mq_notify:244/184 mq_getsetattr:245/185
    """,
    "the machine": """
        uname:63/160 sysinfo:99/179 getrandom:318/278
    """,
}
_BY_ARGUMENT: Final = """
    socket:41/198 socketpair:53/199 personality:135/92 clone:56/220 mknod:133/- mknodat:259/33
"""
"""Allowed for some values of one argument; ``_conditions`` says which."""
_NOT_THERE: Final = """
    clone3:435/435 io_uring_setup:425/425 io_uring_enter:426/426 io_uring_register:427/427
"""
_REFUSED: Final[Mapping[str, str]] = {
    "reach into other processes": """
        ptrace:101/117 process_vm_readv:310/270 process_vm_writev:311/271 process_madvise:440/440 kcmp:312/272
        pidfd_getfd:438/438
    """,
    "namespaces, mounts and roots": """
        unshare:272/97 setns:308/268 mount:165/40 umount2:166/39 pivot_root:155/41 chroot:161/51 open_tree:428/428
        open_tree_attr:467/467 move_mount:429/429 mount_setattr:442/442 fsopen:430/430 fsconfig:431/431
        fsmount:432/432 fspick:433/433
    """,
    "programs in the kernel, and measuring it": """
        bpf:321/280 perf_event_open:298/241 lookup_dcookie:212/18 syslog:103/116 userfaultfd:323/282
    """,
    "the kernel's keys": """
        add_key:248/217 request_key:249/218 keyctl:250/219
    """,
    "files past their paths": """
        name_to_handle_at:303/- open_by_handle_at:304/- fanotify_init:300/262 fanotify_mark:301/263 quotactl:179/60
        quotactl_fd:443/443
    """,
    "the machine itself": """
        init_module:175/105 finit_module:313/273 delete_module:176/106 kexec_load:246/104 kexec_file_load:320/294
        reboot:169/142 swapon:167/224 swapoff:168/225 acct:163/89 sethostname:170/161 setdomainname:171/162
        settimeofday:164/170 clock_settime:227/112 vhangup:153/58 iopl:172/- ioperm:173/- modify_ldt:154/-
    """,
    "memory of other processes, or hidden memory": """
        move_pages:279/239 migrate_pages:256/238 memfd_secret:447/447
    """,
    "security modules": """
        lsm_get_self_attr:459/459 lsm_set_self_attr:460/460 lsm_list_modules:461/461
    """,
    "out of use": """
        uselib:134/- ustat:136/- sysfs:139/- _sysctl:156/- nfsservctl:180/42 epoll_ctl_old:214/- epoll_wait_old:215/-
        create_module:174/- get_kernel_syms:177/- query_module:178/- getpmsg:181/- putpmsg:182/- afs_syscall:183/-
        tuxcall:184/- security:185/- vserver:236/-
    """,
}
"""Not needed for the filter, which refuses whatever is not allowed; it says why a name is missing above."""


class _Machine(NamedTuple):
    audit: int
    column: int


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, 0),
    "aarch64": _Machine(0xC00000B7, 1),
    "riscv64": _Machine(0xC00000F3, 1),
}

_Line: TypeAlias = tuple[int, int, int, int]
"""One instruction: operation, instructions to skip if so, if not, value."""
_Code: TypeAlias = tuple[_Line, ...]

_LOAD: Final = 0x20
_AND: Final = 0x54
_JUMP: Final = 0x05
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_SKIP_MAX: Final = 255
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16


def _refuse(number: int) -> _Line:
    return (_RETURN, 0, 0, 0x00050000 | number)


_ALLOW: Final[_Code] = ((_RETURN, 0, 0, 0x7FFF0000),)
_EPERM: Final[_Code] = (_refuse(errno.EPERM),)
_ENOSYS: Final[_Code] = (_refuse(errno.ENOSYS),)


def names() -> frozenset[str]:
    """The calls that are allowed, for all arguments or for some."""
    return frozenset(name for text in (*_ALLOWED.values(), _BY_ARGUMENT) for name, _ in _read(text))


def refused_names() -> frozenset[str]:
    """The calls that are known, and refused or said not to be there."""
    return frozenset(name for text in (*_REFUSED.values(), _NOT_THERE) for name, _ in _read(text))


def number_of(name: str, machine: str) -> int | None:
    """What the call is called there; None if there is none."""
    column = _known(machine).column
    for text in (*_ALLOWED.values(), _BY_ARGUMENT, _NOT_THERE, *_REFUSED.values()):
        for found, numbers in _read(text):
            if found == name:
                return numbers[column]
    return None


@functools.cache
def program(machine: str) -> bytes:
    """The filter, as the kernel reads it. Raises ``OSError`` where the calls of a machine are not known."""
    known = _known(machine)
    leaves = {number: code for number, code in _leaves(known.column) if number is not None}
    spans: list[tuple[int, _Code]] = []
    for number in range(LAST + 1):
        code = leaves.get(number, _EPERM)
        if not spans or spans[-1][1] != code:
            spans.append((number, code))
    spans.append((LAST + 1, _ENOSYS))  # which is also where the numbers of the x32 architecture lie
    code = (
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, known.audit),
        *_ENOSYS,
        (_LOAD, 0, 0, _NUMBER_AT),
        *_tree(spans),
    )
    return b"".join(struct.pack("<HBBI", *line) for line in code)


def restrict() -> None:
    """From now on, for this process and all it starts. It has given up new privileges already."""
    syscalls.filter_system_calls(program(os.uname().machine))


def _known(machine: str) -> _Machine:
    known = _MACHINES.get(machine)
    if known is None:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known here")
    return known


def _read(text: str) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    for entry in text.split():
        name, _, numbers = entry.partition(":")
        yield name, tuple(None if word == "-" else int(word) for word in numbers.split("/"))


def _leaves(column: int) -> Iterator[tuple[int | None, _Code]]:
    for text in _ALLOWED.values():
        for _, numbers in _read(text):
            yield numbers[column], _ALLOW
    for _, numbers in _read(_NOT_THERE):
        yield numbers[column], _ENOSYS
    conditions = _conditions()
    for name, numbers in _read(_BY_ARGUMENT):
        yield numbers[column], conditions[name]


def _conditions() -> dict[str, _Code]:
    family = _one_of(0, FAMILIES, errno.EAFNOSUPPORT)
    return {
        "socket": family,
        "socketpair": family,
        "personality": _one_of(0, PERSONALITIES, errno.EPERM),
        "clone": (_argument(0), (_ANY_BIT, 0, 1, NAMESPACES), *_EPERM, *_ALLOW),
        "mknod": _no_device(1),
        "mknodat": _no_device(2),
    }


def _argument(place: int) -> _Line:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place)


def _one_of(place: int, values: Sequence[int], otherwise: int) -> _Code:
    tests = ((_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values))
    return (_argument(place), *tests, _refuse(otherwise), *_ALLOW)


def _no_device(place: int) -> _Code:
    """Pipes, sockets and files may be made by this call."""
    return (
        _argument(place),
        (_AND, 0, 0, 0o170000),
        (_EQUAL, 1, 0, stat.S_IFCHR),
        (_EQUAL, 0, 1, stat.S_IFBLK),
        *_EPERM,
        *_ALLOW,
    )


def _tree(spans: Sequence[tuple[int, _Code]]) -> _Code:
    """Decide by halves: each span begins at its number and goes to the next one's."""
    if len(spans) == 1:
        return spans[0][1]
    half = len(spans) // 2
    below, above = _tree(spans[:half]), _tree(spans[half:])
    if len(below) <= _SKIP_MAX:
        return ((_AT_LEAST, len(below), 0, spans[half][0]), *below, *above)
    return ((_AT_LEAST, 0, 1, spans[half][0]), (_JUMP, 0, 0, len(below)), *below, *above)
