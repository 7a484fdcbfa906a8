"""Pages over HTTP: those on the list and none else, wherever a server sends us."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from slipstream import Task
from slipstream.errors import UserError
from slipstream.tools import Executor, Toolbox, ToolError, ToolResult, fetch

PAGE = (
    "<html><head><style>p {}</style><title>Tea</title></head><body><script>no()</script><p>Hot &amp; black</p></body>"
)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.beyond = ""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        beyond = {"/docs/out": self.server.beyond, "/docs/round": "/docs/round", "/docs/near": "page", "/docs/up": "/x"}
        if self.path in beyond:
            self.send_response(302)
            self.send_header("Location", beyond[self.path])
            self.end_headers()
            return
        found = {
            "/docs/page": ("text/html", PAGE),
            "/docs/data": ("image/png", "x"),
            "/docs/plain": ("text/x", "plain"),
        }
        kind, text = found.get(self.path, ("text/plain", "nothing here"))
        self.send_response(200 if self.path in found else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    """One that is allowed under /docs, and one that is not."""
    both = Server(), Server()
    for server in both:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    both[0].beyond = f"{address(both[1])}/docs/page"
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


async def get(server: Server, *urls: str) -> list[ToolResult]:
    executor = Executor(Toolbox([fetch([f"{address(server)}/docs"])]), 10)
    async with executor.session(Task(id="t", prompt="?")) as session:
        return [await session.call("fetch", f'{{"url": "{url}"}}') for url in urls]


async def test_a_page_is_its_text_and_redirects_inside_are_followed(servers: tuple[Server, Server]) -> None:
    here = address(servers[0])
    page, near, plain = await get(servers[0], f"{here}/docs/page", f"{here}/docs/near", f"{here}/docs/plain")
    assert page == near == ToolResult("Tea\nHot & black")
    assert plain == ToolResult("plain")


async def test_no_request_leaves_for_elsewhere(servers: tuple[Server, Server]) -> None:
    inside, outside = servers
    here, port = address(inside), inside.server_port
    results = await get(
        inside,
        f"{here}/docs/out",
        f"{here}/docs/up",
        inside.beyond,
        f"{here}/x",
        f"{here}/docs-too",
        f"{here}/docs/../x",
        f"{here}/docs/%2e%2e/x",
        f"{here}/docs/%252e%252e/x",
        f"{here}/docs/..%5cx",
        f"http://me@127.0.0.1:{port}/docs/page",
        f"http://localhost:{port}/docs/page",
        f"https://127.0.0.1:{port}/docs/page",
    )
    assert {result.error for result in results} == {ToolError.RAISED}
    assert all("is not allowed" in result.text for result in results), results
    assert inside.asked == ["/docs/out", "/docs/up"]
    assert outside.asked == []


async def test_what_cannot_be_shown_is_said(servers: tuple[Server, Server]) -> None:
    here = address(servers[0])
    pages = ("docs/round", "docs/data", "docs/none")
    texts = [
        result.text for result in await get(servers[0], *(f"{here}/{page}" for page in pages), "file:///etc/passwd")
    ]
    for text, part in zip(texts, ("over 5 times", "image/png, not text", "answered 404", "is no address"), strict=True):
        assert part in text


@pytest.mark.parametrize(
    "allow", [[], "https://a.org", ["a.org"], ["ftp://a.org"], ["https://a.org/?q=1"], ["http://"]]
)
def test_bad_lists_are_refused(allow: list[str]) -> None:
    with pytest.raises(UserError, match=r"^fetch"):
        fetch(allow)
