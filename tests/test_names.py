"""One name has one meaning: functions, classes and aliases of modules have distinct names."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "extractors", "pipelines", "train")

COMMAND = "the command, and the function that it calls"
MODULE_OF_EXTRACTORS = "a function of each module with extractors, see `extractors.catalogue.ExtractorModule`"
# Names of several modules, with the reason.
SHARED = {
    "main": "entry points of processes",
    **dict.fromkeys(("find_weights", "describe", "load"), MODULE_OF_EXTRACTORS),
    "spec": "the feature of a model of timm or detectron2, which the catalogue does not list",
    **dict.fromkeys(("embed", "evaluate", "publish", "reproduce", "search", "sts", "train", "validate"), COMMAND),
}
MAX_SHARED = 15


def is_alias(node: ast.AnnAssign | ast.Assign) -> bool:
    """Return whether an assignment names a type: ``TypeAlias``, or a name in capital letters and small ones."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation) == "TypeAlias"
    name = ast.unparse(node.targets[0]).lstrip("_")
    is_variable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
    return name.isidentifier() and name[0].isupper() and not name.isupper() and not is_variable


def names_in(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the functions, classes and aliases of a module."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and is_alias(node):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and is_alias(node):
            yield ast.unparse(node.targets[0])
        elif isinstance(node, (ast.If, ast.Try)):
            yield from names_in([*node.body, *node.orelse])


def shared_names() -> dict[str, list[str]]:
    """Return the modules of each name that several have."""
    modules = defaultdict(set)
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for name in names_in(ast.parse(path.read_text(encoding="utf-8")).body):
            modules[name].add(str(path.relative_to(ROOT)))
    return {name: sorted(paths) for name, paths in sorted(modules.items()) if len(paths) > 1}


def test_names_in_several_modules_are_listed_with_their_reason():
    shared = shared_names()
    assert {name: paths for name, paths in shared.items() if name not in SHARED} == {}
    assert set(SHARED) <= set(shared), "remove names that one module has"
    assert len(shared) <= MAX_SHARED
