"""Columns of the tsv files with regions that other code bases write and read."""

__all__ = ["BOTTOM_UP", "LXMERT"]

BOTTOM_UP = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
"""Columns as peteanderson80/bottom-up-attention writes them."""

LXMERT = (
    "img_id",
    "img_h",
    "img_w",
    "objects_id",
    "objects_conf",
    "attrs_id",
    "attrs_conf",
    "num_boxes",
    "boxes",
    "features",
)
"""Columns as airsplay/lxmert and airsplay/py-bottom-up-attention write them, and LXMERT reads them. Height comes before width.

Their ids of classes and attributes count from 0, without background and none; those of the kind ``regions`` count from 1.
"""
