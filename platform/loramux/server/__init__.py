"""The server as a whole: what opens its parts, holds them and closes them."""
