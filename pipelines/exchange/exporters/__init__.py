"""Writers of the layouts that existing code bases read: each writes a dataset to a `Staging`, as an `ExportJob` asks for."""
