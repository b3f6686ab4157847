"""The server as a whole: it opens its parts, holds them and closes them."""
