"""Uploads in parts, through any server, checked in the background. Every adapter enters the system in this way."""
