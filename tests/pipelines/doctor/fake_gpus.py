"""GPUs that are not there: what `pipelines.doctor.devices.Cuda` asks, answered without any."""

from dataclasses import dataclass, field

import numpy as np

from pipelines.doctor.devices import Forward

__all__ = ["EXPECTED", "FakeCuda", "fake_forward"]

EXPECTED = np.array([[1.0, -4.0, 2.0]], dtype=np.float32)


@dataclass
class FakeCuda:
    """So many GPUs, whose memory holds something once a network has run there."""

    count: int = 1
    free: int = 70_000_000_000
    held: dict[int, int] = field(default_factory=dict)

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def get_device_name(self, device):
        return f"Fake {device}"

    def get_device_capability(self, device):
        return 9, 0

    def mem_get_info(self, device):
        return self.free, 80_000_000_000

    def max_memory_allocated(self, device):
        return self.held.get(device, 0)


def fake_forward(cuda: FakeCuda, found: object = EXPECTED, *, holds: int = 1000, **settings: object) -> Forward:
    """A network that gives `EXPECTED` on the CPU, and something, or an error, on a GPU."""

    def run(device: str):
        if device == "cpu":
            return EXPECTED
        cuda.held[int(device.removeprefix("cuda:"))] = holds
        if isinstance(found, Exception):
            raise found
        return found

    return Forward("a network", run, **settings)
