"""What `dtype=` casts: floating tensors, but no scales, and no quantized weights.

Every cast of a checkpoint's tensors is decided here, with what tensors mean together (`companions.py`). A cast of FP8
codes without their scales would give other values without an error, and so would a copy of plain weights into a
quantized module: both are refused. A name that the caller casts by itself, by a mapping or a function, is cast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from stio.device.tensors import FORMAT_DTYPES, TORCH_DTYPES, Casts, DtypeOf, Lost
from stio.errors import MismatchError, UnsupportedDtypeError, listed, printable
from stio.loading.companions import Companions, find_companions, is_quantized
from stio.runtime.text import log

AS_STORED = (
    "keep them as they are stored, without dtype=, and dequantize with the library that wrote them (from_pretrained of "
    "transformers does)"
)
"""What to do about a cast that is refused."""
BY_NAME = f"{AS_STORED}, or name what to cast: dtype= takes a mapping or a function of the name too"
"""The same, for loads."""


def planned_casts(
    dtypes: Mapping[str, str],
    dtype: torch.dtype | DtypeOf | None,
    *,
    path: str,
    selected: Iterable[str] | None = None,
    further: Iterable[str] = (),
    remedy: str = BY_NAME,
) -> Casts | None:
    """Return what a load casts.

    Args:
        dtypes: Dtypes of the checkpoint's tensors by name, as in the format.
        dtype: The value of `dtype=`: one dtype for the floating tensors, or one for each name; None: no cast.
        path: For messages.
        selected: Names that are loaded; None: all.
        further: Names of tensors in shards that are not open.
        remedy: What to do if it is refused.

    Returns:
        One dtype where all floating tensors are cast, else a dtype by name.

    Raises:
        UnsupportedDtypeError: A quantized tensor would be cast without its scales, or packed pairs.
    """
    if dtype is None:
        return None
    names = dtypes if selected is None else selected
    if not isinstance(dtype, torch.dtype):
        return {name: own for name in names if (own := dtype(name)) is not None}
    companions = find_companions(dtypes, further)
    refused = [
        name
        for name in names
        if _is_cast(dtypes[name], dtype) and (name in companions.of or dtypes[name].startswith("F4"))
    ]
    if refused:
        with_scales = any(name in companions.of for name in refused)
        reason = (
            "a cast of quantized weights without their scales would change their values"
            if with_scales
            else "torch cannot cast packed pairs (F4)"
        )
        raise UnsupportedDtypeError(
            f"{reason}; {remedy}: {listed(_with_companions(refused, companions))}",
            path=path,
            expected="floating tensors that mean something by themselves",
            found=", ".join(sorted({dtypes[name] for name in refused})),
        )
    if not companions.scales:
        return dtype
    return {name: dtype for name in names if name not in companions.scales and _is_cast(dtypes[name], dtype)}


def _is_cast(stored: str, dtype: torch.dtype) -> bool:
    own = TORCH_DTYPES.get(stored)
    return own is not None and own.is_floating_point and own != dtype


def _with_companions(names: Iterable[str], companions: Companions) -> list[str]:
    """Return each name with its companions, for a message."""
    shown = []
    for name in names:
        beside = " and ".join(map(printable, companions.of.get(name, ())))
        shown.append(f"{printable(name)} (with {beside})" if beside else printable(name))
    return shown


def require_together(
    stored: Mapping[str, str],
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, str],
    *,
    assigns: bool,
    path: str,
) -> None:
    """Require that quantized tensors are put into memory as they are stored, together with their companions.

    Args:
        stored: Dtypes of the checkpoint's tensors by name, as in the format.
        targets: The tensors to fill, by their names.
        sources: By the name of a target that is filled, the name of its data in the checkpoint.
        assigns: Whether targets are replaced, and so get the dtypes of the checkpoint.
        path: For messages.

    Raises:
        MismatchError: A quantized tensor would be copied into another dtype, or plain values into a quantized one; or
            codes would be filled whose scales are not.
    """
    kinds = {*stored.values(), *(FORMAT_DTYPES.get(one, "") for one in {tensor.dtype for tensor in targets.values()})}
    if not any(map(is_quantized, kinds)):
        return
    own = {name: FORMAT_DTYPES.get(tensor.dtype, "") for name, tensor in targets.items()}
    there, here = find_companions(stored), find_companions(own)
    filled = {source: name for name, source in sources.items()}
    for name, source in sources.items():
        beside = there.of.get(source, ()), here.of.get(name, ())
        if not any(beside):
            continue
        if stored[source] != own[name] and not (assigns and beside[0]):
            where = "in the checkpoint" if beside[0] else "in the module"
            raise _not_copied(name, where, own[name] or str(targets[name].dtype), stored[source], *beside, path=path)
        left = [one for one in beside[0] if one not in filled] or [one for one in beside[1] if one not in sources]
        if left:
            raise MismatchError(
                f"{printable(name)} is quantized, and its scales would not be loaded with it, so its values would be "
                "wrong; load it by the library that quantized it (from_pretrained of transformers; for bitsandbytes "
                "Params4bit.from_prequantized), or leave it out",
                path=path,
                expected="all or none of them",
                found=f"none for {listed(left)}",
            )


def require_as_stored(stored: Mapping[str, str], copies: Iterable[tuple[str, torch.Tensor]], *, path: str) -> None:
    """Require that no quantized tensor is copied into memory of another dtype.

    Args:
        stored: Dtypes of the checkpoint's tensors by name, as in the format.
        copies: Names of tensors, each with the memory that it is copied into.
        path: For messages.

    Raises:
        MismatchError: One would be.
    """
    companions = find_companions(stored)
    for name, memory in copies if companions.of else ():
        if name in companions.of and TORCH_DTYPES.get(stored[name]) != memory.dtype:
            wanted = FORMAT_DTYPES.get(memory.dtype, str(memory.dtype))
            raise _not_copied(name, "in the checkpoint", wanted, stored[name], companions.of[name], path=path)


def report_lost(lost: Lost, path: str) -> dict[str, int]:
    """Warn of the values that casts have lost.

    Args:
        lost: Their numbers; those of a device are waited for.
        path: The checkpoint.

    Returns:
        The numbers by name, without those that are 0.
    """
    numbers = {name: number for name, one in lost.items() if (number := int(one))}
    if numbers:
        log(
            logging.WARNING,
            "%s: %s outside the range of the dtype to which they were cast, and became inf, NaN, 0, the largest number "
            "or another integer; choose a dtype with a larger range: %s",
            printable(path),
            "1 value was" if sum(numbers.values()) == 1 else f"{sum(numbers.values()):,} values were",
            listed([f"{printable(name)} ({number:,})" for name, number in numbers.items()]),
        )
    return numbers


def _not_copied(
    name: str, where: str, expected: str, found: str, *companions: Sequence[str], path: str
) -> MismatchError:
    beside = next(filter(None, companions), ())
    return MismatchError(
        f"{printable(name)} is quantized {where} and means nothing without its scales, so a copy into another dtype "
        "would change its values; load into a module of the same quantization, or let the library that quantized it "
        "load it (from_pretrained of transformers)",
        path=path,
        expected=f"{expected}, the dtype of its target",
        found=f"{found} beside {listed(beside)}",
    )
