"""The command line: `main` lists the commands; each module holds those of one subject."""
