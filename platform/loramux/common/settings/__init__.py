"""Every setting, read once from one TOML file, checked, and frozen."""
