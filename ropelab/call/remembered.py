"""What earlier calls found out, for calls like them."""

from threading import Lock
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(dict[Key, Value]):
    """A dictionary that forgets its oldest entries, so that shapes that never repeat do not fill memory.

    Args:
        most: the largest number of entries.
    """

    def __init__(self, most: int = 4096):
        super().__init__()
        self.most = most
        self._lock = Lock()

    def keep(self, key: Key | None, value: Value) -> None:
        """Remember ``value`` for ``key``; a key of None remembers nothing."""
        if key is None:
            return
        with self._lock:  # two threads may not forget the same entry
            if key not in self and len(self) >= self.most:
                del self[next(iter(self))]
            self[key] = value
