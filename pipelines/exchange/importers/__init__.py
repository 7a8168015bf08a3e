"""Readers of features that other tools made: npy arrays, bottom-up-attention tsv files, HDF5, tar files.

A layout is a frozen dataclass with the options of one kind of file (`ImportLayout`); opening it gives `FeatureFiles`.
"""

from pipelines.exchange.image_lists import IdRule
from pipelines.exchange.importers.arrays import NpyImport
from pipelines.exchange.importers.base import FeatureFiles, ImportLayout, describe_file
from pipelines.exchange.importers.hdf5 import Hdf5Import
from pipelines.exchange.importers.tsv import TsvImport
from pipelines.exchange.importers.webdataset import WebdatasetImport

__all__ = [
    "LAYOUTS",
    "FeatureFiles",
    "Hdf5Import",
    "IdRule",
    "ImportLayout",
    "NpyImport",
    "TsvImport",
    "WebdatasetImport",
    "describe_file",
]

LAYOUTS = {layout.format: layout for layout in (NpyImport, TsvImport, Hdf5Import, WebdatasetImport)}
"""The layouts by the names of their formats."""
