"""What trajectories of a micro-batch have in common at their beginning is forwarded once, and not once for each.

Invariant: the layout is a tree of segments; a token's past is its own segment up to it, and all of that one's
ancestors: the very tokens that stand before it in its trajectory. What a model says of a token depends on its past
alone, so values and gradients are those of the trajectories side by side, but for the order of sums.

The members of a group have the same prompt, and all groups the same system prompt: most of a batch may be copies.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LEAST = 16  # tokens worth a segment: its own piece of attention costs about as much

Tokens = npt.NDArray[np.int32]


class Segment(NamedTuple):
    start: int  # position of its first token in the trajectory
    length: int
    ancestors: tuple[int, ...]  # indices of the segments with the `start` tokens before it, in their order


class Layout(NamedTuple):
    token_ids: Tensor  # int64 [U], the segments one after the other
    position_ids: Tensor  # int64 [U]
    place: Tensor  # int64 [T]: where each token of the trajectories lies
    segments: list[Segment]


def shared_layout(token_ids: Tensor, cu_seqlens: Tensor) -> Layout:
    """Of token_ids int [T] and cu_seqlens int32 [N+1]: beginnings of `LEAST` tokens or more are laid out once."""
    flat, bounds = token_ids.cpu().numpy().astype(np.int32), cu_seqlens.tolist()
    documents = [flat[start:end] for start, end in pairwise(bounds)]
    # Sorted by their bytes, documents that begin alike are neighbours.
    order = sorted(range(len(documents)), key=lambda index: documents[index].tobytes())
    nodes, paths = _tree([documents[index] for index in order])
    # Segments lie in the order in which the trajectories meet them, so that nothing moves where nothing is shared.
    rank: dict[int, int] = {}
    places: list[int] = []
    for index in np.argsort(order):
        places.extend(rank.setdefault(node, len(rank)) for node in paths[index])
    nodes = [nodes[node] for node in rank]
    segments = [Segment(node.start, len(node.tokens), tuple(rank[above] for above in node.ancestors)) for node in nodes]
    starts = np.cumsum([0, *(segment.length for segment in segments)])
    return Layout(
        token_ids=_joined([node.tokens for node in nodes], token_ids.device),
        position_ids=_joined([np.arange(each.start, each.start + each.length) for each in segments], token_ids.device),
        place=_joined([np.arange(starts[place], starts[place + 1]) for place in places], token_ids.device),
        segments=segments,
    )


class _Node(NamedTuple):
    start: int
    tokens: Tokens
    ancestors: tuple[int, ...]


def _tree(documents: list[Tokens]) -> tuple[list[_Node], list[tuple[int, ...]]]:
    """Nodes, a parent before its children, and each sorted document's path of them."""
    common = [_common(one, other) for one, other in pairwise(documents)]
    nodes: list[_Node] = []
    paths: list[tuple[int, ...]] = [()] * len(documents)

    def add(document: Tokens, start: int, end: int, ancestors: tuple[int, ...]) -> tuple[int, ...]:
        nodes.append(_Node(start, document[start:end], ancestors))
        return (*ancestors, len(nodes) - 1)

    # Documents [first, last) whose first `depth` tokens lie in `ancestors`.
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(documents), 0, ())]
    while todo:
        first, last, depth, ancestors = todo.pop()
        cuts = [i + 1 for i in range(first, last - 1) if common[i] < depth + LEAST]
        for begin, end in zip([first, *cuts], [*cuts, last], strict=True):
            if end - begin > 1:
                shared = min(common[begin : end - 1])
                todo.append((begin, end, shared, add(documents[begin], depth, shared, ancestors)))
            elif end > begin:
                rest = len(documents[begin])
                paths[begin] = add(documents[begin], depth, rest, ancestors) if rest > depth else ancestors
    return nodes, paths


def _common(one: Tokens, other: Tokens) -> int:
    """How many tokens they begin with in common."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _joined(parts: list[npt.NDArray[np.int64]] | list[Tokens], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)).to(device)
