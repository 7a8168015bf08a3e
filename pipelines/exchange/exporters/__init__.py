"""Writers of the layouts of other code bases."""
