"""Check the house rules that no linter has, and their exceptions (tools/house_rules.toml), which only shrink.

ruff holds that every public name is documented and annotated (D, ANN) and that nothing prints (T20); pyright
holds the types; the two conftest.py files hold that no test leaks. The rest is here:

    environment       only accel_state/environ.py touches the environment
    environment-read  only the command and the places in the list of exceptions ask that module
    labels            only accel_state/labels.py compares a DistributedType
    late-import       imports are at the top; laziness is in tables, or in a function for what is OPTIONAL
    streams           only accel_state/streams.py makes streams, events, pinned memory, and copies that nobody
                      waits for
    torch-private     only accel_state/torch_private.py imports the private modules and names of torch
    type-checking     what is imported for types alone would be slow to import, or a circle
    method-docstring  a public method has a docstring, unless a class or protocol that it implements has it
    class-name        a public class is defined once in the workspace
    hidden-export     no module has the name of something that its package exports
    generic-name      a variable is named after its thing: not `one`, `mine`, `theirs`, `found` or `rest`
    module-name       no utils, helpers, misc or common inside the packages
    glossary          names and prose use the field's words (tools/glossary.toml), also in the docs' pages
    one-version       one version everywhere, and members pin each other to it
    top-level         no other folder at the root

An exception that is no longer needed is an error too, so that the list only gets shorter.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glossary import load_glossary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = Path(__file__).with_suffix(".toml")
VAGUE = {"utils", "helpers", "misc", "common", "util", "helper"}
GENERIC = {"one", "mine", "theirs", "found", "rest"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
READERS = {"read", "publish", "parse_flag_from_env", "parse_choice_from_env", "get_int_from_env"}
FOLDERS = {".ci", ".github", "packages", "tests-integration", "tools"}
STREAMS = re.compile(
    r"torch\.(Stream|Event"
    r"|(accelerator|cuda|xpu|npu|mlu)\.(Stream|Event|stream|current_stream|default_stream|set_stream|synchronize))$"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True, order=True)
class Breach:
    """One breach of one rule. The subject is stable under edits, so that an exception can name it."""

    rule: str
    subject: str
    message: str


@dataclass(frozen=True, slots=True)
class Source:
    """A Python file of the workspace: its path from the root, its syntax tree."""

    path: str
    tree: ast.Module

    @property
    def packaged(self) -> bool:
        """Whether the file is shipped, rather than a tool or a part of the harness."""
        return self.path.startswith("packages/")


def main() -> int:
    """Print every breach that is no exception and every exception that is no breach; return 1 if any."""
    files = [*sources()]
    breaches = sorted(
        {
            *check_sources(files),
            *class_name(files),
            *method_docstring(files),
            *hidden_export(ROOT),
            *one_version(ROOT),
            *top_level(),
            *glossary(texts()),
        }
    )
    allowed = {
        (rule, subject)
        for rule, reasons in tomllib.loads(EXCEPTIONS.read_text()).items()
        for subject in reasons
    }
    found = {(breach.rule, breach.subject) for breach in breaches}
    for breach in breaches:
        if (breach.rule, breach.subject) not in allowed:
            print(f"{breach.rule}: {breach.subject}: {breach.message}")
    for rule, subject in sorted(allowed - found):
        print(f"{EXCEPTIONS.name}: the exception [{rule}] {subject!r} is no longer needed: delete it")
    print(f"{len(found - allowed)} breaches, {len(allowed & found)} exceptions")
    return int(found != allowed)


def sources() -> Iterator[Source]:
    """The shipped modules, the tools and the harness."""
    for pattern in ("packages/*/src/**/*.py", "tools/**/*.py", "tests-integration/harness/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            yield Source(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))


def check_sources(files: Iterable[Source]) -> Iterator[Breach]:
    """Apply the rules about source files."""
    for source in files:
        for rule in RULES:
            yield from rule(source)


def environment(source: Source) -> Iterator[Breach]:
    """Only one module of the packages touches the environment."""
    if not source.packaged or source.path.endswith("accel_state/environ.py"):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute) if attribute in ENVIRONMENT:
                named = attribute
            case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & ENVIRONMENT:
                named = "import"
            case _:
                continue
        yield Breach("environment", f"{source.path}::{named}", f"line {node.lineno}: ask accel_state.environ")


def environment_read(source: Source) -> Iterator[Breach]:
    """Settings are resolved at the edge: below it, modules take values as arguments."""
    if not source.packaged or "/accel_cli/" in source.path or "/accel_inspect/" in source.path:
        return
    for node in source.tree.body:  # not what only type checkers import
        match node:
            case ast.ImportFrom(module="accel_state", names=names):
                asks = any(alias.name == "environ" for alias in names)
            case ast.ImportFrom(module="accel_state.environ", names=names):
                asks = bool(READERS & {alias.name for alias in names})
            case _:
                asks = False
        if asks:
            yield Breach("environment-read", source.path, f"line {node.lineno}: take its values as arguments")


def labels(source: Source) -> Iterator[Breach]:
    """A DistributedType is a label for users: nothing decides by it."""
    if not source.packaged or source.path.endswith("accel_state/labels.py"):
        return
    for node in ast.walk(source.tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            compared = [node.pattern]
        for member in (inner for outer in compared for inner in ast.walk(outer)):
            match member:
                case ast.Attribute(value=ast.Name(id="DistributedType"), attr=name):
                    yield Breach(
                        "labels",
                        f"{source.path}::{name}",
                        f"line {member.lineno}: decide by the strategy's features",
                    )
                case _:
                    pass


OPTIONAL = (
    "matplotlib",
    "plotly",
    "prompt_toolkit",
    "questionary",
    "rich",
    "torch.distributed.algorithms",
    "tqdm",
)
"""Libraries that are slow to import, and modules of torch: a function that needs them imports them."""


def late_import(source: Source) -> Iterator[Breach]:
    """Imports are at the top of the file."""
    if not source.packaged:
        return
    for function in (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS)):
        for node in ast.walk(function):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                if any(module == name or module.startswith(f"{name}.") for name in OPTIONAL):
                    continue
                yield Breach(
                    "late-import", f"{source.path}::{module}", f"line {node.lineno}: move it to the top"
                )


def streams(source: Source) -> Iterator[Breach]:
    """Only the seam touches what is asynchronous on a device."""
    if not source.packaged or source.path.endswith("accel_state/streams.py"):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute() as function) if STREAMS.match(named := ast.unparse(function)):
                pass
            case ast.Call(func=ast.Attribute(attr="pin_memory" as named)):
                pass
            case ast.Call(func=ast.Attribute(attr="record_stream" as named), args=[_]):
                pass  # a tensor's; that of the seam has two arguments
            case ast.Call(func=ast.Attribute(attr=named) | ast.Name(id=named), keywords=keywords) if any(
                _is_asynchronous(named, keyword) for keyword in keywords
            ):
                pass
            case _:
                continue
        message = f"line {node.lineno}: use accel_state.streams"
        yield Breach("streams", f"{source.path}::{named}", message)


def _is_asynchronous(function: str, keyword: ast.keyword) -> bool:
    """Whether an argument makes a copy that nobody waits for, or pins what torch allocates.

    A caller's own `non_blocking` may be passed on, but to `copy_`.
    """
    if keyword.arg == "non_blocking":
        match keyword.value:
            case ast.Constant(value=False):
                return False
            case ast.Name(id="non_blocking") | ast.Attribute(attr="non_blocking"):
                return function == "copy_"
            case _:
                return True
    return keyword.arg == "pin_memory" and function in {
        "empty",
        "zeros",
        "empty_like",
        "zeros_like",
        "tensor",
    }


def generic_name(source: Source) -> Iterator[Breach]:
    """A variable is named after its thing, such as `parameter`, `path` or `matches`."""
    for node in ast.walk(source.tree) if source.packaged else ():
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in GENERIC:
                subject = f"{source.path}::{name}"
                yield Breach("generic-name", subject, f"line {node.lineno}: name its thing")
            case _:
                pass


def module_name(source: Source) -> Iterator[Breach]:
    """A file is one idea, named after it. The modules of `accel` have documented names, and only tables."""
    names = set(Path(source.path).with_suffix("").parts)
    if source.packaged and names & VAGUE and "/src/accel/" not in source.path:
        yield Breach("module-name", source.path, "say what is in it")


def type_checking(source: Source) -> Iterator[Breach]:
    """Imports for types alone are slow ones, or would make a circle: not those of the standard library."""
    if not source.packaged:
        return
    for block in (node for node in source.tree.body if isinstance(node, ast.If)):
        if ast.unparse(block.test) != "TYPE_CHECKING":
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
            elif isinstance(node, ast.Import):
                module = node.names[0].name
            else:
                continue
            if module.partition(".")[0] in sys.stdlib_module_names and module not in SLOW:
                yield Breach(
                    "type-checking", f"{source.path}::{module}", f"line {node.lineno}: import it plainly"
                )


SLOW = {"multiprocessing"}
"""Modules of the standard library that only some runs need."""


def class_name(files: Iterable[Source]) -> Iterator[Breach]:
    """A public class is defined once, so that one name means one thing."""
    owners: dict[str, str] = {}
    for source in files:
        for node in source.tree.body if source.packaged else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owner = owners.setdefault(node.name, source.path)
                if owner != source.path:
                    yield Breach("class-name", f"{source.path}::{node.name}", f"{owner} has this name, too")


def method_docstring(files: Iterable[Source]) -> Iterator[Breach]:
    """A public method has a docstring, unless a class or protocol that it implements has it."""
    bases: dict[str, set[str]] = {}
    documented: dict[str, set[str]] = {}
    protocols: set[str] = set()
    methods: list[tuple[Source, str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for source in files:
        classes = (
            node for node in ast.walk(source.tree) if source.packaged and isinstance(node, ast.ClassDef)
        )
        for node in classes:
            names = {re.split(r"[\[.]", ast.unparse(base).removesuffix("]"))[-1] for base in node.bases}
            names |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            bases.setdefault(node.name, set()).update(names)
            for method in (item for item in node.body if isinstance(item, FUNCTIONS)):
                if ast.get_docstring(method) is None:
                    methods.append((source, node.name, method))
                    continue
                documented.setdefault(node.name, set()).add(method.name)
                if "Protocol" in names:
                    protocols.add(method.name)
    for source, owner, method in methods:
        decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
        if method.name.startswith("_") or owner.startswith("_") or method.name in protocols:
            continue
        if any(name.endswith(("overload", ".setter", ".deleter")) for name in decorators):
            continue
        above, known = [owner], set[str]()
        while above:
            name = above.pop()
            if name not in known:
                known.add(name)
                above += bases.get(name, ())
        unknown = known - bases.keys() - {"object", "Protocol", "Generic"}  # a library's documents its own
        if not unknown and not any(method.name in documented.get(name, ()) for name in known):
            subject = f"{source.path}::{owner}.{method.name}"
            yield Breach("method-docstring", subject, f"line {method.lineno}: say what it does")


def torch_private(source: Source) -> Iterator[Breach]:
    """One module imports torch's private modules and names; private attributes are read wherever needed."""
    if not source.packaged or source.path.endswith("accel_state/torch_private.py"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            top, *names = path.split(".")
            if top == "torch" and any(name.startswith("_") for name in names):
                message = f"line {node.lineno}: import it in accel_state/torch_private.py"
                yield Breach("torch-private", f"{source.path}::{names[-1]}", message)


def hidden_export(root: Path) -> Iterator[Breach]:
    """No module has the name of something that its package exports, which it would replace."""
    for stub in sorted(root.glob("packages/*/src/**/__init__.pyi")):
        package = ".".join(stub.parent.parts[stub.parent.parts.index("src") + 1 :])
        modules = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        for module, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub.read_text(), re.MULTILINE):
            if name in modules and module != package and f"{package}.{name}" != "accel.utils.tqdm":
                yield Breach("hidden-export", f"{package}.{name}", "name the module otherwise")


RULES: tuple[Callable[[Source], Iterator[Breach]], ...] = (
    environment,
    environment_read,
    labels,
    late_import,
    type_checking,
    streams,
    torch_private,
    generic_name,
    module_name,
)


def texts() -> Iterator[tuple[str, str]]:
    """The path and text of every file whose words are checked: sources, tests, tools and pages."""
    for pattern in (
        "packages/*/src/**/*.py",
        "packages/*/tests/**/*.py",
        "tools/**/*.py",
        "tests-integration/**/*.py",
        "**/*.md",
    ):
        for path in sorted(ROOT.glob(pattern)):
            relative = path.relative_to(ROOT)
            if relative.parts[0] != "build" and not any(folder.startswith(".") for folder in relative.parts):
                yield relative.as_posix(), path.read_text()


def glossary(files: Iterable[tuple[str, str]]) -> Iterator[Breach]:
    """Names and prose use the field's words."""
    words = load_glossary()
    for path, text in files:
        for finding in words.find(path, text):
            message = f"line {finding.line}: say {finding.instead}"
            yield Breach("glossary", f"{path}::{finding.found}", message)


def one_version(root: Path) -> Iterator[Breach]:
    """Every member has the root's version and pins other members to exactly that."""
    wanted: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in sorted(root.glob("packages/*/pyproject.toml"))
    }
    for folder, project in projects.items():
        if project["name"] != folder:
            yield Breach("one-version", folder, f"the folder of the distribution {project['name']!r}")
        if project["version"] != wanted:
            yield Breach("one-version", folder, f"version {project['version']}, the workspace has {wanted}")
        extras = project.get("optional-dependencies", {}).values()
        for requirement in (*project["dependencies"], *(line for extra in extras for line in extra)):
            name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
            if name in projects and not requirement.endswith(f"=={wanted}"):
                yield Breach(
                    "one-version", f"{folder}::{name}", f"{requirement!r} is not pinned to =={wanted}"
                )


def top_level() -> Iterator[Breach]:
    """Everything lives in the folders that exist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    folders = {name.partition("/")[0] for name in listed.stdout.split("\0") if "/" in name}
    for folder in sorted(folders - FOLDERS):
        yield Breach("top-level", folder, f"not one of {', '.join(sorted(FOLDERS))}")


if __name__ == "__main__":
    sys.exit(main())
