"""Import features of other code bases, and export to their layouts."""
