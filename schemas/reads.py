"""Record of the files that a computation opens or looks for.

`Folder` and `schemas.text` note each of them here, in any thread. Files that worker processes open are not recorded.
"""

from weakref import WeakSet


class Reads:
    """Locations of the files opened or looked for since the object was created.

    Recording ends with the object.
    """

    def __init__(self) -> None:
        self.locations: dict[str, None] = {}
        _active.add(self)


_active: WeakSet[Reads] = WeakSet()


def record_read(location: str) -> None:
    """Note the location of a file in all records."""
    for reads in list(_active):
        reads.locations.setdefault(location)
