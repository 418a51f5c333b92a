"""A delta checkpoint: the elements of tensors that differ from another checkpoint, its *base*. Pure.

A delta is a checkpoint in the usual layout, which any safetensors reader opens. It holds no tensor that is the same in
the base. A tensor of which much has changed is in it whole, under its name. Of the others it holds two tensors: the
*positions* of the changed elements and their new *values*. A description (JSON, `Delta`) maps the names to them; it is
the metadata under `DELTA_KEY`, or the tensor `DELTA_TENSOR` if it is long. The metadata `format` is `FORMAT`, so that
programs which check it refuse the file, and no name of a positions tensor is that of a weight.

Positions are gaps. For each changed element, in ascending order, the number of unchanged elements before it since the
last one is a code of one or two bytes; the largest code M means "M unchanged elements, and no changed one: go on". So
positions are a prefix sum: of `code + 1` for each code below M, and of M for M; the elements are those of codes below
M, and the last code is one. Elements are those of the tensor's dtype; of a dtype below a byte they are bytes.

A base is named relative to the directory that holds the delta, and by its *id*: 128 random bits, which each save that
may become a base gets (`ID_KEY` in the metadata of its files and of its index). A base without one, which was saved
otherwise, is known by the digest of its files. Names, dtypes and shapes of the tensors are those of the base, and so
are the aliases.
"""

from stio.format.delta.description import (
    DELTA_KEY,
    DELTA_POINTER,
    DELTA_TENSOR,
    FORMAT,
    ID_KEY,
    MAX_LINKS,
    ChangedTensor,
    Delta,
    FileRange,
    Patch,
    is_own_name,
    names_of,
    parse_delta,
    patches_of,
)

__all__ = [
    "DELTA_KEY",
    "DELTA_POINTER",
    "DELTA_TENSOR",
    "FORMAT",
    "ID_KEY",
    "MAX_LINKS",
    "ChangedTensor",
    "Delta",
    "FileRange",
    "Patch",
    "is_own_name",
    "names_of",
    "parse_delta",
    "patches_of",
]
