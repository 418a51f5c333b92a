"""The safetensors format and the checkpoint layout: bytes to values, and values to bytes.

Everything here is pure: no input or output, no torch, no device. The caller reads and writes; these modules parse,
check, name and build. Input is untrusted. A malformed file raises a `StioError` with path, offset, expected and found,
in bounded time and memory, and no C call blocks other threads for long (`gil_slices`).

This package is one file: `header` turns its start into a `Header` of checked columns, and makes the bytes before the
data; `dtypes` has the dtypes; `slicing` turns an index such as `[0:8, :]` into byte ranges; `shared` describes tensors
to be saved (`TensorSource`) and finds those that share memory. `stio.format.files` is what files a checkpoint consists
of: names, index, manifest, and files of other kinds. `stio.format.state` is nested state as text. All that is JSON goes
through the strict `json_scanner`.

Start with `header`: `parse_header` shows all steps of reading a file. Continue with `dtypes` and `files`.

Some rules that span several modules: `header` decides which bytes a header may claim, and refuses holes, overlaps and
duplicate keys. `shared` knows which metadata every save makes anew (`may_be_copied`).

A new dtype goes into `dtypes`, with its name in torch; its DLPack code goes into `stio.device.tensors`.
"""

from stio.format.dtypes import BITS, LIBRARY_NAMES, tensor_nbytes
from stio.format.gil_slices import row_slices
from stio.format.header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Header,
    TensorInfo,
    build_header,
    check_name,
    header_nbytes,
    is_encodable,
    parse_header,
    require_text,
)
from stio.format.shared import (
    ALIASES_KEY,
    SharedPolicy,
    TensorSource,
    TiedNames,
    may_be_copied,
    overlap_groups,
    parse_aliases,
    resolve_shared,
)
from stio.format.slicing import Selection, select

__all__ = [
    "ALIASES_KEY",
    "BITS",
    "LIBRARY_NAMES",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "Header",
    "Selection",
    "SharedPolicy",
    "TensorInfo",
    "TensorSource",
    "TiedNames",
    "build_header",
    "check_name",
    "header_nbytes",
    "is_encodable",
    "may_be_copied",
    "overlap_groups",
    "parse_aliases",
    "parse_header",
    "require_text",
    "resolve_shared",
    "row_slices",
    "select",
    "tensor_nbytes",
]
