"""What a machine that joins a run needs to know: the run's config, from the queue.

Invariant: it takes an address and the key alone; nothing is left open behind, so that an engine may be forked after.
"""

import logging
import os
import secrets
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from slipstream.config import Config, RunDir
from slipstream.configfile import read_config, write_config
from slipstream.errors import UserError
from slipstream.queue import address, messages

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds between two lines that say what is waited for
GIVE_UP = 60.0


@contextmanager
def joined(url: str, overrides: list[str]) -> Generator[tuple[Config, RunDir]]:
    """The run's config with `overrides`, checked here, and a directory that stands in for the run's."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        run_dir = RunDir(Path(folder))
        (run_dir.root / "queue.url").write_text(url + "\n")
        write_config(fetch_config(url), run_dir.config)
        config = read_config(run_dir.config, overrides)
        write_config(config, run_dir.config)
        yield config, run_dir


def fetch_config(url: str) -> Config:
    """Raises UserError when there is no queue, or when it does not know the key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(address.CONNECTIONS)
        address.connect(socket, url)
        try:
            return _ask(socket, monitor, url)
        finally:
            socket.disable_monitor()


def _ask(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], url: str) -> Config:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    hello = messages.Hello(role="observer", name=f"joining-{os.getpid()}", pid=os.getpid())
    requests = [[secrets.token_bytes(8), msgspec.msgpack.encode(each)] for each in (hello, messages.AskConfig())]
    for request in requests:
        socket.send_multipart(request)
    began = time.monotonic()
    while (waited := time.monotonic() - began) < GIVE_UP:
        ready = dict(poller.poll(int(PATIENCE * 1000)))
        if monitor in ready:
            address.check_let_in(monitor.recv_multipart(), url)
        if socket in ready:
            answer = msgspec.msgpack.decode(socket.recv_multipart()[1], type=messages.Answer)
            if isinstance(answer, messages.RunConfig):
                return msgspec.json.decode(answer.config, type=Config)
        elif not ready:
            log.info("waiting for the queue at %s for %.0f s; is it running?", url, waited)
    raise UserError(f"--connect {url}: no queue answered for {GIVE_UP:.0f} s; is it running, and is this its key?")
