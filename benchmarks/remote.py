"""Measure loads from URLs and saves to them, against what obstore and Run:ai's streamer do with the same servers.

`make bench-remote`, or:

    python -m benchmarks.remote                         # 5 rounds
    python -m benchmarks.remote --rounds 1 --size-mb 100
    python -m benchmarks.remote --scenario http "S3, busy" --out raw.jsonl

Servers run on this machine, in processes of their own. nginx sends a file by http and by https, with a certificate of
an authority that is made for the run; it also plays S3 for reads, since it ignores signatures. The slow store is a
server of this module: 30 ms to the first byte, 60 MB/s a connection.

Contestants: `stio.sync.load` of the URL; obstore's own reads, 32 threads of 8 MiB, each copied into memory that was
allocated as stio allocates it; Run:ai's streamer with S3, if its package is installed. Each measurement has a process
of its own, which has read a small file from the same server before, and has touched and freed as much memory as the
load needs. Rounds are interleaved; ratios are medians of pairs of one round.

Saves go to a server of this module that speaks as much of S3 as a save needs, and drops what it receives. Contestants:
`stio.sync.save` as one file, and as a directory of shards of 100 MB; obstore's own multipart uploads of the same bytes,
which lie in memory, with parts of the same size and as many at one time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import files, machine, meters

ROOT = Path(__file__).resolve().parent.parent

REQUEST_BYTES, NUM_IN_FLIGHT = 8 << 20, 32
"""What obstore's own reads are made of."""
PART_BYTES, NUM_PARTS_IN_FLIGHT = 8 << 20, 16
"""What obstore's own uploads are made of, as stio's are."""
SLOW_SECONDS, SLOW_BYTES_PER_SECOND = 0.03, 60e6
"""Of the slow store: time to the first byte, and rate of a connection."""

SHARD_BYTES = 100_000_000
"""Of a save of several shards."""

SAVES = ("save", "save, shards")
SCENARIOS = ("http", "http, busy", "https", "https, busy", "S3", "S3, busy", "slow store", "slow store, busy", *SAVES)
GOALS = {"obstore": 0.9, "Run:ai": 2.0}
"""Least rate of stio, as a multiple of the contestant's."""

FILE, SMALL = "model/model.safetensors", "small/model.safetensors"
SERVED = "served"
"""Path on the slow store that answers with the number of bytes which it has sent."""
MAX_SECONDS = 300
"""For one process."""


# Servers.


AUTHORITY = "authority.pem"
"""Certificate of the authority, in the folder of the servers."""


def make_certificate(folder: Path) -> None:
    """Make an authority, and a certificate for 127.0.0.1 by it: leaf.pem and leaf.key."""

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)

    new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=benchmark"
    (folder / "leaf.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    openssl(f"req -x509 {new_key}1 -keyout authority.key -out {AUTHORITY} -days 2")
    openssl(f"req {new_key}2 -keyout leaf.key -out leaf.csr")
    signed = f"-CA {AUTHORITY} -CAkey authority.key -CAcreateserial -days 2 -extfile leaf.ext"
    openssl(f"x509 -req -in leaf.csr -out leaf.pem {signed}")


@contextmanager
def nginx(folder: Path) -> Iterator[tuple[int, int]]:
    """Serve a folder until the block ends; give the ports for http and https."""
    make_certificate(folder)
    port, tls_port = _free_port(), _free_port()
    places = f"root {folder}; location /bucket/ {{ alias {folder}/; }}"
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; worker_processes 2; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        "events { worker_connections 512; }\n"
        "http { access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type text/plain;\n"
        f"ssl_certificate {folder}/leaf.pem; ssl_certificate_key {folder}/leaf.key;\n"
        f"server {{ listen 127.0.0.1:{port}; {places} }}\n"
        f"server {{ listen 127.0.0.1:{tls_port} ssl; {places} }} }}\n"
    )
    with _running(["nginx", "-e", f"{folder}/nginx.log", "-c", f"{folder}/nginx.conf"], port):
        yield port, tls_port


@contextmanager
def slow_store(folder: Path) -> Iterator[int]:
    """Serve a folder as a distant store does, until the block ends; give the port."""
    port = _free_port()
    with _running([sys.executable, "-m", "benchmarks.remote", "--serve", str(folder), "--port", str(port)], port):
        yield port


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{command[0]} does not start") from None
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def sink() -> Iterator[int]:
    """Run a server of S3 that drops what it receives, until the block ends; give the port."""
    port = _free_port()
    with _running([sys.executable, "-m", "benchmarks.remote", "--sink", "--port", str(port)], port):
        yield port


async def drop(port: int) -> None:
    """Answer the requests of saves; for ever. No object exists, and each put is confirmed unless it has If-Match."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                left = int(fields.get("content-length", 0))
                while left:
                    left -= len(await reader.read(min(left, 1 << 20)))
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            status, body = 200, ""
            if "uploads" in target and method == "POST":
                body = "<R><Bucket>b</Bucket><Key>k</Key><UploadId>1</UploadId></R>"
            elif method == "POST":
                body = '<R><ETag>"1"</ETag></R>'
            elif "list-type" in target:
                body = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            elif method == "GET":
                status, body = 404, "<Error><Code>NoSuchKey</Code></Error>"
            elif "if-match" in fields:
                status = 412
            writer.write(f'HTTP/1.1 {status} -\r\nETag: "1"\r\nContent-Length: {len(body)}\r\n\r\n{body}'.encode())

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=1 << 20)
    await server.serve_forever()


async def serve(folder: Path, port: int) -> None:
    """Answer requests for ranges, each after a while and at a limited rate; for ever."""
    contents = {name: (folder / name).read_bytes() for name in (FILE, SMALL)}
    num_sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        writer.transport.set_write_buffer_limits(1 << 20)
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            lines = head.split("\r\n")
            path = lines[0].split()[1].lstrip("/")
            found = memoryview(str(num_sent).encode() if path == SERVED else contents[path])
            given = next((line.partition("=")[2] for line in lines if line.lower().startswith("range:")), "")
            first, _, last = given.partition("-")
            begin, end = int(first or 0), min(len(found), int(last) + 1 if last else len(found))
            await asyncio.sleep(SLOW_SECONDS)
            writer.write(
                f'HTTP/1.1 {206 if given else 200} OK\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n'
                "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
                f"Content-Range: bytes {begin}-{end - 1}/{len(found)}\r\nContent-Length: {end - begin}\r\n\r\n".encode()
            )
            start, at = time.monotonic(), begin if lines[0].startswith("GET") else end
            while at < end:
                due = min(end, begin + int((time.monotonic() - start + 0.005) * SLOW_BYTES_PER_SECOND))
                if due > at:
                    writer.write(found[at:due])
                    num_sent += due - at
                    at = due
                    try:
                        await writer.drain()
                    except ConnectionError:  # the client has gone
                        return
                await asyncio.sleep(0.005)

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


# Contestants. Each returns a function that loads a file, by its name on the server, and returns what it has loaded.


def with_stio(base: str) -> Callable[[str], Any]:
    """Load by stio."""
    import stio.sync

    return lambda name: stio.sync.load(f"{base}/{name}")


def with_obstore(base: str) -> Callable[[str], Any]:
    """Read ranges by obstore, as many at a time as stio does, into memory as stio allocates it."""
    import ctypes

    import numpy as np
    import obstore

    from stio.runtime import memory

    stores: Any = import_module("obstore.store")
    client: dict[str, Any] = {"allow_http": not base.startswith("https:")}
    if base.startswith("https:"):
        client["root_certificate"] = Path(os.environ["SSL_CERT_FILE"]).read_bytes()
    options: dict[str, Any] = {"client_options": client}
    make = stores.S3Store.from_url if base.startswith("s3:") else stores.HTTPStore.from_url
    store = make(base, **options)

    def load(name: str) -> Any:
        size = obstore.head(store, name)["size"]
        region = memory.allocate(size)

        def read(begin: int) -> None:
            data = obstore.get(store, name, options={"range": (begin, min(size, begin + REQUEST_BYTES))}).bytes()
            ctypes.memmove(region.address + begin, np.frombuffer(data, np.uint8).ctypes.data, len(data))

        with ThreadPoolExecutor(NUM_IN_FLIGHT) as threads:
            list(threads.map(read, range(0, size, REQUEST_BYTES)))
        return region

    return load


def with_runai(base: str) -> Callable[[str], Any]:
    """Stream by Run:ai's streamer, and keep each tensor."""
    streamer: Any = import_module("runai_model_streamer").SafetensorsStreamer

    def load(name: str) -> Any:
        with streamer() as running:
            running.stream_file(f"{base}/{name}")
            return {key: tensor.clone() for key, tensor in running.get_tensors()}

    return load


# Each returns a function that saves bytes in memory, as one file or as several.


def save_with_stio(base: str) -> Callable[[dict[str, Any], bool], Any]:
    """Save tensors by stio."""
    import stio.sync

    def save(arrays: dict[str, Any], shards: bool) -> Any:
        if shards:
            return stio.sync.save(arrays, f"{base}/saved", max_shard_size=SHARD_BYTES).files
        return stio.sync.save(arrays, f"{base}/saved.safetensors").files

    return save


def save_with_obstore(base: str) -> Callable[[dict[str, Any], bool], Any]:
    """Upload the bytes by obstore, without a header."""
    import obstore

    stores: Any = import_module("obstore.store")
    client: dict[str, Any] = {"allow_http": True}
    store = stores.S3Store.from_url(base, client_options=client)

    def save(arrays: dict[str, Any], shards: bool) -> Any:
        whole = memoryview(arrays["all"].numpy())
        step = SHARD_BYTES if shards else len(whole)
        for begin in range(0, len(whole), step):
            shard = whole[begin : begin + step]
            parts = (shard[at : at + PART_BYTES] for at in range(0, len(shard), PART_BYTES))
            obstore.put(
                store,
                f"saved-{begin}",
                parts,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=NUM_PARTS_IN_FLIGHT,
            )
        return range(0, len(whole), step)

    return save


SAVERS: dict[str, Callable[[str], Callable[[dict[str, Any], bool], Any]]] = {
    "stio": save_with_stio,
    "obstore": save_with_obstore,
}

CONTESTANTS: dict[str, Callable[[str], Callable[[str], Any]]] = {
    "stio": with_stio,
    "obstore": with_obstore,
    "Run:ai": with_runai,
}


def contestants_of(scenario: str) -> list[str]:
    """Return who takes part: Run:ai's streamer reads S3 alone, by a package of its own."""
    has_runai = scenario.startswith("S3") and find_spec("runai_model_streamer_s3") is not None
    return ["stio", "obstore", "Run:ai"] if has_runai else ["stio", "obstore"]


def child(arguments: dict[str, Any]) -> None:
    """Measure once in this process; print the seconds, and end the process."""
    if arguments["scenario"] in SAVES:
        child_that_saves(arguments)
    load = CONTESTANTS[arguments["contestant"]](arguments["base"])
    load(SMALL)
    meters.prime_memory(arguments["size_bytes"])
    with meters.busy_thread(arguments["busy"]):
        start = time.perf_counter()
        loaded = load(FILE)
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "num": len(loaded) if isinstance(loaded, dict) else 1}), flush=True)
    os._exit(0)


def child_that_saves(arguments: dict[str, Any]) -> None:
    """Measure one save in this process; print the seconds, and end the process."""
    import torch

    save = SAVERS[arguments["contestant"]](arguments["base"])
    whole = torch.ones(arguments["size_bytes"], dtype=torch.uint8)
    tensors: dict[str, Any] = {"all": whole}
    if arguments["contestant"] == "stio":  # views of the same bytes, in the shapes of a model's tensors
        tensors, at = {}, 0
        for one in files.llama_layout(arguments["size_bytes"]).tensors:
            nbytes = min(one.nbytes, len(whole) - at)
            tensors[one.name], at = whole[at : at + nbytes].clone(), at + nbytes
    for shards in (False, True):
        save({name: tensor[:1000] for name, tensor in tensors.items()}, shards)
    start = time.perf_counter()
    saved = save(tensors, "shards" in arguments["scenario"])
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "num": len(saved)}), flush=True)
    os._exit(0)


def measure(scenario: str, contestant: str, port: int, size_bytes: int, authority: Path) -> float:
    """Measure one load in a fresh process; return bytes a second."""
    base = f"http{'s' * scenario.startswith('https')}://127.0.0.1:{port}"
    if scenario.startswith("S3") or scenario in SAVES:
        base = "s3://bucket"
    endpoint = f"http://127.0.0.1:{port}"
    environment = os.environ | {
        **dict.fromkeys(("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), endpoint),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "SSL_CERT_FILE": str(authority),
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_CONCURRENCY": str(NUM_IN_FLIGHT),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    arguments = {
        "contestant": contestant,
        "base": base,
        "busy": "busy" in scenario,
        "size_bytes": size_bytes,
        "scenario": scenario,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.remote", "--child", json.dumps(arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=MAX_SECONDS,
    )
    return size_bytes / float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def table(rates: dict[tuple[str, str], list[float]]) -> str:
    """Return the table of all rates."""
    lines = ["| | contestant | GB/s: median (min to max) | stio / contestant | goal |", "|---|---|--:|--:|--:|"]
    for (scenario, contestant), found in rates.items():
        pairs = zip(rates[scenario, "stio"], found, strict=True)
        ratio = "" if contestant == "stio" else f"{median(own / other for own, other in pairs):.2f}"
        goal = f"{GOALS[contestant]:g}" if contestant in GOALS and scenario not in SAVES else ""
        shown = f"{median(found) / 1e9:.2f} ({min(found) / 1e9:.2f} to {max(found) / 1e9:.2f})"
        lines.append(f"| {scenario} | {contestant} | {shown} | {ratio} | {goal} |")
    return "\n".join(lines)


def main() -> None:
    """Take the command's options; be a server or one measurement if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=500)
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--out", type=Path, help="append raw figures, as JSON lines")
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--child", "--serve", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
    elif options.sink:
        asyncio.run(drop(int(options.port)))
    elif options.serve:
        asyncio.run(serve(Path(options.serve), int(options.port)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Measure all scenarios in turn, and print them."""
    if shutil.which("nginx") is None:
        raise SystemExit("this benchmark needs nginx (Debian: nginx-light)")
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="remote-") as name:
        folder = Path(name)
        for path, size in ((FILE, options.size_mb * 1_000_000), (SMALL, 1_000_000)):
            (folder / path).parent.mkdir()
            files.write_file(folder / path, files.llama_layout(size))
        size_bytes = (folder / FILE).stat().st_size
        with nginx(folder) as (fast, fast_tls), slow_store(folder) as slow, sink() as dropping:
            ports = {"slow store": slow, "https": fast_tls, **dict.fromkeys(SAVES, dropping)}
            for number in range(options.rounds):
                for scenario in options.scenario:
                    names = contestants_of(scenario)
                    port = ports.get(scenario) or ports.get(scenario.partition(",")[0], fast)
                    for contestant in names if number % 2 == 0 else names[::-1]:
                        rate = measure(scenario, contestant, port, size_bytes, folder / AUTHORITY)
                        rates.setdefault((scenario, contestant), []).append(rate)
                        print(f"round {number + 1}: {scenario}, {contestant}: {rate / 1e9:.2f} GB/s", file=sys.stderr)
                        if options.out:
                            raw = {"round": number, "scenario": scenario, "contestant": contestant, "rate": rate}
                            with options.out.open("a") as file:
                                print(json.dumps(raw), file=file)
    rates = {(s, c): rates[s, c] for s in options.scenario for c in contestants_of(s)}
    print(json.dumps(machine.describe()), file=sys.stderr)
    print(table(rates))


if __name__ == "__main__":
    main()
