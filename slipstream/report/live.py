"""`slipstream watch`: the page of a run that goes on, over HTTP, made anew as the run moves.

Invariant: it listens on the loopback interface only, answers nobody who does not have the token, and only reads.
The page costs the run little: it is made when it is asked for, and not again before ten times what it took.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import sys
import time
from html import escape

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from slipstream.config import Config, RunDir
from slipstream.errors import UserError
from slipstream.launch.status import Row, ask_queue, process_rows, supervised
from slipstream.observe.advise import health
from slipstream.report.build import body_of, page_of
from slipstream.report.history import History

HOST = "127.0.0.1"
REST = 10.0  # times what the last page took
LEAST = 2.0  # seconds between two readings of the run


class Live:
    """The newest body of a run's page."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config, self._run_dir = config, run_dir
        self._history = History(run_dir)
        self._lock = asyncio.Lock()  # one reading at a time
        self._body, self._not_before = "", 0.0

    async def body(self) -> str:
        async with self._lock:
            if time.monotonic() >= self._not_before:
                now = await self._now()
                began = time.monotonic()
                self._body = await asyncio.to_thread(self._made, now)
                took = time.monotonic() - began
                self._not_before = time.monotonic() + max(LEAST, REST * took)
            return self._body

    async def _now(self) -> list[Row]:
        """What each process does."""
        status = await ask_queue(self._run_dir)
        return process_rows(status) if status else [(_state(self._run_dir), "", "", "")]

    def _made(self, now: list[Row]) -> str:
        try:
            self._history.read()
        except UserError as error:  # no journal yet
            return f'<p class="empty">{escape(str(error))}</p>'
        advice = [each.sentence for each in health(self._config, self._history.metrics)]
        return body_of(self._config, self._run_dir, self._history, advice, now)


def _state(run_dir: RunDir) -> str:
    if supervised(run_dir):
        return f"the run goes on; its queue does not answer (see {run_dir.logs / 'queue.log'})"
    return "the run ended" if run_dir.summary.is_file() else "no process of the run is there"


def application(live: Live, name: str, token: str) -> Starlette:
    def refused(request: Request) -> Response | None:
        if hmac.compare_digest(request.query_params.get("token", "").encode(), token.encode()):
            return None
        return PlainTextResponse("the token is missing or wrong: open the address that `slipstream watch` printed", 403)

    async def page(request: Request) -> Response:
        return refused(request) or HTMLResponse(page_of(name, "", live=True), headers=_HEADERS)

    async def body(request: Request) -> Response:
        if (answer := refused(request)) is not None:
            return answer
        made = await live.body()
        tag = f'"{hashlib.blake2b(made.encode(), digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**_HEADERS, "ETag": tag})
        return HTMLResponse(made, headers={**_HEADERS, "ETag": tag})

    return Starlette(routes=[Route("/", page), Route("/body", body)])


# The token is in the address: it must not travel on, nor the page be framed or kept.
_HEADERS = {"Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}


def watch(config: Config, run_dir: RunDir, port: int) -> None:
    """Serves until Ctrl-C. Raises UserError when the port is taken."""
    token = secrets.token_urlsafe(18)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()  # the address works as soon as it is printed
    except OSError as error:
        listener.close()
        raise UserError(f"--port {port}: {error.strerror}; name another one, or leave it out for a free one") from error
    app = application(Live(config, run_dir), run_dir.root.name, token)
    # An access log would hold the token.
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    sys.stdout.write(f"http://{HOST}:{listener.getsockname()[1]}/?token={token}\n")
    sys.stdout.flush()
    with listener:
        server.run(sockets=[listener])
