"""Work on untrusted input, in processes without rights."""
