"""Files of checkpoints between loads: in host memory, or, those of remote stores, on this machine's disk.

`host_cache.py` has the public class `HostCache`: prefetch, evict, close, and `hold` for loads with `cache=`.
`entries.py` decides which files are held, under one lock and one budget, and has one file in memory (`FileImage`) and
the interfaces by which loads know both kinds of caches. A load holds each image that it uses until its copies are done,
and then releases it. `disk_cache.py` has the public class `DiskCache`, a directory that
processes share: a load gets local files in place of objects, before it is planned.

Invariants: an entry is one state of one file or object; what a load uses is not removed and not changed; loads that run
together read each byte once, those with a `DiskCache` in all processes of a machine. With a `HostCache` tensors on the
CPU are copies, so none depends on it; with a `DiskCache` they may be mapped, and hold their file. Start with
`host_cache.py` or `disk_cache.py`.

An image belongs to one state of one file, including its times of change. Within one tick of the filesystem's clock two
states look the same, so a load waits if the file was written within the last 50 ms. One reader claims a chunk of an
image and others wait for it. The object whose last use is longest ago is evicted first.
"""
