"""Checkpoints behind http addresses: what is asked for, what is sent, and servers that misbehave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.header_files import header_folder, shapes_of_config
from tests.checkpoint.web import Served, served
from tests.conftest import DATA, GOLDEN

from scantling.checkpoint import remote
from scantling.checkpoint.find import default_model
from scantling.checkpoint.remote import FIRST, Address
from scantling.errors import ScantlingInputError
from scantling.inspection import Inspection, inspect

TINY = GOLDEN / "tiny"


def assert_same(far: Inspection, near: Inspection) -> None:
    """All but the places is the same; rows of another machine are not looked at."""
    assert far.card is not None
    assert near.card is not None
    assert replace_name(far.card) == replace_name(near.card)
    assert (far.lines, far.total, far.by_part, far.kinds) == (near.lines, near.total, near.by_part, near.kinds)
    assert [f.code for f in far.findings] == [f.code for f in near.findings]


def replace_name(card: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(card, name="model")


@pytest.mark.parametrize("name", ["llama-gqa", "bert", "t5", "deepseek-v3", "modernbert"])
@pytest.mark.parametrize("end", ["", "/", "/model.safetensors"])
def test_a_folder_and_a_file(name: str, end: str) -> None:
    with served(TINY) as server:
        assert_same(inspect(server.address + name + end), inspect(TINY / name))


def test_shards_are_read_by_their_first_bytes(tmp_path: Path) -> None:
    """140 GB behind the address; what is sent is a header of each shard, the index and the config."""
    config = GOLDEN / "configs" / "llama-2-70b.json"
    folder = header_folder(tmp_path / "model", shapes_of_config(config), config)
    with served(folder) as server:
        far = inspect(server.address)
    assert_same(far, inspect(folder))
    assert far.gathered.nbytes > 137 * 10**9
    shards = [path for path, _ in server.asked if path.endswith(".safetensors")]
    assert set(shards) == {*(path.name for path in folder.glob("*.safetensors")), "model.safetensors"}
    weights = [ask for path, ask in server.asked if path.startswith("model-")]
    assert set(weights) == {f"bytes=0-{FIRST - 1}"} | {ask for ask in weights if len(server.asked) < 80}
    assert server.sent < 40 * FIRST


def test_gguf_is_fetched_as_far_as_its_header_goes() -> None:
    path = default_model()
    with served(path.parent) as server:
        far = inspect(server.address + path.name)
    near = inspect(path)
    assert (far.total, far.kinds, far.card) == (near.total, near.kinds, near.card)
    assert server.sent < 4 * 2**20 < path.stat().st_size
    assert all(ask.startswith("bytes=") for _, ask in server.asked)
    small = DATA / "checkpoints" / "gguf-llama-gqa"
    with served(small) as server:
        assert inspect(server.address + "model.gguf").total == inspect(small / "model.gguf").total


def test_a_server_without_ranges_is_enough_for_small_headers() -> None:
    with served(TINY, ranges=False) as server:
        assert inspect(server.address + "llama-gqa").total == inspect(TINY / "llama-gqa").total
    path = default_model()
    sent_whole = pytest.raises(ScantlingInputError, match="sends whole files only")
    with served(path.parent, ranges=False) as server, sent_whole as caught:
        inspect(server.address + path.name)
    assert str(caught.value).startswith(server.address)


def test_findings_name_the_address(tmp_path: Path) -> None:
    """Small files are fetched into a folder of the moment; no message speaks of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    source = TINY / "llama-gqa"
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with served(tmp_path) as server:
        found = inspect(server.address + "model")
        assert [finding.code for finding in found.findings] == ["config_refused"]
        assert found.findings[0].message.startswith(f"{server.address}model/config.json: model_type is 'lama'")
        (folder / "config.json").write_text("{NaN")
        with pytest.raises(ScantlingInputError) as caught:
            inspect(server.address + "model")
    assert str(caught.value).startswith(f"{server.address}model/config.json: not JSON")


def test_missing_shards_of_another_machine() -> None:
    with served(DATA / "checkpoints") as server:
        found = inspect(server.address + "shards-one-missing")
    assert [finding.code for finding in found.findings] == ["shard_missing"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "has neither model.safetensors, nor"),
        ("absent.safetensors", "there is no such file"),
        ("absent.gguf", "there is no such file"),
        ("weights.bin", "has neither"),
    ],
)
def test_what_is_not_there(path: str, words: str, tmp_path: Path) -> None:
    with served(tmp_path) as server, pytest.raises(ScantlingInputError, match=words) as caught:
        inspect(server.address + path)
    assert str(caught.value).startswith(server.address)


def status(code: int) -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_error(code)
        return True

    return answer


def says(range_text: str, length: int = 8, body: bytes = b"") -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Range", range_text)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True
        return True

    return answer


def goes_to(place: str) -> Callable[[BaseHTTPRequestHandler], bool]:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(302)
        handler.send_header("Location", place)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return answer


ODD: dict[str, tuple[Callable[[BaseHTTPRequestHandler], bool], str]] = {
    "a login is asked for": (status(401), "answers 401"),
    "forbidden": (status(403), "answers 403"),
    "an error of its own": (status(500), "answers 500"),
    "a range that was not asked for": (says("bytes 5-12/100"), "answers with the range"),
    "a range beyond the file": (says("bytes 0-200/100"), "answers with the range"),
    "no numbers": (says("bytes */*"), "answers with the range"),
    "a size of 40 digits": (says("bytes 0-7/" + "9" * 40), "answers with the range"),
    "a size of 2^62 and a header as long": (
        says(f"bytes 0-7/{2**62}", 8, (2**61).to_bytes(8, "little")),
        "answers with the range",
    ),
    "it stops early": (says("bytes 0-4095/5000", 4096, b"\x10"), "answers with the range"),
    "an empty file": (says("bytes 0-0/1", 1, b"x"), "fewer than the 8"),
    "to a file": (goes_to("file:///etc/passwd"), "answers 302|cannot be fetched"),
    "to itself": (goes_to("/model.safetensors"), "redirect"),
}


@pytest.mark.parametrize(("odd", "words"), ODD.values(), ids=ODD.keys())
def test_a_server_that_misbehaves_gets_one_sentence(
    odd: Callable[[BaseHTTPRequestHandler], bool], words: str, tmp_path: Path
) -> None:
    with served(tmp_path, odd=odd) as server, pytest.raises(ScantlingInputError, match=words) as caught:
        inspect(server.address + "model.safetensors")
    message = str(caught.value)
    assert message.startswith(server.address)
    assert "\n" not in message
    assert len(message) < 500


def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    gone = threading.Event()

    def silent(handler: BaseHTTPRequestHandler) -> bool:
        gone.wait(20)
        return True

    with served(tmp_path, odd=silent) as server:
        with pytest.raises(ScantlingInputError, match="timed out"):
            inspect(server.address + "model.safetensors")
        gone.set()


def test_nobody_listens() -> None:
    with served(DATA) as server:
        address = server.address
    with pytest.raises(ScantlingInputError, match=r"cannot be fetched: .*refused"):
        inspect(address + "model.safetensors")


@pytest.mark.parametrize("address", ["http://", "https:///path/model.safetensors"])
def test_no_address(address: str) -> None:
    with pytest.raises(ScantlingInputError, match="must begin with http"):
        inspect(address)


def test_credentials_stay_with_their_host() -> None:
    """A redirect to another host is followed without them; a redirect within the host keeps them."""
    with served(TINY / "llama-gqa") as other:

        def elsewhere(handler: BaseHTTPRequestHandler) -> bool:
            return goes_to(other.address + handler.path.lstrip("/"))(handler)

        with served(TINY, odd=elsewhere) as first:
            address = Address(first.address + "model.safetensors", {"Authorization": "Bearer secret"})
            file, size = address.opened()
            file.close()
    assert size == (TINY / "llama-gqa" / "model.safetensors").stat().st_size
    assert first.headers[0]["authorization"] == "Bearer secret"
    assert all("authorization" not in headers for headers in other.headers)
    assert other.headers[0]["range"] == f"bytes=0-{FIRST - 1}"


def test_no_password_in_messages() -> None:
    with served(DATA) as server, pytest.raises(ScantlingInputError) as caught:
        inspect(server.address.replace("://", "://me:secret@") + "absent.safetensors?token=secret")
    assert "secret" not in str(caught.value)


def test_a_repository_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the address that huggingface_hub makes of it, with the token that it sends."""
    hub = pytest.importorskip("huggingface_hub")
    asked: list[tuple[str, str | None]] = []

    def serve(server: Served) -> None:
        def url(repo: str, file: str, *, revision: str | None = None) -> str:
            asked.append((repo, revision))
            return f"{server.address}{repo.partition('/')[2]}/{file}"

        monkeypatch.setattr(hub, "hf_hub_url", url)
        monkeypatch.setattr(hub.utils, "build_hf_headers", lambda: {"authorization": "Bearer token"})

    with served(TINY) as server:
        serve(server)
        found = inspect("someone/qwen3", revision="main")
    assert_same(found, inspect(TINY / "qwen3"))
    assert asked == [("someone/qwen3", "main")]
    assert {headers.get("authorization") for headers in server.headers} == {"Bearer token"}
    assert found.card is not None
    assert found.card.name == "qwen3"


def test_the_address_that_the_hub_library_really_makes() -> None:
    pytest.importorskip("huggingface_hub")
    from scantling.checkpoint.inspect.elsewhere import hub_address, name_of

    address = hub_address("someone/model-7B", "v1")
    assert str(address).endswith("/someone/model-7B/resolve/v1/")
    assert name_of(address) == "model-7B"
    with pytest.raises(ScantlingInputError, match="no hub repository"):
        hub_address("someone/..--bad", None)


def test_a_hash_of_another_machines_file_is_refused() -> None:
    with served(TINY) as server, pytest.raises(ScantlingInputError, match="--hash"):
        inspect(server.address + "llama-gqa", hashes=True)


def test_a_revision_goes_with_a_hub_id() -> None:
    with pytest.raises(ScantlingInputError, match="--revision goes with a hub id"):
        inspect(TINY / "llama-gqa", revision="main")


def test_replacing_keeps_the_findings_type() -> None:
    found = inspect(TINY / "llama-gqa")
    assert replace(found, findings=()).findings == ()
