"""Checkpoints in remote stores: `s3://`, `gs://`, `az://`, `http://` and `https://`, by obstore (extra `remote`).

A `RemoteRoot` (`source.py`; start there) is a place in a store, and opens `RemoteSource`s, which `loading/` reads as it
reads files. `stores.py` takes a URL apart and makes a store with credentials and endpoint by the conventions of each
provider. `settings.py` strips and checks what the environment has, and `pods.py` gets credentials for pods.
`requests.py` makes requests that a cancel leaves within a second, and repeats those that failed.
`failures.py` decides which failures are worth another attempt, and turns the others into errors of stio.
`one_request.py` repeats a request that obstore was refused, to get the whole head of the answer; `answers.py` judges
answers. `whole.py` reads objects of servers that have no ranges.

For saves: `save.py` has the transaction, which one put commits; `upload.py` sends the bytes, `folder.py` has the
objects below a URL, and `unused.py` deletes what interrupted saves have left.

Invariants: before any byte of an answer reaches the caller's memory, the answer is known to belong to the state in
which the object was opened (its ETag), and to have exactly the bytes that were requested. An error, a log line and a
trace never show user, password or query of a URL.
"""
