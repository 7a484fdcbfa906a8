"""Reward functions written for verl and for TRL, called as those call them.

Invariant: the function is handed exactly the parameters that it declares, of a batch of one where it wants batches.
"""

import inspect
from collections.abc import Callable
from typing import Any

from slipstream.rewards.evidence import Evidence


def is_verl(function: Callable[..., Any]) -> bool:
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`"""
    return {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()


def is_trl(function: Callable[..., Any]) -> bool:
    """`reward(prompts, completions, **columns)`"""
    return "completions" in inspect.signature(function).parameters


def for_verl(function: Callable[..., Any], evidence: Evidence) -> dict[str, Any]:
    """`solution_str` is the last turn without its thoughts; `ground_truth` is as the row has it."""
    extra = evidence.task.extra
    model: Any = extra.get("reward_model")
    row = {
        "data_source": extra.get("data_source", ""),
        "solution_str": evidence.answer,
        "ground_truth": model["ground_truth"] if isinstance(model, dict) else evidence.task.answer,
        "extra_info": extra.get("extra_info", {}),
    }
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def for_trl(function: Callable[..., Any], evidence: Evidence) -> dict[str, Any]:
    """Texts where the row's prompt is one, messages where it is a list of them."""
    task, stream = evidence.task, evidence.trajectory
    own = task.messages()
    added = evidence.messages[:1] != own[:1]  # the environment's system prompt
    begun = max(stream.sampled.find(1), 0)
    row: dict[str, Any] = {
        **task.extra,
        "answer": task.answer,
        "prompts": task.prompt,
        "completions": evidence.answer if isinstance(task.prompt, str) else evidence.messages[len(own) + added :],
        "completion_ids": stream.token_ids[begun:].tolist(),
    }
    batch = {name: [value] for name, value in row.items()}
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return batch
    return {name: value for name, value in batch.items() if name in parameters}


def of_one(value: Any) -> Any:
    """The score in a batch of one."""
    if not isinstance(value, list) or len(value) != 1:
        raise TypeError(f"it returned {value!r} for a batch of one; a list of one score was expected")
    return value[0]
