"""A holder as a process of its own, to be killed or stopped: ``holder_program.py DATA_SOCKET again|stay``.

On its stdin come, line by line, a token and what to run under it (JSON); for each it prints the guest's pid, or 0. Then
it stays; with ``again`` it asks for another guest until that is refused, and prints what the error is called.
"""

from __future__ import annotations

import json
import sys
import time

from sublet.errors import SubletError
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Greeting, GuestSpec, HolderReply, Start, Started


def main(path: str, what: str) -> None:
    talks = []
    for line in sys.stdin:
        token, argv, imports, env = json.loads(line)
        talk = Conversation.connect(path, dumps(Greeting(capability=token)), timeout_s=30)
        talks.append(talk)
        spec = GuestSpec(argv=tuple(argv), imports=tuple(imports), env=env, cwd="/")
        pid = 0
        try:
            reply = loads(HolderReply, talk.call(dumps(Start(spec=spec)), timeout_s=30).body)
            pid = reply.pid if isinstance(reply, Started) else 0
        except SubletError:
            pass
        print(pid, flush=True)
    print("all", flush=True)
    while what == "again":
        time.sleep(0.02)
        try:
            talks[0].call(dumps(Start(spec=GuestSpec(argv=("true",), cwd="/", env={"PATH": "/usr/bin:/bin"}))))
        except SubletError as error:
            print(type(error).__name__, flush=True)
            break
    time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
