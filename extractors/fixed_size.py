"""Base classes of extractors with one input size, so that a batch is one tensor.

Shapes: ``B`` images, ``H`` and ``W`` pixels of the input, ``S`` side of a crop in pixels, ``D`` channels of
the last feature map, ``h`` and ``w`` its sides.
"""

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
from extractors.computing.devices import AUTOCAST_DTYPES, cast_layers, download, precision_context
from extractors.computing.fusion import optimize_for_inference, trace_and_fold
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from extractors.images.preprocessing import Normalizer, Preprocessing, cropped_pixels
from extractors.options import ExtractorOptions
from schemas.process.devices import upload


class FixedSizeExtractor(Extractor):
    """Extractor with one input size.

    Attributes:
        forward_images: images per forward on a CPU.
    """

    forward_images = FORWARD_IMAGES
    _normalize: Normalizer
    _network: nn.Module

    def __init__(
        self, description: Description, size_hw: tuple[int, int], settings: ExtractorOptions, device: torch.device
    ) -> None:
        super().__init__(description, device)
        self._input_shape = (3, *size_hw)
        self._precision = settings.precision
        self._device = device
        self._limits = BatchLimits()

    @property
    def feeder_threads(self) -> int:
        """Number of feeder threads: two on a CPU, so that no torch thread idles."""
        return 2 if not self.on_gpu and passes_share_threads() else super().feeder_threads

    @property
    @abstractmethod
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """Picklable `preprocess` without the model."""

    def preprocess(self, image: Image.Image) -> Tensor:
        """Preprocess an image: uint8 ``[3, H, W]``, channels R, G, B."""
        return torch.from_numpy(self.preprocessor(image))

    def collate(self, images: Sequence[Tensor]) -> Tensor:
        """Stack B preprocessed images, for a GPU in pinned memory.

        Returns:
            uint8 ``[B, 3, H, W]`` in channels-last layout, that of the images from `preprocess` and of the models.
        """
        rows = [image.permute(1, 2, 0) for image in images]  # [H, W, 3]
        if not self.on_gpu:
            return torch.stack(rows).permute(0, 3, 1, 2)
        with torch.cuda.device(self._device):  # See `precision_context`. The memory is reused only after pending copies.
            batch = torch.empty(len(rows), *rows[0].shape, dtype=rows[0].dtype, pin_memory=True)
        return torch.stack(rows, out=batch).permute(0, 3, 1, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute float32 ``[B, *spec.shape]`` from uint8 ``[B, 3, H, W]`` on any device.

        16-bit precisions use ``torch.autocast``.
        """
        values = self._normalize(upload(pixels, self._device).contiguous(memory_format=torch.channels_last))
        dtype = AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            features = self._network(values)
        return (features if isinstance(features, Tensor) else features[0]).to(torch.float32)  # CoCa also returns tokens.

    def warm_up_compile(self, *, enabled: bool) -> None:
        """Compile a model on a CPU now if ``enabled``; on a GPU the first batch does so."""
        if enabled and self._device.type == "cpu":
            warm_up_compile(self.forward, torch.zeros(self.forward_images, *self._input_shape, dtype=torch.uint8))

    def extract(self, batch: Tensor) -> np.ndarray:
        """Run the model on uint8 ``[B, 3, H, W]``, channels R, G, B; B may be 0.

        Returns:
            ``[B, *spec.shape]`` in the spec's dtype. On a CPU the bytes do not depend on batch and thread count.
        """
        self._check(batch)
        if not len(batch):
            return np.zeros((0, *self.spec.shape), dtype=self.spec.dtype)
        if self._device.type == "cpu":
            return self.spec.rounded(run_in_chunks(self.forward, batch, self.forward_images).numpy())
        return self._launch(batch)()["feature"]

    def extract_async(self, batch: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        """Launch the copies and kernels of a batch on a GPU without waiting."""
        self._check(batch)
        return self._launch(batch) if self.on_gpu and len(batch) else super().extract_async(batch)

    def _check(self, batch: Tensor) -> None:
        if batch.dtype != torch.uint8 or batch.shape[1:] != self._input_shape:
            sides = ", ".join(map(str, self._input_shape))
            raise ValueError(f"batch is {batch.dtype} {list(batch.shape)}, expected torch.uint8 [B, {sides}]")

    def _launch(self, batch: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        with precision_context(self._precision, self._device), torch.inference_mode():
            wait = download(run_with_oom_retry(self.forward, batch, self._limits))
        return lambda: {"feature": self.spec.rounded(wait().numpy())}


class CropExtractor(FixedSizeExtractor):
    """Extractor on a square crop of an image, or on the image resized to a square."""

    def __init__(
        self, description: Description, preprocessing: Preprocessing, settings: ExtractorOptions, device: torch.device
    ) -> None:
        super().__init__(description, (preprocessing.crop, preprocessing.crop), settings, device)
        self._preprocessing = preprocessing
        self._normalize = preprocessing.normalizer(device)

    @property
    def preprocessor(self) -> Callable[[Image.Image], np.ndarray]:
        """Picklable function that resizes an image and crops its centre."""
        return partial(cropped_pixels, preprocessing=self._preprocessing)


class CenterCropExtractor(CropExtractor):
    """Network up to its last feature map (``trunk``) on the centre crop of an image."""

    def __init__(
        self,
        description: Description,
        trunk: nn.Module,
        preprocessing: Preprocessing,
        settings: ExtractorOptions,
        device: torch.device,
    ) -> None:
        super().__init__(description, preprocessing, settings, device)
        graph = trace_and_fold(trunk.eval().requires_grad_(False))
        self._dtype = cast_layers(graph, settings.precision)
        self._network = optimize_for_inference(
            graph, (self.forward_images, *self._input_shape), device, precision=settings.precision, compile=settings.compile
        )
        self.warm_up_compile(enabled=settings.compile)

    @abstractmethod
    def features(self, maps: Tensor) -> Tensor:
        """Convert feature maps ``[B, D, h, w]`` to float32 ``[B, *spec.shape]``."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute float32 ``[B, *spec.shape]`` from uint8 ``[B, 3, S, S]`` on any device."""
        pixels = upload(pixels, self._device).contiguous(memory_format=torch.channels_last)
        return self.features(self._network(self._normalize(pixels).to(self._dtype)))
