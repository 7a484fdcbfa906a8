"""One trajectory for a person: what the model said in colour, what is not trained on in grey.

Invariant: every token of the stream is printed once, in order, as its tokenizer decodes it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from slipstream.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

GREY, COLOUR = "grey50", "bold green"


def show(batches: "Iterable[pa.RecordBatch]", lease: int, model: str) -> None:
    """Print the trajectory of `lease` among `batches`, decoded with the tokenizer of `model`."""
    count = 0
    for batch in batches:
        leases = batch.column("lease").to_pylist()
        count += len(leases)
        if lease in leases:
            return _print(batch, leases.index(lease), model)
    raise UserError(f"--trajectory {lease}: the run has {count} trajectories, none with this lease number")


def _print(batch: "pa.RecordBatch", row: int, model: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    values = {name: batch.column(name)[row].as_py() for name in batch.schema.names}
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
