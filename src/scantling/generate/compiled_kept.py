"""Compiled steps in the cache folder, so that a second start does not compile again.

A package is a zip file of torch's own making: native code, and the source that it was compiled from. It holds no
weights. Torch's loader of packages for Python would also read other things from it, some of them by pickle; here the
C++ loader is called directly, which takes the native code out and nothing else.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from scantling.errors import ScantlingInputError
from scantling.native.library import cache_folder, compiler, processor

_CODE = ("parts", "tensor", "generate/compiled_step.py", "generate/compiled_kept.py", "visibility.py")
# Nothing is read from a cache that anybody else fills.
_SETTINGS = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "autotune_local_cache": False}


class Package:
    """A file whose name tells apart the model, the widths, the torch, the code and the processor that it is for.

    Attributes:
        path: it is there only when it is whole; it can be deleted at any time.
    """

    def __init__(self, *about: str) -> None:
        told = [torch.__version__, str(torch.get_num_threads()), processor(), repr(_SETTINGS), _code(), *about]
        key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
        self.path = cache_folder() / "steps" / f"step-{key}.pt2"

    @property
    def is_whole(self) -> bool:
        """Whether the file is there and each of its entries has the check sum that was written with it."""
        try:
            with zipfile.ZipFile(self.path) as file:
                return file.testzip() is None
        except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, ValueError):
            return False

    def runner(self, export: Callable[[], ExportedProgram]) -> Callable[[list[Tensor]], list[Tensor]]:
        """The compiled step, called with its tensors in a row; compiled now where the file is not there or not whole.

        Raises:
            ScantlingInputError: no compiler, one that fails, or a folder that cannot be written to.
        """
        if self.is_whole:
            try:
                return _loaded(self.path)
            except RuntimeError:
                self.path.unlink(missing_ok=True)
        self._make(export)
        return _loaded(self.path)

    def _make(self, export: Callable[[], ExportedProgram]) -> None:
        if (why := missing()) is not None:
            raise ScantlingInputError(f"{why}; without it everything runs through PyTorch, slower")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                made = Path(folder) / self.path.name
                _compile(export(), made)
                # Renamed when it is whole: another process may be about to load it.
                made.replace(self.path)
        except OSError as error:
            raise ScantlingInputError(f"the compiled step cannot be kept in {self.path.parent}: {error}") from None


def missing() -> str | None:
    """Why no step can be compiled; None where one can."""
    return None if compiler() else "no C++ compiler was found (g++ or clang++, or $CXX)"


def _compile(program: ExportedProgram, target: Path) -> None:
    from torch._inductor import aoti_compile_and_package, config
    from torch._inductor.exc import CppCompileError
    from torch._inductor.utils import fresh_cache

    with warnings.catch_warnings(), fresh_cache(), config.patch({"cpp.cxx": (compiler(),)}):
        # Torch's own, about its insides.
        warnings.simplefilter("ignore")
        try:
            aoti_compile_and_package(program, package_path=str(target), inductor_configs=dict(_SETTINGS))
        except CppCompileError as error:
            first = next((line for line in str(error).splitlines() if "error" in line), "no message")
            raise ScantlingInputError(f"{compiler()} does not compile the step: {first.strip()}") from None


def _loaded(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    # Experts are an operator of ours, which the code looks up by name.
    import scantling.tensor.experts  # noqa: F401

    loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    return loader.run  # type: ignore[no-any-return]


@cache
def _code() -> str:
    """A hash of all that decides what a step computes."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for name in _CODE:
        place = root / name
        for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            found.update(path.read_bytes())
    return found.hexdigest()
