"""The protocol of checkpoints: whole or not there, the newest whole one found, older ones untouched by a failure."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import scantling as sc
from scantling.checkpoint import whole_folder
from scantling.train import checkpoints
from scantling.train.checkpoints import clean, fault_of, held, newest, save, steps


def filled(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "training").mkdir(parents=True)
        (folder / "weights").write_text(text)
        (folder / "training" / "state").write_text(text * 2)

    return write


def test_the_newest_is_found_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert newest(run) is None
    for step in (1, 2, 10):
        save(run, step, filled(str(step)), keep=5)
    found = newest(run)
    assert found is not None
    assert (found.folder, found.step, found.skipped) == (run / "step-10", 10, ())
    assert os.readlink(run / "latest") == "step-10"
    assert (run / "latest" / "weights").read_text() == "10"
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, filled("x"), keep=2, best=3 if step >= 3 else None)
    assert steps(tmp_path) == [3, 6, 7]
    save(tmp_path, 8, filled("x"), keep=0)
    assert steps(tmp_path) == [8]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda f: (f / "weights").write_text("3"), "weights is not what was written"),
    "cut": (lambda f: (f / "training" / "state").write_text("2"), "training/state has 1 bytes and the manifest says 2"),
    "missing": (lambda f: (f / "weights").unlink(), "weights is missing"),
    "added": (lambda f: (f / "more").write_text(""), "more is not in the manifest"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
    "a bad manifest": (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
    "a manifest of another kind": (lambda f: (f / "manifest.json").write_text('{"files": [1]}'), "cannot be read"),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damaged_checkpoint_is_skipped_and_said(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    for step in (1, 2):
        save(tmp_path, step, filled(str(step)), keep=5)
    damage(tmp_path / "step-2")
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(found.skipped) == 1
    assert message in found.skipped[0]
    damage(tmp_path / "step-1")
    if name != "flipped":
        with pytest.raises(sc.ScantlingInputError, match="no checkpoint is whole"):
            newest(tmp_path)


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1, filled("1"), keep=1)

    def full(folder: Path) -> None:
        filled("2")(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(sc.ScantlingInputError, match=r"step-2: .*No space left on device; the older ones"):
        save(tmp_path, 2, full, keep=1)
    assert steps(tmp_path) == [1]
    assert fault_of(tmp_path / "step-1") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_step_that_is_written_again_replaces_its_old_one(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(whole_folder, "_exchanged", lambda *_: False)
    save(tmp_path, 1, filled("1"), keep=1)
    save(tmp_path, 1, filled("3"), keep=1)
    assert (tmp_path / "step-1" / "weights").read_text() == "3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_an_old_one_goes_only_after_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, filled("1"), keep=1)
    monkeypatch.setattr(checkpoints, "put", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "input/output error")))
    with pytest.raises(sc.ScantlingInputError, match="input/output error"):
        save(tmp_path, 2, filled("2"), keep=1)
    assert steps(tmp_path) == [1]


def test_leftovers_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, filled("1"), keep=1)
    for name in (".tmp-step-2-77", "..tmp-step-2-77.saving-ab", ".old-step-0-77"):
        (tmp_path / name).mkdir()
    (tmp_path / ".latest-77").symlink_to("step-1")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def _hold(run: Path, answer: multiprocessing.queues.Queue[str]) -> None:  # type: ignore[name-defined]
    try:
        with held(run):
            answer.put("held")
    except sc.ScantlingInputError as error:
        answer.put(str(error))


def test_two_processes_do_not_train_into_one_folder(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    with held(tmp_path):
        other = spawn.Process(target=_hold, args=(tmp_path, answer))
        other.start()
        assert "another process trains into this folder" in answer.get(timeout=60)
        other.join()
    with held(tmp_path):
        pass
