"""What these tests share: the parent of the processes that end."""

from crash.zygote import zygote  # noqa: F401 - a fixture
