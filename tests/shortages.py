"""Shortages that a test makes: calls that fail a few times, as they do where descriptors or memory are used up."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest


def fail_accepts(monkeypatch: pytest.MonkeyPatch, error: BaseException, times: int = 3) -> list[int]:
    """Have the running loop accept nothing so many times. How often it will still fail is in the list."""
    loop = asyncio.get_running_loop()
    real, left = loop.sock_accept, [times]

    async def accept(listening: socket.socket) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return await real(listening)

    monkeypatch.setattr(loop, "sock_accept", accept)
    return left
