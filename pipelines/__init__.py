"""Beam pipelines and the command line. Importing this loads neither Beam nor torch: import the module that you need."""

# A worker on another machine begins with whatever module its first function is in, in a folder where any module may hide ours.
import imagepivot  # noqa: F401
