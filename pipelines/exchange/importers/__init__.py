"""Readers of features that other tools made: npy arrays, bottom-up-attention tsv files, HDF5. Plain Python, no Beam."""

from pipelines.exchange.importers.arrays import ArrayFiles
from pipelines.exchange.importers.base import FeatureFiles, IdRule, ImportedFile
from pipelines.exchange.importers.hdf5 import Hdf5File
from pipelines.exchange.importers.tsv import TsvFiles

__all__ = ["ArrayFiles", "FeatureFiles", "Hdf5File", "IdRule", "ImportedFile", "TsvFiles"]
