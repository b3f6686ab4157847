"""The shipped demo: a tiny base model, five adapters, and the script that trained them."""
