"""Packages that only some environments need: what is missing is said in one line, with what to install."""

from collections.abc import Generator
from contextlib import contextmanager

from slipstream.errors import UserError


@contextmanager
def needs(package: str, extra: str, who: str) -> Generator[None]:
    """Around an import. Raises UserError naming `extra` (of pyproject.toml) when `package` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        raise UserError(f"{who} needs the package {package}: pip install 'slipstream[{extra}]'") from error
