"""The load generator: one process, plain sockets with keep-alive, epoll; the same code for us and for every peer.

It knows nothing of leases. It is told what to send, which bytes an answer must have, and which part of an answer goes
into the next request. Parsing is minimal on purpose: the generator shares the machine with what it measures, so its own
processor time is reported with every sample, and ``peers/null.py`` shows how fast it could go.

``http1.py`` has the bytes, ``closed.py`` clients that send the next request when the last was answered, ``paced.py``
requests at stated moments, ``remote.py`` the harness's end of the pipe.
"""
