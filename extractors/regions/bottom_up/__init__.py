"""Detector of bottom-up attention: network, preprocessing and weights."""
