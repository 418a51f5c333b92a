"""The program `stio`: how its commands end, whatever comes between, and what shells and terminals see of it."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from commands import interrupted, large_imports, piped, refused, run, terminal, write_sharded
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import run_python

import stio as package
from stio.cli import verify as cli_verify
from stio.cli.interrupts import starting
from stio.cli.main import main
from stio.cli.output import explained, rate_text
from stio.errors import StioError

COMMANDS = sorted(main.commands)
ERRORS = [
    kind for name in package.__all__ if isinstance(kind := getattr(package, name), type) and issubclass(kind, StioError)
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.ones(3, 4), "b": torch.arange(5)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


# Calls.


def test_the_commands() -> None:
    assert COMMANDS == ["bench", "convert", "diff", "gc", "inspect", "load", "pull", "verify"]
    for name in COMMANDS:
        options = {option for parameter in main.commands[name].params for option in parameter.opts}
        assert "--json" in options
        assert run(name, "--help").stdout.startswith(f"Usage: stio {name} ")
        assert "\\" not in run(name, "--help").stdout
        assert not main.commands[name].get_short_help_str().endswith("...")


def test_wrong_calls_are_one_sentence_and_status_2() -> None:
    assert refused("inspect") == "Error: Missing argument 'PATH' (see `stio inspect --help`)"
    assert "(see `stio inspect --help`)" in refused("inspect", "x", "--no-such-option")
    assert "(see `stio --help`)" in refused("no-such-command")
    assert "(see `stio load --help`)" in refused("load", "x", "--memory", "much")
    assert run("--version").stdout == f"stio, version {package.__version__} ({package.stats().engine})\n"
    assert "Commands:" in run(status=2).output
    assert "\\" not in run("--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_path_is_told(name: str) -> None:
    arguments = {"diff": ["", "x"], "convert": ["", "x"]}.get(name, [""])
    assert "the path is empty; give a file or a directory" in refused(name, *arguments)


@pytest.mark.parametrize("name", ["convert", "diff", "gc", "inspect", "load", "verify"])
def test_a_missing_path_is_told(name: str, tmp_path: Path) -> None:
    absent = tmp_path / "none" / "absent"
    arguments = {"diff": [absent, absent], "convert": [absent, tmp_path / "d"]}.get(name, [absent])
    assert refused(name, *arguments).endswith("; check the path")
    assert not (tmp_path / "d").exists()


def test_importing_the_program_costs_no_torch() -> None:
    assert large_imports(sys.executable, "--help") == []  # a real interpreter without torch: what the program imports


@pytest.mark.matrix
@pytest.mark.parametrize("missing", ["click", "tqdm"])
def test_missing_extras_are_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import stio.__main__"
    # A real interpreter without torch: what the program imports.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "stio: the command line needs click and tqdm: pip install 'stio-torch[cli]'\n"


# Errors.


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_says_what_to_do(kind: type[StioError]) -> None:
    text = explained(kind("it\x1b[2J broke", path="a\nb"))
    assert text.isprintable()
    assert kind in (
        package.StioError,
        package.ClosedError,
        package.MismatchError,
        package.SliceError,
        package.RankError,
        package.SaveInProgressError,
        package.WarmStartError,  # no command makes one
    ) or re.search(r"broke; .{8,}", text)
    assert explained(kind("it broke; mend it", path="a")) == "a: it broke; mend it"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "not enough memory; free some"),
        (PermissionError(13, "Permission denied", "/x\ny"), "/x\\ny: Permission denied; look at"),
        (OSError("odd"), "odd; look at"),
        (OSError(5, "Input/output error", 7), "Error: Input/output error; look at"),
    ],
)
def test_errors_of_the_system(monkeypatch: pytest.MonkeyPatch, error: Exception, text: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli_verify, "examine", fail)
    assert text in refused("verify", "x")


def test_a_bug_is_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verify, "examine", lambda *_, **__: 1 / 0)
    done = run("verify", "x", status=1)
    assert isinstance(done.exception, ZeroDivisionError)


def test_a_bug_is_no_damage_and_no_difference(program_zygote: Zygote, model: Path) -> None:
    code = """
from stio.cli import diff
diff.compare = lambda *_, **__: 1 / 0
from stio.__main__ import main
main()
"""
    done = run_python(code, "diff", model, model, python=program_zygote.python)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_directory_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").mkdir()
    assert "give a directory with .safetensors files" in refused("inspect", tmp_path / "m.safetensors")


BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
"""The environment of a shell. Unbuffered, the interpreter itself forgets what a write did not take."""


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [["inspect", "m.safetensors"], ["inspect", "--help"], ["--help"], ["--version"]])
@pytest.mark.parametrize("environment", [BUFFERED, BUFFERED | {"PYTHONUNBUFFERED": "1"}])
def test_a_full_disk(program: list[str], model: Path, arguments: list[str], environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*program, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, cwd=model.parent
        )
    assert done.returncode == 2
    assert done.stderr == "Error: No space left on device; look at the path, its permissions and the disk\n"


def test_a_full_disk_for_errors(program: list[str], model: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*program, "inspect", "absent"], stdout=subprocess.PIPE, stderr=full, env=BUFFERED, cwd=model.parent
        )
    assert (done.returncode, done.stdout) == (2, b"")


def test_an_error_names_the_path_as_it_is(tmp_path: Path) -> None:
    assert refused("inspect", tmp_path / "a  b").startswith(f"Error: {tmp_path}/a  b: there is no such file")


@pytest.mark.slow
def test_warnings_are_a_line_each(zygote: Zygote, tmp_path: Path) -> None:
    """A pickle of another protocol than torch's earns a warning of torch's, which is no use here."""
    (tmp_path / "raw.pkl").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    program = "import warnings; warnings.resetwarnings(); from stio.__main__ import main; main()"
    done = zygote.run(program, "convert", tmp_path / "raw.pkl", tmp_path / "d")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, line.startswith("Error: ")) == (2, "", True)
    torch.save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    done = zygote.run(program, "convert", tmp_path / "module.pt", tmp_path / "d.safetensors", "--trust-pickle")
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: ")
    assert "can run any code" in line


def test_warnings_of_the_log_are_escaped_lines(program: list[str], tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "\x1b[2J")
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": 24', '"total_size": 25'))
    done = piped(program, "inspect", folder)
    assert done.returncode == 0
    shown = str(folder).replace("\x1b", r"\x1b")
    assert done.stderr == f"warning: {shown}: the index claims total_size 25, the shards hold 24 bytes\n"


# Pipes and terminals.


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(program: list[str], tmp_path: Path) -> None:
    save_file({f"tensor.{k:05}": torch.zeros(1) for k in range(5000)}, tmp_path / "m.safetensors")
    with subprocess.Popen(
        [*program, "inspect", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BUFFERED
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [["inspect", "m.safetensors"], ["inspect", "--help"], ["--help"], ["--version"]])
@pytest.mark.parametrize("shell", ['exec "$@"', 'exec "$@" 2>&-'])
def test_a_pipe_that_is_closed_from_the_start(
    program: list[str], model: Path, arguments: list[str], shell: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *program, *arguments],
        stdout=writer, stderr=subprocess.PIPE, env=BUFFERED, cwd=model.parent,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_no_standard_output_at_all(program: list[str], model: Path) -> None:
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *program, "inspect", str(model)], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_bars_obey_terminals(program: list[str], model: Path) -> None:
    arguments = ("verify", model)
    drawn = terminal(program, *arguments)
    assert "verifying" in drawn
    for no_bar in (terminal(program, *arguments, "--no-progress"), terminal(program, *arguments, TERM="dumb")):
        assert "verifying" not in no_bar
        assert "\x1b" not in no_bar
    assert piped(program, *arguments, FORCE_COLOR="1").stderr == ""


def complete(program: list[str], *words: str) -> list[str]:
    environment = {"_STIO_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return piped(program, **environment).stdout.splitlines()


@pytest.mark.slow
def test_completion(program: list[str]) -> None:
    assert complete(program, "stio", "in") == ["plain,inspect"]
    assert complete(program, "stio", "diff", "--head") == ["plain,--header-only"]
    assert complete(program, "stio", "load", "--memory", "l") == ["plain,lazy"]
    assert complete(program, "stio", "inspect", "m") == ["file,m"]
    script = piped(program, _STIO_COMPLETE="zsh_source")
    assert (script.returncode, "compdef" in script.stdout) == (0, True)
    for shell in ("bash", "zsh", "fish"):
        assert f"_STIO_COMPLETE={shell}_source stio" in run("--help").stdout


@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash")
def test_the_line_for_bash_works(program: list[str]) -> None:
    line = f'stio() {{ "{program[0]}" -m stio "$@"; }}; eval "$(_STIO_COMPLETE=bash_source stio)"; complete -p stio'
    done = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.split() == ["complete", "-o", "nosort", "-F", "_stio_completion", "stio"]


# Ctrl-C.


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_verify, "examine", press)
    assert run("verify", "x", status=130).stderr == "\nInterrupted.\n"


def test_a_second_ctrl_c_while_the_program_ends(program_zygote: Zygote) -> None:
    code = """
from stio import __main__ as program
def press():
    raise KeyboardInterrupt
program.command = press
program.main()
"""
    done = run_python(code, python=program_zygote.python)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.matrix
@pytest.mark.parametrize("module", ["click", "tqdm", "stio.storage.checkpoint.open"])
def test_ctrl_c_while_the_program_starts(module: str) -> None:
    code = f"""
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
import stio.__main__
print("alive")
"""
    # A real interpreter without torch: how the program starts.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("command", ["load", "convert"])
def test_ctrl_c_while_torch_is_imported(command: str, program_zygote: Zygote, model: Path, tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from stio.__main__ import main
sys.argv[1:] = {[command, str(model), *([str(tmp_path / "d")] if command == "convert" else [])]!r}
main()
"""
    done = run_python(code, python=program_zygote.python)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert os.listdir(tmp_path) == [model.name]


def test_the_program_dies_of_the_signal(zygote: Zygote, tmp_path: Path) -> None:
    """So that a shell's loop around it ends too. The file is sparse: 32 GiB are hours to no disk, and seconds to read."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [32 << 30], "data_offsets": [0, 32 << 30]}}).encode()
    for name in ("a", "b"):
        with open(tmp_path / f"{name}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (32 << 30))
    begun = tmp_path / "begun"
    code = f"""
import sys
from pathlib import Path
from stio.cli.output import Bar
Bar.advance = lambda *_: Path({str(begun)!r}).touch()
from stio.__main__ import main
main()
"""
    program = [str(zygote.python), "-c", code]
    files = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert interrupted(program, "diff", *files, when=begun.exists) == (-signal.SIGINT, "", "\nInterrupted.\n")


def test_ctrl_c_after_the_work_changes_nothing(program_zygote: Zygote, model: Path) -> None:
    code = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from stio.__main__ import main
main()
"""
    done = run_python(code, "inspect", model, python=program_zygote.python)
    assert (done.returncode, done.stderr) == (0, "")


def test_starting_leaves_other_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with starting():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(ValueError, match="odd"), starting():
            raise ValueError("odd")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with starting():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_starting_on_another_thread_does_nothing() -> None:
    seen: list[object] = []

    def start() -> None:
        with starting():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


# Texts.


def test_rates() -> None:
    assert rate_text(3_000_000_000, 2) == "1.5 GB/s"
    assert rate_text(0, 0) == "0 B/s"
