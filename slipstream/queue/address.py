"""Where the queue listens, and how the others find it: RUN/queue.url.

An address is what a socket connects to, and for TCP, behind a #, the file with the key:

    ipc:///runs/a/queue.sock        tcp://10.0.0.5:5571#/runs/a/queue.key

Invariant: `queue.url` is whole whenever it is there, and names an address that a client can connect to; nothing listens
on TCP without keys, and a socket file is the owner's alone.
"""

import hashlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq

from slipstream.config import RunDir
from slipstream.errors import UserError
from slipstream.queue import keys

CONNECTIONS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # what a client's monitor watches
SOCKET_PATH_BYTES = 100  # a Unix socket's path may have 107


def connect(socket: Any, address: str) -> None:
    """Raises UserError where the key is missing or none."""
    url, key = split(address)
    if key is not None:
        keys.read_client_keys(key).use(socket)
    elif not url.startswith("ipc://"):
        raise UserError(f"{url}: a queue on TCP wants a key; write {url}#FILE with the run's queue.key as FILE")
    try:
        socket.connect(url)
    except zmq.ZMQError as error:
        raise UserError(f"{url}: {error.strerror}; write one such as tcp://10.0.0.5:5571") from error


def check_let_in(event: list[bytes], address: str) -> None:
    """Raises UserError when this event of a socket's monitor says that its key is not the run's."""
    if int.from_bytes(event[0][:2], sys.byteorder) == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        raise UserError(f"{address}: the queue does not know this key; copy queue.key from its run directory again")


def split(address: str) -> tuple[str, Path | None]:
    """What to connect to, and the file with the key. The path of a Unix socket may have a # in it."""
    if address.startswith("ipc://"):
        return address, None
    url, hash_sign, key = address.partition("#")
    return url, Path(key).expanduser() if hash_sign else None


def bind(router: Any, listen: str, run_dir: RunDir) -> str:
    """Bind to `queue.listen`, or to a socket file of the run, and write the address down."""
    url = listen or f"ipc://{_socket_path(run_dir)}"
    try:
        router.bind(url)
    except zmq.ZMQError as error:
        raise UserError(f"queue.listen = {url!r}: {error.strerror}; write one such as tcp://127.0.0.1:5571") from error
    bound: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
    if is_tcp(listen):
        reachable = bound.replace("//0.0.0.0:", f"//{socket.gethostname()}:") + f"#{keys.client_file(run_dir)}"
    else:
        reachable = bound
        os.chmod(bound.removeprefix("ipc://"), 0o600)
    draft = run_dir.root / f".queue.url.{os.getpid()}"
    draft.write_text(reachable + "\n")
    draft.rename(run_dir.root / "queue.url")
    return reachable


def is_tcp(listen: str) -> bool:
    return listen.startswith("tcp://")


def _socket_path(run_dir: RunDir) -> Path:
    path = run_dir.root.resolve() / "queue.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    folder = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}.sock"
