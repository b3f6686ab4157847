"""Uploads: in parts, through any server, checked in the background; every adapter comes in this way."""
