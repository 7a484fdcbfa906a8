"""One trajectory for a person: what the model said in colour, what is not trained on in grey.

Invariant: every token of the stream is printed once, in order, as its tokenizer decodes it.
"""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    import pyarrow as pa

GREY, COLOUR = "grey50", "bold green"


def show(trajectory: "pa.RecordBatch", model: str) -> None:
    """Print a trajectory (a batch of one row), decoded with the tokenizer of `model`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    values = {name: trajectory.column(name)[0].as_py() for name in trajectory.schema.names}
    versions = sorted({run["version"] for run in values["version_runs"] if run["version"] >= 0})
    console = Console(highlight=False)
    console.print(
        f"lease {values['lease']}  group {values['group']}  task {values['task']}  outcome {values['outcome']}  "
        f"reward {values['reward']}  turns {values['turns']}  tool calls {values['tool_calls']}  "
        f"sampled by versions {versions}  {sum(values['sampled'])} of {len(values['token_ids'])} tokens sampled",
        style="bold",
        markup=False,
    )
    text = Text()
    for ids, sampled in _runs(values["token_ids"], values["sampled"]):
        text.append(tokenizer.decode(ids, skip_special_tokens=False), style=COLOUR if sampled else GREY)
    console.print(text)


def _runs(token_ids: list[int], sampled: list[bool]) -> list[tuple[list[int], bool]]:
    """Neighbouring tokens of one kind together, so that characters made of several tokens come out whole."""
    runs: list[tuple[list[int], bool]] = []
    for token, flag in zip(token_ids, sampled, strict=True):
        if not runs or runs[-1][1] != flag:
            runs.append(([], flag))
        runs[-1][0].append(token)
    return runs
