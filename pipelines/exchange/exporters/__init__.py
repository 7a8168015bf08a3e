"""Writers of the layouts of other code bases: each writes a dataset of an `ExportJob` to a `Staging`."""
