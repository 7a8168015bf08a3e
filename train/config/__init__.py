"""Configurations: strict TOML sections and the presets."""
