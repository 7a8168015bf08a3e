"""Plans: TOML files of steps, each a command with its options."""
