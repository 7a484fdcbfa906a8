"""Where the queue listens, and how the others find it: RUN/queue.url.

Invariant: `queue.url` is whole whenever it is there, and names an address that a client can connect to.
"""

import hashlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import zmq

from slipstream.config import RunDir
from slipstream.errors import UserError

SOCKET_PATH_BYTES = 100  # a Unix socket's path may have 107


def bind(router: Any, listen: str, run_dir: RunDir) -> str:
    """Bind to `queue.listen`, or to a socket file of the run, and write the address down."""
    url = listen or f"ipc://{_socket_path(run_dir)}"
    try:
        router.bind(url)
    except zmq.ZMQError as error:
        raise UserError(f"queue.listen = {url!r}: {error.strerror}; write one such as tcp://127.0.0.1:5571") from error
    bound: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
    reachable = bound.replace("//0.0.0.0:", f"//{socket.gethostname()}:")
    draft = run_dir.root / f".queue.url.{os.getpid()}"
    draft.write_text(reachable + "\n")
    draft.rename(run_dir.root / "queue.url")
    return reachable


def _socket_path(run_dir: RunDir) -> Path:
    path = run_dir.root.resolve() / "queue.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}.sock"
