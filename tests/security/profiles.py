"""The system calls that two profiles allow, as far as they exist on x86-64 or 64-bit ARM. Facts to compare with.

DOCKER: what Docker's default profile allows a container without added capabilities: ``seccomp/default.json`` of
github.com/moby/profiles at tag seccomp/v0.2.3. ``clone`` is allowed without flags of namespaces, ``personality`` for
five values, ``socket`` for all families but 38 and 40; ``clone3`` is answered with ENOSYS.

SYSTEMD: what ``SystemCallFilter=@system-service`` allows: ``systemd-analyze syscall-filter`` of systemd 252
(252.39-1~deb12u2), with the sets in it spelled out.
"""

DOCKER = """
    accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_adjtime
    clock_getres clock_gettime clock_nanosleep clone close close_range connect copy_file_range creat dup dup2 dup3
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
    eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod
    fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
    fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake futimesat get_robust_list
    get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid
    getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
    getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get ioprio_set
    kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen
    listmount listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack
    membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt
    mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget
    msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause
    personality pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64
    preadv preadv2 prlimit64 process_mrelease process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev
    pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr
    removexattrat rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
    semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid
    setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt
    setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 socket socketpair
    splice stat statfs statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time
    timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
    timerfd_settime times tkill truncate umask uname unlink unlinkat uretprobe utime utimensat utimes vfork vmsplice
    wait4 waitid write writev
"""
SYSTEMD = """
    accept accept4 access add_key alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres
    clock_gettime clock_nanosleep clone clone3 close close_range connect copy_file_range creat dup dup2 dup3
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
    eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat
    fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs
    fsync ftruncate futex futex_waitv futimesat get_mempolicy get_robust_list get_thread_area getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
    getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid
    getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents
    io_pgetevents io_setup io_submit io_uring_enter io_uring_register io_uring_setup ioctl ioprio_get ioprio_set
    kcmp keyctl kill lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat
    madvise mbind membarrier memfd_create migrate_pages mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap
    move_pages mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap msgctl msgget
    msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause
    personality pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64
    process_madvise process_vm_readv process_vm_writev pselect6 pwrite64 pwritev pwritev2 read readahead readlink
    readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename renameat renameat2 request_key
    restart_syscall riscv_flush_icache riscv_hwprobe rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield select semctl semget semop
    semtimedop sendfile sendmmsg sendmsg sendto set_mempolicy set_mempolicy_home_node set_robust_list
    set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setns setpgid setpriority setregid
    setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt shmget shutdown
    sigaltstack signalfd signalfd4 socket socketpair splice stat statfs statx symlink symlinkat sync sync_file_range
    syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
    timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat unshare
    uretprobe userfaultfd utime utimensat utimes vfork vmsplice wait4 waitid write writev
"""
