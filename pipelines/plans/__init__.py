"""Plans: TOML files whose steps are commands, which run in order."""
