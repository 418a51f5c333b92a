"""Pools: more models than a device holds, with the device's memory as a cache in front of host memory, disk and stores.

`policy.py` decides: which model is loaded next, which one is evicted for it, which callers get theirs. It is pure.
`content.py` has the tensors of one model on the device: loads them, removes them, finds what still refers to them.
`status.py` has what a pool tells of itself.
`thread.py` carries out what the policy decides, on the pool's thread.
`api.py` has the public class `ModelPool`; its methods run on callers' threads.

One thread owns a pool's state. Callers post to it what they want, and wait; they share no lock with it. Loads,
evictions and updates are operations of their own, and post what became of them. So a decision is made from one state,
and no caller's code runs while one is made.

Start with `policy.py`.
"""
