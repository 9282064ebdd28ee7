"""A llama.cpp of one's own build: a stand-in of its program, which answers with times that are known."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from scantling.benches.llama_cpp import LlamaCpp, cores
from scantling.benches.plan import Load
from scantling.benches.resident import most_resident
from scantling.errors import ScantlingInputError

SERVER = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pathlib.Path(__file__).with_name("asked.json").write_text(json.dumps(asked))
        rows = [{"timings": {"prompt_ms": 40.0 + row, "predicted_ms": 250.0}} for row in range(len(asked["prompt"]))]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(rows).encode())

    def log_message(self, *words):
        pass

if "--help" in sys.argv:
    print(pathlib.Path(__file__).with_name("help.txt").read_text())
    sys.exit()
pathlib.Path(__file__).with_name("options.json").write_text(json.dumps(sys.argv[1:]))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As much of a GGUF file as is looked at before the program is."""
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tensor("token_embd.weight", np.zeros((131, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, and nothing else, on PATH."""
    file = folder / "llama-server"
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(("spoken", "wanted"), [("--load-mode MODE", "--load-mode none"), ("--mmap", "--no-mmap")])
def test_its_times_are_taken(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoken: str, wanted: str
) -> None:
    """Two rows of 10 steps, each in 250 ms by its clock: 80 tokens a second together."""
    program(tmp_path, SERVER, monkeypatch)
    (tmp_path / "help.txt").write_text(spoken)
    peer = LlamaCpp(file, 131, built=True)
    found = peer.run(Load(2, 5, 10))
    assert (found["first_seconds"], found["made"]) == (0.041, 20)
    assert found["decode_seconds"] == pytest.approx(20 / 80)
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert [len(row) for row in asked["prompt"]] == [5, 5]
    assert (asked["n_predict"], asked["cache_prompt"], asked["ignore_eos"]) == (11, False, True)
    options = json.loads((tmp_path / "options.json").read_text())
    given = dict(itertools.pairwise(options))
    assert (given["-m"], given["-np"], given["-t"], given["-fa"]) == (file, "2", str(cores()), "on")
    assert f" {wanted} " in f" {' '.join(options)} "
    process = peer.process
    assert process is not None
    assert most_resident(process) != most_resident()
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit('unknown model architecture')", "does not load this model: unknown model architecture"),
        (None, "llama-server is not on PATH; build llama.cpp"),
    ],
)
def test_what_does_not_run_says_why(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        program(tmp_path, text, monkeypatch)
    with pytest.raises(ScantlingInputError, match=message):
        LlamaCpp(file, 131, built=True).run(Load(1, 5, 2))
