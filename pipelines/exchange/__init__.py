"""Exchange with other code bases: importing their features and exporting to their layouts."""
