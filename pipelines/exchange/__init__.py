"""Features in from, and out to, the layouts of other code bases."""
