"""Readers of features that other tools made: npy arrays, bottom-up-attention tsv files, HDF5. Plain Python, no Beam."""

from pipelines.importers.arrays import ArrayFiles
from pipelines.importers.base import FeatureFiles, IdRule, ImportedFile
from pipelines.importers.hdf5 import Hdf5File
from pipelines.importers.tsv import TsvFiles

__all__ = ["ArrayFiles", "FeatureFiles", "Hdf5File", "IdRule", "ImportedFile", "TsvFiles"]
