"""examples/demo.py in a small form: it measures, says what it found, draws it, and leaves nothing."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import eventually

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
SMALL = ["--size-mb", "8", "--rounds", "2", "--save-mb", "1", "--kills", "2", "--kill-seconds", "9"]


@pytest.fixture(scope="module", autouse=True)
def examples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield


def module(name: str) -> Any:
    return import_module(name)


def command(python: str | Path, folder: Path, *arguments: str) -> list[str]:
    (folder / "files").mkdir()
    options = ["--dir", str(folder / "files"), "--picture", str(folder / "new" / "demo.svg")]
    return [str(python), str(ROOT / "examples" / "demo.py"), *options, *arguments]


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, kind: str) -> list[str]:
    return [element.get("d") or "" for element in root.iter(f"{SVG}path") if (element.get("class") or "") == kind]


# The whole program.


@pytest.mark.costly("processes of its own")
def test_demo(zygote: Zygote, disk_path: Path) -> None:
    done = subprocess.run(command(zygote.python, disk_path, *SMALL), cwd=disk_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    loads, saves = module("demo_server").LOADS, module("demo_kills").SAVES
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= max(80, len(f"picture: {disk_path}/new/demo.svg"))
    for name in loads:
        (row,) = [line for line in lines if line.startswith(f"   {name} ")]
        figures = row.removeprefix(f"   {name}")
        assert re.fullmatch(r"( +[\d.]+ m?s){2} +[\d.]+ \([\d.]+-[\d.]+\) s", figures), row
    for name in saves:
        (row,) = [line for line in lines if line.startswith(f"   {name} ")]
        kills, old, new, broken, _, unit = row.removeprefix(f"   {name}").split()
        assert unit == "MB"
        assert int(kills) == int(old) + int(new) + int(broken) >= 1
        assert broken == "0" or not name.startswith("stio")
    assert "are bit-equal to those of safetensors" in done.stdout
    assert re.search(r"of \d in turn.*\n\n   stio's longest wait: \d.+\n   stio's load: \d", done.stdout)
    root = ElementTree.parse(disk_path / "new" / "demo.svg").getroot()
    assert len(paths(root, "dots stio")) == 1
    assert len(paths(root, "dots other")) == 2
    assert all(each.count("M") > 20 for each in paths(root, "dots stio") + paths(root, "dots other"))
    assert list((disk_path / "files").iterdir()) == []


@pytest.mark.slow
def test_a_file_of_the_user_is_loaded_and_stays(zygote: Zygote, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    kills = module("demo_kills")
    save_file(kills.tensors_of(1, 1 << 20), path)
    before = path.read_bytes()
    done = subprocess.run(
        [*command(zygote.python, tmp_path, *SMALL), "--kills", "1", "--rounds", "1", str(path)], cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "All 16 tensors" in done.stdout
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "number", "status"),
    [
        ("1. ", signal.SIGINT, 130),
        pytest.param("2. ", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("1. ", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("2. ", signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_no_files_and_no_processes(tmp_path: Path, part: str, number: int, status: int) -> None:
    arguments = [*SMALL, "--kill-seconds", "60", "--kills", "10000", "--rounds", "10000" if part == "1. " else "1"]
    demo = subprocess.Popen(  # a real interpreter: its process group
        command(sys.executable, tmp_path, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        assert any(line.startswith(part) for line in demo.stdout)
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does it
        else:
            demo.send_signal(number)
        _, errors = demo.communicate(timeout=60)
        assert (demo.returncode, errors) == (status, "")
        assert list((tmp_path / "files").iterdir()) == []
        assert eventually(lambda: not has_members(demo.pid), 20)
    finally:
        if has_members(demo.pid):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()


def has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def parsed(*arguments: str) -> argparse.Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["demo.py", *arguments])
        options: argparse.Namespace = module("demo").arguments()
    return options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--save-mb", "0"], "argument --save-mb: it takes a whole number, 1 or more, not 0"),
        (["--size-mb", "-5"], "argument --size-mb: it takes a whole number, 1 or more, not -5"),
        (["--kills", "0"], "argument --kills: "),
        (["--rounds", "many"], "argument --rounds: "),
        (["--kill-seconds", "nan"], "argument --kill-seconds: it takes a number of seconds, not nan"),
        (["--kill-seconds", "-1"], "argument --kill-seconds: "),
        (["nowhere.safetensors"], "argument path: there is no such file: nowhere.safetensors"),
    ],
)
def test_wrong_calls(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parsed(*arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    demo = module("demo")
    (tmp_path / "demo.svg").mkdir()
    with pytest.raises(SystemExit, match="choose another file with --picture"):
        demo.main(parsed("--picture", str(tmp_path / "demo.svg"), "--dir", str(tmp_path)))
    demo.require_writable(tmp_path / "new" / "demo.svg")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_goes_wrong_is_a_sentence(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    done = subprocess.run(
        [*command(zygote.python, tmp_path, *SMALL), str(tmp_path / "bad.safetensors")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith(f"the demo cannot go on: {tmp_path}/bad.safetensors: ")
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_a_file_in_memory_is_not_called_one_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the demo's own files are."""
    demo = module("demo")
    monkeypatch.setattr(demo, "disk_directory", lambda _: (tmp_path, True))
    monkeypatch.setattr(
        demo, "kill_all", lambda *_: {name: killed("old", "new") for name in module("demo_kills").SAVES}
    )
    monkeypatch.setattr(demo, "measure_loads", lambda *_: [rounds(1.0)])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "m.safetensors"
        save_file(module("demo_kills").tensors_of(1, 1 << 16), path)
        assert demo.main(parsed(str(path), "--picture", str(tmp_path / "demo.svg"), "--dir", str(tmp_path))) == 0
    said = capsys.readouterr().out
    assert f"files in {folder} stay in memory" in said
    assert "0 MB from memory" in said


def test_a_broken_checkpoint_of_stio_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = module("demo")
    monkeypatch.setattr(demo, "import_ahead", lambda: None)  # it starts an interpreter, which nothing here needs
    found = {name: killed("old", "mixed") for name in module("demo_kills").SAVES}
    monkeypatch.setattr(demo, "kill_all", lambda *_: found)
    monkeypatch.setattr(demo, "measure_loads", lambda *_: [rounds(1.0), rounds(3.0), rounds(2.0)])
    options = argparse.Namespace(dir=tmp_path, path=None, size_mb=1, rounds=3, save_mb=1, kills=2, kill_seconds=0.0)
    options.picture = tmp_path / "demo.svg"
    assert demo.main(options) == 1
    assert "no answer for 2.00 s" in options.picture.read_text(), "the middle round is drawn"
    assert "1 old, 1 neither" in options.picture.read_text()
    found.update({name: killed("old", "new") for name in found if name.startswith("stio")})
    assert demo.main(options) == 0


def test_what_is_worse_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    demo = module("demo")
    demo.compare("A", [0.5, 0.25, 3.0])
    demo.compare("A", [1.5])
    said = re.findall(r"stio's A: (.+)", capsys.readouterr().out)
    where = "x load_file's in a thread"
    assert said == [f"0.50 {where} (0.25 to 3.00)", f"1.50 {where} (1.50 to 1.50), WORSE"]


def test_a_wrong_bit_is_noticed() -> None:
    import torch

    with pytest.raises(SystemExit, match="w differs"):
        module("demo").prove_equal({"w": torch.tensor(0.0)}, {"w": torch.tensor(-0.0)})


# Parts.


def rounds(seconds: float) -> dict[str, Any]:
    """Return a round with a pause during its load, and an answer each 10 ms before and after."""
    server = module("demo_server")
    times = [k / 100 for k in range(-25, 1)] + [seconds + k / 100 for k in range(26)]
    answers = [(time - 0.001, time) for time in times]
    return {name: server.Round(seconds, answers) for name in server.LOADS}


def killed(*left: str) -> Any:
    kills = module("demo_kills")
    return kills.Killed([kills.Kill(0.01 * k, each) for k, each in enumerate(left)])


def test_requests_in_progress_during_the_load_count_and_the_next_one() -> None:
    one = module("demo_server").Round(1.0, [(-0.2, -0.1), (-0.1, 0.5), (0.5, 0.75), (0.9, 1.5), (1.0, 1.2), (1.1, 1.2)])
    assert one.waits() == pytest.approx([0.6, 0.25, 0.6, 0.2])


def test_what_a_kill_left(tmp_path: Path) -> None:
    kills = module("demo_kills")

    def look() -> str:
        return str(kills.look(tmp_path, 5))

    assert look() == "unreadable"
    for generation, left in ((5, "new"), (4, "old"), (3, "lost"), (6, "lost")):
        kills.stio_file(kills.tensors_of(generation, 1 << 16), tmp_path)
        assert look() == left
    mixed = kills.tensors_of(5, 1 << 16) | {"layer.3": kills.tensors_of(4, 1 << 16)["layer.3"]}
    kills.stio_file(mixed, tmp_path)
    assert look() == "mixed"
    mixed = kills.tensors_of(5, 1 << 16)
    mixed["layer.3"][7] = 4
    kills.stio_file(mixed, tmp_path)
    assert look() == "mixed"
    del mixed["layer.3"]
    kills.stio_file(mixed, tmp_path)
    assert look() == "unreadable"
    os.truncate(tmp_path / kills.FILE, 1 << 15)
    assert look() == "unreadable"


@pytest.mark.parametrize("save", ["hub_shards", "stio_shards"])
def test_what_a_kill_left_of_shards(tmp_path: Path, save: str) -> None:
    kills = module("demo_kills")
    getattr(kills, save)(kills.tensors_of(5, 1 << 16), tmp_path)
    shards = sorted(kills.files_of(tmp_path))
    assert len(shards) == kills.NUM_SHARDS
    assert kills.look(tmp_path, 5) == "new"
    save_file(
        {f"layer.{k}": tensor for k, tensor in enumerate(list(kills.tensors_of(4, 1 << 16).values())[:1])}, shards[0]
    )
    assert kills.look(tmp_path, 5) in ("mixed", "unreadable")
    shards[0].unlink()
    assert kills.look(tmp_path, 5) == "unreadable"


def test_files_that_are_not_in_memory(tmp_path: Path) -> None:
    machine = module("demo_machine")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert machine.resident_fraction(path) == 1.0
    place, is_disk = machine.disk_directory([tmp_path])
    assert place == tmp_path
    assert machine.evict(path) is is_disk
    assert (machine.resident_fraction(path) < 0.01) is is_disk


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_a_directory_in_memory_is_the_last_choice(tmp_path: Path) -> None:
    machine = module("demo_machine")
    memory = Path("/dev/shm")
    assert machine.disk_directory([memory]) == (memory, False)
    if machine.disk_directory([tmp_path])[1]:
        assert machine.disk_directory([memory, tmp_path]) == (tmp_path, True)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="choose a directory with --dir"):
        module("demo_machine").disk_directory([tmp_path / "file"])


# The picture.


def test_the_picture_shows_pauses_and_kills() -> None:
    picture = module("demo_picture")
    kills = {"safetensors: <b>": killed("old", "new", "unreadable"), "stio: b": killed("old", "old", "new")}
    kills["stio: b"].left_over = {Path("a"): 2_000_000, Path("b"): 1_000_000}
    text = picture.draw(rounds(1.0), kills, loaded="8 MB & more", machine="2 processors")
    root = ElementTree.fromstring(text)
    assert (root.get("width"), root.get("viewBox")) == ("900", f"0 0 900 {root.get('height')}")
    assert [element.tag for element in list(root)[:2]] == [f"{SVG}title", f"{SVG}desc"]
    assert all(sentence in (root[1].text or "") for sentence in ("longest wait 1.0 ms", "1 old, 1 new, 1 neither"))
    assert texts(root).count("no answer for 1.00 s") == 3
    assert texts(root).count("1 old, 1 new, 1 neither") == 1
    assert "2 old, 1 new; 3 MB left over" in texts(root)
    circles = [element.get("class") for element in root.iter(f"{SVG}circle")]
    legend = 1
    assert (circles.count("old"), circles.count("new"), len(paths(root, "broken"))) == (
        3 + legend,
        2 + legend,
        1 + legend,
    )
    assert min(float(size) for size in re.findall(r"(?:font:|font-size:)([\d.]+)px", text)) >= 12
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|<script|<image", text), "it fetches nothing"


@pytest.mark.parametrize(
    ("begin", "end", "labels"), [(-0.25, 1.6, "0.0 0.5"), (0.0, 0.06, "0.00 0.01"), (0, 30, "0 5")]
)
def test_axes_have_round_numbers(begin: float, end: float, labels: str) -> None:
    root = ElementTree.fromstring(
        f'<svg xmlns="{SVG[1:-1]}">{module("demo_picture").draw_axis(begin, end, 0, "s")}</svg>'
    )
    assert labels in " ".join(texts(root))
    assert 4 <= len(texts(root)) <= 11
