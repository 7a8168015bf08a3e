"""Models: their interface, the kinds, and their parts."""
