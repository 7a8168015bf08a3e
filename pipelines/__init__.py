"""Beam pipelines and the command line. Importing this loads neither Beam nor torch: import the module that you need."""
