"""The contract of storages, as a class of tests to inherit from. Public; it needs pytest.

A test class for a storage of your own inherits from `SourceContract`, which runs the tests of `contract.py`: reads at
any offset and into many regions, files that shrink or change, reads on many threads at once. Nothing in stio outside
this package imports it. The fakes of stio's own tests are in `tests/fakes`, outside the package.
"""

from stio.testing.contract import SourceContract
from stio.testing.contract import read_guarded as read_guarded

__all__ = ["SourceContract"]
