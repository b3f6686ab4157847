"""How the demo's base model and adapters were made. Needs the extra `loramux[train]`; the demo itself does not."""
