"""No knob turns nothing: every key of the config is read somewhere in the code, as a field of its own section."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import fields

import slipstream
from slipstream.config import Config
from slipstream.configfile import keys
from slipstream.trajectory import Outcome

PACKAGE = Path(slipstream.__file__).parent
# They define the keys, read and write all of them alike, and check them against each other: that turns nothing.
DEFINE = {"config.py", "configfile.py", "model_folder.py"}
SECTIONS = {section.type.__name__: section.name for section in fields(Config)}
KEYS = {key.dotted for key in keys()}

Aliases = dict[str, str]  # a variable or `self.attribute`, as written -> the section that it holds


def readings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each `section.key` that a module reads, with its line."""
    held = aliases(tree, {})
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = aliases(scope, held)
            for node in ast.walk(scope):
                yield from read_by(node, inside)


def read_by(node: ast.AST, held: Aliases) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (section := section_of(node.value, held)):
        yield f"{section}.{node.attr}", node.lineno
    # The policy of an outcome is looked up by the outcome's name.
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        section, name = section_of(node.args[0], held), node.args[1]
        yield from ((f"{section}.{outcome}", node.lineno) for outcome in Outcome if is_outcome(section, name))


def is_outcome(section: str | None, name: ast.expr) -> bool:
    return section == "outcomes" and isinstance(name, ast.Name | ast.Attribute)


def section_of(node: ast.expr, held: Aliases) -> str | None:
    """The section that an expression is, where it is one: `...config.learner`, or what an alias of it is called."""
    written = ast.unparse(node)
    if written in held:
        return held[written]
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS.values():
        owner = ast.unparse(node.value)
        return node.attr if owner.rpartition(".")[2].lstrip("_") == "config" else None
    return None


def aliases(scope: ast.AST, outer: Aliases) -> Aliases:
    """Parameters annotated with a section, and what is assigned from one; a class's `self.x` are its module's."""
    found = dict(outer)
    is_function = isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id in SECTIONS:
            found[node.arg] = SECTIONS[node.annotation.id]
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target, value in pairs(node):
                if section := section_of(value, found):
                    found[ast.unparse(target)] = section
    return found if is_function else {name: section for name, section in found.items() if name.startswith("self.")}


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    (target,) = node.targets[:1]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        yield from zip(target.elts, node.value.elts, strict=False)
    else:
        yield target, node.value


def read_in_package() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() not in DEFINE:
            for key, line in readings(ast.parse(path.read_text())):
                found.setdefault(key, []).append(f"{path.relative_to(PACKAGE)}:{line}")
    return found


READ = read_in_package()


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_is_read(key: str) -> None:
    assert READ.get(key), f"nothing reads {key}: let it do what its description says, or take it out"


def test_every_key_that_is_read_is_there() -> None:
    """Also that the search above finds sections and nothing else."""
    methods = {"replace", "start_depth"}  # the latter says what a key comes to
    assert {key for key in READ if key not in KEYS and key.partition(".")[2] not in methods} == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(config): return config.learner.lr", {"learner.lr"}),
        ("def f(self): return self._config.run.seed", {"run.seed"}),
        ("def f(section: EngineSection): return section.threads", {"engine.threads"}),
        ("def f(config):\n    a, b = config.loss, 1\n    return a.name", {"loss.name"}),
        (
            "class A:\n    def __init__(self, limits: RolloutSection): self.limits = limits\n"
            "    def f(self): return self.limits.group",
            {"rollout.group"},
        ),
        ("def f(config, o): return getattr(config.outcomes, o)", {f"outcomes.{outcome}" for outcome in Outcome}),
        ("def f(section): return section.threads", set()),
        ("def f(other): return other.learner.lr", set()),
        ("def f(a: LossSection): pass\ndef g(a): return a.name", set()),
        ('def f(config): "config.learner.lr"', set()),
        ("def f(config): config.learner.lr = 1", set()),
    ],
)
def test_a_reading_is_told_from_what_looks_like_one(code: str, found: set[str]) -> None:
    assert {key for key, _ in readings(ast.parse(code))} == found
