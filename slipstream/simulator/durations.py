"""How long things take, as a distribution: a number, a lognormal, a file of measurements, or a mixture of those.

Invariant: one seed gives one sequence of draws; a mixture's part is chosen by the caller's share (0..1), so that all
trajectories of one task come from one part: several environments in one run.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from slipstream.errors import UserError

BLOCK = 4096  # draws made at once
FORMS = "a number, lognormal:MEAN,SIGMA[,MAX], file:PATH, or a mixture such as 0.7*lognormal:2,1+0.3*9"


class Constant(msgspec.Struct, frozen=True):
    value: float

    def mean(self) -> float:
        return self.value

    def block(self, random: np.random.Generator) -> list[float]:
        return [self.value] * BLOCK


class Lognormal(msgspec.Struct, frozen=True):
    """`average` is the distribution's own mean (not that of its logarithm); what is over `most` becomes `most`."""

    average: float
    sigma: float
    most: float = math.inf

    def mean(self) -> float:
        if math.isinf(self.most):
            return self.average
        mu = math.log(self.average) - self.sigma**2 / 2
        z = (math.log(self.most) - mu) / max(self.sigma, 1e-12)
        return self.average * _normal(z - self.sigma) + self.most * _normal(-z)

    def block(self, random: np.random.Generator) -> list[float]:
        draws = random.lognormal(math.log(self.average) - self.sigma**2 / 2, self.sigma, BLOCK)
        return np.minimum(draws, self.most).tolist()


class Empirical(msgspec.Struct, frozen=True):
    values: list[float]

    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def block(self, random: np.random.Generator) -> list[float]:
        return random.choice(np.asarray(self.values), BLOCK).tolist()


Form = Constant | Lognormal | Empirical


class Part(msgspec.Struct, frozen=True):
    weight: float
    form: Form


class Durations(msgspec.Struct, frozen=True):
    """A mixture; mostly of one part."""

    parts: list[Part]

    def mean(self) -> float:
        total = sum(part.weight for part in self.parts)
        return sum(part.weight * part.form.mean() for part in self.parts) / total

    def drawer(self, random: np.random.Generator) -> Callable[[float], float]:
        """A function that draws; its argument is the share that decides the part."""
        draws = [_Drawn(part.form, random).draw for part in self.parts]
        if len(draws) == 1:
            only = draws[0]
            return lambda share: only()
        bounds = np.cumsum([part.weight for part in self.parts]) / sum(part.weight for part in self.parts)
        edges: list[float] = bounds[:-1].tolist()
        return lambda share: draws[sum(share >= edge for edge in edges)]()


class _Drawn:
    def __init__(self, form: Form, random: np.random.Generator) -> None:
        self._form, self._random = form, random
        self._left: list[float] = []

    def draw(self) -> float:
        if not self._left:
            self._left = self._form.block(self._random)
            self._left.reverse()
        return self._left.pop()


def constant(value: float) -> Durations:
    return Durations([Part(1.0, Constant(value))])


def empirical(values: Sequence[float]) -> Durations:
    return Durations([Part(1.0, Empirical(list(values)))])


def parse(text: str, key: str) -> Durations:
    """Raises UserError naming `key`."""
    return Durations([_part(piece.strip(), key, text) for piece in _pieces(text)])


def _pieces(text: str) -> list[str]:
    """Split at + signs; a file's name may not contain one."""
    return text.split("+")


def _part(piece: str, key: str, text: str) -> Part:
    weight, star, form = piece.rpartition("*")
    try:
        share = float(weight) if star else 1.0
        if share <= 0:
            raise ValueError
        return Part(share, _form(form.strip(), key))
    except ValueError:
        raise UserError(f"{key} = {text!r}: is no distribution of times; write {FORMS}") from None


def _form(form: str, key: str) -> Form:
    name, _, rest = form.partition(":")
    if name == "file":
        return Empirical(_read(Path(rest), key))
    numbers = [float(number) for number in (rest if name == "lognormal" else form).split(",")]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError
    if name == "lognormal" and len(numbers) in (2, 3) and numbers[0] > 0 and all(n > 0 for n in numbers[2:]):
        return Lognormal(*numbers)
    if name == form and len(numbers) == 1:
        return Constant(numbers[0])
    raise ValueError


def _read(path: Path, key: str) -> list[float]:
    try:
        values = [float(word) for word in path.read_text().split()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key} = 'file:{path}': it cannot be read ({error}); name a text file of numbers") from error
    except ValueError as error:
        raise UserError(f"{key} = 'file:{path}': {error}; write numbers with white space between them") from error
    if not values or not all(math.isfinite(value) and value >= 0 for value in values):
        raise UserError(f"{key} = 'file:{path}': it needs numbers of at least 0, and one or more of them")
    return values


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))
