"""The processes of a run: how many, which one this is, and what they tell each other. Alone, all of it is nothing.

Ranks are numbered so that those that share matrices stand together: rank = data_rank * tensor + tensor_rank. Text goes
from rank to rank as bytes; no object is ever pickled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from scantling.cards.training import Parallel
from scantling.errors import ScantlingError, ScantlingInputError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another one before it gives the run up."""


class RankLost(ScantlingError):
    """Another process of the run is gone, or does not answer."""


class Told(ScantlingInputError):
    """What went wrong in this process or in others, and rank 0 says."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        size: how many there are.
        rank: which of them this one is.
        tensor: ranks that share every matrix; they read the same rows.
        replicated: whether ranks hold all weights instead of shards.
    """

    size: int = 1
    rank: int = 0
    tensor: int = 1
    replicated: bool = False

    @classmethod
    def here(cls, parallel: Parallel) -> Ranks:
        """Those of torch.distributed where it has been initialised, else one.

        Raises:
            ScantlingInputError: the settings ask for another number of them.
        """
        found = cls.any_layout()
        return cls(found.size, found.rank, *_divided(parallel, found.size))

    @classmethod
    def any_layout(cls) -> Ranks:
        """All processes, however they will share the run."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_world_size(), dist.get_rank())

    @property
    def data(self) -> int:
        """Ranks, or groups of tensor ranks, with rows of their own."""
        return self.size // self.tensor

    @property
    def data_rank(self) -> int:
        """Which of them this one is in."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """Which of its group this one is."""
        return self.rank % self.tensor

    def sums(self, values: list[float], device: torch.device) -> list[float]:
        """Each value summed over the rows of all processes, in float64 (float32 on mps).

        Of ranks that read the same rows one counts.
        """
        return self.totals(values if self.tensor_rank == 0 else [0.0] * len(values), device)

    def totals(self, values: list[float], device: torch.device) -> list[float]:
        """Each value summed over all processes, whichever rows they read."""
        if self.size == 1:
            return values
        kind = torch.float32 if device.type == "mps" else torch.float64
        held = torch.tensor(values, dtype=kind, device=device)
        dist.all_reduce(held)
        return [float(value) for value in held]

    def texts(self, text: str) -> list[str]:
        """What every process says, by rank."""
        if self.size == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=_wire()) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=_wire()))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = [torch.zeros(longest, dtype=torch.uint8, device=_wire()) for _ in range(self.size)]
        dist.all_gather(found, padded.to(_wire()))
        plain = (bytes(one[: int(size)].tolist()) for one, size in zip(found, sizes, strict=True))
        return ["" if said == b"\0" else said.decode() for said in plain]

    def first(self, text: str | None) -> str | None:
        """What the first of the processes that say something says, the same in all of them."""
        return next((said for said in self.texts(text or "") if said), None)

    def agree(self, what: str, text: str) -> None:
        """Compare what must be the same in all processes.

        Raises:
            ScantlingInputError: it is not.
        """
        said = self.texts(text)
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            sentence = f"rank {other} has {what} than rank 0; all ranks of a run need the same"
            raise (ScantlingInputError if self.rank == 0 else Told)(sentence)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong in any process while the block runs ends it in all of them.

        The block must not need the other processes.

        Raises:
            ScantlingInputError: it went wrong in another one.
            Told: in all processes but rank 0.
        """
        failed: ScantlingError | OSError | None = None
        try:
            yield
        except (ScantlingError, OSError) as error:
            failed = error
        said = self.first(None if failed is None else str(failed) or type(failed).__name__)
        if said is None:
            return
        if self.rank == 0 and failed is not None:
            raise failed
        raise (ScantlingInputError if self.rank == 0 else Told)(said)

    def alone(self, run: Callable[[], str]) -> str:
        """What `run` returns in rank 0, which alone calls it; the others wait for it.

        Raises:
            Told: it went wrong there.
        """
        text = ""
        with self.together():
            text = run() if self.rank == 0 else ""
        return self.texts(text)[0]

    @contextmanager
    def node_first(self) -> Iterator[None]:
        """The first process of each machine runs the block, then the others do: they find what it left in a cache."""
        first = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        if first or self.size == 1:
            with self.together():
                yield
            with self.together():
                pass
        else:
            with self.together():
                pass
            with self.together():
                yield


ALONE = Ranks()
"""One process."""


def _divided(parallel: Parallel, size: int) -> tuple[int, bool]:
    """Ranks of a tensor group, and whether the others hold all weights."""
    tensor, replicated = parallel.tensor, parallel.replicated
    if replicated > 1 and (tensor > 1 or (parallel.sharded or 1) > 1):
        raise ScantlingInputError(
            "parallel: replicated ranks hold all weights, so they go with neither sharded nor tensor ranks"
        )
    sharded = parallel.sharded or (1 if replicated > 1 else max(1, size // tensor))
    wanted = replicated * sharded * tensor
    if wanted != size:
        said = ", ".join(f"{name}: {n}" for name, n in _said(parallel).items())
        raise ScantlingInputError(
            f"parallel: {{{said}}} is a layout of {wanted} ranks or a multiple, and {size} "
            f"{'is' if size == 1 else 'are'} running (torchrun --nproc-per-node {wanted})"
        )
    return tensor, replicated > 1


def _said(parallel: Parallel) -> dict[str, int]:
    """The numbers of ranks that are set."""
    found = {"sharded": parallel.sharded, "tensor": parallel.tensor, "replicated": parallel.replicated}
    return {name: n for name, n in found.items() if n is not None and (n > 1 or name == "sharded")}


def _wire() -> torch.device:
    """Where the backend takes tensors from."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def launched() -> int:
    """How many processes torchrun, or who sets the same variables, started; 1 where nobody did."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def joined(device: str, where: str | None = None) -> Iterator[str]:
    """The group of all processes while the block runs; gives the device of this one (``cuda`` is ``cuda:LOCAL_RANK``).

    Args:
        where: an address of `torch.distributed.init_process_group`; None is the variables of torchrun.

    Raises:
        ScantlingInputError: the device has no way to talk.
        RankLost: another process is gone.
    """
    if launched() == 1:
        yield device
        return
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ScantlingInputError(f"device {device!r} with several processes: use cpu or cuda")
    if kind == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
        torch.cuda.set_device(device)
    size, rank = launched(), int(os.environ["RANK"])
    try:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", where, PATIENCE, size, rank)
        yield device
    except Told:
        raise SystemExit(2) from None
    except RuntimeError as error:
        raise RankLost(_gone(error)) from error
    finally:
        _leave()


def _leave() -> None:
    """End the threads of the transport, which an exit of the interpreter would trip over.

    NCCL could wait here for a process that is gone; its threads do not mind.
    """
    if dist.is_initialized() and (dist.get_backend() == "gloo" or sys.exc_info()[0] is None):
        dist.destroy_process_group()


def _gone(error: RuntimeError) -> str:
    """A sentence for an error of the transport; others go on as they are."""
    text = str(error)
    signs = ("onnection", "gloo", "imed out", "imeout", "NCCL", "by peer", "ocket")
    if not (isinstance(error, dist.DistError) or any(sign in text for sign in signs)):
        raise error
    why = text.strip().splitlines()[0].partition(". ")[0][:200]
    return f"another rank is gone or does not answer, so this one ends too ({why})"
