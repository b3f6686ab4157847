"""The shipped demo: a tiny base model, six adapters, and the script that trained them."""
