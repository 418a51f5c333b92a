"""Which device a name leads to: exact names, prefixes at a dot, a callable; and what leads nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeDevice

from stio.device import base
from stio.device.base import DeviceMap
from stio.errors import DeviceError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.w", "layer 0"), ("model.layers.0", "layer 0"), ("model.layers.01.w", "model"),
        ("model.layers.1.w", "model"), ("model.layers.0.norm.w", "norm"), ("model.layers.0.normal", "layer 0"),
        ("model", "model"), ("modelling.w", "rest"), ("lm_head.weight", "rest"), ("", "rest"), ("a..b", "rest"),
        (".model", "rest"), ("model.", "model"), ("model.layers.0.w.", "layer 0"),
    ],
)  # fmt: skip
def test_the_longest_prefix_at_a_dot_counts(name: str, expected: str) -> None:
    devices = {key: FakeDevice() for key in ("layer 0", "model", "norm", "rest")}
    place = DeviceMap(
        {
            "model.layers.0": devices["layer 0"],
            "model": devices["model"],
            "model.layers.0.norm": devices["norm"],
            "": devices["rest"],
        }
    )
    assert place(name) is devices[expected]


@pytest.mark.parametrize("name", ["b.w", "aa", "", ".a", "a b"])
def test_a_name_that_nothing_covers(name: str) -> None:
    with pytest.raises(DeviceError, match="has no entry for a tensor") as caught:
        DeviceMap({"a": "cpu"})(name)
    assert caught.value.requested == name


def test_a_callable_gets_the_name() -> None:
    fake = FakeDevice()
    place = DeviceMap(lambda name: fake if name == "w" else "cpu")
    assert place("w") is fake
    assert place("b") == CPU


def test_a_callable_may_return_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an object of its own, which ends at once; the next one may get its identity."""
    monkeypatch.setattr(base, "resolve_device", lambda device: torch.device("cuda", int(device)))
    place = DeviceMap(lambda name: np.int64(int(name) % 2))
    assert [place(str(number)) for number in range(4)] == [torch.device("cuda", k) for k in (0, 1, 0, 1)]


def test_equal_devices_are_one_object() -> None:
    """So that a load has as many targets as there are devices, however they are spelled."""
    spellings = {"a": "cpu", "b": torch.device("cpu"), "c": "cpu:0", "d": torch.device("cpu", 0)}
    place = DeviceMap(spellings)
    assert len({id(place(name)) for name in spellings}) == 1


def test_only_what_is_used_is_resolved() -> None:
    place = DeviceMap({"stage.7": "nonsense:9", "": "cpu"})
    assert place("stage.1.w") == CPU
    with pytest.raises(DeviceError, match=r"no such device.*'stage\.7\.w'"):
        place("stage.7.w")


@pytest.mark.parametrize("device", [None, "disk", "meta", 1.5, ["cpu"], {"": "cpu"}, object()])
def test_what_is_no_device(device: Any) -> None:
    with pytest.raises(DeviceError, match="'w'"):
        DeviceMap(lambda name: device)("w")


def test_errors_of_a_callable_are_the_caller_s() -> None:
    with pytest.raises(KeyError, match="'w'"):
        DeviceMap({"b": "cpu"}.__getitem__)("w")


def test_what_says_it_by_name_and_what_does_not() -> None:
    fake = FakeDevice()
    assert DeviceMap.of(fake) is fake
    assert DeviceMap.of("cpu") == CPU
    assert DeviceMap.of(CPU) == CPU
    for by_name in ({"": "cpu"}, lambda name: "cpu"):
        place = DeviceMap.of(by_name)
        assert isinstance(place, DeviceMap)
        assert place("w") == CPU
    with pytest.raises(DeviceError):
        DeviceMap.of(None)


def test_a_mapping_without_an_entry_for_a_name() -> None:
    with pytest.raises(DeviceError, match="has no entry for a tensor.*all other tensors"):
        DeviceMap({"other": "cpu"})("w")


def test_devices_of_other_libraries_get_advice() -> None:
    with pytest.raises(DeviceError, match=r"`memory='lazy'` leaves tensors on the CPU.*'w' there.*one of: cpu"):
        DeviceMap({"": "disk"})("w")
