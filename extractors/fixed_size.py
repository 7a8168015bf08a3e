"""Extractors whose images all have one size, so that a batch is one tensor.

Letters in shapes: ``B`` images, ``H`` and ``W`` pixels of the input, ``S`` side of a crop in pixels, ``D`` channels of a network's
last map, ``h`` and ``w`` its sides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from extractors.base import Description, Extractor
from extractors.computing.compile import warm_up_compile
from extractors.computing.cpu_parallel import FORWARD_IMAGES, passes_share_threads, run_in_chunks
from extractors.computing.devices import cast_layers, download, pinned_empty, precision_context, upload
from extractors.computing.fusion import optimize_for_inference, trace_and_fold
from extractors.computing.oom import BatchLimits, run_parts_with_oom_retry
from extractors.images.preprocessing import Preprocessing, cropped_pixels, resize_and_crop
from extractors.options import ExtractorOptions


class FixedSizeExtractor(Extractor):
    """An extractor whose images all have one size, ``size_hw``; one pass on a CPU takes ``forward_images`` of them."""

    def __init__(
        self,
        description: Description,
        size_hw: tuple[int, int],
        settings: ExtractorOptions,
        device: torch.device,
        forward_images: int = FORWARD_IMAGES,
    ) -> None:
        super().__init__(description, device)
        self._input_shape = (3, *size_hw)
        self._precision = settings.precision
        self._device = device
        self._forward_images = forward_images
        self._limits = BatchLimits()

    @property
    def feeder_threads(self) -> int:
        """Threads that give the model one batch each: on a CPU two.

        When the last passes of a batch leave threads without work, those of the next one take them.
        """
        return 2 if not self.on_gpu and passes_share_threads() else super().feeder_threads

    def collate(self, images: Sequence[Tensor]) -> Tensor:
        """Make a batch for `extract` from the pixels of B images, for a GPU in page-locked memory.

        Returns:
            uint8 ``[B, 3, H, W]`` with the channels innermost in memory, as those of the images that `preprocess` makes: so each is
            copied in one piece, and the models take the batch as it is.
        """
        rows = [image.permute(1, 2, 0) for image in images]  # [H, W, 3]
        if not self.on_gpu:
            return torch.stack(rows).permute(0, 3, 1, 2)
        batch = pinned_empty((len(rows), *rows[0].shape), rows[0].dtype, self._device)
        return torch.stack(rows, out=batch).permute(0, 3, 1, 2)

    @abstractmethod
    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features: uint8 ``[B, 3, H, W]`` on any device to float32 ``[B, *spec.shape]`` on that of the extractor."""

    def warm_up_compile(self, *, enabled: bool) -> None:
        """Compile the model of a CPU if ``enabled``; elsewhere that is left to the first batch."""
        if enabled and self._device.type == "cpu":
            warm_up_compile(self.forward, torch.zeros(self._forward_images, *self._input_shape, dtype=torch.uint8))

    def extract(self, batch: Tensor) -> np.ndarray:
        """Run the model on preprocessed images.

        Args:
            batch: uint8 ``[B, 3, H, W]``, channels R, G, B; B may be 0.

        Returns:
            ``[B, *spec.shape]`` in the type of the spec. On a CPU an image has the same bytes in any batch and with any number of
            threads.
        """
        self._check(batch)
        if not len(batch):
            return np.zeros((0, *self.spec.shape), dtype=self.spec.dtype)
        if self._device.type == "cpu":
            return self.spec.rounded(run_in_chunks(self.forward, batch, self._forward_images).numpy())
        return self._started(batch)()["feature"]

    def extract_async(self, batch: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        """Give a GPU all that there is to do with a batch, the copies too, and return without waiting."""
        self._check(batch)
        return self._started(batch) if self.on_gpu and len(batch) else super().extract_async(batch)

    def _check(self, batch: Tensor) -> None:
        if batch.dtype != torch.uint8 or batch.shape[1:] != self._input_shape:
            sides = ", ".join(map(str, self._input_shape))
            raise ValueError(f"batch is {batch.dtype} {list(batch.shape)}, expected torch.uint8 [B, {sides}]")

    def _started(self, batch: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        with precision_context(self._precision, self._device), torch.inference_mode():
            found = download(run_parts_with_oom_retry(self.forward, batch, self._limits))
        return lambda: {"feature": self.spec.rounded(found().numpy())}


class CenterCropExtractor(FixedSizeExtractor):
    """A network of convolutions up to its last map, ``trunk``, on the CPU, of one crop of an image."""

    def __init__(
        self,
        description: Description,
        trunk: nn.Module,
        preprocessing: Preprocessing,
        settings: ExtractorOptions,
        device: torch.device,
        forward_images: int = FORWARD_IMAGES,
    ) -> None:
        super().__init__(description, (preprocessing.crop, preprocessing.crop), settings, device, forward_images)
        self._preprocessing = preprocessing
        self._normalize = preprocessing.normalizer(device)
        graph = trace_and_fold(trunk.eval().requires_grad_(False))
        self._dtype = cast_layers(graph, settings.precision)
        self._trunk = optimize_for_inference(
            graph, (forward_images, *self._input_shape), device, precision=settings.precision, compile=settings.compile
        )
        self.warm_up_compile(enabled=settings.compile)

    @abstractmethod
    def features(self, maps: Tensor) -> Tensor:
        """Make features of maps: ``[B, D, h, w]`` in the type of the network to float32 ``[B, *spec.shape]``."""

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """The function `preprocess` without the model."""
        return partial(cropped_pixels, preprocessing=self._preprocessing)

    def preprocess(self, image: Image.Image) -> Tensor:
        """Resize an image and cut out its centre, see `extractors.images.preprocessing.resize_and_crop`.

        Returns:
            uint8 ``[3, S, S]``, channels R, G, B.
        """
        return resize_and_crop(image, self._preprocessing)

    def preprocess_single_threaded(self, image: Image.Image) -> Tensor:
        """Return what `preprocess` does, in less time where a single thread does so."""
        return resize_and_crop(image, self._preprocessing, single_threaded=True)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute features: uint8 ``[B, 3, S, S]`` on any device to float32 ``[B, *spec.shape]`` on that of the extractor."""
        pixels = upload(pixels, self._device).contiguous(memory_format=torch.channels_last)
        return self.features(self._trunk(self._normalize(pixels).to(self._dtype)))
