"""Who may import whom, and what must not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import GOLDEN

import scantling

ROOT = Path(scantling.__file__).parent

BASE = {"errors", "units", "visibility", "strict_yaml"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "visibility": set(),
    "strict_yaml": {"errors"},
    "tensor": BASE,
    "cards": BASE,
    "parts": BASE | {"tensor"},
    "assembly": BASE | {"cards", "parts"},
    "numbers": BASE | {"parts"},
    "text": BASE,
    "checkpoint": BASE | {"cards"},
    "data": BASE | {"text", "checkpoint"},
    "study": BASE | {"cards", "parts", "assembly", "numbers", "tensor"},
    "inputs": BASE | {"cards", "tensor"},
    "passes": BASE | {"inputs", "tensor", "model"},
    "model": BASE | {"passes", "inputs", "cards", "parts", "checkpoint", "text", "tensor", "generate"},
    "loading": BASE | {"cards", "parts", "assembly", "checkpoint", "text", "tensor", "generate", "model"},
    "inspection": BASE | {"cards", "assembly", "study", "checkpoint"},
    "saving": BASE | {"cards", "parts", "assembly", "checkpoint", "model"},
    "native": BASE | {"parts", "checkpoint"},
    "train": BASE
    | {"inputs", "cards", "parts", "assembly", "numbers", "checkpoint", "text", "data", "tensor", "model", "saving"}
    | {"generate", "loading"},
    "generate": BASE | {"checkpoint", "native", "inputs", "passes", "cards", "parts", "tensor", "model", "text"},
    "lens": BASE | {"parts", "tensor", "checkpoint", "text", "passes", "model"},
    "benches": BASE
    | {"cards", "parts", "numbers", "study", "checkpoint", "text", "tensor", "model", "saving", "generate", "native"}
    | {"loading"},
    "measure": BASE | {"cards", "parts", "assembly", "numbers", "study", "tensor", "model", "train", "loading"},
    "audits": {"errors"},
    "subjects": BASE
    | {"audits", "cards", "parts", "checkpoint", "text", "tensor", "generate", "model", "saving", "train"}
    | {"loading"},
    "cli": BASE
    | {"cards", "parts", "assembly", "numbers", "study", "checkpoint", "text", "model", "saving", "generate", "native"}
    | {"data", "train", "audits", "subjects", "inspection", "lens", "passes", "benches", "measure", "tensor"}
    | {"loading"},
    "__init__": BASE | {"cards", "parts", "assembly", "model", "loading", "saving", "subjects", "inspection"},
    "__main__": {"cli"},
}
ONLY_INSIDE_FUNCTIONS = {("parts", "tensor"), ("study", "tensor"), ("model", "tensor"), ("model", "generate")}
ONLY_INSIDE_FUNCTIONS |= {("loading", "tensor"), ("loading", "generate")}
TOP_LEVEL_EVEN_SO = {("parts/net.py", "tensor")}
NUMPY_AT_IMPORT = {"data", "native"}
TORCH_AT_IMPORT = {"tensor", "train", "generate", "lens", "parts/net.py", "audits", "measure"}
TORCH_AT_IMPORT |= {f"benches/{name}.py" for name in ("ours", "theirs", "drift")}
TORCH_AT_IMPORT |= {
    f"subjects/{name}.py" for name in ("caches", "ours", "theirs", "their_config", "their_runs", "named")
}


def room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules named by import statements, and whether they run when the file is imported."""

    def visit(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names] if child.module == "scantling" else []
                yield from ((name, top) for name in names or [child.module or ""])
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, top and not inner)

    yield from visit(ast.parse(path.read_text()), True)


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    here, relative = room(path), str(path.relative_to(ROOT))
    for module, top in imports(path):
        if not module.startswith("scantling."):
            continue
        there = module.split(".")[1]
        if there == here:
            continue
        assert there in MAY_IMPORT[here], f"{relative} imports {module}"
        if (here, there) in ONLY_INSIDE_FUNCTIONS and (relative, there) not in TOP_LEVEL_EVEN_SO:
            assert not top, f"{relative} imports {module} outside a function"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_is_imported_at_the_top_only_where_tensors_live(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    heavy = {module.split(".")[0] for module, top in imports(path) if top} & {"torch", "numpy", "safetensors"}
    if room(path) in NUMPY_AT_IMPORT:
        heavy.discard("numpy")
    if room(path) not in TORCH_AT_IMPORT and relative not in TORCH_AT_IMPORT:
        assert not heavy, f"{relative} imports {heavy}"


@pytest.mark.parametrize(
    "code",
    [
        "import scantling; scantling.assemble(scantling.card('llama-3-8b')).params",
        "import scantling.cli.main, scantling.numbers.count, scantling.numbers.flops, scantling.numbers.memory",
        "import scantling.cli.main as m; assert m._run(['count', 'llama-3-8b']) == 0",
        "import scantling.cli.main as m; assert m._run(['trace', 'gpt2', '--tokens', '8']) == 0",
        "import scantling.cli.main as m; assert m._run(['flops', 'gpt2', '--json']) == 0",
        "import scantling.cli.main as m; assert m._run(['memory', 'mixtral-8x7b']) == 0",
        "import scantling.cli.main as m; assert m._run(['cost', 'gpt2', '--train-tokens=1B', '--device=h100']) == 0",
        "import scantling.cli.main as m; assert m._run(['roofline', 'gpt2', '--device', 'h100']) == 0",
        "import scantling.cli.main as m; assert m._run(['parts', 'gpt2']) == 0",
        "import scantling.cli.main as m; assert m._run(['cards']) == 0",
        "import scantling.cli.main as m; assert m._run(['--help']) == 0",
        "import scantling.cli.main as m; assert m._run(['tokenize', 'hello']) == 0",
        "import scantling.cli.main as m; assert m._run(['compare', 'gpt2', 't5-base']) == 0",
        "import scantling.cli.main as m; assert m._run(['diff', 'gpt2', 'gpt2-xl']) == 0",
        "import scantling.cli.main as m; assert m._run(['examine', 'deepseek-v3']) == 0",
        "import scantling.cli.main as m; assert m._run(['size', '--params', '1B']) == 0",
        "import scantling.cli.main as m; assert m._run(['plan', 'gpt2', '--devices=8', '--device=h100']) == 0",
        "import scantling.cli.main as m; assert m._run(['audit', '--help']) == 0",
        "import scantling.cli.main as m; assert m._run(['bench', '--help']) == 0",
        "import scantling.cli.main as m; assert m._run(['lens', '--help']) == 0",
        f"import scantling.cli.main as m; assert m._run(['inspect', {str(GOLDEN / 'tiny' / 'llama-gqa')!r}]) == 0",
    ],
)
def test_commands_without_tensors_do_not_load_torch(code: str) -> None:
    code += "\nimport sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_count_imports_neither_torch_nor_numpy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "scantling", "count", "llama-3-8b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "8,030,261,248" in done.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "numpy", "safetensors", "tokenizers", "gguf", "jinja2", "huggingface_hub"}
    assert "msgspec" in loaded


def test_without_torch_numbers_work_and_the_missing_extra_names_its_command() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'numpy', 'safetensors', 'tokenizers', 'gguf', 'jinja2'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Absent())
from scantling.cli.main import _run
assert _run(['count', 'llama-2-7b', '--json']) == 0
assert _run(['trace', 'llama-2-7b', '--tokens', '8', '--json']) == 0
assert _run(['inspect', FOLDER]) == 0
assert _run(['verify', 'tiny']) == 2
assert _run(['generate', 'hello']) == 2
assert _run(['tokenize', 'hello']) == 2
"""
    code = code.replace("FOLDER", repr(str(GOLDEN / "tiny" / "llama-gqa")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "not looked at: numpy is needed" in done.stdout
    lines = done.stderr.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] * 3
    assert "pip install 'scantling[torch]'" in lines[0]
    assert "pip install 'scantling[torch]'" in lines[1]
    assert "pip install 'scantling[text]'" in lines[2]
