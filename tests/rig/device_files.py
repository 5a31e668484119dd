"""The device files of cards, for programs that are to find them; only root can make them."""

from __future__ import annotations

from typing import Final

__all__ = ["DEVICES"]

DEVICES: Final = """
import os, sys
from sublet.node.sandbox import syscalls
from sublet.node.sandbox.plan import BASIC_NODES
names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", *(f"nvidia{number}" for number in range(10, 14))]
devices = {name: os.makedev(1, 7) for name in names}  # /dev/full, which no process has open
devices |= {os.path.basename(path): os.stat(path).st_rdev for path in BASIC_NODES}
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount("tmpfs", "/dev", syscalls.MS_NOSUID)
os.umask(0)
for name, device in devices.items():
    os.mknod("/dev/" + name, 0o20666, device)
for name in ("pts", "shm"):
    os.mkdir("/dev/" + name)
"""
"""A program that begins with this has the device files of four cards, 10 to 13, in a mount namespace of its own."""
