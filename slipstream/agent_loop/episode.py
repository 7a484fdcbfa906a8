"""One attempt while it runs: what all of its conversations share, and each conversation with its token stream.

Invariant: a sampled token stands as sampled in one branch alone; where another branch begins with it, it is a prompt
there. So a trajectory made of all branches trains each sampled token once.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence

from slipstream.agent_loop.ended import Ended
from slipstream.agent_loop.stream import TokenStream, end_to_end
from slipstream.agent_loop.text import Messages
from slipstream.task import Task
from slipstream.tools import Session, Shown
from slipstream.trajectory import SpanKind


class Episode:
    """Budgets, counts and tools are the attempt's; `branches` are its conversations, in the order they began."""

    def __init__(self, lease: int, task: Task, seed: int, seconds: float) -> None:
        self.lease, self.task, self.seed = lease, task, seed
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.park_at = math.inf
        self.group, self.attempt, self.t_leased = 0, 0, 0.0
        self.branches: list[Branch] = []
        self.messages: Messages = []  # all that was said in any branch, each message once, as it came
        self.tools: Session  # open while the agent runs
        self.answer = ""
        self.cut = False  # whether the last turn of any branch was cut, or had no room
        self.ended: Ended | None = None  # a budget that is out is out for every branch
        self.on_end: list[Callable[[], None]] = []  # called when the agent has returned
        self.asked = 0  # requests to the engine
        self.turn = 0
        self.tool_calls = 0
        self.tool_errors = 0
        self.t_first_token = 0.0
        self.s_generate = 0.0
        self.s_tool = 0.0

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def sampled_count(self) -> int:
        return sum(branch.stream.sampled_count for branch in self.branches)

    def next_seed(self) -> int:
        """For the next request to the engine."""
        self.asked += 1
        return turn_seed(self.seed, self.asked - 1)

    def stream(self) -> TokenStream:
        """Of all branches in which the model spoke, or of the first where it never did."""
        spoke = [branch.stream for branch in self.branches if branch.stream.sampled_count]
        return end_to_end(spoke or [branch.stream for branch in self.branches[:1]])


class Branch:
    """One conversation: its messages, the tools that its prompt shows, and its tokens, which only grow."""

    def __init__(self, episode: Episode, tools: Sequence[Shown], messages: Messages) -> None:
        self.episode, self.tools, self.messages = episode, list(tools), messages
        self.stream = TokenStream()
        episode.branches.append(self)

    def fork(self, tokens: int | None = None, messages: int | None = None) -> "Branch":
        """A branch that begins as this one did, with its first so many tokens and messages (None: all)."""
        other = Branch(self.episode, self.tools, self.messages[:messages])
        other.stream.append_text(self.stream.token_ids[:tokens].tolist(), SpanKind.BRANCH, self.episode.turn)
        return other

    def add(self, messages: Messages) -> None:
        self.messages.extend(messages)
        self.episode.messages.extend(messages)


def turn_seed(seed: int, turn: int) -> int:
    """No two turns of any two seeds share one, but for the odds of 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
