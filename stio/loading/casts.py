"""What `dtype=` casts: floating tensors, but no scales, and no quantized weights.

Every cast of a checkpoint's tensors is decided here, with what tensors mean together (`companions.py`). A cast of FP8
codes without their scales would give other values without an error, and so would a copy of plain weights into a
quantized module: both are refused. A name that the caller casts by itself, by a mapping or a function, is cast.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import torch

from stio.device import TORCH_DTYPES, Casts
from stio.errors import MismatchError, UnsupportedDtypeError, listed, printable
from stio.loading.companions import Companions, find_companions, is_quantized
from stio.text import log

_AS_STORED = (
    "keep them as they are stored, without dtype=, and dequantize with the library that wrote them (from_pretrained of "
    "transformers does)"
)
_BY_NAME = ", or name what to cast: dtype= takes a mapping or a function of the name too"

DtypeLike: TypeAlias = torch.dtype | str
"""A dtype of torch, or a name of one, as torch spells it ("bfloat16") or the format does ("BF16")."""

DtypeOf: TypeAlias = Callable[[str], torch.dtype | None]
"""Returns the dtype that a tensor of this name is cast to; None: as stored."""

DtypesLike: TypeAlias = DtypeLike | Mapping[str, DtypeLike | None] | Callable[[str], DtypeLike | None]
"""What floating tensors are cast to: one dtype; or one for each name, by a mapping from names, whose other names are as
stored, or by a function of the name, which is called on a thread of the load. None as a value: as stored."""


def checked_casts(dtype: object) -> torch.dtype | DtypeOf | None:
    """Return what an argument `dtype=` casts, see `DtypesLike`; values of a function are checked when it is called.

    Raises:
        TypeError: A dtype is neither a dtype nor text, or a key of a mapping is no name.
        ValueError: torch has no dtype of this name, or the cast would lose the values.
    """
    if dtype is None:
        return None
    if isinstance(dtype, Mapping):
        for name in dtype:
            if not isinstance(name, str):
                raise TypeError(f"dtype= takes a mapping from names, not from {name!r}")
        return {name: None if one is None else _checked_cast(one) for name, one in dtype.items()}.get
    if callable(dtype) and not isinstance(dtype, type):  # `float` is a mistake for torch.float32
        return lambda name: None if (one := dtype(name)) is None else _checked_cast(one)
    return _checked_cast(dtype)


def _checked_cast(dtype: object) -> torch.dtype:
    wanted = TORCH_DTYPES.parse(dtype)
    if not (wanted.is_floating_point or wanted.is_complex):
        raise ValueError(
            f"dtype= casts floating tensors, and {printable(str(wanted).removeprefix('torch.'))!r} would lose their "
            "values: give a floating dtype, such as 'bfloat16', or none, and cast the loaded tensors yourself"
        )
    return wanted


def planned_casts(
    dtypes: Mapping[str, str],
    dtype: torch.dtype | DtypeOf | None,
    *,
    path: str,
    selected: Iterable[str] | None = None,
    further: Iterable[str] = (),
    by_name: bool = True,
) -> Casts:
    """Return what a load casts.

    Args:
        dtypes: Dtypes of the checkpoint's tensors by name, as in the format.
        dtype: The value of `dtype=`: one dtype for the floating tensors, or one for each name; None: no cast.
        path: For messages.
        selected: Names that are loaded; None: all.
        further: Names of tensors in shards that are not open.
        by_name: Whether the caller may name what to cast, for the error.

    Raises:
        UnsupportedDtypeError: A quantized tensor would be cast without its scales, or packed pairs.
    """
    if dtype is None:
        return Casts()
    names = dtypes if selected is None else selected
    if not isinstance(dtype, torch.dtype):
        return Casts(by_name={name: own for name in names if (own := dtype(name)) is not None})
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
            f"{reason}; {_AS_STORED}{_BY_NAME if by_name else ''}: {listed(_with_companions(refused, companions))}",
            path=path,
            expected="floating tensors that mean something by themselves",
            found=", ".join(sorted({dtypes[name] for name in refused})),
        )
    if not companions.scales:
        return Casts(dtype)
    cast = (name for name in names if name not in companions.scales and _is_cast(dtypes[name], dtype))
    return Casts(by_name=dict.fromkeys(cast, dtype))


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
    kinds = {*stored.values(), *(TORCH_DTYPES.name(one) for one in {tensor.dtype for tensor in targets.values()})}
    if not any(map(is_quantized, kinds)):
        return
    own = {name: TORCH_DTYPES.name(tensor.dtype) for name, tensor in targets.items()}
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
            wanted = TORCH_DTYPES.name(memory.dtype) or str(memory.dtype)
            raise _not_copied(name, "in the checkpoint", wanted, stored[name], companions.of[name], path=path)


def warn_of_codes(stored: Mapping[str, str], unexpected: AbstractSet[str], *, path: str) -> None:
    """Warn of quantized tensors that `load_state_dict` has put into a module without any of their scales.

    Hooks of the module may need no scales, so this is no error.

    Args:
        stored: Dtypes of the checkpoint's tensors by name, as in the format.
        unexpected: Names that the module did not take.
        path: The checkpoint.
    """
    companions = find_companions(stored) if unexpected else Companions()
    left = [name for name, beside in companions.of.items() if name not in unexpected and set(beside) <= unexpected]
    if left:
        log(
            logging.WARNING,
            "%s: the module took quantized tensors and not their scales, so its values are wrong unless a hook of it "
            "has dequantized them; load them by the library that quantized them: %s",
            printable(path),
            listed(_with_companions(left, companions)),
        )


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
