"""`python -m loramux_api` is `loramux`."""

from loramux_api.cli import main

main()
