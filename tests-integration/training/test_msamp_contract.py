"""What we call of MS-AMP exists in it as it was published, and its DeepSpeed engine cannot be imported here.

The library is on no registry and needs a GPU: its public sources (github.com/Azure/MS-AMP, 0.2 to 0.4) were
read, and what they define is written down here. Where it is installed, that is compared with its sources.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from accel_plugins.fp8 import build

PUBLISHED = {
    "initialize of 0.2": lambda model, optimizer=None, opt_level="O1": None,
    "initialize of 0.3 and newer": lambda model, optimizer=None, opt_level="O1", use_te=False: None,
    "all_reduce_grads": lambda self, model: None,
}
WHERE = {"initialize": "__init__.py", "all_reduce_grads": "optim/optimizer.py"}
OF_THE_ENGINE = (
    "AMP", "BFLOAT16", "DeepSpeedEngine", "DeepSpeedZeRoOffload", "DeepSpeedZeroOptimizer", "DummyOptim",
    "FP16", "PipelineModule", "SparseTensor", "ZERO_OPTIMIZATION", "ZeroStageEnum", "amp",
    "instrument_w_nvtx", "log_dist", "logger", "see_memory_usage",
)  # fmt: skip
"""What `msamp.deepspeed.runtime.engine`, of O1 to O3 under ZeRO, imports from `deepspeed.runtime.engine`."""


def calls():
    """Our calls of the library, by name."""
    tree = ast.parse(Path(inspect.getfile(build)).read_text())
    names = {
        one.func.attr: one for one in ast.walk(tree) if isinstance(getattr(one, "func", None), ast.Attribute)
    }
    return {name: names[name] for name in WHERE}


@pytest.mark.parametrize("row", PUBLISHED)
def test_what_we_call_takes_what_we_pass(row):
    call = calls()[row.split()[0]]
    own = [None] if row == "all_reduce_grads" else []
    bound = inspect.signature(PUBLISHED[row]).bind(
        *own, *call.args, **{keyword.arg: keyword.value for keyword in call.keywords}
    )
    passed = {"model"} if own else {"model", "optimizer", "opt_level"}
    assert passed == bound.arguments.keys() - {"self"}


@pytest.mark.skipif(importlib.util.find_spec("msamp") is None, reason="MS-AMP is on no registry")
def test_what_is_written_down_is_what_is_installed():
    folder = Path(importlib.util.find_spec("msamp").origin).parent
    for row in [*PUBLISHED][1:]:
        name = row.split()[0]
        tree = ast.parse((folder / WHERE[name]).read_text())
        node = next(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == name)
        assert [arg.arg for arg in node.args.args] == [*inspect.signature(PUBLISHED[row]).parameters]


def bound_names(path):
    """Names that a module binds at its top, those of its branches included."""
    found = set()
    statements = [*ast.parse(path.read_text()).body]
    while statements:
        one = statements.pop()
        if isinstance(one, (ast.If, ast.Try)):
            handlers = getattr(one, "handlers", [])
            statements += [*one.body, *one.orelse, *[inner for each in handlers for inner in each.body]]
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in one.names}
        elif isinstance(one, (ast.ClassDef, ast.FunctionDef)):
            found.add(one.name)
        elif isinstance(one, ast.Assign):
            found |= {target.id for target in one.targets if isinstance(target, ast.Name)}
    return found


def test_its_engine_imports_what_deepspeed_no_longer_has():
    """As `DeepSpeedPlugin(enable_msamp=True)` says; were it there again, that could be tried."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None:
        pytest.skip("DeepSpeed is not installed")
    there = bound_names(Path(spec.origin).parent / "runtime" / "engine.py")
    assert "*" not in there
    assert {name for name in OF_THE_ENGINE if name not in there} == {"AMP", "amp"}
