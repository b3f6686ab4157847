"""Code that every area may use: settings, errors, units, logs, jobs, sandboxes."""
