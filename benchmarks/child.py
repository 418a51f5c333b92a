"""One run in a process of its own: `python -m benchmarks.child MODULE SPEC`, SPEC being JSON.

The module's `run(spec)` does it: imports are done, memory is primed and control groups are joined before the clock
starts. The last line of the output is the run's record as JSON, with `error` where the contestant failed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import meters


@dataclass(frozen=True, slots=True)
class Spec:
    """What one process has to do; a module uses the fields that it needs."""

    contestant: str
    path: str  # the file to load, or the directory of the files or saves
    task: str = "load"
    case: str = ""  # the name of the case
    size_bytes: int = 0  # of the model
    busy: bool = False  # beside a busy pure-Python thread
    state: str = ""  # cold, warm (filled by reads), faults (filled by page faults), or left as it is
    touch: str = "page"  # see `meters.touch_all`
    verify: bool = False  # compare every byte after the clock has stopped
    prime_bytes: int = 0  # memory to touch and free before
    join: Sequence[str] = ()  # `cgroup.procs` files to join before the clock starts
    options: dict[str, Any] = field(default_factory=dict)  # keywords for the contestant

    def encode(self) -> str:
        """Give the spec as an argument of this module."""
        return json.dumps(asdict(self))

    def prime(self) -> float:
        """Touch and free memory; give the seconds that it took."""
        gc.collect()
        return meters.prime_memory(min(self.prime_bytes, meters.available_bytes() // 2))

    def join_groups(self) -> None:
        """Join the control groups."""
        for procs in self.join:
            Path(procs).write_text(str(os.getpid()))


def main() -> None:
    """Run the spec of the arguments, print the record, and leave without the interpreter's teardown."""
    try:
        record = import_module(sys.argv[1]).run(Spec(**json.loads(sys.argv[2])))
    except Exception as error:  # noqa: BLE001 - a contestant's failure is a result
        record = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(record), flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
