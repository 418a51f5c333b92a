"""Checkpoints in remote stores and in the hub: `s3://`, `gs://`, `az://`, `http://`, `https://` by obstore, and `hf://`.

A `RemoteRoot` (`source.py`; start there) is a place in a store, and opens `RemoteSource`s, which `loading/` reads as it
reads files. `stores.py` takes a URL apart and makes a store; obstore finds the credentials. `requests.py` makes
requests that a cancel leaves within a second, repeats what failed, and turns failures into errors of stio.

For saves: `save.py` has the transaction, which one put commits, and deletes what interrupted saves have left;
`folder.py` puts and deletes the objects below a URL, and uploads them in parts.

`hub.py` finds repositories of the Hugging Face hub (`hf://`); their files are then local. `disk_cache.py` has
`DiskCache`, a directory of objects that the processes of a machine share: a load gets local files in place of objects,
before it is planned; it copies an object to a file by a `Download`, as `pulls.py` does, which copies a checkpoint.
The schemes of URLs are registered in `stio/__init__.py`, so nothing below this package imports it.

Invariants: before any byte of an answer reaches the caller's memory, the answer is known to belong to the state in
which the object was opened (its ETag), and to have exactly the bytes that were requested. An error, a log line and a
trace never show user, password or query of a URL.

obstore reads every URL; unfinished uploads, which it does not list, are listed by boto3 (`save.py`). It collects an
answer in memory of its own, and its calls cannot be interrupted, so each runs on a thread. Uploads take its iterator
form, which is aborted when the iterator raises; its writer objects would leave parts in the store. Conditional puts
exist for one request only, so an object that is a whole checkpoint carries the id of its save, which settles the case
of a lost answer. `Patience` and `Attempts` (`requests.py`) bound how long and how often a request is repeated.
"""

from stio.remote.disk_cache import DiskCache
from stio.remote.pulls import PullResult, pull
from stio.remote.save import RemoteDestination, RemoteTransaction, Uploads
from stio.remote.source import RemoteRoot

__all__ = [
    "DiskCache",
    "PullResult",
    "RemoteDestination",
    "RemoteRoot",
    "RemoteTransaction",
    "Uploads",
    "pull",
]
