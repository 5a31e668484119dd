"""A pretended object store on loopback, and a client for it."""

from __future__ import annotations

import datetime as dt
import logging
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.store import S3Store


@contextmanager
def object_store() -> Iterator[str]:
    """The address of a store with the bucket ``replicas``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    try:
        _, port = server.get_host_and_port()
        endpoint = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/replicas", method="PUT"), timeout=30).close()
        yield endpoint
    finally:
        server.stop()


def client(endpoint: str) -> S3Store:
    return S3Store(
        "replicas",
        endpoint=endpoint,
        access_key_id="tests",
        secret_access_key="tests",
        region="us-east-1",
        client_options={"allow_http": True, "timeout": "20s"},
        retry_config={"max_retries": 0, "retry_timeout": dt.timedelta(seconds=20)},
    )
