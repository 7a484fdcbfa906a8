"""The HTTP server of one rollouter's trajectories, on loopback alone.

Invariant: a request reaches the trajectory whose key it carries, in its URL or as its API key, and no other; when the
trajectory has ended, the key opens nothing. Every error has the form of the API that was asked.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.agent_loop.chat import Endpoint
from slipstream.agent_loop.endpoint import anthropic_messages, openai_chat, openai_responses
from slipstream.agent_loop.endpoint.asked import Api, Body, Refused, Reply
from slipstream.agent_loop.endpoint.session import GONE, Session
from slipstream.agent_loop.episode import Episode

if TYPE_CHECKING:
    from slipstream.agent_loop.loop import AgentLoop

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
APIS = {
    "/v1/chat/completions": openai_chat.API,
    "/v1/responses": openai_responses.API,
    "/v1/messages": anthropic_messages.API,
}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """They are the rollouter's."""
        yield


class Door:
    """Make it inside the event loop; it listens at once."""

    def __init__(self, loop: "AgentLoop") -> None:
        self._loop = loop
        self._sessions: dict[str, Session] = {}
        routes = [
            Route(prefix + path, self._serving(api), methods=["POST"])
            for prefix in ("", "/{key}")
            for path, api in APIS.items()
        ]
        routes += [Route(prefix + "/v1/models", self._models) for prefix in ("", "/{key}")]
        app = Starlette(routes=routes, exception_handlers={404: _no_page, 405: _no_page})
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1
        )
        self._server = _Server(config)
        self._serving_task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    def admit(self, episode: Episode) -> tuple[Endpoint, Callable[[], None]]:
        """Addresses for one trajectory, and what closes them."""
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = Session(self._loop, episode)

        def close() -> None:
            del self._sessions[key]
            session.close()

        base = f"http://{HOST}:{self._socket.getsockname()[1]}/{key}"
        return Endpoint(openai=f"{base}/v1", anthropic=base, key=key), close

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving_task

    def _session(self, request: Request) -> Session:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.path_params.get("key") or request.headers.get("x-api-key") or bearer
        if key not in self._sessions:
            raise Refused(404, GONE)
        return self._sessions[key]

    def _serving(self, api: Api) -> "Callable[[Request], asyncio.Future[Response]]":
        async def serve(request: Request) -> Response:
            try:
                session = self._session(request)
                asked = api.read(await request.body())
                if asked.previous:
                    fresh = [message for message in asked.messages if message["role"] != "system"]
                    system = [message for message in asked.messages if message["role"] == "system"]
                    asked.messages = [*system, *session.remembered(asked.previous), *fresh]
                reply = await _unless_gone(request, session.start(asked))
                if api.remembered_as is not None:
                    session.remember(api.remembered_as(reply), asked, reply)
            except Refused as refused:
                return _json(api.error(refused), refused.status)
            except Exception:
                log.exception("a request of an agent failed")
                return _json(api.error(Refused(500, "the server failed; its log says why")), 500)
            if asked.stream:
                return Response(b"".join(api.events(reply, asked)), media_type="text/event-stream")
            return _json(api.answer(reply, asked), 200)

        return serve  # pyright: ignore[reportReturnType]

    async def _models(self, request: Request) -> Response:
        try:
            self._session(request)
        except Refused as refused:
            return _json(openai_chat.API.error(refused), refused.status)
        model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "slipstream"}
        return _json({"object": "list", "data": [model]}, 200)


async def _unless_gone(request: Request, work: "asyncio.Task[Reply]") -> Reply:
    """What the task gives. A client that went away wants no more tokens."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    away = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, away}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Refused(404, GONE) from None
    finally:
        work.cancel()
        away.cancel()


def _json(body: Body, status: int) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _no_page(request: Request, error: Exception) -> Response:
    says = f"there is no {request.method} {request.url.path}; there are POST {', POST '.join(APIS)}, GET /v1/models"
    return _json(openai_chat.API.error(Refused(404, says)), 404)
