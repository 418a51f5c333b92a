"""vLLM's engine for the CPU loads and reloads through stio: `make engines` runs these, since vLLM is large.

Each engine must answer as one that loads by vLLM's own loader: the same tokens, with the same probabilities.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import models

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("engine.py")
ANSWER = "answer: "
"""With this the script's answers begin."""

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: `make engines`"),
    pytest.mark.timeout(1200),
]

ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "stio",
}


class EngineError(Exception):
    """What a call of an engine raised."""


class Engines:
    """A process that starts engines, one at a time."""

    def __init__(self, log: Path, **environment: str) -> None:
        self._log = log
        self.environment = environment
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **ENVIRONMENT, **environment}, start_new_session=True,
            )  # fmt: skip
        self._printed = ""
        self._begin = 0
        self._runs = False

    @contextmanager
    def start(self, model: Path, load_format: str = "stio", **options: object) -> Iterator[Engines]:
        """Return a context in which an engine runs.

        Raises:
            RuntimeError: Another one runs. The new one would take its place, and the calls of both contexts.
        """
        if self._runs:
            raise RuntimeError("another engine runs")
        self._printed, self._begin = "", self._log.stat().st_size
        self.call("start", {"model": str(model), "load_format": load_format, **options})
        self._runs = True
        try:
            yield self
        finally:
            self._runs = False
            self.call("stop")

    def generate(self) -> object:
        return self.call("generate")

    def reload(self, path: Path) -> None:
        self.call("reload", str(path))

    def printed(self) -> str:
        """Return what was printed since the engine was started."""
        return self._printed + self._log.read_bytes()[self._begin :].decode(errors="replace")

    def call(self, command: str, *arguments: object) -> object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if not line.startswith(ANSWER):
                self._printed += line
                continue
            found = json.loads(line.removeprefix(ANSWER))
            if "error" in found:
                raise EngineError(found["error"] + self.printed())
            return found["result"]
        raise EngineError("the process ended: " + self.printed()[-3000:])

    def close(self) -> None:
        with self._process as process:  # waits for its end
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    made = Engines(tmp_path_factory.mktemp("engines") / "log")
    yield made
    made.close()


@pytest.fixture(scope="module")
def tensors():
    return models.weights_of(models.LLAMA)


@pytest.fixture(scope="module")
def expected(engines, tmp_path_factory, tensors):
    """Return the answers of engines that load by vLLM's own loader, by the name of a checkpoint and number of ranks."""
    answers: dict[object, object] = {}

    def answer(name, config=models.LLAMA, made=tensors, **options):
        key = (name, *options.items())
        if key not in answers:
            folder = tmp_path_factory.mktemp("expected")
            with engines.start(models.write(folder / "model", made, config), "safetensors", **options) as one:
                answers[key] = one.generate()
        return answers[key]

    return answer


@pytest.mark.parametrize("layout", ["file", "shards", "shards without an index", "files"])
def test_each_layout(engines, tmp_path, tensors, expected, layout):
    answers = expected("llama")
    model = models.write(tmp_path / "model", tensors, models.LLAMA, layout=layout)
    with engines.start(model) as one:
        assert one.generate() == answers
        assert "Loading weights took" in one.printed()


@pytest.mark.parametrize("extra", [{"memory": "copy", "limits": {"max_rank": 4}}, {"memory": "lazy"}], ids=str)
def test_options(engines, tmp_path, tensors, expected, extra):
    answers = expected("llama")
    extra = {**extra, "trace": str(tmp_path / "trace.json")}
    with engines.start(models.write(tmp_path / "model", tensors, models.LLAMA), model_loader_extra_config=extra) as one:
        assert one.generate() == answers
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_wrong_option_is_one_error(engines, tmp_path, tensors):
    model = models.write(tmp_path / "model", tensors, models.LLAMA)
    with pytest.raises(EngineError, match="load format 'stio' does not take colour in the extra configuration"):
        with engines.start(model, model_loader_extra_config={"colour": 1}):
            pass


def test_a_checkpoint_without_a_plain_weight_does_not_start(engines, tmp_path, tensors):
    """vLLM's own loader starts with it, and the engine answers with noise."""
    missing = "model.layers.1.mlp.down_proj.weight"
    part = {name: tensor for name, tensor in tensors.items() if name != missing}
    model = models.write(tmp_path / "model", part, models.LLAMA)
    with pytest.raises(EngineError, match=f"1 of the model's weights are not in the checkpoint: {missing}"):
        with engines.start(model):
            pass


def test_a_tied_model(engines, tmp_path, expected):
    config = {**models.LLAMA, "tie_word_embeddings": True}
    tensors = models.weights_of(config)
    answers = expected("tied", config, tensors)
    model = models.write(tmp_path / "model", tensors, config)
    with engines.start(model) as one:
        assert one.generate() == answers
        one.reload(model)
        assert one.generate() == answers


def test_w8a8(engines, tmp_path, expected):
    config = {**models.LLAMA, "quantization_config": models.W8A8}
    tensors = models.quantized(models.weights_of(config))
    answers = expected("w8a8", config, tensors)
    model = models.write(tmp_path / "model", tensors, config)
    with engines.start(model) as one:
        assert one.generate() == answers
        part = {name: tensor for name, tensor in tensors.items() if name != "model.layers.0.mlp.down_proj.weight_scale"}
        with pytest.raises(EngineError, match=r"1 weights .* are not in the checkpoint"):
            one.reload(models.write(tmp_path / "part", part, config))
        one.reload(model)
        assert one.generate() == answers


def test_a_rank_reads_its_experts(engines, tmp_path, expected):
    tensors = models.weights_of(models.MIXTRAL)
    model = models.write(tmp_path / "model", tensors, models.MIXTRAL)
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_ep_weight_filter": True}
    try:
        answers = expected("mixtral", models.MIXTRAL, tensors, **parallel)
    except EngineError:
        pytest.skip("vLLM's engine does not answer with experts on two ranks here, by its own loader")
    with engines.start(model, **parallel) as one:
        assert one.generate() == answers
        assert "loading 2/4 experts" in one.printed()
        one.reload(model)
        assert one.generate() == answers


def _spoil(directory: Path, kind: str) -> None:
    shard = directory / "model-00002-of-00003.safetensors"
    if kind == "missing":
        shard.unlink()
    elif kind in ("cut", "empty"):
        os.truncate(shard, 0 if kind == "empty" else shard.stat().st_size // 2)
    elif kind == "no directory":
        shutil.rmtree(directory)
    elif kind == "wrong shapes":
        config = {**models.LLAMA, "intermediate_size": 192}
        models.write(directory, models.weights_of(config), config)
    elif kind == "incomplete":
        part = models.weights_of(models.LLAMA)
        del part["model.layers.1.self_attn.k_proj.weight"]  # vLLM has it in one weight with two others
        models.write(directory, part, models.LLAMA)


def _fail_to_reload(one, directory, tensors, kind):
    spoiled = models.write(directory, tensors, models.LLAMA)
    _spoil(spoiled, kind)
    with pytest.raises(EngineError):
        one.reload(spoiled)
    shutil.rmtree(spoiled, ignore_errors=True)


TWO_RANKS = {"tensor_parallel_size": 2, "dtype": "float32"}
KINDS = ("missing", "cut", "empty", "no directory", "wrong shapes", "incomplete")


def test_a_failed_reload_leaves_the_engine_answering(engines, tmp_path, tensors, expected):
    changed = models.weights_of(models.LLAMA, seed=1)
    first, second = (models.write(tmp_path / f"{k}", one, models.LLAMA) for k, one in enumerate((tensors, changed)))
    answers = [expected("llama"), expected("changed", made=changed)]
    assert answers[0] != answers[1]
    with engines.start(first) as one:
        assert one.generate() == answers[0]
        for turn in range(10):
            now = turn % 2
            for kind in KINDS:
                _fail_to_reload(one, tmp_path / "spoiled", changed, kind)
                assert one.generate() == answers[now], kind
            one.reload((second, first)[now])
            assert one.generate() == answers[1 - now]


def test_two_ranks_answer_after_a_failed_reload_of_each_kind(engines, tmp_path, tensors, expected):
    """No more of them: vLLM 0.32 raises the error of one rank, and leaves the answers of the others in its queue. Each
    of the next calls then reports one of these errors. When the queue is full the engine ends, also after calls that
    fail before any loader, with vLLM's own load format."""
    answers = expected("llama", **TWO_RANKS)
    changed = models.weights_of(models.LLAMA, seed=1)
    with engines.start(models.write(tmp_path / "model", tensors, models.LLAMA), **TWO_RANKS) as one:
        assert one.generate() == answers
        for kind in KINDS:
            _fail_to_reload(one, tmp_path / "spoiled", changed, kind)
            assert one.generate() == answers, kind


def test_two_ranks_reload(engines, tmp_path, tensors, expected):
    changed = models.weights_of(models.LLAMA, seed=1)
    first, second = (models.write(tmp_path / f"{k}", one, models.LLAMA) for k, one in enumerate((tensors, changed)))
    answers = [expected("llama", **TWO_RANKS), expected("changed", made=changed, **TWO_RANKS)]
    with engines.start(first, **TWO_RANKS) as one:
        assert one.generate() == answers[0]
        for turn in range(4):
            one.reload((second, first)[turn % 2])
            assert one.generate() == answers[1 - turn % 2]


# Over HTTP.


class Server:
    def __init__(self, model: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        # As `vllm serve`, which vllm-cpu 0.32.0 cannot run: it asks for the version of a package of another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--load-format", "stio"]
        # With bfloat16 the attention of this release (cpu_attention_with_kv_cache) ended the worker by an illegal
        # instruction at the first completion, before any reload.
        command += ["--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--max-model-len", "64"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--no-enable-prefix-caching", "--served-model-name", "model", *options],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
            )  # fmt: skip

    def status(self, path: str, body: object = None, timeout: float = 60) -> tuple[int, str]:
        """Return the status of a response, 0 for none, and its text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def answer(self) -> str:
        body = {"model": "model", "prompt": "stio", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, text = self.status("/v1/completions", {**body, "logprobs": 1})
        assert status == 200, text
        (choice,) = json.loads(text)["choices"]
        return json.dumps([choice["text"], choice["logprobs"]["token_logprobs"]])

    def reload(self, path: Path) -> int:
        return self.status("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})[0]

    def wait(self) -> list[int]:
        """Wait until the server is healthy; return the statuses of its health until then."""
        seen: list[int] = []
        deadline = time.monotonic() + 480
        while not seen or seen[-1] != 200:
            assert self._process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            seen.append(self.status("/health", timeout=1)[0])
            time.sleep(0.1)
        return seen

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def test_a_server_answers_and_reloads(tmp_path, tensors):
    changed = models.weights_of(models.LLAMA, seed=1)
    first, second = (models.write(tmp_path / f"{k}", one, models.LLAMA) for k, one in enumerate((tensors, changed)))
    models.write_tokenizer(first)
    server = Server(first, tmp_path / "log")
    try:
        assert set(server.wait()) <= {0, 200}  # it is never said to be broken
        before = server.answer()
        health: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.02):
                health.append(server.status("/health")[0])

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            for _ in range(3):
                assert server.reload(second) == 200
                after = server.answer()
                assert after != before
                for kind in KINDS:
                    spoiled = models.write(tmp_path / "spoiled", changed, models.LLAMA)
                    _spoil(spoiled, kind)
                    assert server.reload(spoiled) == 500, kind
                    shutil.rmtree(spoiled, ignore_errors=True)
                    assert server.answer() == after, kind
                assert server.reload(first) == 200
                assert server.answer() == before
        finally:
            stop.set()
            watching.join()
        assert set(health) == {200}
    finally:
        server.close()
