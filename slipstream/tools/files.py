"""A folder of files that a trajectory reads and writes.

Invariant: nothing outside the folder is read, written or told of, whatever a path says and wherever a link leads.
"""

import shutil
import tempfile
from pathlib import Path

from slipstream.errors import UserError
from slipstream.task import Task
from slipstream.tools.tool import tool
from slipstream.tools.toolset import ToolSet

MOST_BYTES = 1 << 20  # of a file
MOST_FILES = 1000


class Files(ToolSet):
    """`Environment(tools=[Files])` begins with the task's `files` ({path: text}), if it has any;
    `functools.partial(Files, "folder")` with a copy of that folder too."""

    def __init__(self, start: str = "") -> None:
        if start and not Path(start).is_dir():
            raise UserError(f"Files({start!r}): there is no such folder")
        self._start = start
        self._kept = tempfile.TemporaryDirectory(prefix="slipstream-files-", ignore_cleanup_errors=True)
        self.root = Path(self._kept.name).resolve()

    async def setup(self, task: Task) -> None:
        if self._start:
            shutil.copytree(self._start, self.root, symlinks=True, dirs_exist_ok=True)
        files = task.extra.get("files", {})
        if not isinstance(files, dict):
            raise ValueError(f'task {task.id}: "files" is no object of texts by path')
        for path, text in dict[str, str](files).items():
            self._write(path, text)

    async def teardown(self) -> None:
        self._kept.cleanup()

    @tool
    def list_files(self) -> str:
        """List all files, with their sizes in bytes."""
        files = sorted(path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())
        return "\n".join(f"{path.relative_to(self.root)} {path.stat().st_size}" for path in files) or "There are none."

    @tool
    def read_file(self, path: str) -> str:
        """Show a file's text.

        Args:
            path: as list_files shows it
        """
        found = self._inside(path)
        if not found.is_file():
            raise ValueError(f"there is no file {path!r}")
        with found.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "replace")

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Write a file; what it held before is gone.

        Args:
            path: where, with folders if need be: notes/today.txt
            text: all that the file is to hold
        """
        return f"{self._write(path, text)} bytes written"

    @tool
    def delete_file(self, path: str) -> str:
        """Delete a file.

        Args:
            path: as list_files shows it
        """
        found = self._inside(path)
        if not found.is_file():
            raise ValueError(f"there is no file {path!r}")
        found.unlink()
        return "deleted"

    def _write(self, path: str, text: str) -> int:
        found, data = self._inside(path), text.encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"{path!r} would have {len(data)} bytes; {MOST_BYTES} is the most")
        if not found.exists() and sum(1 for each in self.root.rglob("*") if each.is_file()) >= MOST_FILES:
            raise ValueError(f"there are {MOST_FILES} files; delete some first")
        if found.exists() and not found.is_file():
            raise ValueError(f"{path!r} is no file")
        try:
            found.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"a folder of {path!r} is a file") from error
        return found.write_bytes(data)

    def _inside(self, path: str) -> Path:
        """Where it leads, all links followed. Raises ValueError when that is outside."""
        try:
            found = (self.root / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long, a null byte
            raise ValueError(f"{path!r} is no path") from error
        if not found.is_relative_to(self.root) or found == self.root:
            raise ValueError(f"{path!r} is outside the folder; write a path such as notes/today.txt")
        return found
