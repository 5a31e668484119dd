"""A guest that does not want to leave: ``race_guest.py DEVICE RECORD LEASE``.

It ignores every signal it can, forks, forks twice, changes session and group, and each of its four processes keeps the
device open and says every few milliseconds that it is there. A lock on the open file stands for the context on a
device: it lasts until the last copy of the descriptor is closed, so whoever comes too early finds it taken.
"""

import fcntl
import os
import signal
import sys
import time

BEAT_S = 0.008


def say(record: int, lease: str, who: str, what: str) -> None:
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    os.write(record, f"{lease} {who} {what} {now_ns}\n".encode())


def stay(record: int, lease: str, who: str) -> None:
    while True:
        say(record, lease, who, "there")
        time.sleep(BEAT_S)


def main(device_path: str, record_path: str, lease: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    record = os.open(record_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    device = os.open(device_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(record, lease, "first", "taken")
        fcntl.flock(device, fcntl.LOCK_EX)
    if os.fork() == 0:
        os.setpgid(0, 0)
        stay(record, lease, "child")
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        stay(record, lease, "orphan")
    if os.fork() == 0:
        if os.fork() != 0:
            os._exit(0)
        os.environ.clear()
        os.setsid()
        stay(record, lease, "nobody")
    stay(record, lease, "first")


if __name__ == "__main__":
    main(*sys.argv[1:])
