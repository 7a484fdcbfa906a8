"""Pages of the web, of those sites alone that the environment allows.

Invariant: no request leaves for an address that is not on the list: neither the first, nor where a redirect leads.
"""

import html.parser
import posixpath
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote

from slipstream.errors import UserError
from slipstream.tools.tool import Tool, tool

if TYPE_CHECKING:
    import httpx2

MOST_REDIRECTS = 5
MOST_BYTES = 2_000_000
READ = ("text/", "application/json", "application/xml", "application/xhtml+xml", "application/javascript")


def fetch(allow: Sequence[str], *, headers: dict[str, str] | None = None, seconds: float = 8.0) -> Tool:
    """The tool `fetch`, which gets a page as text.

    `allow`: beginnings of addresses, as "https://docs.python.org/3/"; scheme, host and port must be these, and the path
    this one or under it. `headers`: sent with each request. `seconds`: of one request; below rollout.tool_seconds.
    """
    import httpx2

    allowed = [_allowed(each) for each in allow]
    if isinstance(allow, str) or not allowed:
        raise UserError(f'fetch({allow!r}): write a list of addresses, as ["https://docs.python.org/3/"]')
    context = ssl.create_default_context()  # takes long to make

    @tool(at_once=32)
    async def fetch(url: str) -> str:
        """Get a web page and show its text.

        Args:
            url: the whole address, beginning with http:// or https://
        """
        async with httpx2.AsyncClient(verify=context, headers=headers, timeout=seconds) as client:
            at = _address(url)
            for _ in range(MOST_REDIRECTS + 1):
                if not any(_under(at, site) for site in allowed):
                    raise ValueError(f"{at} is not allowed; what is begins with {', '.join(allow)}")
                async with client.stream("GET", at) as answer:
                    if answer.next_request is None:
                        return await _text(answer)
                    at = answer.next_request.url
            raise ValueError(f"{url} leads from one address to the next, over {MOST_REDIRECTS} times")

    return fetch


def _allowed(text: str) -> "httpx2.URL":
    try:
        url = _address(text)
    except ValueError as error:
        raise UserError(f"fetch: {error}") from error
    if url.query or url.fragment:
        raise UserError(f"fetch: {text!r} has a query or a fragment; write scheme, host and path alone")
    return url


def _address(text: str) -> "httpx2.URL":
    import httpx2

    try:
        url = httpx2.URL(text.strip())
    except httpx2.InvalidURL as error:
        raise ValueError(f"{text!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{text!r} is no address; write http:// or https://, the host and the path")
    return url


def _under(url: "httpx2.URL", site: "httpx2.URL") -> bool:
    if url.userinfo or (url.scheme, url.host, _port(url)) != (site.scheme, site.host, _port(site)):
        return False
    path, wanted = _path(url), _path(site)
    return path == wanted or path.startswith(wanted.rstrip("/") + "/")


def _port(url: "httpx2.URL") -> int:
    return url.port or {"http": 80, "https": 443}[url.scheme]


def _path(url: "httpx2.URL") -> str:
    """As a server may understand it: decoded until nothing is left to decode, and without `..`."""
    path = url.path
    while (plain := unquote(path)) != path:
        path = plain
    return posixpath.normpath("/" + path.replace("\\", "/").lstrip("/"))


async def _text(answer: "httpx2.Response") -> str:
    kind = answer.headers.get("content-type", "text/plain").lower()
    if not kind.startswith(READ):
        raise ValueError(f"{answer.url} is {kind}, not text")
    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > MOST_BYTES:
            break
    try:
        text = bytes(body[:MOST_BYTES]).decode(answer.charset_encoding or "utf-8", "replace")
    except LookupError:  # an encoding that is none
        text = bytes(body[:MOST_BYTES]).decode("utf-8", "replace")
    if "html" in kind:
        text = _Words.of(text)
    if answer.is_error:
        raise ValueError(f"{answer.url} answered {answer.status_code} {answer.reason_phrase}: {text[:500]}")
    return text


class _Words(html.parser.HTMLParser):
    """What a reader sees of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._unseen = 0

    @staticmethod
    def of(page: str) -> str:
        words = _Words()
        words.feed(page)
        words.close()
        return "\n".join(words.lines)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in ("script", "style") and self._unseen > 0

    def handle_data(self, data: str) -> None:
        if not self._unseen and data.strip():
            self.lines.append(" ".join(data.split()))
