"""The run's keys: who may speak with a queue that listens on TCP (CURVE, http://rfc.zeromq.org/spec:26).

    RUN/queue.secret   the queue's own pair; leaves the machine never
    RUN/queue.key      what a client needs: the queue's public key and the clients' pair

Invariant: every TCP address is encrypted, and without the key in `queue.key` nobody gets as far as a request; both
files are the owner's alone (0600), made once a run, so that a queue that is started again knows its clients.
"""

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from slipstream.config import RunDir
from slipstream.errors import UserError

DOMAIN = b"slipstream"  # of the queue's authentication

K = TypeVar("K", bound="QueueKeys | ClientKeys")


class QueueKeys(msgspec.Struct, frozen=True):
    public: str
    secret: str


class ClientKeys(msgspec.Struct, frozen=True):
    queue: str  # its public key
    public: str
    secret: str

    def use(self, socket: Any) -> None:
        """Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.queue.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())


def client_file(run_dir: RunDir) -> Path:
    return run_dir.root.resolve() / "queue.key"


def run_keys(run_dir: RunDir) -> tuple[QueueKeys, ClientKeys]:
    """The run's keys, made if there are none."""
    own, clients = run_dir.root / "queue.secret", client_file(run_dir)
    if not (own.exists() and clients.exists()):
        public, secret = _pair()
        _write(own, QueueKeys(public, secret))
        _write(clients, ClientKeys(public, *_pair()))
    return _read(own, QueueKeys), _read(clients, ClientKeys)


def read_client_keys(path: Path) -> ClientKeys:
    return _read(path, ClientKeys)


def lock(socket: Any, own: QueueKeys) -> None:
    """Before it binds. Without an answer from `doorkeeper.Doorkeeper` nobody gets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else all are let in while nobody stands at the door


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write(path: Path, keys: QueueKeys | ClientKeys) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(keys) + b"\n")
    draft.rename(path)


def _read(path: Path, kind: type[K]) -> K:
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: others may read this key; `chmod 600` it")
        keys = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UserError(f"{path}: the key cannot be read: {error.strerror}; copy it from RUN/queue.key") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: is no key of a queue ({error}); copy it from RUN/queue.key") from error
    if any(len(getattr(keys, name)) != 40 for name in keys.__struct_fields__):
        raise UserError(f"{path}: is no key of a queue (a key has 40 characters); copy it from RUN/queue.key")
    return keys
