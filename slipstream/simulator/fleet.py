"""An engine on a virtual clock: requests that share it, pauses that stop it, and which weights made which token.

Invariant: all active requests of an engine sample at one pace, so its *position* (tokens that a request which never
left would have) says everything: a request ends at a position, and a version begins at one.
"""

import heapq
from bisect import bisect_right

from slipstream.queue.messages import Lease
from slipstream.trajectory import VersionRun


class Request:
    """A trajectory that an engine makes."""

    __slots__ = ("lease", "left", "length", "per_turn", "spans", "start_version", "turns")

    def __init__(self, lease: Lease, length: int, turns: int) -> None:
        self.lease, self.length, self.turns = lease, length, turns
        self.left = turns
        self.per_turn = length / turns
        self.spans: list[tuple[float, float]] = []  # positions of the engine over which it was active
        self.start_version = -1


class Engine:
    """`slots` trajectories at once; a decode step (a token of each) takes `base_s + request_s * active` s."""

    def __init__(self, name: str, slots: int, base_s: float, request_s: float, in_flight: bool) -> None:
        self.name, self.slots = name, slots
        self._base_s, self._request_s, self._in_flight = base_s, request_s, in_flight
        self.requests: set[Request] = set()  # held: active, with a tool, or waiting for weights
        self.waiting: list[Request] = []  # for weights that are new enough
        self.version = -1
        self.epoch = 0  # of the event that `next_end` was planned as; an older one is void
        self.alive = True
        self.asking = False  # it is in the queue for leases
        self.paused = 0.0  # seconds it stood still for weights
        self._active: list[tuple[float, int, Request]] = []
        self._order = 0
        self._position = 0.0
        self._at = 0.0  # when the position was right; later than now while it stands still
        self._from: list[float] = [0.0]  # positions at which versions begin
        self._versions: list[int] = [-1]

    @property
    def room(self) -> int:
        return self.slots - len(self.requests) if self.alive else 0

    @property
    def active(self) -> int:
        return len(self._active)

    def _pace(self) -> float:
        return 1.0 / (self._base_s + self._request_s * len(self._active))

    def _advance(self, now: float) -> None:
        if now > self._at:
            if self._active:
                self._position += (now - self._at) * self._pace()
            self._at = now

    def stall(self, now: float, seconds: float) -> None:
        """Nothing is sampled for so long from here on."""
        self._advance(now)
        self._at += seconds

    def begin_turn(self, request: Request, now: float) -> bool:
        """True when the engine's next end of a turn has to be planned anew."""
        self._advance(now)
        if request.start_version < 0:
            request.start_version = self.version
        end = self._position + request.per_turn
        self._order += 1
        heapq.heappush(self._active, (end, self._order, request))
        request.spans.append((self._position, end))
        return self._request_s > 0 or self._active[0][2] is request

    def next_end(self, now: float) -> float:
        """When the first active request ends its turn, if nothing changes."""
        self._advance(now)
        return self._at + max(0.0, self._active[0][0] - self._position) / self._pace()

    def end_turn(self, now: float) -> Request:
        self._advance(now)
        end, _, request = heapq.heappop(self._active)
        self._position = max(self._position, end)
        request.left -= 1
        return request

    def load(self, version: int, now: float, pause_s: float) -> None:
        self._advance(now)
        self.version = version
        if self._in_flight:
            if self._from[-1] == self._position:
                self._versions[-1] = version
            else:
                self._from.append(self._position)
                self._versions.append(version)
        if pause_s > 0:
            self.paused += pause_s
            self._at += pause_s

    def crash(self) -> list[Request]:
        """All that it held is lost."""
        lost = list(self.requests)
        self.requests.clear()
        self.waiting.clear()
        self._active.clear()
        self.alive = False
        self.epoch += 1
        return lost

    def runs(self, request: Request) -> list[VersionRun]:
        """Its tokens by the version that sampled them."""
        if not self._in_flight:
            return [VersionRun(request.length, request.start_version)]
        counts: dict[int, float] = {}
        for begin, end in request.spans:
            index = bisect_right(self._from, begin) - 1
            while begin < end:
                edge = self._from[index + 1] if index + 1 < len(self._from) else end
                upto = min(edge, end)
                version = self._versions[index]
                counts[version] = counts.get(version, 0.0) + upto - begin
                begin, index = upto, index + 1
        return _whole(counts, request.length)


def _whole(counts: dict[int, float], total: int) -> list[VersionRun]:
    """Fractions of tokens to whole tokens that sum to the total."""
    runs: list[VersionRun] = []
    seen, given = 0.0, 0
    scale = total / sum(counts.values())
    for version, count in counts.items():
        seen += count * scale
        upto = min(total, round(seen))
        if upto > given:
            runs.append(VersionRun(upto - given, version))
            given = upto
    if given < total:
        runs.append(VersionRun(total - given, next(reversed(counts))))
    return runs
