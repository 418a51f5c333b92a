"""What the tests of training frameworks share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from crash.zygote import Zygote


@pytest.fixture(scope="package")
def trainer_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return the parent of processes that begin with what trainings need imported."""
    modules = ["torch", "torch._dynamo", "stio.distributed", "stio.sync", "support"]
    modules += ["transformers.trainer"] if find_spec("transformers") and find_spec("accelerate") else []
    zygote = Zygote(tmp_path_factory.mktemp("output"), modules)
    yield zygote
    zygote.close()
