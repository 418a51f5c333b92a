"""Files of checkpoints in host memory, between loads.

`host_cache.py` has the public class `HostCache`: prefetch, evict, close, and `hold` for loads with `cache=`.
`entries.py` decides which files are held, under one lock and one budget. `file_image.py` is one file in memory:
segments, chunks, claims. A load holds each image that it uses until its copies are done, and then releases it.

Invariants: an entry is one state of one file; memory that a load uses is not freed and not changed; loads that run
together read each byte once; tensors on the CPU are copies, so none depends on the cache. Start with `host_cache.py`.
"""
