"""TIFF reader that follows all tags, for files that Pillow silently misreads."""

from PIL import ImagePalette, TiffImagePlugin

_BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _PLANES = 258, 259, 262, 266, 277, 284
_COLOR_MAP, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 320, 338, 339
_PHOTOMETRIC_KNOWN = ("tiff_ccitt", "group3", "group4", "tiff_jpeg")  # Fax has white at 0; the old JPEG is YCbCr.
_WEBP = 50001  # The libtiff of Pillow's wheels does not decode it.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _YCBCR = 0, 1, 6
_UNSIGNED, _SIGNED = 1, 2


class TiffFile(TiffImagePlugin.TiffImageFile):
    """Pillow's TIFF file that raises `NotImplementedError` for tags Pillow ignores.

    Attributes:
        white_is_zero: loaded 16-bit grey values have white at 0; Pillow inverts fewer bits itself.
        is_signed: the file holds signed integers; 8-bit ones are loaded as unsigned.
    """

    white_is_zero = False
    is_signed = False

    def _setup(self) -> None:
        """Choose mode and decoder by tags, see `TiffImagePlugin.TiffImageFile`."""
        tags = self.tag_v2
        compression = tags.get(_COMPRESSION, 1)
        if compression not in TiffImagePlugin.COMPRESSION_INFO or compression == _WEBP:
            raise NotImplementedError(f"compression {compression}")
        kinds = set(tags.get(_SAMPLE_FORMAT, (_UNSIGNED,)))
        self.is_signed = _SIGNED in kinds
        if tags.get(_SAMPLES, 1) == 1:
            tags[_PLANES] = 1  # A single sample has one plane.
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO and tags.get(_BITS) == (16,) and kinds == {_UNSIGNED}:
            self.white_is_zero = True
            tags[_PHOTOMETRIC] = _BLACK_IS_ZERO  # Supported by Pillow; `decoding` inverts the values.
        if compression == 1 and tags.get(_PLANES) == 2 and not self._has_plain_planes():
            raise NotImplementedError("separate planes without compression of other samples than bytes")
        super()._setup()
        if (fault := self._misread()) is not None:
            raise NotImplementedError(fault)
        if self.mode in ("P", "PA") and max(tags[_COLOR_MAP]) < 256:  # As libtiff: 8 bits where the format has 16.
            self.palette = ImagePalette.raw("RGB;L", bytes(tags[_COLOR_MAP]))

    def _has_plain_planes(self) -> bool:
        tags = self.tag_v2
        return set(tags.get(_BITS, (1,))) == {8} and tags.get(_FILL_ORDER, 1) == 1 and 0 not in tags.get(_EXTRA_SAMPLES, ())

    def _misread(self) -> str | None:
        """Return a property of the file that Pillow ignores, or None."""
        tags, is_raw = self.tag_v2, self._compression == "raw"
        if _PHOTOMETRIC not in tags and self._compression not in _PHOTOMETRIC_KNOWN:
            return "no tag of the photometric interpretation: 0 may be black or white"
        if is_raw and tags.get(_PHOTOMETRIC) == _YCBCR and self.mode != "L":
            return "YCbCr without compression"
        if not is_raw and self.is_signed and self.mode == "I" and self.tag_v2.prefix == b"MM":
            return "compressed signed integers in big-endian order"
        return None
