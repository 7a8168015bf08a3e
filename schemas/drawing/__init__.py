"""Drawing by matplotlib: the package's own style, and fonts for all scripts."""
